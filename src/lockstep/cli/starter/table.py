"""A table of numbers: table.csv, whose last column is predicted from the others. Replace it by your own.

For classes let it hold 0, 1, 2, ... there, `Net` have an output for each, and `pairs` return `part[:, -1].long()`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

TABLE = Path(__file__).parent / "table.csv"


class Net(nn.Sequential):
    """A net of two layers: float [N, num_inputs] to [N, 1]."""

    def __init__(self, num_inputs: int, hidden: int = 32) -> None:
        super().__init__(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def datasets(test_fraction: float = 0.2) -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    """Return (train, test), each of pairs (inputs, target); inputs have mean 0 and deviation 1 in the training data."""
    rows = torch.from_numpy(np.loadtxt(TABLE, delimiter=",", skiprows=1, dtype=np.float32))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))  # the same split in each run
    test, train = rows[order].split([round(test_fraction * len(rows)), len(rows) - round(test_fraction * len(rows))])
    mean, deviation = train[:, :-1].mean(0), train[:, :-1].std(0)

    def pairs(part: Tensor) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset((part[:, :-1] - mean) / deviation, part[:, -1:])

    return pairs(train), pairs(test)


def absolute_error(output: Tensor, target: Tensor) -> ls.Mean:
    """Return the sum of a metric over samples, and their number: here how far the outputs are from the targets."""
    return ls.Mean((output - target).abs().sum(), len(target))


def new() -> Dataset[tuple[Tensor, ...]]:
    """Return the data for `lockstep predict --data mine:new`; here those of the test."""
    return datasets()[1]
