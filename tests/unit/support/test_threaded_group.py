"""The threads that stand for ranks: collectives are right, and programs that are wrong fail, at once and everywhere."""

import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.changed import ALL, ALWAYS, choose_tests
from tests.support.threaded_ranks import make_subgroup, run_ranks
from tests.support.threaded_work import UnsafeAccessError
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

SIZES = [1, 2, 3]
POISONS = [False, True]


def numbered(rank: int, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 100 * rank


@pytest.mark.parametrize("poisons", POISONS)
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_every_rank_its_part(size: int, poisons: bool) -> None:
    def program(world: World) -> None:
        group, rank = world.group, world.rank
        every = [numbered(peer, 2, 3) for peer in range(size)]
        total = torch.stack(every).sum(0)

        summed = numbered(rank, 2, 3)
        dist.all_reduce(summed, group=group)
        assert torch.equal(summed, total)
        biggest = numbered(rank, 2, 3)
        dist.all_reduce(biggest, dist.ReduceOp.MAX, group=group)
        assert torch.equal(biggest, every[-1])
        average = numbered(rank, 2, 3).t()
        dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
        assert torch.equal(average, total.t() / size)

        root = size - 1
        given = numbered(rank, 2, 3)
        dist.broadcast(given, group_src=root, group=group)
        assert torch.equal(given, every[root])
        reduced = numbered(rank, 2, 3)
        dist.reduce(reduced, group_dst=root, group=group)
        assert torch.equal(reduced, total if rank == root else every[rank])

        parts = [torch.empty(2, 3) for _ in range(size)]
        dist.all_gather(parts, every[rank], group=group)
        assert torch.equal(torch.stack(parts), torch.stack(every))
        whole = torch.empty(size, 2, 3)
        dist.all_gather_single(whole, every[rank], group=group)
        assert torch.equal(whole, torch.stack(every))

        own = torch.empty(2)
        dist.reduce_scatter(own, [numbered(rank, 2) + peer for peer in range(size)], group=group)
        assert torch.equal(own, sum(numbered(peer, 2) + rank for peer in range(size)))
        own = torch.empty(2)
        dist.reduce_scatter_single(own, numbered(rank, 2 * size), group=group)
        assert torch.equal(own, sum(numbered(peer, 2 * size) for peer in range(size))[2 * rank : 2 * rank + 2])

        sent = [torch.full((2,), 10.0 * rank + peer) for peer in range(size)]
        taken = [torch.empty(2) for _ in range(size)]
        dist.all_to_all(taken, sent, group=group)
        assert torch.equal(torch.stack(taken), torch.stack([torch.full((2,), 10.0 * p + rank) for p in range(size)]))
        rows = torch.empty(size * (rank + 1), 2)
        counts = [peer + 1 for peer in range(size)]
        source = torch.full((sum(counts), 2), float(rank))
        dist.all_to_all_single(rows, source, [rank + 1] * size, counts, group=group)
        assert rows[:, 0].tolist() == [float(peer) for peer in range(size) for _ in range(rank + 1)]

        gathered = [torch.empty(2, 3) for _ in range(size)] if rank == root else None
        dist.gather(every[rank], gathered, group_dst=root, group=group)
        assert gathered is None or torch.equal(torch.stack(gathered), torch.stack(every))
        place = torch.empty(2, 3)
        dist.scatter(place, every if rank == root else None, group_src=root, group=group)
        assert torch.equal(place, every[rank])
        dist.barrier(group=group)

    run_ranks(size, program, poisons=poisons)


@pytest.mark.parametrize("poisons", POISONS)
def test_messages_arrive_in_the_order_in_which_they_were_sent(poisons: bool) -> None:
    def program(world: World) -> list[float]:
        after, before = (world.rank + 1) % 3, (world.rank - 1) % 3
        landings = [torch.empty(1) for _ in range(3)]
        works: list[Any] = [dist.irecv(landing, group_src=before, group=world.group) for landing in landings]
        works += [
            dist.isend(torch.tensor([10.0 * world.rank + number]), group_dst=after, group=world.group)
            for number in range(3)
        ]
        for work in reversed(works):
            work.wait()
        return [landing.item() for landing in landings]

    assert run_ranks(3, program, poisons=poisons) == [[20.0, 21.0, 22.0], [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def test_messages_of_a_batch_cross() -> None:
    def program(world: World) -> float:
        peer = 1 - world.rank
        landing, own = torch.empty(1), torch.tensor([float(world.rank)])
        messages = [
            dist.P2POp(dist.isend, own, group=world.group, group_peer=peer),
            dist.P2POp(dist.irecv, landing, group=world.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return landing.item()

    assert run_ranks(2, program) == [1.0, 0.0]


def test_objects_travel_without_a_default_group() -> None:
    def program(world: World) -> tuple[list[Any], str]:
        assert not dist.is_initialized()
        return world.gather_objects({"rank": world.rank}), world.from_first(lambda: f"from {world.rank}")

    assert run_ranks(2, program) == [([{"rank": 0}, {"rank": 1}], "from 0")] * 2


def test_each_rank_has_its_own_default_group() -> None:
    def program(world: World) -> tuple[int, int]:
        dist.barrier()
        return dist.get_rank(), dist.get_world_size()

    assert run_ranks(3, program, has_default_group=True) == [(0, 3), (1, 3), (2, 3)]
    assert not dist.is_initialized()


def test_a_backward_can_communicate() -> None:
    def program(world: World) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)

        def average(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=world.group)
            return gradient

        model.weight.register_hook(average)
        model(numbered(world.rank, 1, 3)).sum().backward()
        return model.weight.grad

    expected = (numbered(0, 1, 3) + numbered(1, 1, 3)) / 2
    assert all(torch.equal(gradient, expected) for gradient in run_ranks(2, program, poisons=True))


def test_random_numbers_are_those_of_a_process_of_its_own() -> None:
    def program(world: World) -> list[float]:
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random()]
            dist.barrier(group=world.group)
        return drawn

    before = torch.get_rng_state()
    together = run_ranks(2, program)
    assert together[0] == run_ranks(1, program)[0]
    assert together[0] != together[1]
    assert torch.equal(torch.get_rng_state(), before)


# -- Programs that are wrong ---------------------------------------------------------------------------------------


def test_an_output_that_is_read_too_early_is_not_the_result() -> None:
    def program(world: World) -> tuple[float, float]:
        number, count = torch.tensor(1.0), torch.tensor(1)
        works: list[Any] = [dist.all_reduce(tensor, group=world.group, async_op=True) for tensor in (number, count)]
        early = number.item(), count.item()
        for work in works:
            work.wait()
        assert (number.item(), count.item()) == (2.0, 2)
        return early

    assert run_ranks(2, program) == [(1.0, 1)] * 2
    assert all(str(number) == "nan" and count != 2 for number, count in run_ranks(2, program, poisons=True))


@pytest.mark.parametrize("poisons", POISONS)
@pytest.mark.parametrize("what", ["input", "output"])
def test_writing_what_a_call_uses_is_an_error_of_wait(what: str, poisons: bool) -> None:
    def program(world: World) -> None:
        tensors = {"input": torch.ones(2), "output": torch.ones(4)}
        work: Any = dist.all_gather_single(tensors["output"], tensors["input"], group=world.group, async_op=True)
        if world.rank == 1:
            tensors[what].fill_(7.0)
        work.wait()

    with pytest.raises(UnsafeAccessError, match=r"Rank 1.*all_gather_into_tensor.*before the call was waited for"):
        run_ranks(2, program, poisons=poisons)


def test_a_future_is_done_when_it_is_waited_for() -> None:
    def program(world: World) -> tuple[bool, float]:
        work: Any = dist.all_reduce(torch.tensor(1.0), group=world.group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] / 2).then(lambda done: done.value().item())
        early = future.done()
        return early, future.wait()

    assert run_ranks(2, program) == [(False, 1.0)] * 2


def test_different_calls_are_an_error_on_every_rank() -> None:
    def program(world: World) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_reduce(torch.ones(2 + world.rank), group=world.group)
        dist.barrier(group=world.group)  # the group is as good as before
        return str(caught.value)

    for message in run_ranks(2, program):
        assert "rank 0 calls all_reduce(RedOpType.SUM, float32 [2]); rank 1 calls" in message


def test_the_first_failure_is_raised_and_releases_the_others() -> None:
    others: list[PeerLostError] = []

    def program(world: World) -> None:
        if world.rank == 1:
            raise ValueError("rank 1 cannot")
        try:
            dist.all_reduce(torch.ones(1), group=world.group)
        except PeerLostError as error:
            others.append(error)
            raise

    with pytest.raises(ValueError, match="rank 1 cannot") as caught:
        run_ranks(3, program)
    assert [error.rank for error in others] == [1, 1]
    assert "rank 1, the first to fail" in caught.value.__notes__[0]
    assert len(caught.value.__notes__) == 3


def test_a_rank_that_returned_is_lost_for_those_that_wait_for_it() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            dist.recv(torch.empty(1), group_src=1, group=world.group)

    with pytest.raises(PeerLostError, match=r"Rank 1 has returned.*rank 0 waits for a receive from rank 1"):
        run_ranks(2, program)


def test_ranks_that_wait_for_each_other_get_an_error_at_once() -> None:
    def program(world: World) -> None:
        dist.send(torch.ones(1), group_dst=1 - world.rank, group=world.group)
        dist.recv(torch.empty(1), group_src=1 - world.rank, group=world.group)

    with pytest.raises(CollectiveTimeoutError, match="No rank can go on: rank 0 waits for a send to rank 1; rank 1"):
        run_ranks(2, program)


def test_a_rank_that_waits_for_something_else_is_an_error() -> None:
    never = threading.Event()

    def program(world: World) -> None:
        if world.rank == 0:
            never.wait(5.0)
        dist.barrier(group=world.group)

    with pytest.raises(AssertionError, match=r"A turn of rank 0 takes longer than 0.2 s(.|\n)*never.wait"):
        run_ranks(2, program, turn_seconds=0.2)
    never.set()


def test_survivors_go_on_in_a_new_group() -> None:
    def program(world: World) -> float:
        tensor = torch.tensor(1.0)
        if world.rank == 1:
            return 0.0
        with pytest.raises(PeerLostError):
            dist.all_reduce(tensor, group=world.group)
        survivors = make_subgroup(world, [0, 2])
        assert (survivors.rank, survivors.world_size) == (world.rank // 2, 2)
        dist.all_reduce(tensor, group=survivors.group)
        return tensor.item()

    assert run_ranks(3, program) == [2.0, 0.0, 2.0]


# -- Which unit tests `make check` chooses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["src/lockstep/engine/update.py", "src/lockstep/comm/shm/work.py"], [f"{ALL}/comm", f"{ALL}/engine"]),
        (["tests/unit/data/test_order.py", "src/lockstep/data/order.py"], [f"{ALL}/data"]),
        (["tests/unit/test_settings.py"], [f"{ALL}/test_settings.py"]),
        (["tests/unit/engine/removed/test_of_old.py", "src/lockstep/removed/old.py"], [f"{ALL}/engine"]),
        (["docs/config.md", "src/lockstep/explanations/LS322.md", "tests/process/test_run.py"], []),
    ],
)
def test_a_package_is_tested_by_the_folder_of_its_name(changed: list[str], expected: list[str]) -> None:
    assert choose_tests(changed) == [*ALWAYS, *expected]


@pytest.mark.parametrize("name", ["src/lockstep/errors.py", "tests/support/turns.py", "pyproject.toml"])
def test_what_all_depend_on_is_tested_by_all(name: str) -> None:
    assert choose_tests(["src/lockstep/engine/update.py", name]) == [ALWAYS[0], ALL]
