"""The order of addition, and adding blockwise in place, within one process."""

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.shm.arithmetic import Step, reduce_into, reduction, schedule, schedule_nodes
from lockstep.comm.shm.collectives import check_writable, copy_into, flatten, premultiply, write_back
from lockstep.shards import add_in_tree_order, partial_nodes, shard_range
from lockstep.shards.tree import Node


def bracket(left: str, right: str) -> str:
    return f"({left}+{right})"


def played(steps: Sequence[Step], operands: Sequence[str]) -> str:
    """Take the steps with names for numbers, and return what the result is made of."""
    registers = dict(enumerate(operands))
    result = operands[0]
    for number, step in enumerate(steps):
        value = bracket(registers[step.left], registers[step.right])
        assert (step.target == -1) == (number == len(steps) - 1), "the result is written by the last step, only"
        assert step.target not in range(len(operands)), "an operand is overwritten"
        registers[step.target] = result = value
    return result


@given(st.integers(1, 70))
def test_ranks_are_added_in_the_order_of_the_tree(size: int) -> None:
    names = [str(rank) for rank in range(size)]
    expected = add_in_tree_order({(rank, rank + 1): name for rank, name in enumerate(names)}, size, bracket)
    assert played(schedule(size), names) == expected


@given(st.integers(1, 6), st.integers(1, 30))
def test_partials_are_added_in_the_order_of_the_tree(size: int, num_shards: int) -> None:
    nodes: list[Node] = []
    for rank in range(min(size, num_shards)):
        owned = shard_range(rank, min(size, num_shards), num_shards)
        nodes += partial_nodes(owned.start, owned.stop, num_shards)
    names = [f"{start}:{stop}" for start, stop in nodes]
    expected = add_in_tree_order(dict(zip(nodes, names, strict=True)), num_shards, bracket)
    assert played(schedule_nodes(tuple(nodes), num_shards), names) == expected


def wild(rank: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator) * 10.0 ** torch.randint(-8, 8, (length,), generator=generator)


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    leaves = {(rank, rank + 1): value for rank, value in enumerate(values)}
    return add_in_tree_order(leaves, len(values), operator.add)


SUM = reduction(ReduceOp.SUM, torch.float32)


@pytest.mark.parametrize("length", [0, 1, 7, 65_535, 65_536, 65_537, 200_003])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_have_the_bits_of_the_whole(size: int, length: int) -> None:
    values = [wild(rank, length) for rank in range(size)]
    out = torch.empty(length)
    copy = torch.empty(length)
    reduce_into(out, values, SUM, schedule(size), copies=[copy])
    assert torch.equal(out, tree_sum(values))
    assert torch.equal(copy, out)
    assert all(torch.equal(value, wild(rank, length)) for rank, value in enumerate(values))


@pytest.mark.parametrize("owner", range(4))
def test_the_result_may_lie_where_an_operand_lies(owner: int) -> None:
    values = [wild(rank, 70_001) for rank in range(4)]
    expected = tree_sum(values)
    reduce_into(
        values[owner], values, SUM, schedule(4), copies=[value for value in values if value is not values[owner]]
    )
    assert all(torch.equal(value, expected) for value in values)


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        (ReduceOp.SUM, [[1, -2], [5, 7], [-1, 1]], [5, 6]),
        (ReduceOp.AVG, [[1, -2], [5, -7], [-1, -1]], [1, -3]),
        (ReduceOp.PRODUCT, [[1, -2], [5, 7], [-1, 1]], [-5, -14]),
        (ReduceOp.MIN, [[1, -2], [5, 7], [-1, 1]], [-1, -2]),
        (ReduceOp.MAX, [[1, -2], [5, 7], [-1, 1]], [5, 7]),
        (ReduceOp.BAND, [[7, 6], [5, 7], [13, 2]], [5, 2]),
        (ReduceOp.BOR, [[1, 2], [4, 8], [0, 2]], [5, 10]),
        (ReduceOp.BXOR, [[1, 2], [5, 8], [0, 2]], [4, 8]),
    ],
)
def test_operations_on_whole_numbers(operation: Any, values: list[list[int]], expected: list[int]) -> None:
    out = torch.empty(2, dtype=torch.int32)
    parts = [torch.tensor(value, dtype=torch.int32) for value in values]
    reduce_into(out, parts, reduction(operation, torch.int32), schedule(3))
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (ReduceOp.SUM, [False, True, True]),
        (ReduceOp.MAX, [False, True, True]),
        (ReduceOp.BOR, [False, True, True]),
        (ReduceOp.PRODUCT, [False, False, True]),
        (ReduceOp.MIN, [False, False, True]),
        (ReduceOp.BAND, [False, False, True]),
        (ReduceOp.BXOR, [False, True, False]),
    ],
)
def test_operations_on_booleans(operation: Any, expected: list[bool]) -> None:
    parts = [torch.tensor([False, False, True]), torch.tensor([False, True, True])]
    out = torch.empty(3, dtype=torch.bool)
    reduce_into(out, parts, reduction(operation, torch.bool), schedule(2))
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("operation", "dtype", "said"),
    [
        (ReduceOp.BAND, torch.float32, "ReduceOp.BAND does not work on torch.float32"),
        (ReduceOp.AVG, torch.bool, "ReduceOp.AVG has no meaning for torch.bool; cast"),
        (ReduceOp.SUM, torch.uint16, "ReduceOp.SUM does not work on torch.uint16"),
        (ReduceOp.SUM, torch.float8_e5m2, "ReduceOp.SUM does not work on torch.float8_e5m2"),
        (ReduceOp.MAX, torch.complex64, "ReduceOp.MAX does not work on torch.complex64"),
    ],
)
def test_what_makes_no_sense_is_refused(operation: Any, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        reduction(operation, dtype)


def test_what_the_cpu_cannot_do_is_refused_whatever_the_default_device() -> None:
    # It was tried on the default device, and "meta" can do everything.
    with torch.device("meta"), pytest.raises(TypeError, match=r"SUM does not work on torch\.uint16"):
        reduction(ReduceOp.SUM, torch.uint16)


# -- Reading what torch hands a process group --------------------------------------------------------------------------


ONE = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize("tensor", [torch.arange(4.0)[1::2][:1], torch.arange(4.0)[::2][:0]], ids=["one", "none"])
def test_a_row_of_one_element_or_none_has_a_view_as_bytes(tensor: Tensor) -> None:
    # Torch calls it contiguous whatever its stride, and had no view of it: broadcast broke its group.
    flat = flatten(tensor)
    assert flat.view(torch.uint8).nbytes == tensor.nbytes
    assert flat.data_ptr() == tensor.data_ptr()


def test_a_row_of_a_conjugate_view_has_its_values() -> None:
    # A row that was itself conjugate lost what was written into its bytes.
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    flat = flatten(tensor.conj())
    assert not flat.is_conj()
    write_back(tensor.conj(), flat.mul_(1j))
    assert torch.equal(tensor, torch.tensor([1 + 2j, 3 - 4j]) * -1j)


def test_a_factor_leaves_the_tensor_alone() -> None:
    tensor = ONE.clone()
    how = reduction(dist._make_nccl_premul_sum(0.5), torch.float32)
    assert torch.equal(premultiply(tensor, how), ONE.view(-1) * 0.5)
    assert torch.equal(tensor, ONE)
    assert premultiply(tensor, reduction(dist.ReduceOp.SUM, torch.float32)).data_ptr() == tensor.data_ptr()


def test_a_factor_does_not_change_the_dtype() -> None:
    # A factor of float64 made a row of float64, which was then taken for one of float32.
    how = reduction(dist._make_nccl_premul_sum(torch.tensor([2.0], dtype=torch.float64)), torch.float32)
    flat = premultiply(ONE, how)
    assert flat.dtype == torch.float32
    assert torch.equal(flat, ONE.view(-1) * 2)


def test_values_come_into_a_tensor_of_inference_mode() -> None:
    # Only that mode may write into one, and the thread that takes a message is not in it.
    with torch.inference_mode():
        target = torch.zeros(3)
    copy_into(target, torch.ones(3))
    assert target.tolist() == [1.0] * 3


def test_integers_take_no_factor() -> None:
    with pytest.raises(TypeError, match=r"PREMUL_SUM multiplies by 0.5, which torch.int64 cannot hold"):
        reduction(dist._make_nccl_premul_sum(0.5), torch.int64)


def test_nothing_is_written_into_an_expanded_tensor() -> None:
    check_writable([ONE, ONE.T, ONE[:1].expand(1, 3), ONE.to_sparse()])
    with pytest.raises(ValueError, match=r"shape \[4, 2, 3\] is expanded"):
        check_writable([ONE.expand(4, 2, 3)])
