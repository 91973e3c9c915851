"""Replace torch's classes by ours in this process and in those that it starts; and restore them.

Names in modules are bound anew. `from torch.nn.parallel import DistributedDataParallel as DDP` binds a name in the
importing module: if that ran before the drop-in, it is not enough to bind those in torch's modules.

And torch's classes construct ours, for code that holds a reference to torch's class in another place: an attribute of a
class, a default argument, a dictionary, or a subclass that was defined before.
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
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils import data as torch_data

from lockstep.comm import init_process_group, launched_world
from lockstep.data import DistributedSampler
from lockstep.errors import GroupError
from lockstep.launch.environment import NOTICE, has_drop_in, with_drop_in, without_drop_in
from lockstep.parallel import DataParallel, DistributedDataParallel, SyncBatchNorm, data_parallel
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.settings import read_settings, set_python_path


@dataclass(frozen=True, slots=True)
class ReplacedClass:
    """A class of torch, and the subclass of it that takes its place."""

    torchs: type[Any]
    ours: type[Any]


CLASSES = (
    ReplacedClass(parallel.DistributedDataParallel, DistributedDataParallel),
    ReplacedClass(parallel.DataParallel, DataParallel),
    ReplacedClass(torch_data.DistributedSampler, DistributedSampler),
    ReplacedClass(nn.SyncBatchNorm, SyncBatchNorm),
)
_FUNCTIONS: Mapping[Any, Any] = MappingProxyType(
    {dist.init_process_group: init_process_group, parallel.data_parallel: data_parallel}
)
OURS_FOR_TORCHS: Mapping[Any, Any] = MappingProxyType({**{each.torchs: each.ours for each in CLASSES}, **_FUNCTIONS})
"""Everything that is replaced, by torch's own."""
_TORCHS_FOR_OURS = {ours: torchs for torchs, ours in OURS_FOR_TORCHS.items()}
_OWN = re.compile(r"lockstep(_command)?(\.|$)")
_FROM_LOCKSTEP = re.compile(r"^\s*from\s+lockstep\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Binding:
    module: ModuleType
    name: str

    def bind(self, value: object) -> None:
        vars(self.module)[self.name] = value

    def bound(self) -> Any:
        return vars(self.module)[self.name]


@final
class DropIn:
    """Whether torch's names are Lockstep's in this process; changed by `apply` and `undo`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_active = False
        self._redirections = [Redirection(each) for each in CLASSES]
        self._were_ours: frozenset[Binding] = frozenset()
        self._were_torchs: frozenset[Binding] = frozenset()

    @property
    def is_active(self) -> bool:
        return self._is_active

    def apply(self) -> None:
        """Replace torch's names; do nothing if that is done already (local)."""
        with self._lock:
            if self._is_active:
                return
            self._is_active = True
            existing = find_existing(CLASSES)
            self._were_ours = frozenset(find_bindings(_TORCHS_FOR_OURS))
            self._were_torchs = frozenset(find_bindings(OURS_FOR_TORCHS))
            rebind(self._were_torchs, OURS_FOR_TORCHS)
            kept = [each for redirection in self._redirections for each in redirection.apply(existing)]
            python_path = read_settings().python_path()
            set_python_path(with_drop_in(python_path))
        if not has_drop_in(python_path) and _is_rank_0():
            sys.stderr.write(f"{NOTICE}\n")
        if existing or kept:
            warnings.warn(_describe_kept(existing, kept), stacklevel=stacklevel_of_user())

    def undo(self) -> None:
        """Restore torch's names; do nothing if they are torch's (local). Objects that exist stay Lockstep's."""
        with self._lock:
            if not self._is_active:
                return
            self._is_active = False
            for redirection in self._redirections:
                redirection.undo()
            rebind(filter(self._was_torchs, find_bindings(_TORCHS_FOR_OURS)), _TORCHS_FOR_OURS)
            set_python_path(without_drop_in(read_settings().python_path()))

    def _was_torchs(self, binding: Binding) -> bool:
        if binding in self._were_ours:
            return False
        return binding in self._were_torchs or not imports_from_lockstep(binding.module)


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

    def __init__(self, replaced: ReplacedClass) -> None:
        self._replaced = replaced
        self._init: Any = None
        self._moved: list[tuple[type[Any], tuple[type[Any], ...]]] = []

    def apply(self, existing: frozenset[type[Any]]) -> list[type[Any]]:
        """Redirect; return the subclasses that keep torch's class as a base, as those in `existing` do."""
        torchs, ours = self._replaced.torchs, self._replaced.ours
        original = self._init = torchs.__init__

        @functools.wraps(original)
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            if type(instance) is not torchs:  # super().__init__() of a subclass
                original(instance, *args, **kwargs)
                return
            object.__setattr__(instance, "__class__", ours)
            ours.__init__(instance, *args, **kwargs)

        torchs.__init__ = construct
        kept = [each for each in _foreign_subclasses(torchs) if not self._move(each, existing)]
        _forget_instance_checks(ours)
        return kept

    def _move(self, subclass: type[Any], existing: frozenset[type[Any]]) -> bool:
        torchs, ours = self._replaced.torchs, self._replaced.ours
        bases = subclass.__bases__
        if any(issubclass(each, subclass) for each in existing):
            return False
        try:
            subclass.__bases__ = tuple(ours if base is torchs else base for base in bases)
        except TypeError:  # its other bases do not go together with ours
            return False
        self._moved.append((subclass, bases))
        return True

    def undo(self) -> None:
        self._replaced.torchs.__init__ = self._init
        for subclass, bases in self._moved:
            subclass.__bases__ = bases
        self._moved.clear()
        _forget_instance_checks(self._replaced.ours)


def find_existing(classes: Iterable[ReplacedClass]) -> frozenset[type[Any]]:
    """Return those of torch's classes, and of their subclasses that are not ours, of which there are objects."""
    pairs = [(each.torchs, each.ours) for each in classes]
    # Not isinstance, which would run the code of proxies.
    types = {type(each) for each in gc.get_objects()}
    return frozenset(
        each for each in types if any(issubclass(each, torchs) and not issubclass(each, ours) for torchs, ours in pairs)
    )


def _foreign_subclasses(torchs: type[Any]) -> list[type[Any]]:
    return [each for each in type.__subclasses__(torchs) if not each.__module__.startswith("lockstep.")]


def _forget_instance_checks(ours: type[Any]) -> None:
    """Clear the cache of isinstance, which torch's wrapper has because it is an abstract class."""
    for each in ours.__mro__:
        if isinstance(each, ABCMeta):
            abstract: Any = each
            abstract._abc_caches_clear()  # noqa: SLF001 - Python's name for it


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
    for binding in bindings:
        binding.bind(replacements[binding.bound()])


def imports_from_lockstep(module: ModuleType) -> bool:
    """Return whether a module's source imports names from Lockstep, or cannot be read."""
    try:
        return _FROM_LOCKSTEP.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):  # typed into a console, or not written in Python
        return True
