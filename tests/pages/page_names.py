"""The names that the lines of the explanations take for granted: a model, data, a trainer."""

import contextlib
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
from lockstep.explanations import ENGLISH, page_of


def section_of(code: str, language: str = ENGLISH) -> str:
    """Return what is said of a code: a page, or a section of one that it shares with others."""
    page = page_of(code, language)
    section = re.search(rf"^## {code}: .*?(?=^## LS|^\S+ ?docs/|\Z)", page, re.DOTALL | re.MULTILINE)
    return page if section is None else section[0].rstrip() + "\n"


class Net(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(inputs).relu())
        return scores


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def make_names() -> dict[str, Any]:
    """Return the names, with new objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = [(torch.randn(8), torch.tensor(index % 3)) for index in range(64)]
        inputs, labels = torch.randn(64, 8), torch.arange(64) % 3
        dataset = TensorDataset(inputs, labels)
        loader = ls.ShardedLoader(dataset, batch_size=32, num_shards=8, seed=0)
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0)
        batch = next(iter(loader.epoch(0)))
    made = {name: value for name, value in locals().items() if not name.startswith("_")}
    modules = {"torch": torch, "nn": nn, "dist": dist, "ls": ls, "contextlib": contextlib, "Path": Path}
    classes = {"Dataset": Dataset, "DataLoader": DataLoader, "Net": Net, "loss_fn": loss_fn}
    return made | modules | classes | {"run": SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))}
