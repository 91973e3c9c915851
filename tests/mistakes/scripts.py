"""All scripts by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.mistakes import (
    changes,
    collectives,
    correct,
    drawn,
    habits,
    mean,
    models,
    out_of_step,
    replicas,
    settings,
    starts,
    unusual,
)
from tests.mistakes.script import Script

SCRIPTS: Mapping[str, Script] = MappingProxyType(
    {
        script.name: script
        for module in (
            replicas,
            out_of_step,
            mean,
            collectives,
            models,
            starts,
            habits,
            settings,
            correct,
            unusual,
            changes,
            drawn,
        )
        for script in vars(module).values()
        if isinstance(script, Script)
    }
)
