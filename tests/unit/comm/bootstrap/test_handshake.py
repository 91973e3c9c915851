"""The startup handshake: who is there, who is not, and who has other settings. A thread per worker, one store."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from lockstep.comm.bootstrap import handshake
from lockstep.comm.bootstrap.handshake import Announcement, report_duplicate_rank, run_handshake
from lockstep.errors import GroupError

Outcome = int | str | None
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls in which everybody answers: a machine with much else to do makes nobody look dead."""
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 20.0)


@pytest.fixture
def short_wait(long_wait: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a call in which somebody will not answer."""
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 0.5)


@final
class Killed(Exception):  # noqa: N818 - it stands for a signal
    """Ends a worker in the middle of its handshake."""


@final
class FatalStore(Store):
    """A store in which this worker is killed as soon as it begins to wait."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._inner.compare_set(key, expected_value, desired_value)

    def wait(self, *_: Any) -> None:
        raise Killed


def worker(rank: int, world_size: int = 3, backend: str = "gloo", process: str | None = None) -> Announcement:
    name = process or f"process {rank}"
    return Announcement(rank=rank, world_size=world_size, backend=backend, process=name, token=name)


def world(*ranks: int, life: str = "") -> list[Announcement]:
    return [worker(rank, len(ranks), process=f"process {place}{life}") for place, rank in enumerate(ranks)]


def kill_while_waiting(store: Store, me: Announcement) -> None:
    fatal = FatalStore(store)
    with pytest.raises(Killed):
        run_handshake(fatal, me, timeout=LONG)


def answer(store: Store, me: Announcement, **options: Any) -> Outcome:
    try:
        return run_handshake(store, me, **{"timeout": LONG, **options})
    except GroupError as error:
        return str(error)


def give_up(patient: Announcement, impatient: Announcement, **options: Any) -> list[Outcome]:
    """Let two workers meet, and one of them, with these options, give up while the other waits on."""
    store = HashStore()
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(answer(store, patient)))
    waiting.start()
    store.wait([f"lockstep/0/handshake/place/{patient.rank}"], LONG)
    outcomes.append(answer(store, impatient, **options))
    waiting.join()
    return outcomes


Call = Callable[..., list[Outcome]]


@pytest.fixture
def call() -> Call:
    def call_all(store: Store, workers: Sequence[Announcement], **options: Any) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(workers)

        def run(place: int) -> None:
            outcomes[place] = answer(store, workers[place], **options)

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    return call_all


def assert_all_raise(outcomes: list[Outcome], *said: str) -> None:
    assert len(set(outcomes)) == 1, outcomes
    for part in said:
        assert part in str(outcomes[0])


def assert_all_meet_later(outcomes: list[Outcome]) -> None:
    """They meet in one generation, after that of the dead; how much later depends on how busy the machine is."""
    assert len(set(outcomes)) == 1, outcomes
    assert isinstance(outcomes[0], int)
    assert outcomes[0] > 0


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_complete_world_meets(call: Call, world_size: int) -> None:
    assert call(HashStore(), world(*range(world_size))) == [0] * world_size


def test_each_group_over_a_store_gets_a_generation_of_its_own(call: Call) -> None:
    store = HashStore()
    assert [call(store, world(0, 1)) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_new_processes_meet_in_a_store_that_outlived_the_old_ones(call: Call) -> None:
    store = HashStore()
    call(store, world(0, 1, life=" of the first start"))
    assert call(store, world(0, 1, life=" of the second")) == [1, 1]
    assert call(store, world(0, 1, 2, life=" of the third")) == [2, 2, 2]


def test_two_workers_with_one_rank_are_named_to_all_at_once(call: Call) -> None:
    start = time.monotonic()
    outcomes = call(HashStore(), world(0, 1, 1))
    assert_all_raise(outcomes, "Two workers have rank 1 of 3", "process 1", "process 2", "0 to 2")
    assert time.monotonic() - start < 10


def test_different_world_sizes_are_named_to_all_at_once(call: Call) -> None:
    outcomes = call(HashStore(), [worker(0, 3), worker(1, 2), worker(2, 3)])
    assert_all_raise(outcomes, "different world sizes", "rank 1 (process 1)", "WORLD_SIZE")


def test_different_backends_are_named_to_all_at_once(call: Call) -> None:
    outcomes = call(HashStore(), [worker(0), worker(1, backend="nccl"), worker(2)])
    assert_all_raise(outcomes, "rank 1 (process 1)", "'nccl'", "'gloo'", "same backend")


def test_missing_ranks_are_named() -> None:
    outcomes = give_up(worker(2, 4), worker(0, 4), timeout=timedelta(seconds=0.2))
    assert_all_raise(outcomes, "Ranks 1, 3 did not connect: ranks 0, 2 waited", "WORLD_SIZE is too large")


@pytest.mark.usefixtures("short_wait")
def test_a_long_wait_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "WARNING_SECONDS", 0.1)
    store = HashStore()
    kill_while_waiting(store, worker(2, 4))  # it would warn too, if it were the first to look
    with pytest.warns(UserWarning, match="Ranks 1, 3 of 4 did not connect in 0.1 s; ranks 0, 2 will wait") as said:
        answer(store, worker(0, 4), timeout=timedelta(seconds=1))
    assert len(said) == 1


def test_many_missing_ranks_are_counted() -> None:
    assert "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more did not connect: rank 0 waited" in str(
        answer(HashStore(), worker(0, 100), timeout=timedelta(seconds=0.01))
    )


def test_the_first_whose_time_is_up_ends_it_for_all() -> None:
    outcomes = give_up(worker(1), worker(0), timeout=timedelta(seconds=0.2))
    assert_all_raise(outcomes, "Rank 2 did not connect")


def test_what_keeps_one_worker_away_is_told_to_all(call: Call) -> None:
    store = HashStore()
    outcomes: list[Outcome] = []
    well = threading.Thread(target=lambda: outcomes.extend(call(store, [worker(0), worker(2)])))
    well.start()
    outcomes.append(answer(store, worker(1), problem="Rank 1 has no nccl."))
    well.join()
    assert outcomes == ["Rank 1 has no nccl."] * 3


@pytest.mark.usefixtures("short_wait")
def test_a_worker_that_cannot_take_part_does_not_wait_for_the_others() -> None:
    assert answer(HashStore(), worker(1), problem="Rank 1 has no nccl.") == "Rank 1 has no nccl."


def test_a_difference_between_workers_says_more_than_that_one_cannot_take_part(call: Call) -> None:
    store = HashStore()
    outcomes: list[Outcome] = []
    asks = threading.Thread(target=lambda: outcomes.append(answer(store, worker(1, 2, "nccl"), problem="None here.")))
    asks.start()
    outcomes.append(answer(store, worker(0, 2)))
    asks.join()
    assert_all_raise(outcomes, "'nccl'", "'gloo'")


def test_a_late_worker_hears_of_the_mistake() -> None:
    store = HashStore()
    outcomes: list[Outcome] = []
    pair = [worker(0), worker(1, backend="nccl")]
    threads = [threading.Thread(target=lambda me=me: outcomes.append(answer(store, me))) for me in pair]
    for thread in threads:
        thread.start()
    store.wait(["lockstep/0/handshake/decision"], LONG)  # the two now wait for the third to hear it
    outcomes.append(answer(store, worker(2)))
    for thread in threads:
        thread.join()
    assert_all_raise(outcomes, "different backends")


def test_after_a_failure_the_workers_can_meet(call: Call) -> None:
    store = HashStore()
    assert_all_raise(call(store, world(0, 1, 1)), "Two workers")
    assert call(store, world(0, 1, 2)) == [1, 1, 1]


@pytest.mark.usefixtures("short_wait")
def test_a_second_worker_is_told_from_a_dead_one(call: Call) -> None:
    # torchrun's agent kills the workers that wait and starts all again, over the same store.
    store = HashStore()
    kill_while_waiting(store, worker(0, process="the killed"))
    assert_all_meet_later(call(store, world(0, 1, 2)))


def test_a_world_is_not_complete_with_a_dead_worker(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 1.5)
    store = HashStore()
    kill_while_waiting(store, worker(0, process="the killed"))
    outcomes = call(store, [worker(1), worker(2)], timeout=timedelta(seconds=5))
    assert_all_raise(outcomes, "Rank 0 did not connect: ranks 1, 2 waited")


@pytest.mark.usefixtures("short_wait")
def test_what_the_dead_were_told_does_not_count(call: Call) -> None:
    store = HashStore()
    kill_while_waiting(store, worker(0, world_size=7, process="the killed"))
    assert_all_meet_later(call(store, world(0, 1)))


def test_a_worker_that_was_interrupted_can_come_again(call: Call) -> None:
    store = HashStore()
    kill_while_waiting(store, worker(0))
    assert call(store, [worker(0), worker(1), worker(2)]) == [0, 0, 0]


def test_a_stranger_is_sent_away_from_a_complete_world(call: Call) -> None:
    store = HashStore()
    hosted = {"hosted_at": "there:29500"}
    call(store, world(0, 1), **hosted)
    assert_all_raise(
        [answer(store, worker(1, 2, process="a stranger"), **hosted)],
        "The world at there:29500 is complete without this worker, a stranger",
        "ranks 0 to 1, and this one has rank 1 of 2",
        "set MASTER_PORT",
    )
    assert "this one has rank 2 of 3" in str(answer(store, worker(2, 3, process="a stranger"), **hosted))


def test_a_worker_that_comes_before_rank_0_has_left_is_asked_to_open_the_next_store() -> None:
    # Both destroy their group and make another one over env://; rank 0, which serves the store, is the slower.
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    hosted = {"hosted_at": "there:29500"}
    outcomes: list[Outcome] = []
    slow = threading.Thread(target=answer, args=(served, world(0, 1)[0]), kwargs=hosted)
    slow.start()
    outcomes.append(answer(client, world(0, 1)[1], **hosted))
    slow.join()
    fast = threading.Thread(target=lambda: outcomes.append(answer(client, world(0, 1)[1], **hosted)))
    fast.start()
    served.wait(["lockstep/1/handshake/place/1"], LONG)
    del served, slow
    fast.join()
    assert outcomes == [0, None]


def test_a_store_that_is_lost_is_named() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(answer(client, worker(1), hosted_at="there:29500")))
    waiting.start()
    served.wait(["lockstep/0/handshake/taken"], LONG)
    del served
    waiting.join()
    assert_all_raise(outcomes, "Rank 1 lost the store at there:29500, which rank 0 serves")


def test_a_second_rank_0_is_named_to_all_of_its_world(call: Call) -> None:
    store = HashStore()
    outcomes: list[Outcome] = []
    others = threading.Thread(target=lambda: outcomes.extend(call(store, [worker(0), worker(1)])))
    others.start()
    with pytest.raises(GroupError, match="Two workers have rank 0 of 3") as raised:
        report_duplicate_rank(store, worker(0, process="another"))
    others.join()
    assert_all_raise([*outcomes, str(raised.value)])


def test_another_training_is_left_alone(call: Call) -> None:
    store = HashStore()
    outcomes: list[Outcome] = []
    others = threading.Thread(target=lambda: outcomes.extend(call(store, [worker(0), worker(1)])))
    others.start()
    stranger = worker(0, world_size=8, process="another")
    assert report_duplicate_rank(store, stranger) == "process 0"
    outcomes.append(answer(store, worker(2)))
    others.join()
    assert outcomes == [0, 0, 0]
    assert report_duplicate_rank(store, replace(stranger, world_size=3)) == "process 0"


def test_a_store_without_a_handshake_is_nobodys() -> None:
    assert not report_duplicate_rank(HashStore(), worker(0))
