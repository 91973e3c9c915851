"""The queue of a group's calls, the threads that run them, and what is checked before and told after a failure.

A work queue runs its calls one after another, in the order in which they were made. A thread that waits for the next
call runs it itself, so a call that is waited for at once needs no switch of threads. The queue's own thread,
which starts when it is first needed, runs all others.

    submit -> queue -> run by   the thread that waits (`QueuedWork.wait`), or by the queue's thread
                       the holder of `_run_lock`, one call at a time, oldest first

Callbacks of a call's future may make calls and wait for them, as torch's PowerSGD hook does. So they run after the lock
is released, and while they hold up a thread of the queue, another thread takes its place.

A call may be complete before it is run: a receive whose message came while an older one was still waiting for its own.

[Note: Ctrl-C] KeyboardInterrupt may be raised after any call of the main thread, also after one that took a lock.
So a lock is taken within the `try` that releases it, and `_run_lock` has an owner: releasing what another thread
holds is an error and changes nothing. A call leaves the queue when it is done, not when it is looked at.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.open_calls import CallEvents, is_users_call, log_not_waited_for
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.compiler import keep_compiler_out_of_methods

_LOGGER = logging.getLogger("lockstep")
_RECHECK_SECONDS: Final = 1.0
"""How often a thread that waits for another one checks for itself: Ctrl-C may have prevented the release."""
Result = TypeVar("Result")


@final
@keep_compiler_out_of_methods
class QueuedWork(Work):
    """One call of a group, as torch's `Work`; `action` may return the rank that sent the message."""

    def __init__(self, action: Callable[[], int | None], tensors: Sequence[Tensor], work_queue: "WorkQueue") -> None:
        super().__init__()
        self._action = action
        self._tensors = list(tensors)
        self._work_queue = work_queue
        self._done = threading.Lock()
        self._done.acquire()
        self._is_running = False
        self.is_done = False
        self._error: BaseException | None = None
        self.name = ""
        """The call and its line, where somebody must wait for it."""
        self._source = -1
        self._is_error_seen = False
        self._completion_lock = threading.Lock()
        self._pending: list[torch.futures.Future[None]] = []

    def run(self) -> None:
        """Run the call, unless it is done; called once, by the thread that has the queue's lock."""
        if self.has_begun:
            return
        try:
            self._is_running = True
            source = self._action()
            self.complete(source=-1 if source is None else source)
        except CollectiveMismatchError as error:
            # Its frames reference this call: with them, it would not be collected, and __del__ would not log the error.
            self.complete(error=error.with_traceback(None))
        except BaseException as error:
            self.complete(error=error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    def complete(self, *, source: int = -1, error: BaseException | None = None) -> None:
        """Mark it as done, with or without an error; only the first time counts."""
        with self._completion_lock:
            if self.is_done:
                return
            self._source, self._error, self.is_done = source, error, True
            self._work_queue.unset_futures.extend(self._pending)
        self._action = _do_nothing  # drops what it references
        pending, self._pending = self._pending, []
        self._done.release()
        if pending and not self._is_running:
            self._work_queue.complete_futures_now()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done.

        Ctrl-C ends the wait. If this thread runs the call, it ends the call too, which breaks the group; otherwise, as
        after a timeout, the call continues and the group stays usable.
        """
        if not self.is_done:
            seconds = timeout.total_seconds()
            if seconds > 0:
                self._work_queue.start()
                if self._done.acquire(timeout=seconds):
                    self._done.release()
                elif not self.is_done:
                    raise CollectiveTimeoutError(f"The call is not complete after {seconds:g} s; it continues. (LS202)")
            else:
                self._work_queue.finish(self, self._done)
        self._is_error_seen = True
        if self._error is not None:
            raise self._error
        return True

    def __del__(self) -> None:
        """Log that no code has looked at it; a later call must not fail because of this one."""
        if self._is_error_seen or sys.is_finalizing():
            return
        if isinstance(self._error, CollectiveMismatchError):
            _LOGGER.error("An asynchronous call failed, and no code waited for it: %s (LS213)", self._error)
        elif self.name and self._error is None and self.name not in self._work_queue.told:
            self._work_queue.told.add(self.name)
            log_not_waited_for(self.name)

    def is_completed(self) -> bool:
        self.name = "" if self.is_done else self.name  # whoever polls may know enough, but not of an error
        return self.is_done

    @property
    def has_begun(self) -> bool:
        return self.is_done or self._is_running

    def is_success(self) -> bool:
        self._is_error_seen = self._is_error_seen or self.is_done
        return self.is_done and self._error is None

    def exception(self) -> BaseException | None:
        self._is_error_seen = self._is_error_seen or self.is_done
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future of the tensors; an error of the call is its error, in C++ a RuntimeError with our text."""
        self._is_error_seen = True  # the future delivers the error
        base: torch.futures.Future[None] = torch.futures.Future()
        future = base.then(self._deliver)
        with self._completion_lock:
            if not self.is_done:
                self._pending.append(base)
                self._work_queue.start()
                return future
        base.set_result(None)
        return future

    def _deliver(self, _: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


@final
class WorkQueue:
    """A queue of calls of which one runs at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._run_lock = threading.RLock()  # but no thread takes it twice
        self._queue: deque[QueuedWork] = deque()
        self.told: set[str] = set()
        """Of which calls was said that nobody waits for them."""
        self.unset_futures: deque[torch.futures.Future[None]] = deque()
        """Futures of calls that are done, to be completed after the lock is released."""
        self._wake = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_completing = 0
        self._completion_threads: list[threading.Thread] = []
        self._is_closed = False
        self.is_in_background = False
        """Whether the current call runs in the queue's own thread."""

    def run(
        self, action: Callable[..., int | None], tensors: Sequence[Tensor], arguments: tuple[Any, ...] = ()
    ) -> None:
        """Run `action` in order and return when it is done; at once and in this thread if the queue is empty."""
        lock = self._run_lock
        # As `_try_lock` does, in fewer steps.
        if not self._queue and not lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
            try:
                if lock.acquire(blocking=False):
                    action(*arguments)
                    return
            finally:
                try:  # noqa: SIM105
                    lock.release()
                except RuntimeError:  # another thread has it
                    pass
                if self._queue:
                    self.start()
        call = QueuedWork(partial(action, *arguments), tensors, self)
        self.submit(call, soon=False)
        call.wait()

    def put(self, action: Callable[[], int | None], tensors: Sequence[Tensor]) -> QueuedWork:
        """Queue `action`, to be run in order whether or not a thread waits for it."""
        call = QueuedWork(action, tensors, self)
        self.submit(call, soon=True)
        return call

    def try_now(self, action: Callable[[bool], Result]) -> Result:
        """Run `action` at once; its argument is whether it has the lock: if no call runs and none is queued."""
        try:
            return self._try_lock(lambda has_lock: action(has_lock and not self._queue))
        finally:
            if self._queue or self.unset_futures:
                self.start()

    def submit(self, call: QueuedWork, *, soon: bool) -> None:
        """Put a call in the queue; with `soon`, it is run even if no thread waits for it."""
        self._queue.append(call)
        if soon:
            self.start()

    def finish(self, call: QueuedWork, done: threading.Lock) -> None:
        """Return when `call`, which is in the queue or running, is done; `done` is released when it is."""

        def run_if(has_lock: bool) -> bool:
            # Only if it is next: the call before it may be a receive that ends later.
            if has_lock and self._queue and self._queue[0] is call:
                self._run_next()
            return has_lock

        try:
            if not call.is_done and self._try_lock(run_if):
                self._complete_futures()
        finally:
            if self._queue or self.unset_futures:
                self.start()
        while not call.is_done:
            if done.acquire(timeout=_RECHECK_SECONDS):
                done.release()
            else:
                self.start()

    def start(self) -> None:
        """Let a thread of the queue run what is in the queue."""
        with self._starting:
            if len(self._threads) <= self._num_completing and not self._is_closed:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)  # not before: starting it may fail, or Ctrl-C may interrupt
        self._wake.release()

    @property
    def is_idle(self) -> bool:
        return all(call.is_done for call in list(self._queue))

    def complete_futures_now(self) -> None:
        """Complete the futures of a call that another call completed, whose thread may stay busy for long."""
        with self._starting:
            if self._is_closed:
                return  # close() completes them
            thread = threading.Thread(target=self._complete_futures, name=self._name, daemon=True)
            with suppress(RuntimeError):  # no thread can be started: they are completed after the lock is released
                thread.start()
            self._completion_threads = [*(other for other in self._completion_threads if other.is_alive()), thread]

    def close(self, timeout_seconds: float) -> None:
        """Run no more calls; one that is running may take `timeout_seconds` to end."""
        with self._starting:
            self._is_closed = True
            threads, self._threads = [*self._threads, *self._completion_threads], []
        self._wake.release()  # each thread that ends wakes the next one
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout_seconds)
        while self._queue:
            self._run_next()
        self._complete_futures()

    def _serve(self) -> None:
        while not self._is_closed:
            self._wake.acquire()
            while (self._queue or self.unset_futures) and not self._is_closed:
                with self._run_lock:
                    self.is_in_background = True
                    try:
                        self._run_next()
                    finally:
                        self.is_in_background = False
                if self.unset_futures:
                    self._complete_futures_without_lock()
        self._wake.release()

    def _try_lock(self, action: Callable[[bool], Result]) -> Result:
        """Run `action` at once; its argument is whether no other thread has the lock. [Note: Ctrl-C]."""
        if self._run_lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition asks
            return action(False)
        try:
            return action(self._run_lock.acquire(blocking=False))
        finally:
            # Not suppress(): Ctrl-C could be raised between its first line and this one.
            try:  # noqa: SIM105
                self._run_lock.release()
            except RuntimeError:  # another thread has it
                pass

    def _complete_futures_without_lock(self) -> None:
        with self._starting:
            self._num_completing += 1
        try:
            if self._queue:
                self.start()
            self._complete_futures()
        finally:
            with self._starting:
                self._num_completing -= 1

    def _complete_futures(self) -> None:
        with suppress(IndexError):  # another thread takes them too
            while True:
                self.unset_futures.popleft().set_result(None)

    def _run_next(self) -> None:
        try:
            call = self._queue[0]
        except IndexError:
            return
        try:
            call.run()
        finally:
            if call.has_begun:
                with suppress(ValueError, IndexError):  # close() removes calls too
                    self._queue.remove(call)


def _do_nothing() -> None:
    """Replace an action that is done."""


@final
class CallRunner:
    """Runs the calls of a group in their order, in the caller's thread or behind it."""

    def __init__(
        self,
        exchange: PhaseExchange,
        peers: Peers,
        work_queue: WorkQueue,
        events: CallEvents,
    ) -> None:
        self._exchange = exchange
        self._peers = peers
        self.work_queue = work_queue
        self._events = events

    def start(
        self,
        call: bytes,
        action: Callable[..., object],
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...] = (),
        *,
        is_async: bool,
    ) -> Work | None:
        """Begin a call that writes to `tensors`, which were checked; one that is not asynchronous is over then: None.

        Torch's functions take None for a call that is over; making a `Work` takes a tenth of the time of a small one,
        and binding arguments to a function a twentieth.
        """
        if self._peers.broken is not None:
            self._peers.raise_if_broken()
        # A rank that does not wait at once is elsewhere when its call is found to differ.
        caller = find_user_line() if is_async else threading.get_ident()
        guarded = self._events.take_number(), caller, call, tensors, action, arguments
        if is_async:
            work = self.work_queue.put(partial(self._run, *guarded), tensors)
            work.name = f"{call.decode()} at {caller}" if caller and tensors and is_users_call() else ""
            return work
        self.work_queue.run(self._run, tensors, guarded)
        return None

    def compare(self, call: bytes) -> None:
        """Return when every rank has made this call, which carries nothing."""
        self.start(call, self._exchange.compare_calls, [], (call,), is_async=False)

    def _run(  # what a call is
        self,
        number: int,
        caller: str | int,
        call: bytes,
        tensors: Sequence[Tensor],
        action: Callable[..., object],
        arguments: tuple[Any, ...],
    ) -> None:
        if self._peers.broken is not None:
            self._peers.raise_if_broken()
        event = self._events.begin(number, call, tensors)
        self._exchange.caller = caller
        self._exchange.may_spin = not self.work_queue.is_in_background
        try:
            action(*arguments)
        except CollectiveMismatchError:
            raise  # on every rank alike, between two phases: the group is as good as before
        except GroupError:
            raise  # published by the rank that found it
        except BaseException as error:
            self._peers.fail(error, call)  # without this the others would wait for phases that never come
            raise
        finally:
            self._events.end(event)
