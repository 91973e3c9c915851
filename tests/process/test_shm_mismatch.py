"""Ranks of a "shm" group that do not mean the same: an error on each that names all calls; the group works on.

Each test runs one scenario, on ranks that stay from one to the next.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.scenarios import Claims, ShmScenario, ShmScenarios, error_of, found_in, name_of, scenarios_in
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.shm.file_layout import FileLayout

SIZE = 3
ODD = 1
"""The rank that does something else, unless a mistake says otherwise."""
SUM = "all_reduce(sum, float32 [3])"
Mistake = Callable[[int, Any], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# -- Collectives: each is called by every rank with its number, and is what that rank does -----------------------------


def other_collective(rank: int, group: Any) -> Any:
    return dist.broadcast(ones(3), 0, group) if rank == ODD else dist.all_reduce(ones(3), group=group)


def other_dtype(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(3, dtype=torch.float64 if rank == ODD else torch.float32), group=group)


def other_shape(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(3, 1) if rank == ODD else ones(3), group=group)


def other_operation(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(3), ReduceOp.MAX if rank == ODD else ReduceOp.SUM, group)


def other_length_by_far(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(5_000_000) if rank == ODD else ones(3), group=group)


def other_shape_in_the_groups_memory(rank: int, group: Any) -> Any:
    length = 400_001 if rank == ODD else 400_000
    return dist.all_reduce(group.allocate_tensor(length, dtype=torch.float32, device=None), group=group)


def dtype_of_a_long_one(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(400_000, dtype=torch.int32 if rank == ODD else torch.float32), group=group)


def barrier_on_one(rank: int, group: Any) -> Any:
    return dist.barrier(group) if rank == ODD else dist.all_reduce(ones(3), group=group)


def sparse_on_one(rank: int, group: Any) -> Any:
    return dist.all_reduce(ones(3).to_sparse() if rank == ODD else ones(3), group=group)


def objects_on_one(rank: int, group: Any) -> Any:
    if rank == ODD:
        return dist.all_gather_object([None] * SIZE, "text", group)
    return dist.all_reduce(ones(3), group=group)


def fewer_tensors(rank: int, group: Any) -> Any:
    return dist.all_reduce_coalesced([ones(3), ones(2)][: 1 if rank == ODD else 2], group=group)


def broadcast_from_another(rank: int, group: Any) -> Any:
    return dist.broadcast(ones(3), ODD if rank == ODD else 0, group)


def reduce_to_another(rank: int, group: Any) -> Any:
    return dist.reduce(ones(3), ODD if rank == ODD else 0, group=group)


def gather_to_another(rank: int, group: Any) -> Any:
    root = ODD if rank == ODD else 0
    return dist.gather(ones(3), [ones(3) for _ in range(SIZE)] if rank == root else None, root, group)


def scatter_from_another(rank: int, group: Any) -> Any:
    root = ODD if rank == ODD else 0
    return dist.scatter(ones(3), [ones(3) for _ in range(SIZE)] if rank == root else None, root, group)


def all_gather_of_another_shape(rank: int, group: Any) -> Any:
    piece = ones(2 if rank == ODD else 3)
    return dist.all_gather([torch.empty_like(piece) for _ in range(SIZE)], piece, group)


def reduce_scatter_by_another_operation(rank: int, group: Any) -> Any:
    operation = ReduceOp.AVG if rank == ODD else ReduceOp.SUM
    return dist.reduce_scatter(ones(3), [ones(3) for _ in range(SIZE)], operation, group)


def all_to_all_of_another_dtype(rank: int, group: Any) -> Any:
    dtype = torch.float16 if rank == ODD else torch.float32
    return dist.all_to_all_single(ones(SIZE, dtype=dtype), ones(SIZE, dtype=dtype), group=group)


def all_to_all_of_other_rows(rank: int, group: Any) -> Any:
    shape = (SIZE, 1, 2) if rank == ODD else (SIZE, 2)
    return dist.all_to_all_single(ones(*shape), ones(*shape), group=group)


def all_to_all_with_another_split(rank: int, group: Any) -> Any:
    # The odd rank sends two elements to rank 2, which expects one.
    sent = [0, 1, 2] if rank == ODD else [1, 1, 1]
    received = [1, 1, 1] if rank else [1, 0, 1]
    return dist.all_to_all_single(ones(sum(received)), ones(sum(sent)), received, sent, group)


def all_to_all_of_another_length(rank: int, group: Any) -> Any:
    inputs = [ones(4 if rank == ODD and other == 2 else 3) for other in range(SIZE)]
    return dist.all_to_all([ones(3) for _ in range(SIZE)], inputs, group)


def waited_for_later(rank: int, group: Any) -> Any:
    """Make a wrong call between two that are right, all under way at once."""
    before, wrong, after = ones(3), ones(3 + (rank == ODD)), ones(100_000)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (before, wrong, after)]
    works[2].wait()
    works[0].wait()
    assert before.tolist() == [3.0] * 3
    assert after.unique().tolist() == [3.0]
    assert not works[1].is_success()
    assert "all_reduce(sum, float32 [4])" in str(works[1].exception())
    return works[1].wait()


def in_a_future(rank: int, group: Any) -> Any:
    future = dist.all_reduce(ones(3 + (rank == ODD)), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()).wait()


COLLECTIVES: dict[Mistake, tuple[str, str]] = {
    other_collective: (SUM, "broadcast(from rank 0, float32 [3])"),
    other_dtype: (SUM, "all_reduce(sum, float64 [3])"),
    other_shape: (SUM, "all_reduce(sum, float32 [3, 1])"),
    other_operation: (SUM, "all_reduce(max, float32 [3])"),
    other_length_by_far: (SUM, "all_reduce(sum, float32 [5000000])"),
    other_shape_in_the_groups_memory: ("all_reduce(sum, float32 [400000])", "all_reduce(sum, float32 [400001])"),
    dtype_of_a_long_one: ("all_reduce(sum, float32 [400000])", "all_reduce(sum, int32 [400000])"),
    barrier_on_one: (SUM, "barrier()"),
    sparse_on_one: (SUM, "(sparse, sum, float32 [3])"),
    objects_on_one: (SUM, "all_gather(int64 [1])"),
    fewer_tensors: ("all_reduce_coalesced(sum, float32 [3], float32 [2])", "all_reduce_coalesced(sum, float32 [3])"),
    broadcast_from_another: ("broadcast(from rank 0, float32 [3])", "broadcast(from rank 1, float32 [3])"),
    reduce_to_another: ("reduce(sum, to rank 0, float32 [3])", "reduce(sum, to rank 1, float32 [3])"),
    gather_to_another: ("gather(to rank 0, float32 [3])", "gather(to rank 1, float32 [3])"),
    scatter_from_another: ("scatter(from rank 0, float32 [3])", "scatter(from rank 1, float32 [3])"),
    all_gather_of_another_shape: ("all_gather(float32 [3])", "all_gather(float32 [2])"),
    reduce_scatter_by_another_operation: ("reduce_scatter(sum, float32 [3])", "reduce_scatter(avg, float32 [3])"),
    all_to_all_of_another_dtype: ("all_to_all_single(rows of [], float32 [])", "(rows of [], float16 [])"),
    all_to_all_of_other_rows: ("all_to_all_single(rows of [2], float32 [])", "(rows of [1, 2], float32 [])"),
    waited_for_later: (SUM, "all_reduce(sum, float32 [4])"),
    in_a_future: (SUM, "all_reduce(sum, float32 [4])"),
}
"""Each mistake, what ranks 0 and 2 call, and what rank 1 calls."""
SPLITS: dict[Mistake, str] = {
    all_to_all_with_another_split: "rank 1 sends 8 bytes to rank 2, which expects 4",
    all_to_all_of_another_length: "rank 1 sends 16 bytes to rank 2, which expects 12",
}
SLOT = FileLayout(SIZE).slot_bytes


def other_dtype_in_a_message(rank: int, group: Any) -> Any:
    if rank == 0:
        return dist.send(ones(3), ODD, group)
    return dist.recv(ones(3, dtype=torch.float64), 0, group) if rank == ODD else None


def other_length_in_a_message(rank: int, group: Any) -> Any:
    if rank == 0:
        return dist.send(ones(3), ODD, group, tag=5)
    return dist.recv(ones(2, 2), 0, group, tag=5) if rank == ODD else None


def many_chunks_for_one(rank: int, group: Any) -> Any:
    if rank == 0:
        return dist.send(ones(5 * SLOT, dtype=torch.uint8), ODD, group)
    return dist.recv(ones(3), 0, group) if rank == ODD else None


def one_chunk_for_many(rank: int, group: Any) -> Any:
    if rank == 0:
        return dist.send(ones(3), ODD, group)
    return dist.recv(ones(5 * SLOT, dtype=torch.uint8), 0, group) if rank == ODD else None


def other_dtype_for_any_sender(rank: int, group: Any) -> Any:
    if rank == 0:
        return dist.send(ones(3), ODD, group)
    return dist.recv(ones(3, dtype=torch.int32), None, group) if rank == ODD else None


def later_messages_under_way(rank: int, group: Any) -> Any:
    """Send a wrong message between two that are right."""
    right = torch.arange(3.0)
    if rank == 0:
        works = [dist.isend(right, ODD, group), dist.isend(ones(4), ODD, group), dist.isend(right + 5, ODD, group)]
    elif rank == ODD:
        places = [torch.zeros(3) for _ in range(3)]
        works = [dist.irecv(place, 0, group) for place in places]
    else:
        return
    works[2].wait()
    works[0].wait()
    if rank == ODD:
        assert places[0].tolist() == [0.0, 1.0, 2.0]
        assert places[2].tolist() == [5.0, 6.0, 7.0]
    works[1].wait()


def other_dtype_in_a_message_kept_aside(rank: int, group: Any) -> Any:
    """Receive the second message first: the first one waits where its sender sees it no more."""
    if rank == 0:
        works = [dist.isend(ones(3), ODD, group, tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    if rank == ODD:
        dist.recv(ones(3), 0, group, 2)
        dist.recv(ones(3, dtype=torch.float64), 0, group, 1)


MESSAGES: dict[Mistake, str] = {
    other_dtype_in_a_message: "Rank 0 sends 3 elements of float32 but rank 1 receives 3 elements of float64",
    other_length_in_a_message: "Rank 0 sends 3 elements of float32 but rank 1 receives 4 elements of float32",
    many_chunks_for_one: f"Rank 0 sends {5 * SLOT} elements of uint8 but rank 1 receives 3 elements of float32",
    one_chunk_for_many: f"Rank 0 sends 3 elements of float32 but rank 1 receives {5 * SLOT} elements of uint8",
    other_dtype_for_any_sender: "Rank 0 sends 3 elements of float32 but rank 1 receives 3 elements of int32",
    later_messages_under_way: "Rank 0 sends 4 elements of float32 but rank 1 receives 3 elements of float32",
}


def _group_is_as_good_as_before(rank: int, group: Any, what: str) -> Claims:
    passed, total = torch.zeros(1), torch.full((2,), rank + 1.0)
    if rank == 0:
        dist.send(torch.ones(1), ODD, group)
    if rank == ODD:
        dist.recv(passed, 0, group)
        total += passed - 1
    dist.all_reduce(total, group=group)
    yield f"a sum after {what}", total.tolist(), [6.0, 6.0]


def every_rank_is_told_both_calls(rank: int, size: int, group: Any) -> Claims:
    for mistake, (common, odd) in COLLECTIVES.items():
        message = error_of(partial(mistake, rank, group))
        for said in ("CollectiveMismatchError", f"ranks 0 and 2 call {common}", "rank 1 calls ", odd):
            yield mistake.__name__, found_in(message, said), said
        yield from _group_is_as_good_as_before(rank, group, mistake.__name__)


def every_rank_is_told_which_splits_differ(rank: int, size: int, group: Any) -> Claims:
    for mistake, splits in SPLITS.items():
        message = error_of(partial(mistake, rank, group))
        for said in ("CollectiveMismatchError", splits):
            yield mistake.__name__, found_in(message, said), said
        yield from _group_is_as_good_as_before(rank, group, mistake.__name__)


def sender_and_receiver_are_told(rank: int, size: int, group: Any) -> Claims:
    for mistake, elements in MESSAGES.items():
        said = f"CollectiveMismatchError: {elements}" if rank < 2 else "no error"
        yield mistake.__name__, found_in(error_of(partial(mistake, rank, group)), said), said
        yield from _group_is_as_good_as_before(rank, group, mistake.__name__)


def the_receiver_of_a_message_kept_aside_is_told(rank: int, size: int, group: Any) -> Claims:
    message = error_of(partial(other_dtype_in_a_message_kept_aside, rank, group))
    if rank == ODD:
        said = f"CollectiveMismatchError: {MESSAGES[other_dtype_in_a_message]}"
        yield "message", found_in(message, said), said
    yield from _group_is_as_good_as_before(rank, group, "it")


def every_call_is_named_when_all_differ(rank: int, size: int, group: Any) -> Claims:
    message = error_of(lambda: dist.all_reduce(ones(rank + 1), group=group))
    for other in range(size):
        said = f"rank {other} calls all_reduce(sum, float32 [{other + 1}])"
        yield "message", found_in(message, said), said
    yield from _group_is_as_good_as_before(rank, group, "it")


def calls_in_another_order_are_wrong_each(rank: int, size: int, group: Any) -> Claims:
    calls = [partial(dist.all_reduce, ones(3), group=group), partial(dist.broadcast, ones(3), 0, group)]
    expected = [(SUM, "broadcast(from rank 0"), ("broadcast(from rank 0", SUM)]
    for call, (common, odd) in zip(calls[::-1] if rank == ODD else calls, expected, strict=True):
        message = error_of(call)
        for said in (f"ranks 0 and 2 call {common}", f"rank 1 calls {odd}"):
            yield "message", found_in(message, said), said
    yield from _group_is_as_good_as_before(rank, group, "them")


def tensors_of_a_wrong_call_stay_as_they_were(rank: int, size: int, group: Any) -> Claims:
    for length in (3, 400_002):
        tensor = torch.full((length,), float(rank))
        shaped = tensor.view(-1, 1 + (rank == ODD) * 2)
        for call in (partial(dist.all_reduce, shaped, group=group), partial(dist.broadcast, tensor, rank % 2, group)):
            yield "is an error", error_of(call) == "no error", False
        yield f"{length} elements", tensor.unique().tolist(), [float(rank)]


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(shm_scenarios: ShmScenarios, scenario: ShmScenario) -> None:
    assert shm_scenarios.wrong_in(scenario, SIZE) == []
