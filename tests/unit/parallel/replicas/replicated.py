"""Modules on several replicas of the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.replicas.data_parallel import DataParallel

CPU = torch.device("cpu")
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


class Call(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def parallel(function: Callable[..., Any], num_replicas: int = 2, **options: Any) -> DataParallel:
    """Return a function as a module on so many replicas."""
    return DataParallel(Call(function), ["cpu"] * num_replicas, **options)


class Normed(nn.Module):
    """A layer with weights and one with buffers; replicas differ in their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(4, 4)
        self.norm: nn.Module = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))
