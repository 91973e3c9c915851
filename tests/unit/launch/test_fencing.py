"""Which workers are ended because they hang, without processes."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.modules import linear

from lockstep.launch import signals
from lockstep.launch.continuation import Answer, WorkerReports
from lockstep.launch.membership import Generation, WorkerLimits
from lockstep.launch.restarts import Elastic
from lockstep.launch.signals import look_at_main_thread
from lockstep.launch.supervision import Fencing
from lockstep.processes.host import StackLine

SECONDS = 10.0


class Process:
    exit_code: int | None = None


class Launch:
    """Workers 0 to 2 that train, and worker 3 that waits to join; each answers as a test says."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.now = 0.0
        self.killed: dict[int, str] = {}
        self.generation = Generation(number=0, workers=(0, 1, 2))
        self.reports = WorkerReports(ready={worker: WorkerLimits(max_workers=4) for worker in range(3)})
        self.workers = {worker: Process() for worker in range(4)}
        self.leaving: tuple[int, ...] = ()
        self.new: tuple[int, ...] = ()
        self.absent: tuple[int, ...] = ()
        self.decided_at = 0.0
        self.pids = {worker: 100 + worker for worker in range(4)}
        self.answers: dict[int, tuple[bool | None, int] | None] = dict.fromkeys(range(4), (True, 0))
        evict_after = None if seconds == float("inf") else seconds
        launch: Any = SimpleNamespace(pool=self, continuation=self, elastic=Elastic(evict_after=evict_after))
        self.fencing = Fencing(launch, clock=lambda: self.now)

    def is_new(self, worker: int) -> bool:
        return worker in self.new

    @property
    def needed(self) -> tuple[int, ...]:
        return (*self.generation.workers, *self.leaving)

    @property
    def decided_for(self) -> float:
        return self.now - self.decided_at

    @property
    def server(self) -> "Launch":
        return self

    def send(self, worker: int, message: dict[str, Any]) -> None:
        answer = self.answers[worker]
        if answer is not None:
            self.reports.alive[worker] = Answer(message["number"], *answer, "train.py, line 3, in loss")

    def kill(self, process: Process, killer: str) -> None:
        process.exit_code = -9
        self.killed[next(number for number, each in self.workers.items() if each is process)] = killer

    def pass_time(self, seconds: float, *, calls: bool = False) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            if calls:
                self.answers = {each: given and (given[0], given[1] + 1) for each, given in self.answers.items()}
            self.fencing.advance()


@pytest.fixture
def launch() -> Launch:
    return Launch()


def test_a_silent_worker_is_ended_in_time_and_no_other(launch: Launch) -> None:
    launch.pass_time(30)
    launch.answers[1] = None
    launch.pass_time(SECONDS - 1)
    assert not launch.killed
    launch.pass_time(5)
    assert launch.killed == {1: "by its launcher, because it has not answered for 10 s"}


def test_a_silent_worker_that_is_to_leave_is_ended_too(launch: Launch) -> None:
    # The others need it for the step under way. They once waited for it for ever.
    launch.generation, launch.leaving = Generation(number=1, workers=(0, 2)), (1,)
    launch.answers[1] = None
    launch.pass_time(SECONDS + 5)
    assert launch.killed == {1: "by its launcher, because it has not answered for 10 s"}


def test_a_worker_for_which_others_wait_is_ended_with_the_line_that_it_runs(launch: Launch) -> None:
    launch.answers[2] = (False, 0)
    launch.pass_time(SECONDS - 1)
    assert not launch.killed
    launch.pass_time(5)
    said = "by its launcher, because others have waited for it for 10 s: it was in train.py, line 3, in loss"
    assert launch.killed == {2: said}


def test_nobody_is_ended_who_takes_steps_or_for_whom_nobody_waits(launch: Launch) -> None:
    launch.answers[2] = (False, 0)  # the slowest
    launch.pass_time(3 * SECONDS, calls=True)
    launch.answers = dict.fromkeys(range(4), (False, 0))  # a long step
    launch.pass_time(3 * SECONDS)
    assert not launch.killed


def test_a_worker_that_waited_and_is_gone_lets_nobody_be_ended(launch: Launch) -> None:
    launch.answers = {0: (False, 0), 1: (False, 0), 2: (True, 0), 3: None}
    launch.pass_time(SECONDS / 2)
    launch.generation = Generation(number=1, workers=(0, 1))  # worker 2 was lost
    launch.pass_time(3 * SECONDS)
    assert not launch.killed


def test_a_new_worker_that_waits_for_the_next_step_lets_nobody_be_ended(launch: Launch) -> None:
    launch.generation, launch.new = Generation(number=1, workers=(0, 1, 2)), (2,)
    launch.answers = {0: (False, 0), 1: (False, 0), 2: (True, 0), 3: None}  # a long step
    launch.pass_time(3 * SECONDS)
    assert not launch.killed
    launch.answers = {0: (True, 0), 1: (True, 0), 2: (False, 0), 3: None}  # it keeps the others waiting
    launch.pass_time(2 * SECONDS)
    assert list(launch.killed) == [2]


def test_a_new_worker_that_is_silent_does_not_keep_the_others_waiting_whatever_the_options_say() -> None:
    launch = Launch(seconds=float("inf"))
    assert launch.fencing.next_look == float("inf")
    launch.answers[1] = None  # a member is waited for, as without the option
    launch.reports.waiting.append(3)
    launch.pass_time(20)
    assert not launch.killed
    launch.answers[3] = None
    launch.pass_time(8)
    assert list(launch.killed) == [3]


def test_a_member_that_waits_in_a_call_of_the_old_group_is_ended_so_that_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launch = Launch(seconds=float("inf"))
    launch.now = launch.decided_at = 100.0
    launch.absent = (1,)
    assert launch.fencing.next_look == 101.0, "whoever comes at once is not asked"
    launch.pass_time(6)
    (told,) = [record.message for record in caplog.records]
    assert told == (
        "The others wait for worker 1 (pid 101), to continue without one that is lost: it is in train.py, line 3, in "
        "loss. (LS604)"
    )
    launch.pass_time(10)
    assert not launch.killed
    launch.pass_time(8)
    said = "it has waited for 20 s in a call of workers of which one was lost, in train.py, line 3, in loss"
    assert launch.killed == {1: f"by its launcher, because {said}"}


@pytest.mark.parametrize("answer", [(False, 0), None])
def test_a_member_that_comes_late_by_its_own_code_or_is_stopped_is_told_of_and_waited_for(
    answer: tuple[bool, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    launch = Launch(seconds=float("inf"))
    launch.answers[2] = answer
    launch.now = launch.decided_at = 100.0
    launch.absent = (2,)
    launch.pass_time(100)
    assert not launch.killed
    where = "does not answer the launcher" if answer is None else "is in train.py, line 3, in loss"
    assert [record.message.rpartition(": it ")[2] for record in caplog.records] == [f"{where}. (LS604)"]


def test_after_the_launcher_was_away_everybody_has_time_to_answer(launch: Launch) -> None:
    launch.pass_time(5)
    launch.answers = dict.fromkeys(range(4), None)
    launch.pass_time(4)
    launch.now += 1000  # the machine slept
    launch.pass_time(4)
    assert not launch.killed


def test_a_worker_whose_main_thread_is_not_seen_is_not_ended_and_lets_nobody_be_ended(launch: Launch) -> None:
    # It counted as one that does not wait: it was ended although it waited for another, or nobody was.
    launch.answers = {0: (None, 0), 1: (None, 0), 2: (False, 0), 3: None}
    launch.pass_time(3 * SECONDS)
    assert not launch.killed
    launch.answers[0] = (True, 0)
    launch.pass_time(2 * SECONDS)
    assert list(launch.killed) == [2]


def test_a_main_thread_beside_many_others_is_not_seen() -> None:
    # faulthandler writes the 100 newest threads.
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(101)]
    for thread in threads:
        thread.start()
    try:
        assert look_at_main_thread()["waits"] is None
    finally:
        end.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("waits", [True, False])
def test_a_main_thread_waits_in_code_that_exchanges_something(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/python/lib/site-packages/torch/distributed/distributed_c10d.py" if waits else "/home/me/train.py"
    stack = [StackLine(file, 1, "loss"), StackLine("/home/me/train.py", 9, "main")]
    monkeypatch.setattr(signals, "stack_of_thread", lambda _thread: stack)
    stand = look_at_main_thread()
    assert stand["waits"] is waits
    assert waits or stand["place"] == "train.py, line 1, in loss"


def test_a_script_beside_the_interpreter_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    # In images whose Python is /usr/bin/python, /usr/src/app/train.py counted as Python's own, and no line was named.
    script = f"{sys.base_prefix}/src/app/train.py"
    stack = [StackLine(linear.__file__, 1, "forward"), StackLine(script, 7, "f")]
    monkeypatch.setattr(signals, "stack_of_thread", lambda _thread: stack)
    assert look_at_main_thread()["place"] == "train.py, line 7, in f"
