"""The groups of this process and their calls: ended from another thread when workers are replaced, and recorded.

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

import logging
import queue
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol, final

from torch import Tensor
from torch.distributed import ProcessGroup, Work, c10d_logger, distributed_c10d

from lockstep.errors import GroupError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.processes.forking import call_in_children, leave_inherited_garbage_alone
from lockstep.processes.user_line import is_of_library
from lockstep.recording import EventKind, own_recorder
from lockstep.recording.file_format import GROUP_SHIFT
from lockstep.torch_private.groups import count_calls

_END_SECONDS: Final = 5.0
"""How long a collective may take to end whose connections are closed: milliseconds, unless it hangs."""
_POLL_SECONDS: Final = 0.001
_Outcome = queue.SimpleQueue[bool | BaseException]

_LOGGER = logging.getLogger("lockstep")
_FUNCTIONS: Final = (
    str(Path(__file__).parent),
    *(str(each.__file__) for each in (distributed_c10d, c10d_logger)),
)
"""Where the functions are with which collectives are called."""


class RefusedCallError(RuntimeError):
    """A call in code that this rank alone runs, to look at what it does."""


class HasCalls(Protocol):
    """A group, or the making of one."""

    def end_calls(self, error: GroupError) -> None:
        """Let all calls raise `error`, those that wait now too (local, any thread)."""


@final
class OpenGroups:
    """Groups, held weakly; a forked child is no member of its parent's groups, so it begins without any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[HasCalls] = weakref.WeakSet()
        self._error: GroupError | None = None
        self.num_messages = 0
        """How often a tensor was sent or received: torch's number of a group's calls leaves these out."""
        self._refusing: int | None = None
        self.are_replaced = False
        """Whether a launcher may end their calls, because this worker can continue with others."""
        call_in_children(self._forget)
        leave_inherited_garbage_alone()  # such as groups

    def add(self, group: HasCalls) -> None:
        """Note a group; if calls were ended since `renew`, its calls are ended at once (local)."""
        with self._lock:
            self._groups.add(group)
            error = self._error
        if error is not None:
            group.end_calls(error)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise a RefusedCallError in place of each call of this thread, which the other ranks do not make (local)."""
        before, self._refusing = self._refusing, threading.get_ident()
        try:
            yield
        finally:
            self._refusing = before

    def raise_if_refused(self) -> None:
        if self._refusing is not None and self._refusing == threading.get_ident():
            raise RefusedCallError

    def count_message(self) -> None:
        self.raise_if_refused()
        self.num_messages += 1

    def num_calls(self) -> int:
        """Return a number that is another one when this process has called a group since (local)."""
        with self._lock:
            groups = list(self._groups)
        return self.num_messages + sum(count_calls(group) for group in groups if isinstance(group, ProcessGroup))

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


def describe_destroyed(group: object) -> str:
    """Return what torch's error for a call in a group that was destroyed is to show for the group (local)."""
    return (
        f"<{type(group).__name__} that was destroyed, as all groups are when the workers of a run change; make groups "
        "of your own in a function that you give to trainer.on_new_world(...), which is called again then>"
    )


@final
class CallsUnderWay:
    """A group's collectives in a backend of torch that have not ended: until then they may write into their tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[Any] = deque()

    def add(self, work: Work) -> None:
        with self._lock:
            self._forget_completed()
            self._works.append(work)

    def forget_completed(self) -> None:
        """Hold those that are complete, and their tensors, no longer."""
        with self._lock:
            self._forget_completed()

    def wait_for_end(self, group: object) -> None:
        """Return when none can write into its tensors any more; call it when all connections are closed.

        Gloo never ends one of which a part of a message has arrived: it hangs until the group's timeout, writes
        nothing, and destroying the group would wait for it. A thread, which holds `group`, does that then.
        """
        deadline = time.monotonic() + _END_SECONDS
        with self._lock:
            works = list(self._works)
            self._works.clear()
        while works and time.monotonic() < deadline:
            if has_ended(works[-1]):
                works.pop()
            else:
                time.sleep(_POLL_SECONDS)
        if works:
            start_thread_left_alone(_hold, [works, group], name="lockstep-ending")

    def _forget_completed(self) -> None:
        while self._works and has_ended(self._works[0]):
            self._works.popleft()


def _hold(works: list[Any], _group: object) -> None:
    while works:
        with suppress(RuntimeError):
            works.pop().wait()


def is_users_call() -> bool:
    """Whether the user's code has called the function of torch's, or ours, in which this is (local)."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's name
    while frame is not None and frame.f_code.co_filename.startswith(_FUNCTIONS):
        frame = frame.f_back
    return frame is not None and not is_of_library(frame.f_code.co_filename)


def log_not_waited_for(call: str) -> None:
    """Say so of a call that is dropped; where nobody looks at it, a warning that is an error would be lost."""
    _LOGGER.warning(
        "No code has waited for %s: what it writes may have been read before it was there. Keep what the call returns, "
        "and call wait() on it before its tensors are used; or leave async_op=True out. (LS213)",
        call,
    )


def has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it has failed, and whoever waits for it gets the error
        return True


@final
class InterruptibleWaits:
    """The waits of one group for messages of Gloo, each made by a thread that has no other at that time.

    Gloo never ends the wait for a message of which a part has arrived when the connection ends (`Pair::signalException`
    reports the error to pending operations, and leaves out the one that is being read or written); and a wait with a
    timeout closes the group when it passes. So where a launcher may replace the workers, another thread waits. It is
    left alone if the call is ended, and ends at the group's timeout. Its connection is closed by then, so nothing is
    written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[tuple[Any, _Outcome] | None]] = []
        self._waiting: set[_Outcome] = set()
        self._error: GroupError | None = None

    def wait(self, work: Work) -> bool:
        outcome: _Outcome = queue.SimpleQueue()
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._waiting.add(outcome)
            thread = self._idle.pop() if self._idle else self._start()
        thread.put((work, outcome))
        try:
            found = outcome.get()
        finally:
            with self._lock:
                self._waiting.discard(outcome)
        if isinstance(found, GroupError):
            raise found.with_traceback(None)
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self, error: GroupError) -> None:
        """Let all waits raise `error`, those to come too, and end the threads (any thread)."""
        with self._lock:
            self._error = error
            waiting, idle, self._idle = list(self._waiting), self._idle, []
        for outcome in waiting:
            outcome.put(error)
        for thread in idle:
            thread.put(None)

    def _start(self) -> "queue.SimpleQueue[tuple[Any, _Outcome] | None]":
        calls: queue.SimpleQueue[tuple[Any, _Outcome] | None] = queue.SimpleQueue()
        start_thread_left_alone(self._serve, [calls], name="lockstep-waits")
        return calls

    def _serve(self, calls: "queue.SimpleQueue[tuple[Any, _Outcome] | None]") -> None:
        while (call := calls.get()) is not None:
            work, outcome = call
            found: bool | BaseException
            try:
                found = bool(work.wait())
            except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is read
                found = error
            del work, call
            with self._lock:
                if self._error is None:
                    self._idle.append(calls)
                else:
                    calls.put(None)
            outcome.put(found)
            del found, outcome


@final
class CallEvents:
    """Records the calls of one group.

    All ranks of a group make the same calls in the same order. So the number of a call, counted by each rank, is the
    same on all of them, and a reader sees which rank has not made a call in which others wait.
    """

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self._recorder = own_recorder()
        is_default = [*global_ranks] == [*range(len(global_ranks))]
        group = 0 if is_default else zlib.crc32(repr([*global_ranks]).encode()) & 0xFFFF | 1
        self._first = group << GROUP_SHIFT
        self.num_calls = 0

    def take_number(self) -> int:
        """Return the number of the next call; called in the order of the calls."""
        OPEN_GROUPS.raise_if_refused()
        number = self._first + self.num_calls
        self.num_calls += 1
        return number

    def begin(self, number: int, call: bytes, tensors: Sequence[Tensor]) -> int:
        recorder = self._recorder
        if not recorder.is_open:
            return 0
        size = 0
        for tensor in tensors:  # `sum` of a generator takes as long as the event
            size += tensor.numel() * tensor.element_size()  # sparse ones have no nbytes
        return recorder.begin(EventKind.COLLECTIVE, number, size, recorder.text(call))

    def end(self, event: int) -> None:
        self._recorder.end(event)
