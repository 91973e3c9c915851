"""Who is told what when workers are lost, join and leave, without processes."""

from typing import Any

import pytest

from lockstep.launch.continuation import Continuation
from lockstep.launch.membership import Generation, Wishes


class RecordedServer:
    """Delivers what a test reports in the workers' place, and records what is sent to them."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, dict[str, Any]]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def take_reports(self) -> list[tuple[int, dict[str, Any]]]:
        taken, self.reported = self.reported, []
        return taken

    def settle(self) -> None:
        """Do nothing: what is reported is there."""

    def send(self, worker: int, message: dict[str, Any]) -> None:
        self.sent.append((worker, message))


class Launch:
    """A launch of three workers that can continue, with a clock of its own."""

    def __init__(self, min_workers: int = 1, max_workers: int = 6) -> None:
        self.now = 0.0
        self.server: Any = RecordedServer()
        self.continuation = Continuation(self.server, {0: 100, 1: 101, 2: 102}, clock=lambda: self.now)
        for worker in range(3):
            self.ready(worker, min_workers, max_workers)

    def ready(self, worker: int, min_workers: int = 1, max_workers: int = 6) -> None:
        self.report(worker, report="ready", min_workers=min_workers, max_workers=max_workers)

    def report(self, worker: int, **message: Any) -> None:
        self.server.reported.append((worker, message))
        self.continuation.receive_reports()

    def join(self, *workers: int) -> None:
        for worker in workers:
            self.report(worker, report="joined", generation=self.continuation.generation.number)

    def arrive(self, worker: int) -> None:
        self.continuation.pids[worker] = 100 + worker
        self.ready(worker)
        self.report(worker, report="waiting_to_join")

    def lose(self, *workers: int) -> bool:
        return self.continuation.continue_without(dict.fromkeys(workers, "killed by SIGKILL"))

    def wish(self, num_workers: int, *leaving: int) -> Any:
        arrived = self.continuation.arrived()
        return self.continuation.change(Wishes(num_workers=num_workers, leaving=leaving, arrived=arrived))

    def absent(self) -> list[int]:
        return list(self.continuation.absent)

    def take_sent(self) -> dict[int, dict[str, Any]]:
        taken, self.server.sent = dict(self.server.sent), []
        return taken


@pytest.fixture
def launch() -> Launch:
    return Launch()


def test_survivors_are_told_at_once_who_is_lost(launch: Launch) -> None:
    assert launch.lose(1)
    sent = launch.take_sent()
    assert sorted(sent) == [0, 2]
    assert sent[2] == {
        "event": "generation",
        "number": 1,
        "rank": 1,
        "world_size": 2,
        "lost": [{"rank": 1, "pid": 101, "reason": "killed by SIGKILL"}],
        "planned": False,
        "arrived": [],
        "leaving": [],
    }


@pytest.mark.parametrize("what", ["ready", "lost", "loading_lost", "raised", "alive", "leave", ["no name"]])
def test_a_report_that_the_users_code_wrote_ends_no_launch(what: object, launch: Launch) -> None:
    # A report without its fields was a KeyError in the launcher, where a bad request is refused.
    launch.report(1, report=what)
    assert not launch.continuation.reports.lost_loading
    assert launch.lose(1)


def test_absent_is_for_whom_others_wait_after_a_loss(launch: Launch) -> None:
    launch.lose(0)
    launch.now = 3.0
    assert not launch.absent(), "nobody waits yet"
    launch.report(2, report="meets", generation=1)
    assert launch.absent() == [1]
    assert launch.continuation.decided_for == 3.0
    launch.report(1, report="meets", generation=1)
    assert not launch.absent()
    launch.join(1, 2)
    launch.arrive(3)
    launch.wish(3)
    launch.report(1, report="meets", generation=2)
    assert not launch.absent(), "between two steps others may do what takes long"


def test_a_second_loss_before_all_have_joined_is_another_generation(launch: Launch) -> None:
    launch.lose(1)
    launch.join(0)
    assert launch.lose(2)
    assert launch.continuation.generation == Generation(number=2, workers=(0,))
    launch.join(0)
    assert launch.continuation.is_settled


def test_nobody_continues_without_a_worker_that_cannot(launch: Launch) -> None:
    launch.continuation.reports.ready.pop(2)
    assert not launch.lose(1)
    assert not launch.take_sent()
    launch.ready(2)  # it was making its trainer
    assert launch.lose(1)


def test_a_run_has_begun_when_all_could_continue_at_some_time(launch: Launch) -> None:
    assert launch.continuation.has_begun
    starting = Launch.__new__(Launch)
    starting.server = RecordedServer()
    starting.continuation = Continuation(starting.server, {0: 100, 1: 101})
    starting.ready(0)
    assert [starting.continuation.has_begun] == [False]
    starting.ready(1)
    assert [starting.continuation.has_begun] == [True]


def test_too_few_are_told_to_stop() -> None:
    launch = Launch(min_workers=3)
    assert not launch.lose(1)
    assert "min_workers is 3" in launch.continuation.stop_reason
    assert {message["event"] for message in launch.take_sent().values()} == {"stop"}


def test_after_an_error_of_the_function_nothing_changes(launch: Launch) -> None:
    launch.continuation.refuse()
    assert not launch.lose(1)
    assert not launch.wish(2, 2).leaving


def test_after_an_error_the_end_of_one_that_was_to_leave_lets_nobody_wait_on(launch: Launch) -> None:
    launch.wish(2, 1)
    launch.join(0)
    assert launch.lose(1)  # it has left
    launch.continuation.refuse()
    assert not launch.lose(1)


def test_an_error_without_a_loss_stands_after_a_moment(launch: Launch) -> None:
    launch.report(0, report="lost", generation=0)
    assert not launch.take_sent()
    assert launch.continuation.next_answer == 1.0
    launch.now = 1.5
    launch.continuation.receive_reports()
    assert launch.take_sent() == {0: {"event": "unchanged"}}


def test_a_new_worker_joins_by_a_planned_generation(launch: Launch) -> None:
    launch.arrive(3)
    assert launch.wish(4).arrived == (3,)
    sent = launch.take_sent()
    assert {worker: message["rank"] for worker, message in sent.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert sent[0]["planned"]
    assert sent[0]["arrived"] == [{"rank": 3, "pid": 103}]
    launch.join(0, 1, 2)
    assert not launch.continuation.is_settled
    launch.join(3)
    assert launch.continuation.is_settled


def test_a_new_worker_that_has_become_silent_is_not_waited_for(launch: Launch) -> None:
    launch.arrive(3)
    launch.now = 10.0
    assert not launch.wish(4).arrived
    launch.report(3, report="alive", number=1, waits=True, calls=0, place="")
    assert launch.wish(4).arrived == (3,)


def test_a_worker_that_leaves_has_no_rank(launch: Launch) -> None:
    assert launch.wish(2, 1).leaving == (1,)
    sent = launch.take_sent()
    assert {worker: message["rank"] for worker, message in sent.items()} == {0: 0, 1: None, 2: 1}
    assert sent[1]["leaving"] == [{"rank": 1, "pid": 101}]


def test_a_planned_change_waits_until_the_last_one_is_made(launch: Launch) -> None:
    launch.lose(1)
    launch.arrive(3)
    assert not launch.wish(3).arrived
    launch.join(0, 2)
    assert launch.wish(3).arrived == (3,)


def test_nothing_is_planned_when_a_worker_makes_no_calls_any_more(launch: Launch) -> None:
    launch.arrive(3)
    launch.report(1, report="over")
    assert not launch.wish(4).arrived


def test_a_loss_supersedes_a_planned_generation(launch: Launch) -> None:
    """A worker that was to leave stays a member: who knows whether the boundary was made.

    A new one waits for another boundary: the others may be in an evaluation, which it does not make.
    """
    launch.arrive(3)
    launch.wish(3, 1)
    assert launch.continuation.generation.workers == (0, 2, 3)
    launch.take_sent()
    assert launch.lose(2)
    sent = launch.take_sent()
    assert sent.pop(3) == {"event": "set_aside"}
    assert {worker: message["rank"] for worker, message in sent.items()} == {0: 0, 1: 1}
    assert not sent[0]["arrived"]
    assert not sent[0]["planned"]
    assert 3 not in launch.continuation.members
    launch.join(0, 1)
    assert launch.wish(3).arrived == (3,)


def test_who_was_to_leave_is_gone_when_another_has_joined_without_it(launch: Launch) -> None:
    launch.wish(2, 1)
    launch.join(0)
    assert launch.lose(2)
    assert launch.continuation.generation.workers == (0,)


@pytest.mark.parametrize("report", ["has_state", "joined"])
def test_a_new_worker_that_has_joined_has_the_state_of_the_run(report: str, launch: Launch) -> None:
    launch.arrive(3)
    launch.wish(4)
    launch.report(3, report=report, generation=launch.continuation.generation.number)
    launch.take_sent()
    assert launch.lose(0, 1, 2)
    assert launch.take_sent()[3]["rank"] == 0


def test_a_new_worker_that_has_not_joined_cannot_go_on_alone(launch: Launch) -> None:
    launch.arrive(3)
    launch.wish(4)
    assert not launch.lose(0, 1, 2)


def test_a_new_worker_that_is_lost_while_it_joins_leaves_the_others_in_a_generation_of_their_own(
    launch: Launch,
) -> None:
    launch.arrive(3)
    launch.wish(4)
    assert launch.lose(3)
    assert launch.continuation.generation == Generation(number=2, workers=(0, 1, 2))


def test_a_worker_that_is_no_member_changes_nothing(launch: Launch) -> None:
    launch.arrive(3)
    assert launch.lose(3)
    assert launch.continuation.generation.number == 0
