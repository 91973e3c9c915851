"""What we rely on of storages, versions and reference counts; each assertion says what breaks without it."""

from sys import getrefcount

import pytest
import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import (
    REFERENCES_OF_ONE_HOLDER,
    USUAL_STORAGE_USERS,
    count_storage_users,
    flatten_dense,
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    storage_address,
    storage_use_count,
    version_of,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
HELD = "gradients in buckets: the memory of a gradient that somebody holds would be overwritten, or copied in each step"
SHARED = "the trainer's partials: two parameters whose gradients share memory would be added to twice"
WRITES = "the trainer's agreement: a parameter that something other than the optimizer wrote to would go unseen"
ADDED = "the trainer's partials: it would not be seen whether a backward has added to a gradient"


class Holder:
    """As the reducer's slots hold the place of a gradient: by an attribute."""

    __slots__ = ("gradient",)

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient


def references(holder: Holder) -> int:
    return getrefcount(holder.gradient)  # not within an assert, where pytest holds it too


def use_count(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage_use_count(storage_address(storage))


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.data,
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.empty(0).set_(tensor.untyped_storage(), 0, (2,), (1,)),
        lambda tensor: memoryview(tensor.numpy()),
    ],
    ids=["view", "detached", "data", "array", "set_", "memoryview"],
)
def test_whoever_holds_memory_counts_until_he_lets_go(make) -> None:
    tensor = torch.zeros(4)
    before = use_count(tensor)
    held = make(tensor)
    assert use_count(tensor) > before, HELD
    del held
    assert use_count(tensor) == before, HELD


def test_one_view_counts_once() -> None:
    tensor = torch.zeros(4)
    before = use_count(tensor)
    held = [tensor[1:], tensor[:2]]
    assert use_count(tensor) == before + len(held), HELD


def test_a_second_reference_to_the_same_tensor_does_not_count() -> None:
    tensor = torch.zeros(4)
    before = use_count(tensor)
    again = tensor  # noqa: F841
    assert use_count(tensor) == before, "getrefcount has to see these: " + HELD


def test_all_storage_objects_of_one_memory_are_one() -> None:
    tensor = torch.zeros(4)
    before = use_count(tensor)
    held = tensor.untyped_storage()
    assert held is tensor[1:].untyped_storage(), "each question for the count would find another number: " + HELD
    assert use_count(tensor) == before


def test_tensors_of_one_memory_have_one_address() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    address = storage_address(tensor.untyped_storage())
    assert storage_address(tensor[2:].untyped_storage()) == address, HELD
    assert storage_address(other.untyped_storage()) != address, HELD
    assert storage_address(torch.empty(0).untyped_storage()) != storage_address(torch.empty(0).untyped_storage()), HELD


def test_an_address_outlives_the_object_that_told_it() -> None:
    tensor = torch.zeros(4)
    address = storage_address(tensor.untyped_storage())
    view = tensor[1:]
    assert storage_use_count(address) >= 2, HELD
    del view


def test_gradients_that_share_memory_have_more_users() -> None:
    (alone,) = count_storage_users([torch.empty(1)])
    position, kind = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    (position[None] + kind[None]).pow(2).sum().backward()
    assert position.grad.data_ptr() == kind.grad.data_ptr(), "no longer needed: autograd gives each its own memory"
    shared = [each.grad for each in (position, kind) if each.grad is not None]
    assert min(count_storage_users(shared)) > alone, SHARED


def test_a_gradient_of_its_own_memory_has_one_user() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.pow(2).sum().backward()
    assert weight.grad is not None
    found = count_storage_users([weight.grad, torch.empty(1)])
    assert found == [USUAL_STORAGE_USERS] * 2, "each gradient would be copied"


def test_versions_count_writes_and_not_reads() -> None:
    parameter = nn.Parameter(torch.ones(3))
    before = version_of(parameter)
    parameter.sum().item()
    parameter.detach().clone()
    assert version_of(parameter) == before, "a forward would count as a write: " + WRITES
    with torch.no_grad():
        parameter.add_(1)
    assert version_of(parameter) == before + 1, WRITES
    with torch.no_grad():
        parameter[1:].zero_()
    assert version_of(parameter) == before + 2, WRITES
    with torch.no_grad():
        foreach_add_([parameter], 1.0)
    assert version_of(parameter) == before + 3, ADDED


def test_versions_do_not_see_writes_through_data() -> None:
    parameter = nn.Parameter(torch.ones(3))
    before = version_of(parameter)
    parameter.data.zero_()
    assert version_of(parameter) == before, "no longer needed: contents are compared because of this"


def test_a_backward_that_adds_to_a_gradient_writes_to_it_once() -> None:
    parameter = nn.Parameter(torch.ones(3))
    partial = torch.ones(3)
    parameter.grad = partial
    before = version_of(partial)
    (parameter * 2).sum().backward()
    assert parameter.grad is partial, "the trainer's partials: autograd adds in place, to the tensor that was there"
    assert version_of(partial) == before + 1, ADDED
    assert partial.tolist() == [3.0, 3.0, 3.0], ADDED


def test_a_copy_through_data_has_a_version_of_its_own() -> None:
    tensor = torch.zeros(4)
    twin = tensor.data
    twin.add_(1)
    assert version_of(tensor) == 0, "replicas: a write in one forward would fail the backward of another"


def test_a_gradient_that_nobody_else_holds_has_one_reference() -> None:
    holder = Holder(torch.zeros(3))
    assert references(holder) == REFERENCES_OF_ONE_HOLDER, "each gradient would be copied: " + HELD


def test_a_held_gradient_has_one_more() -> None:
    holder = Holder(torch.zeros(3))
    held = holder.gradient
    assert references(holder) == REFERENCES_OF_ONE_HOLDER + 1, HELD
    del held
    assert references(holder) == REFERENCES_OF_ONE_HOLDER, HELD


def test_a_gradient_counts_its_parameter_until_it_is_cleared() -> None:
    parameter, holder = nn.Parameter(torch.zeros(3)), Holder(torch.zeros(3))
    parameter.grad = holder.gradient
    assert parameter.grad is holder.gradient, HELD
    assert references(holder) == REFERENCES_OF_ONE_HOLDER + 1, "what `.grad` holds counts as held: " + HELD
    parameter.grad = None
    assert references(holder) == REFERENCES_OF_ONE_HOLDER, HELD


@pytest.mark.parametrize("clear", [True, False])
def test_a_backward_leaves_no_reference(clear: bool) -> None:
    parameter, holder = nn.Parameter(torch.ones(3)), Holder(torch.zeros(3))
    parameter.grad = holder.gradient
    (parameter * 2).sum().backward()
    expected = REFERENCES_OF_ONE_HOLDER + 1
    if clear:
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=True)
        expected -= 1
    assert references(holder) == expected, HELD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_operations_on_lists_have_the_bits_of_single_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [1, 7, 4096, 33]
    left, right = ([torch.randn(size, dtype=dtype) for size in sizes] for _ in range(2))
    one_by_one, together = [each.clone() for each in left], [each.clone() for each in left]
    foreach_add_(together, right)
    foreach_add_(together, 0.0)
    foreach_mul_(together, 1 / 3)
    foreach_div_(together, 7)
    foreach_lerp_(together, right, 0.001)
    for each, other in zip(one_by_one, right, strict=True):
        each.add_(other).add_(0.0).mul_(1 / 3).div_(7).lerp_(other, 0.001)
    assert all(map(torch.equal, one_by_one, together)), "digests would change: gradients of a step have other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_shows_one_number_that_is_not_finite(dtype: torch.dtype) -> None:
    tensors = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
    tensors[1][-1], tensors[2][0] = float("nan"), float("-inf")
    found = [each.isfinite().item() for each in foreach_norm(tensors, ord=float("inf"))]
    assert found == [True, False, False], "DistributedDataParallel on a GPU: such a gradient would not be found"


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_is_not_rounded_to_the_tensors_type(device: str) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(10_000, dtype=torch.bfloat16, device=device)
    gradients[gradients == 0] = 1.0  # some versions of torch draw a zero, which has no relative error
    expected = gradients.double() / 3
    foreach_mul_([gradients], 1 / 3)
    error = (gradients.double() / expected - 1).mean().abs().item()
    assert error < 2e-4, "averages over 3 ranks would be too large by 0.2%, as 1/3 is in bfloat16"


def test_adding_zero_turns_minus_zero_into_zero() -> None:
    tensor = torch.tensor([-0.0])
    foreach_add_([tensor], 0.0)
    assert torch.signbit(tensor).item() is False, "an absent gradient would depend on the number of workers"


def test_flat_tensors_are_copies_in_order() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.zeros(0), torch.tensor([8.0])]
    flat = flatten_dense(tensors)
    assert flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 7.0, 8.0], "a gradient that is not finite could be missed"
    assert flat.untyped_storage()._cdata != tensors[0].untyped_storage()._cdata


def test_copies_go_between_strides_and_types() -> None:
    targets = [torch.zeros(4, 2, dtype=torch.float64).t(), torch.zeros(3)]
    sources = [torch.arange(8.0).view(2, 4), torch.ones(3)]
    foreach_copy_(targets, sources)
    assert targets[0].tolist() == sources[0].tolist(), "gradients would come into the wrong place of a bucket"
    assert targets[1].tolist() == [1.0, 1.0, 1.0]
