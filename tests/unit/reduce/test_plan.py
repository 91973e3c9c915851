from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.reduce import BucketLimits, TrainedModel, plan_buckets
from lockstep.reduce.plan import ALIGNMENT_BYTES, ParameterSpec


def spec(number: int, num_elements: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(
        name=f"p{number}",
        shape=(num_elements,),
        stride=(1,),
        dtype=dtype,
        device=torch.device("cpu"),
        num_elements=num_elements,
    )


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
SPECS = st.lists(st.tuples(st.integers(0, 3000), DTYPES), min_size=1, max_size=30)


@given(parameters=SPECS, first=st.integers(1, 10_000), other=st.integers(1, 40_000))
def test_every_gradient_has_a_place_of_its_own(
    parameters: list[tuple[int, torch.dtype]], first: int, other: int
) -> None:
    specs = [spec(number, size, dtype) for number, (size, dtype) in enumerate(parameters)]
    buckets = plan_buckets(specs, BucketLimits(sizes_bytes=(first, other)), trailer_length=7).buckets
    placed = sorted(slot.parameter for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(specs)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert specs[slot.parameter].dtype == bucket.dtype
            end = slot.offset + specs[slot.parameter].num_elements
        assert bucket.num_gradient_elements >= end
        trailer_length = 7 if bucket is buckets[-1] else 0
        assert bucket.num_elements == bucket.num_gradient_elements + len(bucket.slots) + trailer_length


def plainly_grouped(specs: Sequence[ParameterSpec], limits: BucketLimits, order: Sequence[int]) -> list[list[int]]:
    """Group gradients as `plan_buckets` is to, adding up the sizes of a bucket anew for each of them."""
    open_buckets: dict[torch.dtype, list[int]] = {}
    num_closed: dict[torch.dtype, int] = {}
    closed: list[list[int]] = []
    for index in reversed(order):
        key = specs[index].dtype
        members = open_buckets.setdefault(key, [])
        members.insert(0, index)
        number = num_closed.get(key, 0)
        if sum(specs[member].num_elements for member in members) * key.itemsize >= limits.limit_bytes(number):
            closed.append(open_buckets.pop(key))
            num_closed[key] = number + 1
    return sorted([*closed, *open_buckets.values()], key=lambda members: list(order).index(members[-1]))


@given(parameters=SPECS, sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=3), random=st.randoms())
def test_a_bucket_closes_with_the_gradient_that_fills_it(
    parameters: list[tuple[int, torch.dtype]], sizes: list[int], random: Random
) -> None:
    specs = [spec(number, size, dtype) for number, (size, dtype) in enumerate(parameters)]
    order = random.sample(range(len(specs)), len(specs))
    limits = BucketLimits(sizes_bytes=tuple(sizes))
    buckets = plan_buckets(specs, limits, order=order).buckets
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == plainly_grouped(specs, limits, order)


class CountedReads(list[ParameterSpec]):
    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_plan_of_many_small_gradients_reads_each_a_few_times() -> None:
    specs = CountedReads(spec(number, 4) for number in range(2000))  # all in one bucket, where it was quadratic
    assert len(plan_buckets(specs, BucketLimits()).buckets) == 1
    assert specs.num_reads < 10 * len(specs)


def test_the_bucket_that_is_full_first_travels_first() -> None:
    specs = [spec(0, 8), spec(1, 8, torch.float64), spec(2, 8), spec(3, 8, torch.float64)]
    buckets = plan_buckets(specs, BucketLimits()).buckets
    assert [bucket.dtype for bucket in buckets] == [torch.float64, torch.float32]


def test_description_names_what_ranks_compare() -> None:
    model = nn.Linear(3, 2).to(torch.float64)
    lines = [str(trained.spec) for trained in TrainedModel(model).trained]
    assert lines == ["weight (2x3, torch.float64, strides [3, 1])", "bias (2, torch.float64, strides [1])"]


def test_a_list_of_sizes_holds_for_one_bucket_after_another() -> None:
    specs = [spec(number, 256) for number in range(7)]
    buckets = plan_buckets(specs, BucketLimits(sizes_bytes=(2 << 10, 1 << 10, 3 << 10))).buckets
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [[6], [5, 4, 3], [2], [1, 0]]


def test_buckets_follow_an_order_that_is_given() -> None:
    specs = [spec(number, 256) for number in range(5)]
    buckets = plan_buckets(specs, BucketLimits(sizes_bytes=(1 << 10, 2 << 10)), order=[2, 0, 4, 1, 3]).buckets
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [[2, 0], [4, 1], [3]]


def test_a_hook_gets_gradients_without_gaps() -> None:
    plan = plan_buckets([spec(0, 3), spec(1, 5)], BucketLimits(), trailer_length=7, only_gradients=True)
    (bucket,) = plan.buckets
    assert plan.has_extra_message
    assert bucket.num_elements == bucket.num_gradient_elements == 8
    assert [slot.offset for slot in bucket.slots] == [0, 5]


def test_a_sparse_gradient_travels_alone_and_so_does_the_trailer() -> None:
    specs = [spec(0, 8), replace(spec(1, 8), is_sparse=True), spec(2, 8)]
    plan = plan_buckets(specs, BucketLimits(), trailer_length=7)
    assert plan.has_extra_message
    assert [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets] == [[1], [2, 0]]
    assert [bucket.is_sparse for bucket in plan.buckets] == [True, False]


@pytest.mark.parametrize("order", [[0, 1, 1, 2], [0, 1], [0, 1, 3]])
def test_an_order_names_each_gradient_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each must be named once"):
        plan_buckets([spec(number, 4) for number in range(3)], BucketLimits(), order=order)


# -- Whether a change of a model is seen -------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def add_module(model: nn.Module) -> None:
    model.add_module("more", nn.Linear(1, 1))


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 2))


def prune(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(1, 2)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda model: model.get_parameter("0.weight").requires_grad_(False),
    "cast": lambda model: model.double(),
    "moved": lambda model: model.to("meta"),
    "a module more": add_module,
    "a module less": lambda model: model.__delitem__(2),
    "another parameter": replace_parameter,
    "another shape": prune,
    "another shape in the same memory": lambda model: setattr(model[0].weight, "data", model[0].weight.data.view(2, 3)),
    "one cast": lambda model: setattr(model[0].weight, "data", model[0].weight.data.double()),
    "a parameter more": lambda model: model.get_submodule("1").register_parameter("gain", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda model: model.get_submodule("0").register_parameter("bias", None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    model = net()
    seen = TrainedModel(model)
    assert not seen.has_changed()
    CHANGES[what](model)
    assert seen.has_changed()
    assert seen.has_changed()  # until it is looked at
    seen.look()
    assert not seen.has_changed()


def test_training_is_no_change() -> None:
    model = net()
    seen = TrainedModel(model)
    model(torch.ones(4, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.eval()
    model.load_state_dict(net().state_dict())
    assert not seen.has_changed()


def test_shared_and_ignored_parameters_count_once_and_not() -> None:
    model = net()
    model.add_module("tied", nn.Linear(2, 3))
    model.get_submodule("tied").weight = model[0].weight
    names = [each.spec.name for each in TrainedModel(model, {"0.bias"}).trained]
    assert names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "tied.bias"]


def test_sparse_embeddings_are_known() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=True), "b": nn.Embedding(4, 2)})
    assert [each.spec.is_sparse for each in TrainedModel(model).trained] == [True, False]
