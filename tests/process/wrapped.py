"""What the tests of wrappers wrap. Rank r of two feeds r + 1, so that a mean over the ranks is 1.5."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SMALL_BUCKETS_MB = 0.0005


def ones(rank: int) -> Tensor:
    """Return the input of a rank, for layers of three features."""
    return torch.full((1, 3), float(rank + 1))


def linear(*, bias: bool = False, size: int = 3) -> nn.Linear:
    """Return a layer with one output, of the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Linear(size, 1, bias=bias)


class Two(nn.Module):
    """Two layers in a row, whose weights are 1: their gradients are the inputs, and three times the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


MEANS_OF_TWO = [[1.5] * 3] * 3, [[4.5] * 3]
"""The gradients of `Two`."""


def gradient(parameter: Tensor) -> Any:
    return None if parameter.grad is None else parameter.grad.tolist()


def gradients_of_two(net: Two) -> tuple[Any, Any]:
    return gradient(net.first.weight), gradient(net.second.weight)


def step(model: Any, inputs: Tensor) -> None:
    """Clear the gradients and run a backward."""
    model.zero_grad()
    model(inputs).sum().backward()


def fail_in_backward(_gradient: Tensor) -> None:
    """Be a hook of a gradient that fails."""
    raise ValueError("in backward")


@contextmanager
def all_warnings() -> Iterator[list[str]]:
    """Yield a list that gets what is warned of within: `file: message`."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said += [f"{warning.filename}: {warning.message}" for warning in caught]
