"""Gloo groups whose calls are compared first: with `check=True`, and where shm ranks are not on one host."""

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, RankPool, Ranks, call_on_ranks, join_default_group
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in

import lockstep as ls
from lockstep.comm import backends, hosts, torch_backends
from lockstep.comm.gloo import GlooComparer

pytestmark = pytest.mark.usefixtures("warm_workers")

Answers = dict[str, Any]
WAYS = ("shared memory", "gloo", "apart")
"""Agreement over shared memory, over Gloo, and the group of ranks that seem to be on several hosts."""


PATCHES = pytest.MonkeyPatch()
"""Of a rank; they stay until it ends."""


def join(way: str, run: ls.Run) -> None:
    """Make the default group anew, checked in one of the ways."""
    store = dist.PrefixStore(way, dist.distributed_c10d._get_default_store())
    ls.destroy_process_group()
    if way == "apart":
        PATCHES.setattr(hosts, "host_identity", lambda: f"boot {run.rank // 2}")
    elif way == "gloo":
        PATCHES.setattr(backends, "make_shared_memory_comparer", lambda *_, **_options: None)
    backend = "shm" if way == "apart" else "gloo"
    ls.init_process_group(backend, store=store, rank=run.rank, world_size=run.world_size, check=True)


def odd_calls(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Calls in which the last rank differs from the others."""
    is_odd = rank == size - 1
    ones = torch.ones(2, 3)

    def reduces(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, op=op)

    return {
        "operation": (lambda: dist.broadcast(ones, 0)) if is_odd else reduces(ones),
        "dtype": reduces(ones.int() if is_odd else ones),
        "shape": reduces(ones.T.contiguous() if is_odd else ones),
        "reduce operation": reduces(ones, dist.ReduceOp.MAX if is_odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(ones, int(is_odd)),
        "order": dist.barrier if is_odd else reduces(ones),
        "dtype in the ring": lambda: ls.ring_all_reduce(ones.int() if is_odd else ones.clone()),
        "dtype in tree order": lambda: ls.ordered_all_reduce(ones.int() if is_odd else ones.clone()),
        "ring on one": (lambda: ls.ring_all_reduce(ones.clone())) if is_odd else reduces(ones),
    }


def _calls_are_right(rank: int) -> Claims:
    """Make every collective once."""
    size = dist.get_world_size()
    mine = torch.full((2,), float(rank))

    total = mine.clone()
    dist.all_reduce(total)
    yield "all_reduce", total.tolist(), [sum(range(size))] * 2
    sent = mine.clone()
    dist.broadcast(sent, 1)
    yield "broadcast", sent.tolist(), [1.0, 1.0]
    reduced = mine.clone()
    dist.reduce(reduced, 0, op=dist.ReduceOp.MAX)
    yield "reduce", reduced.tolist() if rank == 0 else None, [size - 1.0] * 2 if rank == 0 else None
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, mine)
    yield "all_gather", [row[0].item() for row in gathered], list(range(size))
    group: Any = dist.group.WORLD
    whole = torch.empty(2 * size)
    group._allgather_base(whole, mine).wait()
    yield "all_gather_into_tensor", whole[::2].tolist(), list(range(size))
    piece = torch.empty(1)
    group._reduce_scatter_base(piece, torch.arange(float(size)), dist.ReduceScatterOptions()).wait()
    yield "reduce_scatter_tensor", piece.item(), rank * size
    rows = torch.empty(size)
    dist.all_to_all_single(rows, torch.arange(float(size)) + 10 * rank)
    yield "all_to_all_single", rows.tolist(), [10 * peer + rank for peer in range(size)]
    at_root = [torch.empty(2) for _ in range(size)] if rank == 0 else []
    dist.gather(mine, at_root or None)
    yield "gather", [row[0].item() for row in at_root], list(range(len(at_root)))
    part = torch.empty(2)
    dist.scatter(part, [torch.full((2,), float(peer)) for peer in range(size)] if rank == 0 else None)
    yield "scatter", part.tolist(), mine.tolist()
    yield "objects", everyone({"rank": rank}), [{"rank": peer} for peer in range(size)]
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(part, 0)
        yield "messages", part.tolist(), [0.0, 0.0]
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    yield "asynchronous", mine.tolist(), [sum(range(size))] * 2


def every_rank_hears_of_different_calls_and_the_group_goes_on(rank: int) -> Claims:
    for mistake, call in odd_calls(rank, dist.get_world_size()).items():
        message = error_of(call)
        for said in ("CollectiveMismatchError", "ranks 0 and 1 call ", "; rank 2 calls "):
            yield mistake, found_in(message, said), said
    yield from _calls_are_right(rank)


def subgroups_are_checked_too(rank: int) -> Claims:
    # By their numbers in the default group, and in the words of shm: it was "broadcast(root 0, ...)".
    group = dist.new_group([1, 2])
    if rank > 0:
        for call, said in (
            (partial(dist.all_reduce, torch.ones(2 + rank)), "rank 1 calls all_reduce(sum, float32 [3])"),
            (partial(dist.broadcast, torch.ones(2), rank), "rank 2 calls broadcast(from rank 2, float32 [2])"),
        ):
            yield "message", found_in(error_of(partial(call, group=group)), said), said


def tensors_that_do_not_lie_in_a_row_are_right(rank: int) -> Claims:
    # Gloo added and sent the elements that lie behind the first one.
    size = dist.get_world_size()
    base = torch.arange(16.0).view(4, 4)
    total = base * sum(range(1, size + 1))
    cuts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "columns": lambda each: each[:, :2],
        "rows": lambda each: each[::2],
        "transposed on one rank": lambda each: each if rank else each.t().contiguous().t(),
    }
    for name, cut in cuts.items():
        mine = cut(base * (rank + 1))
        dist.all_reduce(mine)
        yield f"all_reduce, {name}", torch.equal(mine, cut(total)), True
        mine = cut(base * (rank + 1))
        work: Any = dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        yield f"asynchronous, {name}", torch.equal(mine, cut(base * size)), True
        mine = cut(base * (rank + 1))
        dist.broadcast(mine, 1)
        yield f"broadcast, {name}", torch.equal(mine, cut(base * 2)), True
        mine = cut(base * (rank + 1))
        dist.reduce(mine, 0)
        yield f"reduce, {name}", rank > 0 or torch.equal(mine, cut(total)), True
        found = [cut(torch.zeros(4, 4)) for _ in range(size)]
        dist.all_gather(found, cut(base * (rank + 1)))
        yield f"all_gather, {name}", all(torch.equal(found[each], cut(base * (each + 1))) for each in range(size)), True
        mine = cut(torch.zeros(4, 4))
        dist.reduce_scatter(mine, [cut(base * (rank + 1)) for _ in range(size)])
        yield f"reduce_scatter, {name}", torch.equal(mine, cut(total)), True
        mine = cut(torch.zeros(4, 4))
        dist.scatter(mine, [cut(base * each) for each in range(size)] if rank == 0 else None)
        yield f"scatter, {name}", torch.equal(mine, cut(base * rank)), True


def a_root_that_there_is_not_is_refused(_rank: int) -> Claims:
    message = error_of(lambda: dist.broadcast(torch.ones(2), group_src=7))
    yield "message", found_in(message.lower(), "root"), "root"


@final
class JoinChecked:
    """Makes a default group in one of the ways; for a `RankPool`."""

    def __init__(self, way: str) -> None:
        self._way = way

    def __call__(self, rank: Rank) -> ls.Run:
        run = join_default_group(rank)
        join(self._way, run)
        return run


@pytest.fixture(scope="module", params=WAYS)
def checked(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(3, JoinChecked(request.param)) as pool:
        yield pool


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(checked: RankPool, scenario: Scenario) -> None:
    assert wrong_in(checked, scenario) == []


def said_of_hosts(run: ls.Run) -> list[str]:
    said: list[str] = []
    logging.getLogger("lockstep").addFilter(lambda record: not said.append(record.getMessage()))  # type: ignore[func-returns-value]
    join("apart", run)
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    return [text for text in said if "shared memory" in text]


def test_ranks_on_several_hosts_say_so_once() -> None:
    first, *others = call_on_ranks(3, said_of_hosts)
    assert ["shared memory within each of 2 hosts, and Gloo between them" in text for text in first] == [True]
    assert others == [[], []]


def check_by_variable(run: ls.Run) -> str:
    os.environ["LOCKSTEP_CHECK"] = "1"
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    ls.destroy_process_group()
    ls.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)
    return error_of(lambda: dist.all_reduce(torch.ones(1 + run.rank)))


def test_the_variable_asks_for_checks() -> None:
    assert ["rank 1 calls" in message for message in call_on_ranks(2, check_by_variable)] == [True, True]


def make_groups(run: ls.Run, base: dist.Store, name: str) -> None:
    """Make the default group anew, of Gloo as a rule, and without a word about checks."""
    store = dist.PrefixStore(name, base)
    ls.destroy_process_group()
    backend = "shm" if "beside shm" in name else "gloo"
    ls.init_process_group(
        backend, store=store, rank=run.rank, world_size=run.world_size, timeout=timedelta(seconds=300)
    )


def reduce_later(length: int) -> None:
    work: Any = dist.all_reduce(torch.ones(length), async_op=True)
    work.wait()


def mistakes_of_two(rank: int) -> dict[str, Callable[[], object]]:
    """Calls of one of two ranks that are not those of the other."""
    is_odd = rank == 1
    return {
        "operation": dist.barrier if is_odd else lambda: dist.all_reduce(torch.ones(3)),
        "shape": lambda: dist.all_reduce(torch.ones(3 + rank)),
        "asynchronous": lambda: reduce_later(3 + rank),
        "root": lambda: dist.broadcast(torch.ones(3), rank),
        "a group on one rank": (lambda: dist.all_reduce(torch.ones(1))) if is_odd else lambda: dist.new_group([0, 1]),
        "two groups": lambda: dist.new_group([rank]),
        "in a group": lambda: dist.all_reduce(torch.ones(3 + rank), group=dist.new_group([0, 1])),
        "in a group of gloo": lambda: dist.all_reduce(torch.ones(3 + rank), group=dist.new_group(backend="gloo")),
        "in a group of gloo beside shm": lambda: dist.all_reduce(
            torch.ones(3 + rank), group=dist.new_group(backend="gloo")
        ),
        "one of several": lambda: [dist.all_reduce(torch.ones(3 + (number == 20 and is_odd))) for number in range(30)],
    }


def sum_of_local_group(rank: int) -> float:
    """Return the sum over a group of both ranks that only its members make, and that is gone then."""
    group = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return total.item()


def make_calls_by_default(run: ls.Run) -> Answers:
    answers: Answers = {}
    base = dist.distributed_c10d._get_default_store()
    for name, mistake in mistakes_of_two(run.rank).items():
        make_groups(run, base, name)
        began = time.monotonic()
        answers[name] = error_of(mistake)
        assert time.monotonic() - began < 60
    make_groups(run, base, "right")
    # Many calls, of which one rank is ahead.
    for number in range(100):
        if run.rank == number // 50:
            time.sleep(0.001)
        dist.broadcast(torch.ones(2), 0)
    for what, found, expected in _calls_are_right(run.rank):
        assert found == expected, what
    # What the first one had left in the store was taken for the second one's.
    assert [sum_of_local_group(run.rank) for _ in range(2)] == [3.0, 3.0]
    groups = (None, dist.new_group([0, 1]), dist.new_group(backend="gloo"))
    assert [dist.get_backend(group) for group in groups] == ["gloo"] * 3  # that was asked for
    dist.monitored_barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))  # holds for comparisons too
    began = time.monotonic()
    if run.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        assert time.monotonic() - began < 60
    base.set(f"done {run.rank}", "")
    base.wait([f"done {1 - run.rank}"])
    return answers


def test_gloo_compares_calls_by_default() -> None:
    # `new_group` on one rank waited for half an hour, and Gloo aborted the process or added what it got.
    first, second = call_on_ranks(2, make_calls_by_default)
    assert first == second
    for mistake, message in first.items():
        assert "rank 0 calls " in message, mistake
        assert "rank 1 calls " in message, mistake
        assert len(re.findall(r" at /\S+\.py:\d+", message)) == 2 + ("group made at" in message), mistake


def be_interrupted(run: ls.Run, way: str) -> tuple[str, str]:
    """Ctrl-C while rank 0 waits for rank 1 in an agreement; it goes on with the call that comes next."""
    join(way, run)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if run.rank == 1:
        store.wait(["interrupted"])
    told = []
    for length in (10, 11):
        try:
            if run.rank == 0 and length == 10:
                signal.setitimer(signal.ITIMER_REAL, 1.5)  # by then it is in the call
            dist.all_reduce(torch.ones(length))
            told.append("no error")
        except (KeyboardInterrupt, ls.GroupError) as error:
            told.append(f"{type(error).__name__}: {error}")
            store.set("interrupted", "yes")
    return told[0], told[1]


def test_a_rank_that_is_interrupted_is_no_longer_in_step() -> None:
    # It went on as if nothing had been: its next call then met another one of the others.
    (interrupted, first), (lost, second) = call_on_ranks(2, be_interrupted, "shared memory")
    assert interrupted.startswith("KeyboardInterrupt")
    assert "all_reduce(sum, float32 [10]) was ended on this rank by KeyboardInterrupt" in first
    for message in (lost, second):
        assert "PeerLostError: Rank 0 failed: KeyboardInterrupt" in message


def test_agreement_does_not_use_the_default_device() -> None:
    # Gloo has no tensors on "meta", and that was taken for the loss of a rank.
    with torch.device("meta"):
        agreement = GlooComparer(dist.HashStore(), 0, timedelta(seconds=5), [0])
        agreement.compare_calls(b"barrier()")
        agreement.close()


def lose_a_rank(run: ls.Run, way: str) -> str:
    if way != "shm":
        join(way, run)
    dist.barrier()  # all are connected: this is not about a loss while they connect
    if run.rank == 1:
        raise ValueError("no such file")
    try:
        dist.all_reduce(torch.ones(1))
    except ls.PeerLostError as error:
        raise RuntimeError(f"lost rank {error.rank}: {error}") from error
    return "nothing was lost"


@pytest.mark.parametrize("way", ["shm", "shared memory", "gloo"])
def test_the_others_hear_what_a_worker_died_of(way: str) -> None:
    with pytest.raises(ls.WorkerFailedError, match="Worker 1 failed first: ValueError: no such file") as caught:
        ls.launch(lose_a_rank, way, devices="cpu:3")
    consequences = [failure.reason for failure in caught.value.failures[1:]]
    assert len(consequences) == 2
    for reason in consequences:
        assert "lost rank 1: Rank 1 failed: ValueError: no such file" in reason


def die_within_a_call(rank: Rank) -> tuple[int, str]:
    """Rank 1 is killed after calls were compared, when rank 0 is in Gloo's all-reduce."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ls.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=2)
    dist.barrier()  # both are connected: `die_while_connecting` is about that
    group: Any = dist.group.WORLD
    if rank.number == 1:
        group._comparer.begin_call(b"all_reduce(sum, float32 [100000])")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ls.PeerLostError) as lost:
        dist.all_reduce(torch.ones(100_000))
    return lost.value.rank, str(lost.value)


def die_in_an_unchecked_group(rank: Rank) -> tuple[int, str]:
    """Rank 1 is killed when rank 0 waits for it, for the future of a call, in a group that compares no calls."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ls.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=2, check=False)
    dist.all_reduce(torch.ones(3))
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match=r"PeerLostError: Rank 1 \(process"):
        work.get_future().wait()
    with pytest.raises(ls.PeerLostError) as lost:
        work.wait()
    return lost.value.rank, str(lost.value)


def die_while_connecting(rank: Rank) -> tuple[int, str]:
    """Rank 1 is killed when it is to connect Gloo, for which rank 0 would wait half an hour."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank.number == 1:
        PATCHES.setattr(torch_backends, "connect_gloo", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ls.PeerLostError) as lost:
        ls.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=2)
    return lost.value.rank, str(lost.value)


@pytest.mark.parametrize("die", [die_within_a_call, die_in_an_unchecked_group, die_while_connecting])
def test_a_rank_that_dies_within_a_call_of_gloo_is_named(die: Any, tmp_path: Path) -> None:
    # It was "Connection reset by peer" or "Connection closed by peer", which names no rank.
    with Ranks(tmp_path, 2, die) as ranks:
        number, message = ranks.result(0)
    assert number == 1
    assert "Rank 1 (process " in message
    assert "killed" in message
