"""What the scripts of this folder are made of: a small model, data that differ from rank to rank, a step.

A *script* is a function of the rank and the wrapper. It is written as its user would write it, and returns what the
user keeps of it, as a rule the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WORLD_SIZE = 2
SAME = "same"
"""What is right: every rank ends with the same."""

Wrap = Callable[..., Any]
"""`DistributedDataParallel`, Lockstep's or torch's."""
Run = Callable[[int, Wrap], Any]
Batch = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that runs on two ranks, and how to judge it."""

    name: str
    """Its name."""
    run: Run
    """The script, called with rank and wrapper on each rank."""
    cause: str | None
    """A pattern that a message about the mistake matches; None for a script without a mistake."""
    right: Callable[[], Any] | str | None
    """What is right: a function that computes it in one process, `SAME`, or None if this cannot be right."""
    ends_early: bool = False
    """Whether the process of a rank has ended before the mistake shows, so that it cannot be told of it."""


def mistake(
    cause: str, right: Callable[[], Any] | str | None = SAME, *, ends_early: bool = False
) -> Callable[[Run], Script]:
    """Make a script of a function that has a mistake, which must not matter or must be reported.

    Args:
        cause: A pattern (without regard to case) of which each message that explains the mistake has a part.
        right: See `Script`.
        ends_early: See `Script`.
    """
    return lambda run: Script(name=run.__name__, run=run, cause=cause, right=right, ends_early=ends_early)


def correct(right: Callable[[], Any] | str) -> Callable[[Run], Script]:
    """Make a script of a function without a mistake, which must be right, and without a warning."""
    return lambda run: Script(name=run.__name__, run=run, cause=None, right=right)


def net(*, dropout: float = 0.0, norm: bool = False, seed: int = 0) -> nn.Sequential:
    """Return a classifier of 4 features into 3 classes."""
    with torch.random.fork_rng():  # each rank goes on with numbers of its own
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def batch(step: int, rank: int, size: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 4, generator=generator)
    return inputs, torch.randint(3, (size,), generator=generator)


def batches(rank: int, steps: int = 6, size: int = 4) -> Iterator[Batch]:
    return (batch(step, rank, size) for step in range(steps))


def whole(steps: int = 6, size: int = 4) -> Iterator[Batch]:
    """Yield the batches of all ranks together."""
    for step in range(steps):
        parts = [batch(step, rank, size) for rank in range(WORLD_SIZE)]
        yield torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


def dataset(length: int = 32) -> TensorDataset:
    return TensorDataset(*batch(99, 0, length))


def loss_of(model: Any, data: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def train(model: Any, optimizer: Any, data: Iterator[Batch], loss: Callable[..., Tensor] = loss_of) -> Any:
    """Take a step per batch and return the model."""
    for each in data:
        optimizer.zero_grad()
        loss(model, each).backward()
        optimizer.step()
    return model


def trained(steps: int = 6, size: int = 4) -> nn.Module:
    """Return the model after SGD on whole batches in one process."""
    model = net()
    return train(model, sgd(model), whole(steps, size))
