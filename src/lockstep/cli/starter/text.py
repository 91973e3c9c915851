"""Texts and their classes: texts.csv with the columns text and label. Replace it by your own."""

import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep as ls

TEXTS = Path(__file__).parent / "texts.csv"
NUM_CODES, LENGTH = 256, 64
"""The codes are bytes, 0 where a text is shorter; longer texts are cut."""


class Net(nn.Module):
    """A small network over bytes: int64 [N, LENGTH] to scores [N, classes]."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CODES, width, padding_idx=0)
        self.windows = nn.Conv1d(width, 2 * width, 5, padding=2)
        self.scores = nn.Linear(2 * width, num_classes)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the scores of the classes."""
        found = torch.relu(self.windows(self.embedding(codes).transpose(1, 2))).amax(2)
        scores: Tensor = self.scores(found)
        return scores


class Texts(Dataset[tuple[Tensor, int]]):
    """Pairs of int64 [LENGTH] bytes of a text and the number of its class."""

    def __init__(self, rows: list[dict[str, str]], labels: list[str]) -> None:
        self._texts = [row["text"] for row in rows]
        self.targets = [labels.index(row["label"]) for row in rows]  # `weights: balanced` draws by them

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        codes = list(self._texts[index].encode()[:LENGTH])
        return torch.tensor(codes + [0] * (LENGTH - len(codes))), self.targets[index]


def datasets(test_fraction: float = 0.2) -> tuple[Texts, Texts]:
    """Return (train, test); the split is the same in each run."""
    with TEXTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    labels = sorted({row["label"] for row in rows})
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    num_test = round(test_fraction * len(rows))
    test, train = ([rows[index] for index in part] for part in (order[:num_test], order[num_test:]))
    return Texts(train, labels), Texts(test, labels)


def top2(output: Tensor, target: Tensor) -> ls.Mean:
    """Return the sum of a metric over samples, and their number: here how often the class is one of the best two."""
    return ls.Mean((output.topk(2).indices == target[:, None]).sum(), len(target))


def new() -> Texts:
    """Return the data for `lockstep predict --data mine:new`; here those of the test."""
    return datasets()[1]
