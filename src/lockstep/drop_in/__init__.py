"""Lockstep's classes in place of torch's, in a script that is not changed. Importing this replaces them.

    import lockstep.drop_in              # the first line of a script
    python -m lockstep.drop_in train.py  # or no line at all; also under torchrun
    lockstep run --drop-in train.py      # likewise

Replaced are `DistributedDataParallel`, `DataParallel`, `DistributedSampler`, `SyncBatchNorm`, `data_parallel` and
`init_process_group`: under every name that torch has for them, and in modules that have imported them before.

Names in modules are bound anew: `from torch.nn.parallel import DistributedDataParallel as DDP` binds a name in the
importing module, and if that ran before the drop-in, it is not enough to bind those in torch's modules. And torch's
classes construct ours for code that holds one in another place: an attribute of a class, a default argument, a
dictionary, or a subclass that was defined before.

Invariants: all Python processes that this one starts have the same classes, so no rank trains with others; after
`undo()` torch's names are what they were; nothing else in torch changes.
"""

import functools
import gc
import inspect
import re
import sys
import threading
import warnings
from abc import ABCMeta
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils import data as torch_data

from lockstep.comm import init_process_group, launched_world
from lockstep.data import DistributedSampler
from lockstep.drop_in.observation import observe
from lockstep.errors import GroupError
from lockstep.launch.environment import NOTICE, has_drop_in, with_drop_in, without_drop_in
from lockstep.parallel import DataParallel, DistributedDataParallel, SyncBatchNorm, data_parallel
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.settings import read_settings, set_python_path

__all__ = ["apply", "is_active", "undo"]

_CLASSES: Mapping[type[Any], type[Any]] = MappingProxyType(
    {
        parallel.DistributedDataParallel: DistributedDataParallel,
        parallel.DataParallel: DataParallel,
        torch_data.DistributedSampler: DistributedSampler,
        nn.SyncBatchNorm: SyncBatchNorm,
    }
)
_OURS_FOR_TORCHS: Mapping[Any, Any] = MappingProxyType(
    {
        **_CLASSES,
        dist.init_process_group: init_process_group,
        parallel.data_parallel: data_parallel,
    }
)
_TORCHS_FOR_OURS = {ours: torchs for torchs, ours in _OURS_FOR_TORCHS.items()}
_OWN = re.compile(r"lockstep(_command)?(\.|$)")
_FROM_LOCKSTEP = re.compile(r"^\s*from\s+lockstep\b", re.MULTILINE)


_Binding = tuple[ModuleType, str]
"""A name in a module."""


@final
class DropIn:
    """Whether torch's names are Lockstep's in this process; changed by `apply` and `undo`, from any thread."""

    def __init__(self) -> None:
        self.is_active = False
        self._lock = threading.Lock()
        self._redirections = [Redirection(torchs, ours) for torchs, ours in _CLASSES.items()]
        self._were_ours: frozenset[_Binding] = frozenset()
        self._were_torchs: frozenset[_Binding] = frozenset()

    def apply(self) -> None:
        """Replace torch's classes here and in the processes that this one starts, as the import does (local)."""
        with self._lock:
            if self.is_active:
                return
            self.is_active = True
            existing = _find_existing()
            self._were_ours = frozenset(_find_bindings(_TORCHS_FOR_OURS))
            self._were_torchs = frozenset(_find_bindings(_OURS_FOR_TORCHS))
            _rebind(self._were_torchs, _OURS_FOR_TORCHS)
            kept = [each for redirection in self._redirections for each in redirection.apply(existing)]
            python_path = read_settings().python_path()
            set_python_path(with_drop_in(python_path))
        if not has_drop_in(python_path) and _is_rank_0():
            sys.stderr.write(f"{NOTICE}\n")
        if existing or kept:
            warnings.warn(_describe_kept(existing, kept), stacklevel=stacklevel_of_user())

    def undo(self) -> None:
        """Restore torch's classes (local). Objects that were made meanwhile stay Lockstep's, and go on working.

        Names that a module has imported from Lockstep stay Lockstep's.
        """
        with self._lock:
            if not self.is_active:
                return
            self.is_active = False
            for redirection in self._redirections:
                redirection.undo()
            _rebind(filter(self._was_torchs, _find_bindings(_TORCHS_FOR_OURS)), _TORCHS_FOR_OURS)
            set_python_path(without_drop_in(read_settings().python_path()))

    def _was_torchs(self, binding: _Binding) -> bool:
        if binding in self._were_ours:
            return False
        return binding in self._were_torchs or not _imports_from_lockstep(binding[0])


def _is_rank_0() -> bool:
    try:
        variables = launched_world()
    except GroupError:  # raised again when a group is made
        return True
    return variables is None or variables.rank in {None, "0"}


def _describe_kept(existing: frozenset[type[Any]], kept: list[type[Any]]) -> str:
    names = ", ".join(sorted(each.__qualname__ for each in existing | set(kept)))
    if existing:
        what = f"lockstep.drop_in was imported when this process had objects of torch's classes already ({names})."
    else:
        what = f"These subclasses of torch's classes cannot become subclasses of Lockstep's: {names}."
    return (
        f"{what} They stay torch's, and Lockstep checks nothing there. Make `import lockstep.drop_in` the first line "
        "of the script, before a model is wrapped, or start the script with `lockstep run --drop-in`. (LS380)"
    )


@final
class Redirection:
    """Makes torch's class construct objects of ours, and gives its subclasses ours as a base."""

    def __init__(self, torchs: type[Any], ours: type[Any]) -> None:
        self._torchs = torchs
        self._ours = ours
        self._init: Any = None
        self._moved: list[tuple[type[Any], tuple[type[Any], ...]]] = []

    def apply(self, existing: frozenset[type[Any]]) -> list[type[Any]]:
        """Redirect; return the subclasses that keep torch's class as a base, as those in `existing` do."""
        torchs: Any = self._torchs
        ours = self._ours
        original = self._init = torchs.__init__

        @functools.wraps(original)
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            if type(instance) is not torchs:  # super().__init__() of a subclass
                original(instance, *args, **kwargs)
                return
            object.__setattr__(instance, "__class__", ours)
            ours.__init__(instance, *args, **kwargs)

        torchs.__init__ = construct
        foreign = [each for each in type.__subclasses__(torchs) if not each.__module__.startswith("lockstep.")]
        kept = [each for each in foreign if not self._move(each, existing)]
        _forget_instance_checks(ours)
        return kept

    def _move(self, subclass: type[Any], existing: frozenset[type[Any]]) -> bool:
        bases = subclass.__bases__
        if any(issubclass(each, subclass) for each in existing):
            return False
        try:
            subclass.__bases__ = tuple(self._ours if base is self._torchs else base for base in bases)
        except TypeError:  # its other bases do not go together with ours
            return False
        self._moved.append((subclass, bases))
        return True

    def undo(self) -> None:
        torchs: Any = self._torchs
        torchs.__init__ = self._init
        for subclass, bases in self._moved:
            subclass.__bases__ = bases
        self._moved.clear()
        _forget_instance_checks(self._ours)


def _find_existing() -> frozenset[type[Any]]:
    """Return those of torch's classes, and of their subclasses that are not ours, of which there are objects."""
    # Not isinstance, which would run the code of proxies.
    types = {type(each) for each in gc.get_objects()}
    return frozenset(
        each
        for each in types
        if any(issubclass(each, torchs) and not issubclass(each, ours) for torchs, ours in _CLASSES.items())
    )


def _forget_instance_checks(ours: type[Any]) -> None:
    """Clear the cache of isinstance, which torch's wrapper has because it is an abstract class."""
    for each in ours.__mro__:
        if isinstance(each, ABCMeta):
            abstract: Any = each
            abstract._abc_caches_clear()  # noqa: SLF001 - Python's name for it


def _find_bindings(objects: Iterable[object]) -> list[_Binding]:
    """Return the names that are bound to one of `objects`, in all imported modules but Lockstep's."""
    ids = {id(each) for each in objects}
    # By id, because one module may have several names there.
    modules = {id(module): module for name, module in list(sys.modules.items()) if not _OWN.match(name)}
    return [
        (module, name)
        for module in modules.values()
        # A module that imports lazily has a __getattr__; its namespace has what it has imported so far.
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in ids
    ]


def _rebind(bindings: Iterable[_Binding], replacements: Mapping[Any, Any]) -> None:
    for module, name in bindings:
        vars(module)[name] = replacements[vars(module)[name]]


def _imports_from_lockstep(module: ModuleType) -> bool:
    """Return whether a module's source imports names from Lockstep, or cannot be read."""
    try:
        return _FROM_LOCKSTEP.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):  # typed into a console, or not written in Python
        return True


_DROP_IN = DropIn()
apply = _DROP_IN.apply
undo = _DROP_IN.undo


def is_active() -> bool:
    """Return whether torch's classes are replaced in this process (local)."""
    return _DROP_IN.is_active


apply()
if (_OBSERVATION := read_settings().observation()) is not None:
    observe(Path(_OBSERVATION[0]), read_settings().rank(), _OBSERVATION[1])
