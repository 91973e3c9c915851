"""Sums over several hosts, which use shared memory inside each: their bits, their mistakes, and lost ranks.

Ranks of one machine seem to be on several hosts; real ones, with a network between them, are in `test_launchers.py`.
"""

import gc
import signal
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, RankPool, Ranks, join_default_group
from tests.process.scenarios import Claims, Scenario, error_of, found_in, name_of, scenarios_in, wrong_in
from tests.process.test_ring_ordered import (
    DTYPES,
    LENGTHS,
    ORDERED_DTYPES,
    SHARDS,
    partials_of,
    sum_of,
    tree_sum,
    whole_numbers,
    wild_numbers,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls
from lockstep.comm import hosts
from lockstep.comm.capabilities import capabilities_of
from lockstep.comm.ordered import ordered_all_reduce
from lockstep.shards import shard_range
from lockstep.shards.tree import Node

pytestmark = pytest.mark.usefixtures("warm_workers")

PLACES = {"2 and 2": (0, 0, 1, 1), "in turn": (0, 1, 0, 1), "3 and 1": (0, 1, 1, 1), "1, 2 and 1": (0, 1, 2, 1)}
"""The host of each rank."""
LONG = 3_000_001
"""Elements of several parts of 4 MiB."""
_PATCHES = pytest.MonkeyPatch()


@final
class JoinHosts:
    """Makes the default group of ranks that seem to be on several hosts; for a `RankPool`."""

    def __init__(self, places: tuple[int, ...], timeout: timedelta = timedelta(seconds=100)) -> None:
        self._places = places
        self._timeout = timeout

    def __call__(self, rank: Rank) -> ls.Run:
        run = join_default_group(rank)
        store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
        ls.destroy_process_group()
        _PATCHES.setattr(hosts, "host_identity", lambda: f"boot {self._places[run.rank]}")
        ls.init_process_group(
            "shm", store=store, rank=run.rank, world_size=run.world_size, check=True, timeout=self._timeout
        )
        return run


def sums_are_exact(rank: int) -> Claims:
    for length in (*LENGTHS, LONG):
        for dtype in DTYPES if length < LONG else (torch.float32,):
            tensor = whole_numbers(rank, length, dtype)
            expected = sum_of([whole_numbers(each, length, dtype) for each in range(4)])
            dist.all_reduce(tensor)
            yield f"{length} of {dtype}", torch.equal(tensor, expected), True
    odd = whole_numbers(rank, 60, torch.float32).view(6, 10).t()
    dist.all_reduce(odd)
    yield "transposed", odd.sum(), sum_of([whole_numbers(each, 60, torch.float32) for each in range(4)]).sum()


def sums_are_in_the_order_of_the_tree(rank: int) -> Claims:
    yield "capability", capabilities_of(dist.group.WORLD).adds_in_order, True
    for num_shards in [shards for shards in SHARDS if shards >= 4]:
        for length in (1, 1000, LONG) if num_shards == 8 else (7, 1000):
            for dtype in ORDERED_DTYPES if length == 1000 else (torch.float32,):
                values = [wild_numbers(shard, length, dtype) for shard in range(num_shards)]
                shards = shard_range(rank, 4, num_shards)
                partials = partials_of(values, shards.start, shards.stop)
                total = ordered_all_reduce(partials, num_shards=num_shards, out=torch.empty_like(values[0]))
                same = total.view(torch.uint8).equal(tree_sum(values).view(torch.uint8))
                yield f"{num_shards} shards of {length} {dtype}", same, True


def each_may_hold_any_shards(rank: int) -> Claims:
    values = [wild_numbers(shard, 100_000) for shard in range(7)]
    layout: list[list[Node]] = [[(6, 7), (0, 1)], [(3, 5)], [], [(1, 3), (5, 6)]]
    sums = {**{(s, s + 1): values[s] for s in range(7)}, (3, 5): values[3] + values[4], (1, 3): values[1] + values[2]}
    own = {node: sums[node].clone() for node in layout[rank]}
    before = {node: each.clone() for node, each in own.items()}
    out = next(iter(own.values())) if rank == 3 else torch.empty(100_000)
    total = ordered_all_reduce(own, num_shards=7, out=out, layout=layout)
    yield "sum", torch.equal(total, tree_sum(values)), True
    yield (
        "left alone",
        [each.equal(before[node]) for node, each in own.items() if each is not out],
        [True] * (len(own) - (rank == 3)),
    )


def calls_are_in_order(rank: int) -> Claims:
    first, second, third = torch.full((200_000,), 1.0 + rank), torch.full((3,), float(rank)), torch.ones(5)
    works: list[Any] = [dist.all_reduce(first, async_op=True), dist.broadcast(second, 2, async_op=True)]
    works.append(dist.all_reduce(third, async_op=True))
    dist.barrier()
    for work in reversed(works):
        work.wait()
    yield "sums", (first[-1].item(), second[0].item(), third[0].item()), (10.0, 2.0, 4.0)
    group = dist.new_group([0, 1, 3])
    if rank != 2:
        subset = torch.ones(1) * rank
        dist.all_reduce(subset, group=group)
        yield "subgroup", subset.item(), 4.0
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    yield "another operation", largest.item(), 3.0


def mistakes_are_named_and_change_nothing(rank: int) -> Claims:
    for odd in range(4):
        tensor = torch.ones(3 + (rank == odd))
        said = error_of(lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
        yield (
            f"odd {odd}",
            found_in(said, f"rank {odd} calls all_reduce(sum, float32 [4]) at "),
            (f"rank {odd} calls all_reduce(sum, float32 [4]) at "),
        )
        yield "line", found_in(said, "test_hosts_carrier.py"), "test_hosts_carrier.py"
        yield "left alone", tensor.sum().item(), 3.0 + (rank == odd)
        tensor = torch.ones(3)
        call = (lambda: dist.broadcast(tensor, 0)) if rank == odd else (lambda: dist.all_reduce(tensor))  # noqa: B023
        yield "another call", found_in(error_of(call), f"rank {odd} calls broadcast"), f"rank {odd} calls broadcast"
        sparse = torch.ones(3).to_sparse() if rank == odd else torch.ones(3)
        yield "sparse", found_in(error_of(lambda each=sparse: dist.all_reduce(each)), "over Gloo"), "over Gloo"  # type: ignore[misc]
        work: Any = dist.all_reduce(torch.ones(3 + (rank == odd)), async_op=True)
        yield "asynchronous", found_in(error_of(work.wait), f"rank {odd} calls"), f"rank {odd} calls"
        total = torch.ones(1)
        dist.all_reduce(total)
        yield "usable afterwards", total.item(), 4.0


def what_torch_is_set_to_does_not_matter(rank: int) -> Claims:
    # A default device of torch's once got what hosts exchange on the CPU, and a group made in inference mode wrote
    # into tensors of that mode.
    torch.set_default_device("meta")
    try:
        group = dist.new_group()
    finally:
        torch.set_default_device("cpu")
    with torch.inference_mode():
        other = dist.new_group()
    for each in (group, other):
        for length in (3, 100_000):
            tensor = torch.ones(length)
            dist.all_reduce(tensor, group=each)
            yield "sum", tensor[-1].item(), 4.0
        dist.destroy_process_group(each)
    for length in (3, 100_000):
        with torch.inference_mode(rank == 2):  # it once made another call then
            ones = [torch.ones(length, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.complex64)]
            for tensor in ones:
                dist.all_reduce(tensor)
            yield "inference", [tensor[-1].item() for tensor in ones], [4.0, 4, 4.0]


def tensors_that_cannot_be_added_change_nothing(rank: int) -> Claims:
    for dtype in (torch.float8_e5m2, torch.uint16):
        tensor = torch.ones(3).to(dtype)
        said = error_of(lambda each=tensor: dist.all_reduce(each))  # type: ignore[misc]
        yield "refused", found_in(said, "SUM does not work on"), "SUM does not work on"
        total = torch.ones(1) * rank
        dist.all_reduce(total)
        yield "usable afterwards", total.item(), 6.0


def a_destroyed_group_is_freed(rank: int) -> Claims:
    # The error of a mismatch once held its own frames, and so the group, until the collector came.
    group: Any = dist.new_group()
    error_of(lambda: dist.all_reduce(torch.ones(3 + (rank == 3)), group=group))
    work: Any = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    work.wait()
    held = [weakref.ref(each) for each in (group, *group.parts)]
    gc.disable()
    try:
        dist.destroy_process_group(group)
        group = work = None
        yield "held", [each() for each in held], [None] * len(held)
    finally:
        gc.enable()


def training_is_that_of_one_process(rank: int) -> Claims:
    for wrap in (TorchDDP, ls.DistributedDataParallel):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1)).double()
        wrapped: Any = wrap(model)
        data = torch.randn(8, 300, dtype=torch.float64)
        wrapped(data[2 * rank : 2 * rank + 2]).square().mean().backward()
        found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        model(data).square().mean().backward()
        expected = [each.grad for each in model.parameters() if each.grad is not None]
        close = [torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, expected, strict=True)]
        yield wrap.__module__, close, [True] * 4


@pytest.fixture(scope="module", params=PLACES)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(4, JoinHosts(PLACES[request.param])) as ranks:
        yield ranks


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pool: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pool, scenario) == []


def plain_sum(_run: ls.Run) -> bytes:
    tensor = wild_numbers(dist.get_rank(), 500_000)
    dist.all_reduce(tensor)
    return bytes(tensor.view(torch.uint8).numpy().tobytes())


def test_two_equal_hosts_have_the_bits_of_one() -> None:
    found = []
    for places in ((0, 0, 1, 1), (0, 0, 0, 0)):
        with RankPool(4, JoinHosts(places)) as ranks:
            found += ranks.run(plain_sum)
    assert all(one == other for one, other in pairwise(found))


def sum_until_it_fails(rank: Rank, places: tuple[int, ...], length: int) -> tuple[str, float]:
    JoinHosts(places)(rank)
    tensor = torch.ones(length)
    dist.all_reduce(tensor)
    rank.say("joined")
    try:
        while True:
            dist.all_reduce(tensor.fill_(1.0))
    except RuntimeError as error:
        failed = time.monotonic()
        again = error_of(lambda: dist.all_reduce(tensor))
        assert again != "no error"
        rank.say(f"{type(error).__name__}: {error}")
        rank.hear()
        ls.destroy_process_group()
        return str(error), failed


@pytest.mark.parametrize("length", [10, 3_000_000], ids=["short", "long"])
@pytest.mark.parametrize(("places", "killed"), [((0, 0, 1, 1), 0), ((0, 0, 1, 1), 3), ((0, 1, 1, 1), 3)])
def test_a_killed_rank_ends_the_calls_of_all(tmp_path: Any, places: tuple[int, ...], killed: int, length: int) -> None:
    with Ranks(tmp_path, 4, sum_until_it_fails, places, length) as ranks:
        for rank in range(4):
            assert ranks.hear(rank) == "joined"
        moment = ranks.send_signal(killed, signal.SIGKILL)
        others = [rank for rank in range(4) if rank != killed]
        said = [ranks.hear(rank, 30.0) for rank in others]
        assert [text.startswith("PeerLostError") for text in said] == [True] * 3, said
        assert [text.startswith(f"PeerLostError: Rank {killed} (process ") for text in said] == [True] * 3, said
        for rank in others:
            ranks.say(rank)
        assert max(ranks.result(rank)[1] for rank in others) - moment < 10.0


def leave_during_a_call(rank: Rank, places: tuple[int, ...], length: int) -> str:
    JoinHosts(places)(rank)
    dist.barrier()
    if rank.number == 0:
        work: Any = dist.all_reduce(torch.ones(length), async_op=True)
        time.sleep(0.2)  # it waits for the others by now
        ls.destroy_process_group()
        rank.say()
        return error_of(work.wait)
    rank.hear()
    return error_of(lambda: dist.all_reduce(torch.ones(length)))


@pytest.mark.parametrize("places", [(0, 0, 1), (0, 1, 1), (0, 0, 0)], ids=["beside another", "alone", "one host"])
def test_a_rank_that_destroys_the_group_during_a_call_ends_it_for_all(tmp_path: Any, places: tuple[int, ...]) -> None:
    # The others once waited for the timeout: they counted it among the ranks that had come to the call.
    with Ranks(tmp_path, 3, leave_during_a_call, places, 10) as ranks:
        ranks.hear(0)
        for rank in (1, 2):
            ranks.say(rank)
        said = [ranks.result(rank, 20.0) for rank in range(3)]
        assert "destroyed" in said[0]
        for text in said[1:]:
            assert "PeerLostError: Rank 0 " in text
            assert "destroyed" in text
