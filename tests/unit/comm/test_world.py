"""What is refused before a message is sent, and the flat form of a tensor."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.comm import current_world
from lockstep.comm.messages import check_summable, from_real_row, joined_world, to_real_row
from lockstep.errors import GroupError

NUMBERS = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "out is a list, expected a torch.Tensor"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo.*out.to_dense"),
        (torch.zeros(3, dtype=torch.float8_e5m2), "float8_e5m2, which torch cannot add"),
        (torch.zeros(3, dtype=torch.uint16), "uint16, which torch cannot add"),
        (torch.zeros(1, 3).expand(2, 3), "several of its elements share memory.*out.contiguous"),
    ],
)
def test_what_cannot_be_summed_is_refused(value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        check_summable(value, "out", is_written=True)


def test_an_expanded_tensor_may_be_read() -> None:
    check_summable(torch.zeros(1, 3).expand(2, 3), "tensor", is_written=False)
    check_summable(torch.zeros(1, 3).expand(1, 3), "tensor", is_written=True)


def test_a_contiguous_tensor_is_its_own_flat_form() -> None:
    tensor = NUMBERS.float().requires_grad_()
    flat = to_real_row(tensor, min_elements=24)
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad
    from_real_row(flat.add_(1), tensor)
    assert torch.equal(tensor, NUMBERS.float() + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS.clone().transpose(0, 2),
        NUMBERS.double()[:, ::2, 1:],
        NUMBERS.bfloat16().permute(2, 0, 1)[1],
        torch.complex(NUMBERS.float(), -NUMBERS.float()).mT,
        torch.complex(NUMBERS.float(), -NUMBERS.float()).conj(),
        torch.complex(NUMBERS.float(), -NUMBERS.float()).conj().imag,
        torch.tensor(5),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j], dtype=torch.complex64),
    ],
    ids=["strided", "holes", "bfloat16", "complex", "conjugated", "negated", "scalar", "bool", "short complex"],
)
def test_the_flat_form_has_the_elements_in_order_and_goes_back(tensor: Tensor) -> None:
    expected = tensor.clone()
    flat = to_real_row(tensor, min_elements=5)
    in_order = torch.view_as_real(expected.resolve_conj()) if expected.is_complex() else expected
    assert flat.shape == (max(5, in_order.numel()),)
    assert flat[: in_order.numel()].tolist() == in_order.reshape(-1).tolist()
    assert not flat[in_order.numel() :].any()
    tensor.zero_()
    from_real_row(flat, tensor)
    assert torch.equal(tensor, expected)


def test_without_a_group_the_remedy_is_named() -> None:
    with pytest.raises(GroupError, match=r"ls.init_process_group\(\) first"):
        joined_world(None)


# -- A worker that is alone --------------------------------------------------------------------------------------------


class Held:
    """Something that a frame holds."""


def make_failing(held: Held) -> Callable[[], None]:
    def fail() -> None:
        raise ValueError(f"no {held}")

    return fail


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_error_of_rank_0_keeps_nothing_alive() -> None:
    # Its traceback had the frame that held it: what the frames hold stayed until a garbage collection.
    held = Held()
    found = weakref.ref(held)

    call = make_failing(held)
    with pytest.raises(ValueError, match="no "):
        current_world().from_first(call)
    del held, call
    assert found() is None
