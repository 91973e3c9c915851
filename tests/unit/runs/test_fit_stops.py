"""A run that is asked to stop, or saves now and then, in one process; by signals in tests/process/test_stopped_runs."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.fitting import fit_or_stop, importable

from lockstep.checkpoint.file import read_manifest
from lockstep.data import Cursor
from lockstep.errors import CheckpointError
from lockstep.processes.stop_signals import StopRequest
from lockstep.report.metrics_file import sum_epoch
from lockstep.runs.listing import FitResult, StopResult
from lockstep.runs.saving import Resume

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

calls, stop, call_to_stop = 0, None, None

def net():
    return nn.Linear(3, 1)

def data():
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

def loss(output, target):
    global calls
    calls += 1
    if calls == call_to_stop:
        stop.make()
    return nn.functional.mse_loss(output, target)

class End(ls.Callback):
    def on_step(self, trainer, result):
        if trainer.global_step == 1:
            trainer.request_end("it is enough")
"""
VALUES = {"model": "stopping:net", "data": "stopping:data", "loss": "stopping:loss", "epochs": 2, "async_save": False}
VALUES |= {"batch_size": 8, "num_shards": 1, "keep": 9}
# Of an epoch of 3 steps the loss is called 3 times for the steps and 3 times for the evaluation.


@pytest.fixture(autouse=True)
def _module(tmp_path: Path) -> Any:
    with importable("stopping", MODULE, tmp_path):
        yield


def train(folder: Path, call: int | None = None, resume: Resume | None = None, **values: Any) -> FitResult | StopResult:
    import stopping  # type: ignore[import-not-found]

    stop = StopRequest()
    stopping.calls, stopping.stop, stopping.call_to_stop = 0, stop, call
    return fit_or_stop(folder, VALUES | values, resume, stop)


@pytest.mark.parametrize(
    ("call", "name", "cursor"),
    [
        (1, "step-00000001.ckpt", Cursor(0, 1)),
        (3, "step-00000003.ckpt", Cursor(1, 0)),  # the last step of the epoch: it is evaluated first
        (5, "step-00000003.ckpt", Cursor(1, 0)),  # in the evaluation
        (8, "step-00000005.ckpt", Cursor(1, 2)),
    ],
)
def test_a_run_stops_after_the_step_or_the_evaluation_in_which_it_is_asked(
    tmp_path: Path, call: int, name: str, cursor: Cursor
) -> None:
    stopped = train(tmp_path / "run", call)
    assert stopped == StopResult(checkpoint=tmp_path / "run" / name, epoch=cursor.epoch, step=cursor.step, num_steps=3)
    assert read_manifest(stopped.checkpoint).global_step == int(name[5:13])
    assert bool(read_manifest(stopped.checkpoint).metrics) == (cursor.step == 0)


@pytest.mark.parametrize("call", [9, 11])
def test_a_run_that_is_asked_after_its_last_step_has_ended_well(tmp_path: Path, call: int) -> None:
    assert isinstance(train(tmp_path / "run", call), FitResult)


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize(
    "ends", [{"callbacks": ["stopping:End"]}, {"max_steps": 2}, {"early_stopping": {"patience": 1}}]
)
def test_a_run_that_a_callback_ends_in_the_step_of_the_request_has_ended(
    tmp_path: Path, call: int, ends: dict[str, Any]
) -> None:
    # It stopped, and a resumed run knew nothing of what the callback had asked for: it trained on.
    if "early_stopping" in ends:
        ends, call = {"early_stopping": {"patience": 1, "min_delta": 9.0}, "epochs": 4}, call + 6
    whole = train(tmp_path / "whole", **ends)
    stopped = train(tmp_path / "run", call, **ends)
    assert isinstance(whole, FitResult)
    if "early_stopping" in ends and call < 9:  # before the evaluation that decides
        assert isinstance(stopped, StopResult)
        return
    assert isinstance(stopped, FitResult)
    assert (stopped.digest, stopped.end_reason) == (whole.digest, whole.end_reason)
    assert stopped.end_reason


def test_a_state_that_could_not_be_saved_is_an_error_though_saves_may_fail(tmp_path: Path) -> None:
    (tmp_path / "run" / "step-00000002.ckpt" / "in the way").mkdir(parents=True)
    with (
        pytest.warns(UserWarning, match="The training continues without this checkpoint"),
        pytest.raises(CheckpointError, match=r"asked to stop, but its state could not be saved: .*step-00000002"),
    ):
        train(tmp_path / "run", 2, on_save_error="warn")


def test_a_run_saves_in_the_middle_of_epochs_too(tmp_path: Path) -> None:
    train(tmp_path / "run", save_every=2)
    saved = sorted(path.name for path in (tmp_path / "run").glob("*.ckpt"))
    assert saved == [f"step-0000000{step}.ckpt" for step in (2, 3, 4, 6)]


def test_the_mean_of_an_epoch_that_was_interrupted_is_of_all_its_steps(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    stopped = train(tmp_path / "run", 8)
    assert isinstance(stopped, StopResult)
    loss, weight = sum_epoch(tmp_path / "run" / "metrics.jsonl", 1)
    assert weight == 16
    train(
        tmp_path / "run",
        resume=Resume(path=stopped.checkpoint, allowed=frozenset(), epoch_loss=loss, epoch_weight=weight),
    )
    whole, gone_on = (
        [line.partition('"samples_per')[0] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    )
    assert gone_on == whole
