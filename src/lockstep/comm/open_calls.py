"""The groups of this process, whose calls can be ended from another thread when their workers are replaced.

A worker may wait in a group in which the lost worker is not, or for a rank that has noticed the loss and waits itself.
So when the launcher announces a loss, the thread that reads the channel ends the calls of all groups:

    thread that reads the channel                     thread that makes calls
    -----------------------------                     -----------------------
                                                      1 waits in a group
    2 `end_calls` ends the calls of every group,
      also of those that are made from now on
                                                      3 raises
                                                      4 `renew`, then makes the group of the next generation
"""

import os
import threading
import weakref
from typing import Final, Protocol, final

from lockstep.errors import GroupError
from lockstep.processes.forking import INHERITED_GARBAGE


def describe_destroyed(group: object) -> str:
    """Return what torch's error for a call in a group that was destroyed is to show for the group (local)."""
    return (
        f"<{type(group).__name__} that was destroyed, as all groups are when the workers of a run change; make groups "
        "of your own in a function that you give to trainer.on_new_world(...), which is called again then>"
    )


class HasCalls(Protocol):
    """A group, or the making of one."""

    def end_calls(self, error: GroupError) -> None:
        """Let all calls raise `error`, those that wait now too (local, any thread)."""


@final
class OpenGroups:
    """Groups that are held weakly.

    A forked child is no member of its parent's groups, so it begins without any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[HasCalls] = weakref.WeakSet()
        self._error: GroupError | None = None
        self.are_replaced = False
        """Whether a launcher may end their calls, because this worker can continue with others."""
        os.register_at_fork(after_in_child=self._forget)
        INHERITED_GARBAGE.leave_alone()  # such as groups

    def add(self, group: HasCalls) -> None:
        """Note a group; if calls were ended since `renew`, its calls are ended at once (local)."""
        with self._lock:
            self._groups.add(group)
            error = self._error
        if error is not None:
            group.end_calls(error)

    def end_calls(self, error: GroupError) -> None:
        """End the calls of all groups, and of those to come, with `error` (local, any thread)."""
        with self._lock:
            self._error = error
            groups = list(self._groups)
        for group in groups:
            group.end_calls(error)

    def renew(self) -> None:
        """Let groups that are made from now on make calls (local)."""
        with self._lock:
            self._error = None
            self._groups.clear()

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._groups = weakref.WeakSet()
        self._error = None
        self.are_replaced = False


OPEN_GROUPS: Final = OpenGroups()
