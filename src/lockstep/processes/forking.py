"""What a forked child does with what it inherits. The one hook of the project is here.

A child has a copy of every object of its parent and none of its threads but the one that has forked. So it is no rank
of the parent's groups, and has nothing to tell anybody in the parent's name. It closes what others would take for the
parent (`call_in_children`), calls none of the parent's finalizers and handlers for the end (`finalize_here`,
`call_at_exit_here`), and can tell that it is another process (`this_process`).

It also collects none of the garbage that it inherits. To free an object may be to wait for a thread: a loading process
in which the garbage collector met an old Gloo group, left in a reference cycle by an error, waited in the destructor of
the group for ever, and its parent for the loading process. That also keeps the memory shared that it shares with its
parent.
"""

import atexit
import ctypes
import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Final, final


@final
class _Forks:
    def __init__(self) -> None:
        self.depth = 0
        """How many forks lead from the first process of this program to this one."""
        self._in_children: list[Callable[[], Callable[[], object] | None]] = []
        self._lock = threading.RLock()  # the handler of a signal may fork as well
        self._num_forks = 0  # threads may fork at once
        self._was_collecting = False
        self._leaves_garbage = False

    def leave_garbage_alone(self) -> None:
        self._leaves_garbage = True

    def call_in_children(self, find: Callable[[], Callable[[], object] | None]) -> None:
        with self._lock:
            self._in_children = [each for each in self._in_children if each() is not None]
            self._in_children.append(find)

    def pause(self) -> None:
        """Collect nothing in what else Python calls at a fork, which may come before `begin_child`."""
        with self._lock:
            self._num_forks += 1
            if self._num_forks == 1:
                self._was_collecting = gc.isenabled()
                if self._leaves_garbage:
                    gc.disable()

    def go_on(self) -> None:
        with self._lock:
            if self._num_forks == 1 and self._was_collecting:
                gc.enable()
            self._num_forks -= 1

    def begin_child(self) -> None:
        if self._leaves_garbage:
            gc.freeze()
        self._lock, self._num_forks = threading.RLock(), 1  # another thread may have held it, and is not here
        self.depth += 1
        for find in self._in_children:
            try:
                if (function := find()) is not None:
                    function()
            except Exception:  # noqa: BLE001 - the child goes on, as after any error of such a hook
                traceback.print_exc()
        self.go_on()


_FORKS: Final = _Forks()
os.register_at_fork(before=_FORKS.pause, after_in_parent=_FORKS.go_on, after_in_child=_FORKS.begin_child)
leave_inherited_garbage_alone: Final = _FORKS.leave_garbage_alone


def this_process() -> int:
    """Return a number that is another one in a forked child than in its parent; faster than to ask the kernel."""
    return _FORKS.depth


def call_in_children(function: Callable[[], object]) -> None:
    """Call it in each child that is forked from now on; a method while its object lives, which this does not hold."""
    _FORKS.call_in_children(weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function)


def keep_for_ever(value: object) -> None:
    """Let an object never be destroyed, for a child in which its destructor would wait for a thread."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def finalize_here(owner: object, function: Callable[..., object], *args: Any) -> "weakref.finalize[Any, Any]":
    """Call a function when an object is collected or this process ends, but not when a child collects its copy."""
    return weakref.finalize(owner, _call_here, this_process(), function, *args)


def call_at_exit_here(function: Callable[..., object], *args: Any) -> Callable[[], object]:
    """Call a function when this process ends, but not when a forked child does; return a function that revokes it."""
    call = partial(_call_here, this_process(), function, *args)
    atexit.register(call)
    return partial(atexit.unregister, call)


def _call_here(process: int, function: Callable[..., object], *args: Any) -> None:
    if process == this_process():
        function(*args)
