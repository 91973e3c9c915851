"""The startup handshake: who is there, who is not, and who has other settings. A thread per worker, one store."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from lockstep.comm.bootstrap import handshake
from lockstep.comm.bootstrap.handshake import Announcement, report_duplicate_rank, run_handshake
from lockstep.comm.hosts import GroupMembers, find_hosts
from lockstep.comm.stored_values import Deadline, read_record, to_stored
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


@contextmanager
def answering(store: Store, *workers: Announcement, **options: Any) -> Iterator[list[Outcome]]:
    """Let workers answer while the block runs; yield what becomes of them, which is there after it."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(len(workers)) as pool:
        for me in workers:
            pool.submit(lambda me: outcomes.append(answer(store, me, **options)), me)
        yield outcomes


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
    with answering(store, patient) as outcomes:
        store.wait([f"lockstep/0/handshake/place/{patient.rank}"], LONG)
        outcomes.append(answer(store, impatient, **options))
    return outcomes


Call = Callable[..., list[Outcome]]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def call() -> Call:
    def call_all(store: Store, workers: Sequence[Announcement], **options: Any) -> list[Outcome]:
        with ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(lambda each: answer(store, each, **options), workers))

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


def test_each_group_over_a_store_gets_a_generation_of_its_own(call: Call, store: HashStore) -> None:
    assert [call(store, world(*range(size))) for size in (2, 2, 5, 1)] == [[0] * 2, [1] * 2, [2] * 5, [3]]


def test_new_processes_meet_in_a_store_that_outlived_the_old_ones(call: Call, store: HashStore) -> None:
    call(store, world(0, 1, life=" of the first start"))
    assert call(store, world(0, 1, life=" of the second")) == [1, 1]
    assert call(store, world(0, 1, 2, life=" of the third")) == [2, 2, 2]


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (world(0, 1, 1), ("Two workers have rank 1 of 3", "process 1", "process 2", "0 to 2")),
        ([worker(0, 3), worker(1, 2), worker(2, 3)], ("different world sizes", "rank 1 (process 1)", "WORLD_SIZE")),
        ([worker(0), worker(1, backend="nccl"), worker(2)], ("rank 1 (process 1)", "'nccl'", "'gloo'", "same backend")),
    ],
)
def test_what_differs_is_named_to_all_at_once(call: Call, workers: list[Announcement], said: tuple[str, ...]) -> None:
    start = time.monotonic()
    assert_all_raise(call(HashStore(), workers), *said)
    assert time.monotonic() - start < 10


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


def test_what_keeps_one_worker_away_is_told_to_all(store: HashStore) -> None:
    with answering(store, worker(0), worker(2)) as outcomes:
        outcomes.append(answer(store, worker(1), problem="Rank 1 has no nccl."))
    assert outcomes == ["Rank 1 has no nccl."] * 3


@pytest.mark.usefixtures("short_wait")
def test_a_worker_that_cannot_take_part_does_not_wait_for_the_others() -> None:
    assert answer(HashStore(), worker(1), problem="Rank 1 has no nccl.") == "Rank 1 has no nccl."


def test_a_difference_between_workers_says_more_than_that_one_cannot_take_part(store: HashStore) -> None:
    with answering(store, worker(1, 2, "nccl"), problem="None here.") as outcomes:
        outcomes.append(answer(store, worker(0, 2)))
    assert_all_raise(outcomes, "'nccl'", "'gloo'")


def test_a_late_worker_hears_of_the_mistake(store: HashStore) -> None:
    with answering(store, worker(0), worker(1, backend="nccl")) as outcomes:
        store.wait(["lockstep/0/handshake/decision"], LONG)  # the two now wait for the third to hear it
        outcomes.append(answer(store, worker(2)))
    assert_all_raise(outcomes, "different backends")


def test_after_a_failure_the_workers_can_meet(call: Call, store: HashStore) -> None:
    assert_all_raise(call(store, world(0, 1, 1)), "Two workers")
    assert call(store, world(0, 1, 2)) == [1, 1, 1]


@pytest.mark.usefixtures("short_wait")
def test_a_second_worker_is_told_from_a_dead_one(call: Call, store: HashStore) -> None:
    # torchrun's agent kills the workers that wait and starts all again, over the same store.
    kill_while_waiting(store, worker(0, process="the killed"))
    assert_all_meet_later(call(store, world(0, 1, 2)))


def test_a_world_is_not_complete_with_a_dead_worker(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 1.5)
    store = HashStore()
    kill_while_waiting(store, worker(0, process="the killed"))
    outcomes = call(store, [worker(1), worker(2)], timeout=timedelta(seconds=5))
    assert_all_raise(outcomes, "Rank 0 did not connect: ranks 1, 2 waited")


@pytest.mark.usefixtures("short_wait")
def test_what_the_dead_were_told_does_not_count(call: Call, store: HashStore) -> None:
    kill_while_waiting(store, worker(0, world_size=7, process="the killed"))
    assert_all_meet_later(call(store, world(0, 1)))


def test_a_worker_that_was_interrupted_can_come_again(call: Call, store: HashStore) -> None:
    kill_while_waiting(store, worker(0))
    assert call(store, [worker(0), worker(1), worker(2)]) == [0, 0, 0]


def test_a_stranger_is_sent_away_from_a_complete_world(call: Call, store: HashStore) -> None:
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
    slow, fast = world(0, 1)
    with answering(served, slow, **hosted):
        assert answer(client, fast, **hosted) == 0
    with answering(client, fast, **hosted) as outcomes:
        served.wait(["lockstep/1/handshake/place/1"], LONG)
        del served
    assert outcomes == [None]


def test_a_store_that_is_lost_is_named() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    with answering(client, worker(1), hosted_at="there:29500") as outcomes:
        served.wait(["lockstep/0/handshake/taken"], LONG)
        del served
    assert_all_raise(outcomes, "Rank 1 lost the store at there:29500, which rank 0 serves")


def test_a_second_rank_0_is_named_to_all_of_its_world(store: HashStore) -> None:
    with (
        answering(store, worker(0), worker(1)) as outcomes,
        pytest.raises(GroupError, match="Two workers have rank 0 of 3") as raised,
    ):
        report_duplicate_rank(store, worker(0, process="another"))
    assert_all_raise([*outcomes, str(raised.value)])


def test_another_training_is_left_alone(store: HashStore) -> None:
    stranger = worker(0, world_size=8, process="another")
    with answering(store, worker(0), worker(1)) as outcomes:
        assert report_duplicate_rank(store, stranger) == "process 0"
        outcomes.append(answer(store, worker(2)))
    assert outcomes == [0, 0, 0]
    assert report_duplicate_rank(store, replace(stranger, world_size=3)) == "process 0"


def test_a_store_without_a_handshake_is_nobodys() -> None:
    assert not report_duplicate_rank(HashStore(), worker(0))


# -- Whatever a stranger writes into the store of a rendezvous, the workers say so in one message ----------------------


ME = Announcement(rank=0, world_size=1, backend="shm", process="process 1 on host a", token="t")
GARBAGE = [
    *("", "bad", "null", "[]", "{}", '{"rank": 0}', "1e999", "[" * 100_000, b"\xff\x00"),
    *(to_stored(ME).replace('"shm"', "[1]"), to_stored(ME).replace(": 0", ": true"), to_stored(ME)[:-1] + ', "a": 1}'),
]
TIMEOUT = timedelta(seconds=20)


def test_what_a_worker_has_written_is_read() -> None:
    assert read_record("key", to_stored(ME).encode(), Announcement) == ME


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("key", ["lockstep/0/handshake/first", "lockstep/0/handshake/place/0", "lockstep/decided"])
def test_garbage_under_a_key_of_the_handshake_is_named(
    key: str, garbage: str | bytes, monkeypatch: pytest.MonkeyPatch, store: HashStore
) -> None:
    # A raw ValueError or TypeError ended the run, and named no key.
    store.set(key, garbage)
    if garbage == "" and key != "lockstep/decided":
        pytest.skip("an empty value is that of a key that is not set")
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 0.1)
    with pytest.raises(GroupError, match=f"under the key '{key.rpartition('handshake/')[2]}', which no worker"):
        run_handshake(store, ME, timeout=TIMEOUT)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_instead_of_a_host_or_a_decision_is_named(garbage: str | bytes, store: HashStore) -> None:
    store.set("host/1", garbage)
    with pytest.raises(GroupError, match="under the key 'host/1'"):
        find_hosts(store, 0, GroupMembers(global_ranks=range(2)), Deadline.after(TIMEOUT))
    store.set("lockstep/0/handshake/decision", garbage)
    with pytest.raises(GroupError, match="under the key 'decision'"):
        run_handshake(store, ME, timeout=TIMEOUT)


class ForgedStore(HashStore):
    """A store into which a stranger writes after each rank has."""

    forged = ("host/0", "")

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        super().set(*self.forged)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("forged", [["alone, of my choice", "there"], ["elsewhere", "there"], ["boot 1", "a\nb"]])
def test_a_forged_host_does_not_move_ranks_out_of_shared_memory(forged: list[str], rank: int) -> None:
    # A well-formed value was believed: the ranks took Gloo, and printed the stranger's text as the reason.
    store = ForgedStore()
    for peer in range(2):
        HashStore.set(store, f"host/{peer}", json.dumps(["boot 1", "here"]))
    store.forged = (f"host/{rank if forged[0].startswith('alone') else 1 - rank}", json.dumps(forged))
    with pytest.raises(GroupError, match=r"under the key 'host/[01]', which no worker"):
        find_hosts(store, rank, GroupMembers(global_ranks=range(2)), Deadline.after(TIMEOUT))
