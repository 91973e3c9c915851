"""Calls that wait their turn, and who runs them.

A lane runs its calls one after another in the order in which they were made. Whoever waits for the call that is next
runs it itself, so a call that is waited for at once costs no change of thread; all others are run by the lane's own
thread, which starts when it is first needed.

    submit -> queue -> run by   the thread that waits (`Call.wait`), or by the lane's thread
                       whoever holds `_turn`, one call at a time, oldest first

What hangs on the future of a call may make calls and wait for them, as torch's PowerSGD hook does. So it runs after the
turn, and while a thread of the lane is held up there, another takes its place.

A call may be settled before its turn: a receive whose message came while an older one was still waiting for its own.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.errors import CollectiveTimeoutError


@final
class Call(Work):
    """One call of a group, as torch's `Work`.

    Args:
        action: Does it; may return the rank that a message came from.
        tensors: What `result` and the future hold when it is done.
        lane: Where it waits its turn.
    """

    def __init__(self, action: Callable[[], int | None], tensors: Sequence[Tensor], lane: "Lane") -> None:
        super().__init__()
        self._action = action
        self._tensors = list(tensors)
        self._lane = lane
        self._done = threading.Lock()
        self._done.acquire()
        self._is_done = False
        self._error: BaseException | None = None
        self._source = -1
        self._settling = threading.Lock()
        self._pending: list[torch.futures.Future[None]] = []

    def run(self) -> None:
        """Do it, unless it is done; called once, by whoever has the lane's turn."""
        if self._is_done:
            return
        try:
            source = self._action()
        except BaseException as error:
            self.settle(error=error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        else:
            self.settle(source=-1 if source is None else source)

    def settle(self, *, source: int = -1, error: BaseException | None = None) -> None:
        """Note that it is done, well or not; the first time counts."""
        with self._settling:
            if self._is_done:
                return
            self._source, self._error, self._is_done = source, error, True
            pending, self._pending = self._pending, []
        self._action = _do_nothing  # lets go of what it holds
        self._done.release()
        self._lane.untold.extend(pending)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done.

        Ctrl-C ends the waiting. It ends the call too if this thread runs it, which breaks the group; else, as with any
        timeout, the call goes on and the group is whole.

        Raises:
            GroupError: The call failed.
            CollectiveTimeoutError: It is not done within `timeout`; it goes on.
        """
        if not self._is_done:
            seconds = timeout.total_seconds()
            if seconds > 0:
                self._lane.start()
                if not self._done.acquire(timeout=seconds):
                    raise CollectiveTimeoutError(f"The call is not complete after {seconds:g} s; it goes on.")
                self._done.release()
            else:
                self._lane.finish(self, self._done)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it is done, well or not."""
        return self._is_done

    def is_success(self) -> bool:
        """Return whether it is done well."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return why it failed, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that it filled."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait until it is done."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until it is done."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that a received message came from."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future of the tensors.

        An error of the call is an error of the future, for C++ as well; there it is a RuntimeError with our text.
        """
        base: torch.futures.Future[None] = torch.futures.Future()
        future = base.then(self._deliver)
        with self._settling:
            if not self._is_done:
                self._pending.append(base)
                self._lane.start()
                return future
        base.set_result(None)
        return future

    def _deliver(self, _: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


@final
class Lane:
    """A queue of calls of which one runs at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._queue: deque[Call] = deque()
        self.untold: deque[torch.futures.Future[None]] = deque()
        """Futures of calls that are done, to be completed after the turn."""
        self._wake = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_telling = 0
        self._is_closed = False
        self.is_in_background = False
        """Whether the call that runs is run by the lane's own thread."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._queue and not self._turn.locked()

    def run(self, action: Callable[[], int | None], tensors: Sequence[Tensor]) -> Work:
        """Do `action` in its turn and return when it is done; at once and in this thread if nothing is before it.

        Raises:
            GroupError: What `action` raises.
        """
        if self._queue or not self._turn.acquire(blocking=False):
            call = Call(action, tensors, self)
            self.submit(call, soon=False)
            call.wait()
            return call
        try:
            action()
        finally:
            self._turn.release()
            if self._queue:
                self.start()
        return Done(tensors)

    def put(self, action: Callable[[], int | None], tensors: Sequence[Tensor]) -> Work:
        """Have `action` done in its turn, whether or not anybody waits for it."""
        call = Call(action, tensors, self)
        self.submit(call, soon=True)
        return call

    @contextmanager
    def turn_if_free(self) -> Iterator[bool]:
        """Hold the turn within if nothing runs and nothing waits; yield whether it is held."""
        is_mine = not self._queue and self._turn.acquire(blocking=False)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._turn.release()
                if self._queue or self.untold:
                    self.start()

    def submit(self, call: Call, *, soon: bool) -> None:
        """Put a call in the queue.

        Args:
            call: The call.
            soon: Whether it should make progress although nobody waits for it.
        """
        self._queue.append(call)
        if soon:
            self.start()

    def finish(self, call: Call, done: threading.Lock) -> None:
        """Return when `call`, which is in the queue or running, is done; `done` is released when it is."""
        if not call.is_completed() and self._turn.acquire(blocking=False):
            try:
                # Only if it is next: what is before it may be a receive that ends later than it does.
                if self._queue and self._queue[0] is call:
                    self._run_next()
            finally:
                self._turn.release()
            self._tell()
        if self._queue:
            self.start()
        done.acquire()
        done.release()

    def start(self) -> None:
        """Let a thread of the lane run what is in the queue."""
        with self._starting:
            if len(self._threads) == self._num_telling and not self._is_closed:
                self._threads.append(threading.Thread(target=self._serve, name=self._name, daemon=True))
                self._threads[-1].start()
        self._wake.release()

    def close(self, timeout_seconds: float) -> None:
        """Run nothing more; a call that runs already has so long to end."""
        with self._starting:
            self._is_closed = True
            threads, self._threads = self._threads, []
        self._wake.release(len(threads) + 1)
        for thread in threads:
            # Ctrl-C may have come between making the thread and starting it.
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout_seconds)
        while self._queue:
            self._run_next()
        self._tell()

    def _serve(self) -> None:
        while not self._is_closed:
            self._wake.acquire()
            while (self._queue or self.untold) and not self._is_closed:
                with self._turn:
                    self.is_in_background = True
                    try:
                        self._run_next()
                    finally:
                        self.is_in_background = False
                if self.untold:
                    self._tell_in_its_own_time()

    def _tell_in_its_own_time(self) -> None:
        with self._starting:
            self._num_telling += 1
        try:
            if self._queue:
                self.start()
            self._tell()
        finally:
            with self._starting:
                self._num_telling -= 1

    def _tell(self) -> None:
        with suppress(IndexError):  # another thread takes them too
            while True:
                self.untold.popleft().set_result(None)

    def _run_next(self) -> None:
        try:
            call = self._queue.popleft()
        except IndexError:
            return
        call.run()


def _do_nothing() -> None:
    """Stand for an action that is done."""


@final
class Done(Work):
    """A call that was done before it was returned."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - torch's signature
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Tensor]:
        """Return the tensors that the call filled."""
        return self._tensors

    def synchronize(self) -> None:
        """Return at once."""

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future that holds the tensors already."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
