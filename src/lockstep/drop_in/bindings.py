"""Names in modules that are bound to given objects: found, and bound to others.

`from torch.nn.parallel import DistributedDataParallel as DDP` binds a name in the importing module. If that ran before
the drop-in, the name has to be bound anew there; it is not enough to do so in torch's modules.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_OWN = re.compile(r"lockstep(_command)?(\.|$)")
_FROM_LOCKSTEP = re.compile(r"^\s*from\s+lockstep\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Binding:
    """A name in a module's namespace."""

    module: ModuleType
    name: str

    def bind(self, value: object) -> None:
        vars(self.module)[self.name] = value

    def bound(self) -> Any:
        return vars(self.module)[self.name]


def find_bindings(objects: Iterable[object]) -> list[Binding]:
    """Return the names that are bound to one of `objects`, in all imported modules but Lockstep's."""
    ids = {id(each) for each in objects}
    # By id, because one module may have several names there.
    modules = {id(module): module for name, module in list(sys.modules.items()) if not _OWN.match(name)}
    return [
        Binding(module, name)
        for module in modules.values()
        # A module that imports lazily has a __getattr__; its namespace has what it has imported so far.
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in ids
    ]


def rebind(bindings: Iterable[Binding], replacements: Mapping[Any, Any]) -> None:
    """Bind each name to the replacement of what it is bound to."""
    for binding in bindings:
        binding.bind(replacements[binding.bound()])


def imports_from_lockstep(module: ModuleType) -> bool:
    """Return whether a module's source imports names from Lockstep, or cannot be read."""
    try:
        return _FROM_LOCKSTEP.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):  # typed into a console, or not written in Python
        return True
