"""Data sets of one length are told apart, where tensors hold them, and so are states of what loads samples."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data.contents import content_number, slice_number, state_number


def numbers(start: int, length: int = 500) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + length), torch.zeros(length, 2, dtype=torch.bfloat16))


class Refusing(Dataset[int]):
    """May not be asked for a sample."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError(index)


def test_equal_data_have_equal_numbers_and_others_have_others() -> None:
    assert content_number(numbers(0)) == content_number(numbers(0)) != content_number(numbers(1))
    halves = [Subset(numbers(0), range(start, start + 250)) for start in (0, 0, 1)]
    first, again, other = map(content_number, halves)
    assert first == again != other
    both = [content_number(ConcatDataset([numbers(0), numbers(start)])) for start in (2, 2, 3)]
    assert both[0] == both[1] != both[2]


def test_of_other_data_sets_nothing_is_said() -> None:
    assert content_number(Refusing()) == 0
    assert content_number(ConcatDataset([numbers(0), Subset(numbers(0), [])])) != 0
    assert content_number(Subset(Refusing(), [1, 2])) == 0


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (IMAGES, -IMAGES),
        (IMAGES, IMAGES.half()),
        (IMAGES + 0j, 2 * IMAGES + 0j),
        (np.array([1, 2]), np.array([2, 1])),
        (np.float32(1), np.float32(2)),
        ([1, 2], [2, 1]),
        ("a text", "another"),
        ({"ids": [1], "label": 2}, {"ids": [2], "label": 1}),
        (SimpleNamespace(x=torch.ones(2), y=[1]), SimpleNamespace(x=torch.ones(2), y=[2])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
    ],
)
def test_different_slices_have_different_numbers(one: Any, other: Any) -> None:
    assert slice_number((one, 0)) != slice_number((other, 0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IMAGES, IMAGES * (1 + 1e-7)),  # hosts that round in another way
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ("/scratch/job-1/cat.png", "/scratch/job-2/cat.png"),
        (torch.zeros(0), torch.zeros(0)),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (np.array(["a", "b"]), np.array(["a", "b"])),
        (object(), object()),
    ],
)
def test_equal_slices_have_equal_numbers(one: Any, other: Any) -> None:
    assert slice_number((one, 0)) == slice_number((other, 0)) != 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Stateful(Dataset[int]):
    """Holds what cannot be pickled, and itself."""

    kind = 0

    def __init__(self) -> None:
        factors = self.factors = [1]
        self.epoch = 0
        self.inner = [{"deep": Slotted()}]
        self.scale: Callable[[int], int] = lambda value: value * factors[0]
        self.lock, self.generator, self.itself = threading.Lock(), np.random.default_rng(0), self
        self.paths = [(f"{number}.png", number) for number in range(5000)]
        self.large, self.small = torch.zeros(5_000_000), np.zeros(50_000)
        self.others = [Slotted() for _ in range(2000)]

    def __getitem__(self, index: int) -> int:
        return self.scale(index) + GLOBAL[0]


GLOBAL = [0]
CHANGES: dict[str, Callable[[Stateful], object]] = {
    "an attribute": lambda data: setattr(data, "epoch", 1),
    "a slot deep within": lambda data: setattr(data.inner[0]["deep"], "value", 1),
    "what a function closes over": lambda data: data.factors.append(2),
    "an attribute of the class": lambda data: setattr(Stateful, "kind", Stateful.kind + 1),
    "a global name that a method reads": lambda data: GLOBAL.append(1),
    "an item of a long list": lambda data: data.paths.__setitem__(1234, ("other.png", 1)),
    "an element of a small array": lambda data: data.small.__setitem__(1234, 1),
    "an element of a large tensor": lambda data: data.large[1234:1235].add_(1),
    "a large tensor": lambda data: setattr(data, "large", data.large + 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_state_has_another_number_when_something_in_it_is_changed(what: str) -> None:
    data = Stateful()
    before = state_number((data, max))
    data.generator.random()  # seeded for each sample
    assert state_number((data, max)) == before
    CHANGES[what](data)
    assert state_number((data, max)) != before


def test_a_state_that_cannot_be_told_is_never_the_same() -> None:
    class Endless:
        def __reduce_ex__(self, _protocol: object) -> Any:
            return list, (), None, iter(lambda: 1 // 0, 1)

    assert state_number(Endless()) != state_number(Endless())
