"""What a forked child does with what it inherits: it lets go of some, and collects none of the garbage.

To free an object may be to wait for a thread, and a child has only the thread that has forked. So a loading process in
which the garbage collector met an old Gloo group, left in a reference cycle by an error, waited in the destructor of
the group for ever, and its parent for the loading process. A child therefore leaves alone what it inherits. That also
keeps the memory shared that it shares with its parent.
"""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Final, final


def call_in_children(function: Callable[[], object]) -> None:
    """Call it in each child that is forked from now on; a method while its object lives, which this does not hold."""
    found = weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)


@final
class _InheritedGarbage:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may fork as well
        self._num_forks = 0  # threads may fork at once
        self._was_enabled = False
        self._is_left_alone = False

    def leave_alone(self) -> None:
        """Let children that are forked from now on collect nothing that they inherit."""
        if not self._is_left_alone:
            self._is_left_alone = True
            os.register_at_fork(before=self._pause, after_in_parent=self._go_on, after_in_child=self._freeze)

    def _pause(self) -> None:
        """Collect nothing in what else Python calls at a fork, which may come before `_freeze`."""
        with self._lock:
            self._num_forks += 1
            if self._num_forks == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def _go_on(self) -> None:
        with self._lock:
            if self._num_forks == 1 and self._was_enabled:
                gc.enable()
            self._num_forks -= 1

    def _freeze(self) -> None:
        gc.freeze()
        self._lock, self._num_forks = threading.RLock(), 1  # another thread may have held it, and is not here
        self._go_on()


INHERITED_GARBAGE: Final = _InheritedGarbage()
