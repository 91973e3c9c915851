"""All scripts by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.mistakes import collectives, correct, mean, models, out_of_step, replicas
from tests.mistakes.script import Script

SCRIPTS: Mapping[str, Script] = MappingProxyType(
    {
        script.name: script
        for module in (replicas, out_of_step, mean, collectives, models, correct)
        for script in vars(module).values()
        if isinstance(script, Script)
    }
)
