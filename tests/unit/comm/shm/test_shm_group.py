"""A group of one rank, in this process: the same answers as from many, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import lockstep as ls
from lockstep.errors import GroupError

ONE = torch.tensor([1.0, -2.0, 3.0])


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    ls.destroy_process_group()


@pytest.mark.parametrize("length", [3, 300_000])
@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_one_rank_reduces_to_itself(group: Any, operation: Any, length: int) -> None:
    tensor = ONE.repeat(length // 3)
    dist.all_reduce(tensor, operation)
    dist.reduce(tensor, 0, operation)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, ONE.repeat(length // 3))
    allocated = group.allocate_tensor(length, dtype=torch.float32).copy_(tensor)
    dist.all_reduce(allocated, operation)
    assert torch.equal(allocated, tensor)


def test_one_rank_gathers_and_scatters(group: Any) -> None:
    for function in (dist.all_gather, dist.gather):
        outputs = [torch.zeros(3)]
        function(*((outputs, ONE) if function is dist.all_gather else (ONE, outputs)))
        assert torch.equal(outputs[0], ONE)
    output = torch.zeros(3)
    dist.scatter(output, [ONE], 0)
    assert torch.equal(output, ONE)
    dist.reduce_scatter(output.zero_(), [ONE])
    assert torch.equal(output, ONE)
    dist.all_to_all_single(output.zero_(), ONE)
    assert torch.equal(output, ONE)
    dist.barrier()
    objects: list[Any] = [None]
    dist.all_gather_object(objects, "text")
    assert objects == ["text"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda group: group.allgather([[ONE, ONE]], [ONE]),
            "all_gather: 2 output tensors, expected one per rank of 1",
        ),
        (
            lambda group: group.allgather([[torch.zeros(2)]], [ONE]),
            r"torch.float32 \[2\], expected torch.float32 \[3\]",
        ),
        (lambda group: group.all_gather_single(torch.zeros(5), ONE), "all_gather_into_tensor: one tensor is"),
        (lambda group: group.reduce_scatter([ONE], [[ONE, ONE]]), "reduce_scatter: 2 input tensors"),
        (
            lambda group: group.all_to_all_single(ONE, ONE, [2], [3]),
            r"output splits \[2\] must be 1 numbers that add up",
        ),
        (lambda group: group.allreduce([ONE, ONE]), "Expected one tensor, got 2"),
        (
            lambda group: group.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta")),
            "allocates on the CPU",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(group: Any, call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(group)
    tensor = ONE.clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, ONE)


def test_a_tensor_elsewhere_is_refused(group: Any) -> None:
    with pytest.raises(GroupError, match="The shm backend carries CPU tensors"):
        dist.all_reduce(torch.empty(3, device="meta"))


def test_a_group_says_what_it_is(group: Any) -> None:
    assert group.getBackendName() == "shm"
    assert dist.get_backend() == "shm"
    assert (group.rank(), group.size()) == (0, 1)
    assert group.supports_tensor_alloc(torch.device("cpu"))
    assert not group.supports_tensor_alloc(torch.device("cuda"))
    group.get_group_store().set("key", "value")
    assert group.get_group_store().get("key") == b"value"


def test_a_group_that_was_destroyed_says_so(group: Any) -> None:
    tensor = group.allocate_tensor(3, dtype=torch.float32).copy_(ONE)
    ls.destroy_process_group()
    with pytest.raises(GroupError, match="was destroyed"):
        group.allreduce([ONE.clone()])
    with pytest.raises(GroupError, match="was destroyed"):
        group.recv([ONE.clone()], 0)
    assert torch.equal(tensor, ONE)


def test_an_aborted_group_says_so(group: Any) -> None:
    group.abort()
    with pytest.raises(GroupError, match="has aborted this group"):
        group.allreduce([ONE.clone()])
