"""Calls that wait their turn, without a group."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, final

import pytest
import torch

from lockstep.comm.shm.work import QueuedWork, WorkQueue
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError

PATIENCE = 30
ONE = torch.ones(2)


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    made = WorkQueue("test")
    yield made
    made.close(1.0)


class Gate:
    """An action that waits until it is opened, and records the thread that ran it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.opened.wait(PATIENCE)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fail() -> None:
    raise GroupError("it went wrong")


def test_a_call_that_is_waited_for_at_once_needs_no_thread(queue: WorkQueue) -> None:
    ran_by = []
    queue.run(lambda: ran_by.append(threading.current_thread()), [ONE])
    assert ran_by == [threading.current_thread()]
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


def test_calls_run_in_the_order_in_which_they_were_made(queue: WorkQueue) -> None:
    order: list[int] = []
    gate = Gate()
    first = queue.put(gate, [])
    works = [queue.put(lambda number=number: order.append(number), []) for number in range(5)]  # type: ignore[misc]
    assert gate.entered.wait(PATIENCE)
    assert not works[0].is_completed()
    gate.opened.set()
    for work in reversed(works):
        assert work.wait()
    assert order == [0, 1, 2, 3, 4]
    assert first.is_success()


def test_a_synchronous_call_waits_for_those_before_it(queue: WorkQueue) -> None:
    order: list[str] = []
    gate = Gate()
    queue.put(gate, [])
    queue.put(lambda: order.append("before"), [])
    assert gate.entered.wait(PATIENCE)
    threading.Timer(0.01, gate.opened.set).start()
    queue.run(lambda: order.append("mine"), [])
    assert order == ["before", "mine"]


def test_calls_of_several_threads_run_one_at_a_time(queue: WorkQueue) -> None:
    running, most, total = 0, 0, 0

    def action() -> None:
        nonlocal running, most, total
        running += 1
        most = max(most, running)
        time.sleep(0.0002)
        running -= 1
        total += 1

    def make_calls() -> None:
        for turn in range(20):
            if turn % 2:
                queue.run(action, [])
            else:
                queue.put(action, []).wait()

    with ThreadPoolExecutor() as pool:
        wait([pool.submit(make_calls) for _ in range(4)], PATIENCE)
    assert (most, total) == (1, 80)


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_is_raised_wherever_the_call_is_waited_for(queue: WorkQueue, times: int) -> None:
    work = queue.put(fail, [])
    for _ in range(times):
        with pytest.raises(GroupError, match="it went wrong"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), GroupError)
    assert queue.put(lambda: None, []).wait()
    with pytest.raises(GroupError, match="it went wrong"):
        queue.run(fail, [])
    with pytest.raises(RuntimeError, match="it went wrong"):
        queue.put(fail, [ONE]).get_future().wait()


def test_a_wait_may_end_before_the_call(queue: WorkQueue) -> None:
    gate = Gate()
    work = queue.put(gate, [])
    with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0.01 s; it continues"):
        work.wait(timedelta(seconds=0.01))
    gate.opened.set()
    assert work.wait(timedelta(seconds=PATIENCE))
    assert work.is_success()


def test_a_call_may_say_where_a_message_came_from(queue: WorkQueue) -> None:
    work: Any = queue.put(lambda: 3, [ONE])
    work.wait()
    assert work._source_rank() == work.source_rank() == 3
    assert work.result() == [ONE]


def test_a_call_may_be_finished_before_its_turn(queue: WorkQueue) -> None:
    gate = Gate()
    queue.put(gate, [])
    later: Any = queue.put(fail, [ONE])
    later.complete(source=2)
    assert later.wait()
    assert later.source_rank() == 2
    later.complete(error=GroupError("the first time counts"))
    assert later.is_success()
    gate.opened.set()


def test_a_future_holds_the_tensors(queue: WorkQueue) -> None:
    gate = Gate()
    work = queue.put(gate, [ONE])
    early = work.get_future().then(lambda done: done.value()[0] + 1)
    assert not early.done()
    gate.opened.set()
    assert torch.equal(early.wait(), ONE + 1)
    assert work.get_future().wait()[0] is ONE


def test_a_callback_may_wait_for_another_call() -> None:
    """Torch's PowerSGD hook does. It once hung: the thread that was to make the call stood in the callback."""
    queue = WorkQueue("test")  # closed only if nothing hangs
    gate = Gate()

    def wait_by_future(_: Any) -> str:
        return str(queue.put(lambda: None, ["inner"]).get_future().wait())  # type: ignore[list-item]

    def wait_in_place(_: Any) -> str:
        queue.run(lambda: None, [])
        return "in place"

    futures = [queue.put(gate, []).get_future().then(wait_by_future)]
    futures.append(queue.put(lambda: None, []).get_future().then(wait_in_place))
    futures.append(queue.put(lambda: None, []).get_future().then(lambda _: str(last.wait())))
    last = queue.put(lambda: None, []).get_future()
    gate.opened.set()
    wait_until(lambda: all(future.done() for future in futures))
    assert [future.value() for future in futures] == ["['inner']", "in place", "[]"]
    queue.close(1.0)


def test_ctrl_c_ends_the_waiting_for_a_call_that_another_thread_runs_and_not_the_call(queue: WorkQueue) -> None:
    gate = Gate()

    def interrupt() -> None:
        assert gate.entered.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)

    def wait() -> None:
        interrupting.start()
        work.wait()

    work = queue.put(gate, [ONE])
    assert gate.entered.wait(PATIENCE)
    with pytest.raises(KeyboardInterrupt):
        wait()
    interrupting.join()
    assert not work.is_completed()
    gate.opened.set()
    assert work.wait()
    queue.run(lambda: None, [])


@final
class Interrupting:
    """A lock after whose taking Ctrl-C comes, so many times."""

    def __init__(self, lock: Any, times: int = 1) -> None:
        self._lock = lock
        self._times = times
        self.release = lock.release
        self._is_owned = lock._is_owned
        self.__exit__ = lock.__exit__

    def acquire(self, **arguments: Any) -> bool:
        is_taken: bool = self._lock.acquire(**arguments)
        if is_taken and self._times > 0:
            self._times -= 1
            raise KeyboardInterrupt
        return is_taken


def test_ctrl_c_does_not_leave_the_lock_taken(queue: WorkQueue) -> None:
    # The queue was locked for ever, without a timeout, if Ctrl-C came right after the lock was taken.
    turn = queue._run_lock
    calls: tuple[Callable[[], Any], ...] = (
        lambda: queue.run(lambda: None, []),
        lambda: queue.try_now(lambda _: None),
        QueuedWork(lambda: None, [], queue).wait,
    )
    for call in calls:
        queue._run_lock = Interrupting(turn)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            call()
        queue._run_lock = turn
        assert not turn._is_owned()  # type: ignore[attr-defined]
    queue.run(lambda: None, [])


def test_ctrl_c_does_not_lose_a_call(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    # A call that was out of the queue and did not run yet was lost: its caller waited for ever.
    ran = threading.Event()
    call = QueuedWork(lambda: ran.set(), [], queue)  # noqa: PLW0108 - None, and not the event's answer
    queue.submit(call, soon=False)
    run = QueuedWork.run

    def be_interrupted(_: QueuedWork) -> None:
        monkeypatch.setattr(QueuedWork, "run", run)
        raise KeyboardInterrupt

    monkeypatch.setattr(QueuedWork, "run", be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        call.wait()
    assert call.wait(timedelta(seconds=PATIENCE))
    assert ran.is_set()


def test_a_call_that_ctrl_c_ends_does_not_keep_the_others_from_going_on(queue: WorkQueue) -> None:
    # Its thread once ended without waking the queue's own thread, and without setting the futures of finished calls.
    def be_interrupted() -> None:
        queue.unset_futures.append(unset_futures)
        raise KeyboardInterrupt

    unset_futures: torch.futures.Future[None] = torch.futures.Future()
    ran = threading.Event()
    first = QueuedWork(be_interrupted, [], queue)
    for call in (first, QueuedWork(ran.set, [], queue)):
        queue.submit(call, soon=False)
    with pytest.raises(KeyboardInterrupt):
        first.wait()
    assert ran.wait(PATIENCE)
    wait_until(unset_futures.done)


def test_a_thread_that_could_not_be_started_does_not_count(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    # The queue once counted on a thread that had not started, for ever.
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            queue.put(lambda: None, [])
    ran = threading.Event()
    queue.put(ran.set, [])
    assert ran.wait(PATIENCE)


def test_a_future_is_set_at_once_though_another_call_runs(queue: WorkQueue) -> None:
    # It was set only after the call that finished it had ended: a deadlock, if that call waits for the future.
    gate = Gate()
    queue.put(gate, [])
    later: Any = queue.put(fail, [ONE])
    future = later.get_future()
    assert gate.entered.wait(PATIENCE)
    later.complete(source=1)
    wait_until(future.done)
    assert not gate.opened.is_set()
    gate.opened.set()


def test_what_interposes_has_the_turn_when_nothing_runs(queue: WorkQueue) -> None:
    def try_now(has_lock: bool) -> Any:
        assert has_lock
        assert not queue.try_now(lambda again: again)
        work = queue.put(lambda: None, [])
        assert not work.is_completed()
        return work

    assert queue.try_now(try_now).wait()
    gate = Gate()
    queue.put(gate, [])
    assert gate.entered.wait(PATIENCE)
    assert not queue.try_now(lambda has_lock: has_lock)
    gate.opened.set()


def test_closing_lets_a_running_call_end() -> None:
    queue = WorkQueue("test")
    gate = Gate()
    work = queue.put(gate, [])
    assert gate.entered.wait(PATIENCE)
    threading.Timer(0.02, gate.opened.set).start()
    queue.close(PATIENCE)
    assert work.is_completed()
    assert gate.thread is not None
    gate.thread.join(PATIENCE)
    assert not gate.thread.is_alive()


def wait_in_vain(call: QueuedWork) -> None:
    with pytest.raises(CollectiveMismatchError):
        call.wait()


@pytest.mark.parametrize(
    ("ask", "num_records"),
    [
        (lambda _: None, 1),
        (lambda call: call.exception(), 0),
        (lambda call: call.is_success(), 0),
        (lambda call: call.get_future(), 0),
        (wait_in_vain, 0),
    ],
)
def test_a_mismatch_that_no_caller_waits_for_is_logged(
    queue: WorkQueue, caplog: pytest.LogCaptureFixture, ask: Callable[[QueuedWork], Any], num_records: int
) -> None:
    # It was lost: the group went on, and the tensor was never reduced.
    def differ() -> None:
        raise CollectiveMismatchError("they differ")

    with caplog.at_level(logging.ERROR, "lockstep"):
        call = queue.put(differ, [ONE])
        wait_until(call.is_completed)
        ask(call)
        call = queue.put(lambda: None, [ONE])
        assert call.wait()
        wait_until(lambda: len(caplog.records) == num_records)
    assert all("no code waited for it: they differ" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("ask", [None, QueuedWork.wait, QueuedWork.get_future, QueuedWork.is_completed])
def test_a_call_that_nobody_waits_for_is_logged_once(
    queue: WorkQueue, caplog: pytest.LogCaptureFixture, ask: Callable[[QueuedWork], Any] | None
) -> None:
    with caplog.at_level(logging.WARNING, "lockstep"):
        for _ in range(2):
            call = queue.put(lambda: None, [ONE])
            call.name = "all_reduce(sum, float32 [1]) at train.py:7"
            assert queue.put(lambda: None, [ONE]).wait()
            if ask is not None:
                ask(call)
            last = queue.put(lambda: None, [ONE])
            del call
            assert last.wait()
    expected = [] if ask is not None else ["No code has waited for all_reduce(sum, float32 [1]) at train.py:7: "]
    assert [text[: len(each)] for text, each in zip(caplog.messages, expected, strict=True)] == expected
