"""Replace torch's classes by ours in this process and in those that it starts; and restore them."""

import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

from lockstep.comm import launched_world
from lockstep.drop_in.bindings import Binding, find_bindings, imports_from_lockstep, rebind
from lockstep.drop_in.construction import Redirection, find_existing
from lockstep.drop_in.replacements import CLASSES, OURS_FOR_TORCHS
from lockstep.errors import GroupError
from lockstep.launch.drop_in import NOTICE, has_drop_in, with_drop_in, without_drop_in
from lockstep.settings import read_settings, set_python_path

_TORCHS_FOR_OURS = {ours: torchs for torchs, ours in OURS_FOR_TORCHS.items()}
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen ")


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
            warnings.warn(_describe_kept(existing, kept), stacklevel=_stacklevel_of_user())

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


def _stacklevel_of_user() -> int:
    """Return the level, for a warning of our caller's, of the innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's name for it
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        # Frames of the import system count for no level.
        level += not frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return 1 if frame is None else level
