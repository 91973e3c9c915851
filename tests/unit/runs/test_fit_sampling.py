"""Batches of similar lengths, and a rate that follows a metric, of a run that a config describes; in one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.fitting import fit_or_stop, fit_to_the_end, importable, rows

from lockstep.errors import CheckpointError, ConfigError
from lockstep.runs.listing import FitResult
from lockstep.runs.saving import Resume

MODULE = """
import torch
from torch import nn

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((1 + index % 12,), float(index)), torch.zeros(1)

widths = []

class Net(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, words):
        if self.training:
            widths.append(words.shape[1])
        return super().forward(words.mean(1, keepdim=True))

def collate(samples):
    inputs = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return inputs, torch.stack([target for _, target in samples])

def data():
    return Words(), Words()

def lengths(train):
    return [1 + index % 12 for index in range(len(train))]

def other(train):
    return [1 + index % 5 for index in range(len(train))]

def constant(output, target):
    return 1.0, 1
"""
VALUES: dict[str, Any] = {"model": "worded:Net", "data": "worded:data", "loss": "torch.nn.functional:mse_loss"}
VALUES |= {"collate": "worded:collate", "batch_size": 2, "num_shards": 1, "epochs": 3, "keep": 99, "async_save": False}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path) -> Any:
    with importable("worded", MODULE, tmp_path):
        yield


def train(folder: Path, resume: Path | None = None, **values: Any) -> FitResult:
    return fit_to_the_end(folder, VALUES | values, resume)


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in rows(folder) if row["kind"] == "step"]


def test_samples_of_similar_lengths_come_in_one_batch(tmp_path: Path) -> None:
    train(tmp_path / "run", lengths="worded:lengths", epochs=1)
    module: Any = sys.modules["worded"]
    # Each length comes twice in 24 samples, so a batch of two is never padded.
    assert sorted(module.widths) == list(range(1, 13))
    module.widths.clear()
    train(tmp_path / "any", epochs=1)
    assert sorted(module.widths) != list(range(1, 13))


def test_lengths_may_change_between_epochs_where_that_is_allowed(tmp_path: Path) -> None:
    train(tmp_path / "run", lengths="worded:lengths", epochs=1)
    saved = tmp_path / "run" / "step-00000012.ckpt"
    for lengths in (None, "worded:other"):
        with pytest.raises(CheckpointError, match=r"--allow lengths"):
            train(tmp_path / "refused", resume=saved, lengths=lengths, epochs=2)
        resume = Resume(path=saved, allowed=frozenset({"lengths"}), epoch_loss=0.0, epoch_weight=0.0)
        assert fit_or_stop(tmp_path / str(lengths), VALUES | {"lengths": lengths, "epochs": 2}, resume)


PLATEAU: dict[str, Any] = {"scheduler": "plateau", "metric": "worded:constant", "optimizer_args": {"lr": 0.1}}
PLATEAU |= {"scheduler_args": {"metric": "constant", "mode": "max", "patience": 0, "factor": 0.5}, "epochs": 4}


def test_a_rate_falls_when_a_metric_does_not_improve_and_falls_on_after_a_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **PLATEAU)
    assert rates(tmp_path / "whole")[::12] == [0.1, 0.1, 0.05, 0.025]
    resumed = train(tmp_path / "resumed", resume=tmp_path / "whole" / "step-00000024.ckpt", **PLATEAU)
    assert rates(tmp_path / "resumed")[::12] == [0.05, 0.025]
    assert resumed.digest == whole.digest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lengths": "worded:widths"}, "lengths is 'worded:widths', a list, expected a function of the training set"),
        ({"collate": "worded:widths"}, "collate is 'worded:widths', a list, expected a function"),
        (
            PLATEAU | {"scheduler_args": {"metric": "los", "mode": "min"}},
            "metric is 'los', but no such metric is measured. Did you mean",
        ),
        (PLATEAU | {"scheduler_args": {"metric": "constant"}}, "cannot be concluded from its name"),
        (PLATEAU | {"scheduler_args": {"patients": 2}}, "scheduler is 'plateau', which cannot be used"),
        ({"scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "in a config scheduler: plateau"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", **values)
    assert said in str(caught.value)
