"""A model and its data: fill in your own."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls


class Net(nn.Module):
    """Your model. What the data yield as input comes in; what goes out is given to the loss, with the target."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output: float [N, 2] to [N, 1]."""
        output: Tensor = self.layers(inputs)
        return output


def datasets() -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    """Return (train, test): anything with `__len__` and `__getitem__` that yields pairs (input, target)."""
    inputs = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    targets = inputs.prod(1, keepdim=True)
    return TensorDataset(inputs[100:], targets[100:]), TensorDataset(inputs[:100], targets[:100])


def far_off(output: Tensor, target: Tensor, limit: float = 0.5) -> ls.Mean:
    """Return the sum of a metric over samples, and their number: here how many are wrong by more than a limit."""
    return ls.Mean(((output - target).abs() > limit).sum(), len(target))


def new() -> Dataset[tuple[Tensor, ...]]:
    """Return the data for `lockstep predict --data mine:new`; here those of the test."""
    return datasets()[1]
