"""Reading what torch hands a process group."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.arguments import (
    check_alike,
    check_writable,
    copy_into,
    describe_message,
    flatten,
    is_plain,
    premultiply,
    read_list,
    read_one,
    write_back,
)
from lockstep.comm.shm.arithmetic import reduction

ONE = torch.arange(6.0).view(2, 3)


def test_one_tensor_is_read_from_a_list_or_alone() -> None:
    assert read_one(ONE) == [ONE]
    assert read_one([ONE]) == [ONE]
    with pytest.raises(ValueError, match="Expected one tensor, got 2"):
        read_one([ONE, ONE])


def test_a_list_may_lie_in_a_list() -> None:
    assert [id(tensor) for tensor in read_list([[ONE, ONE]])] == [id(ONE)] * 2
    assert read_list([ONE]) == [ONE]
    assert read_list([]) == []


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [(ONE, True), (ONE.T, True), (ONE.to_sparse(), False), (torch.empty(3, device="meta"), False)],
    ids=["plain", "strided", "sparse", "elsewhere"],
)
def test_what_shared_memory_carries(tensor: Tensor, expected: bool) -> None:
    assert is_plain(tensor) is expected


def test_a_row_is_a_view_where_it_can_be() -> None:
    tensor = ONE.clone().requires_grad_()
    flat = flatten(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad
    flat.add_(1)
    assert torch.equal(tensor.detach(), ONE + 1)


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


def test_what_was_copied_is_written_back() -> None:
    tensor = torch.zeros(3, 4)[:, ::2]
    flat = flatten(tensor)
    write_back(tensor, flat.copy_(ONE.view(-1)))
    assert torch.equal(tensor, ONE.view(3, 2))


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


def test_outputs_of_another_kind_are_named() -> None:
    check_alike("gather", ONE, [torch.zeros(6), torch.zeros(3, 2)])
    with pytest.raises(ValueError, match=r"gather: a tensor is torch.float32 \[5\], expected torch.float32 \[2, 3\]"):
        check_alike("gather", ONE, [torch.zeros(5)])
    with pytest.raises(ValueError, match=r"torch.float64 \[2, 3\]"):
        check_alike("gather", ONE, [ONE.double()])


def test_a_message_is_described_without_its_shape() -> None:
    assert describe_message(ONE) == describe_message(ONE.T) == b"6 elements of float32"
