"""Callbacks, averages and early ends of a run that a config describes, in one process."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.fitting import fit_to_the_end, importable, rows

from lockstep.errors import ConfigError
from lockstep.runs.listing import FitResult

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def data():
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

seen = []

class Note(ls.Callback):
    def __init__(self, word="note"):
        self.word = word

    def on_evaluate(self, trainer, values):
        seen.append((self.word, sorted(values)))

    def on_save(self, trainer, path):
        seen.append((self.word, path.name))

class NoCallback:
    pass
"""
VALUES: dict[str, Any] = {"model": "calling:net", "data": "calling:data", "loss": "torch.nn.functional:mse_loss"}
VALUES |= {"batch_size": 8, "num_shards": 2, "keep": 99, "epochs": 3, "async_save": False}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path) -> Any:
    with importable("calling", MODULE, tmp_path):
        yield


def train(folder: Path, resume: Path | None = None, **values: Any) -> FitResult:
    return fit_to_the_end(folder, VALUES | values, resume)


def test_averages_are_evaluated_and_resumed(tmp_path: Path) -> None:
    averages: dict[str, Any] = {"ema": {"decay": 0.5}, "swa": {"start_epoch": 1}, "save_every": 2}
    averages["callbacks"] = [{"lockstep:EMA": {"decay": 0.9}}]
    whole = train(tmp_path / "whole", **averages)
    assert set(whole.test) == {"loss", "ema_loss", "swa_loss", "ema-2_loss"}
    assert len(set(whole.test.values())) == 4
    first, *_ = [row for row in rows(tmp_path / "whole") if row["kind"] == "epoch"]
    assert first["test_swa_loss"] == first["test_loss"]  # and not that of weights that nothing has trained
    assert {"test_loss", "test_ema_loss", "test_swa_loss"} <= set(rows(tmp_path / "whole")[-1])
    resumed = train(tmp_path / "resumed", resume=tmp_path / "whole" / "step-00000004.ckpt", **averages)
    assert (resumed.digest, resumed.test) == (whole.digest, whole.test)
    assert train(tmp_path / "plain").digest == whole.digest


@pytest.mark.parametrize(("steps", "epochs_of_rows"), [(4, [0, 1]), (6, [0, 1]), (99, [0, 1, 2])])
def test_max_steps_ends_the_run_with_an_evaluation_and_a_checkpoint(
    tmp_path: Path, steps: int, epochs_of_rows: list[int]
) -> None:
    result = train(tmp_path / "run", max_steps=steps)
    found = [row for row in rows(tmp_path / "run") if row["kind"] == "epoch"]
    assert [row["epoch"] for row in found] == epochs_of_rows
    assert [row["learning_rate"] for row in found] == [1e-3] * len(found)
    assert result.is_saved
    assert result.end_reason == ("" if steps == 99 else f"max_steps is {steps}")
    if steps == 4:
        resumed = train(tmp_path / "more", resume=tmp_path / "run" / "step-00000004.ckpt")
        assert resumed.digest == train(tmp_path / "whole").digest
        again = train(tmp_path / "again", resume=tmp_path / "run" / "step-00000004.ckpt", max_steps=4)
        assert again.digest == result.digest


def test_the_evaluation_of_a_cut_epoch_decides_nothing_in_a_run_that_goes_on(tmp_path: Path) -> None:
    values: dict[str, Any] = {"early_stopping": {"patience": 2, "min_delta": 9.0}, "epochs": 4, "ema": {}}
    values |= {"scheduler": "plateau", "scheduler_args": {"patience": 0, "factor": 0.5, "threshold": 9.0}}
    whole = train(tmp_path / "whole", **values)
    for steps in (4, 6, 7):
        resume = None if steps == 4 else tmp_path / "run" / f"step-0000000{4 if steps == 6 else 6}.ckpt"
        assert train(tmp_path / "run", resume, max_steps=steps, **values).end_reason == f"max_steps is {steps}"
    resumed = train(tmp_path / "run", tmp_path / "run" / "step-00000007.ckpt", **values)
    assert (resumed.digest, resumed.test, resumed.end_reason) == (whole.digest, whole.test, whole.end_reason)
    assert rows(tmp_path / "run")[-1]["learning_rate"] == rows(tmp_path / "whole")[-1]["learning_rate"] < 1e-3


def test_early_stopping_and_own_callbacks(tmp_path: Path) -> None:
    values: dict[str, Any] = {"early_stopping": {"patience": 1, "min_delta": 9.0}, "ema": {}}
    result = train(tmp_path / "run", callbacks=["calling:Note", {"calling:Note": {"word": "other"}}], **values)
    assert "not better in 1 evaluations" in result.end_reason
    module: Any = sys.modules["calling"]
    assert module.seen[:4] == [
        ("note", ["ema_loss", "loss"]),
        ("other", ["ema_loss", "loss"]),
        ("note", "step-00000003.ckpt"),
        ("other", "step-00000003.ckpt"),
    ]


def test_an_evaluation_that_ends_the_run_lets_the_mean_have_its_own_statistics(tmp_path: Path) -> None:
    values: dict[str, Any] = {"swa": {"start_epoch": 0}, "callbacks": ["calling:Note"]}
    result = train(tmp_path / "run", early_stopping={"patience": 1, "min_delta": 9.0}, **values)
    whole = train(tmp_path / "whole", epochs=2, **values)
    assert (result.digest, result.test) == (whole.digest, whole.test)
    assert rows(tmp_path / "run")[-1]["test_swa_loss"] == result.test["swa_loss"]
    module: Any = sys.modules["calling"]
    assert [what for _, what in module.seen].count(["loss", "swa_loss"]) == 2 + 2


def test_a_mean_gets_its_statistics_from_the_batches_of_the_training(tmp_path: Path) -> None:
    # The last batch of 3 samples has a slice of one, of which BatchNorm raised an error at the end of the run.
    result = train(tmp_path / "run", swa={"start_epoch": 0}, batch_size=7, drop_last=True, epochs=1)
    assert result.test["swa_loss"] > 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ema": {"decya": 0.9}}, "there is no key 'ema.decya'. Did you mean 'decay'?"),
        ({"ema": {"decay": 1.5}}, "ema.decay is 1.5, expected less than 1"),
        ({"swa": {"start_epoch": 3}}, "swa.start_epoch is 3 and epochs is 3: the mean would be of no epoch."),
        ({"ema": 0.9}, "ema is 0.9, expected keys and values"),
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience is 0, expected at least 1"),
        ({"max_time": "3 weeks"}, "max_time is '3 weeks', expected seconds, or a time with units"),
        ({"max_steps": 0}, "max_steps is 0, expected at least 1"),
        ({"callbacks": ["Note"]}, "callbacks holds 'Note', expected a list of import paths"),
        ({"callbacks": ["calling:NoCallback"]}, "callbacks holds a NoCallback, expected objects"),
        ({"callbacks": [{"calling:Note": {"wrod": 1}}]}, "callbacks could not be constructed"),
        ({"callbacks": ["calling:Nope"]}, "'calling' has no 'Nope'. Did you mean 'Note'?"),
        ({"early_stopping": {"metric": "dice"}}, "cannot be concluded from its name"),
        ({"scheduler": "cosin"}, "scheduler is 'cosin', expected constant, linear, cosine, plateau, a name of"),
        ({"warmup": 99}, "warmup is 99.0, expected fewer steps than the run has (9)"),
        ({"warmup": 2, "scheduler": "torch.optim.lr_scheduler:StepLR"}, "warmup is for a scheduler that is constant"),
        (
            {"scheduler": "linear", "scheduler_args": {"end": 1}},
            "scheduler is 'linear', which goes over the steps of the run and takes only",
        ),
        ({"param_groups": {"3.*": {}}}, "The parameter group '3.*' has no parameters"),
        ({"param_groups": {"2.*": {"rate": 1}}}, "gives '2.*' the option rate, and AdamW has lr, "),
        ({"accumulate": 5}, "smaller than num_shards (2) times accumulate (5)"),
    ],
)
def test_mistakes_are_refused_with_one_message(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", **values)
    assert said in str(caught.value)
    assert "mistakes" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("1h30m", 5400), ("2d", 172800), (7, 7.0), ("5s", 5)])
def test_times_have_units(text: str | float, seconds: float) -> None:
    from lockstep.runs.config import parse_seconds

    assert parse_seconds(text) == seconds


OPTIONS: dict[str, Any] = {"scheduler": "cosine", "warmup": 2, "accumulate": 2, "no_decay": True, "save_every": 2}
OPTIONS |= {"param_groups": {"2.*": {"lr": 0.1}}, "precision": "bfloat16", "track_grad_norm": True}


def test_optimizer_options_are_resumed(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **OPTIONS)
    steps = [row for row in rows(tmp_path / "whole") if row["kind"] == "step"]
    rates = [row["learning_rate"] for row in steps]
    assert rates[0] == pytest.approx(1e-3 / 3)
    assert rates.index(max(rates)) == 2
    assert all(row["grad_norm"] > 0 for row in steps)
    resumed = train(tmp_path / "resumed", resume=tmp_path / "whole" / "step-00000004.ckpt", **OPTIONS)
    assert (resumed.digest, resumed.test) == (whole.digest, whole.test)
    # Accumulation is nothing but more shards.
    assert train(tmp_path / "shards", **OPTIONS | {"accumulate": 1, "num_shards": 4}).digest == whole.digest


METRICS = """
import torch

def worst(output, target):
    return float((output - target).abs().max()), 1

def single(output, target):
    return (output - target).abs().mean()

def nothing(output, target):
    return 0.0, 0

def ema_loss(output, target):
    return float((output - target).square().sum()), len(target)

def val_error(output, target):
    return worst(output, target)

def named_ema():
    found = data()
    return {"ema": found.pop("val"), **found}

def only_val():
    return {name: each for name, each in data().items() if name != "test"}

def data():
    import calling
    half, _ = calling.data()
    return {"train": half, "val": torch.utils.data.Subset(half, range(10)), "test": half}
"""
SETS: dict[str, Any] = {"data": "measured:data", "metrics": ["measured:worst", "torchmetrics:MeanSquaredError"]}


@pytest.fixture
def _metrics(tmp_path: Path) -> Any:
    (tmp_path / "measured.py").write_text(METRICS)
    yield
    sys.modules.pop("measured", None)


@pytest.mark.usefixtures("_metrics")
def test_several_metrics_on_several_sets(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    result = train(tmp_path / "run", ema={}, keep_best="val_loss", early_stopping={"metric": "ema_val_loss"}, **SETS)
    names = ["loss", "worst", "MeanSquaredError"]
    assert set(result.test) == {f"{prefix}{name}" for prefix in ["", "ema_", "val_", "ema_val_"] for name in names}
    assert result.test["MeanSquaredError"] == pytest.approx(result.test["loss"])
    assert set(result.others) == {name for name in result.test if "val_" in name}
    last = rows(tmp_path / "run")[-1]
    assert {"test_loss", "test_ema_worst", "val_worst", "ema_val_MeanSquaredError"} <= set(last)
    assert (tmp_path / "run" / "best.ckpt").exists()


@pytest.mark.usefixtures("_metrics")
def test_without_a_test_set_the_loss_of_the_first_other_set_is_looked_at(tmp_path: Path) -> None:
    options = {"early_stopping": {"patience": 1, "min_delta": 9.0}, "scheduler": "plateau"}
    assert train(tmp_path / "run", data="measured:only_val", **options).end_reason.startswith("val_loss was best")


@pytest.mark.usefixtures("_metrics")
def test_a_metric_that_is_named_like_one_of_another_set_is_of_the_set_that_it_is_measured_on(tmp_path: Path) -> None:
    # That of the test set was shown, and written to metrics.jsonl, as "error" of the set "val".
    result = train(tmp_path / "run", data="measured:data", metrics=["measured:val_error"])
    assert list(result.others) == ["val_loss", "val_val_error"]
    last = rows(tmp_path / "run")[-1]
    assert "val_error" not in last
    assert {"test_val_error", "val_val_error"} <= set(last)


@pytest.mark.usefixtures("_metrics")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"keep_best": "-val_los"},
            "keep_best is '-val_los', but no such metric is measured. Did you mean 'val_loss'?",
        ),
        ({"early_stopping": {"metric": "val_losss", "mode": "min"}}, "Did you mean 'val_loss'?"),
        ({"metrics": ["measured:worst", "measured:worst"]}, "names two metrics called 'worst'"),
        ({"data": "measured:named_ema", "ema": {}, "metrics": []}, "'ema' would be the name of two results"),
        ({"ema": {}, "metrics": ["measured:ema_loss"]}, "'ema_loss' would be the name of two results"),
        ({"metrics": ["measured:METRIC"]}, "'measured' has no 'METRIC'"),
        ({"metrics": [{"torchmetrics:ConfusionMatrix": {"tsk": 1}}]}, "metrics could not be constructed"),
    ],
)
def test_unknown_metrics_are_refused_before_the_first_step(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", **SETS | values)
    assert said in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.usefixtures("_metrics")
def test_a_metric_that_counts_nothing_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="The metric nothing has counted nothing") as caught:
        result = train(tmp_path / "run", metrics=["measured:nothing"], early_stopping={"metric": "loss"})
    assert math.isnan(result.test["nothing"])
    assert rows(tmp_path / "run")[-1]["test_nothing"] is None
    assert len([each for each in caught if "nothing" in str(each.message)]) == 3  # one an epoch, none before the first


@pytest.mark.usefixtures("_metrics")
@pytest.mark.parametrize("key", ["metric", "metrics"])
def test_a_metric_that_fails_does_so_before_the_first_step(tmp_path: Path, key: str) -> None:
    wrong: Any = {"metric": "measured:single", "metrics": ["measured:single"]}[key]
    with pytest.raises(TypeError, match="The metric single returned a tensor of shape"):
        train(tmp_path / "run", **{key: wrong})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_dry_run_takes_two_steps_and_overfitting_trains_on_what_it_evaluates(tmp_path: Path) -> None:
    dry = train(tmp_path / "dry", dry_run=True, scheduler="cosine", warmup=5, ema={}, keep_best="-ema_loss")
    assert [row["kind"] for row in rows(tmp_path / "dry")] == ["step", "step", "epoch"]
    assert dry.is_saved
    assert dry.num_test_samples == 16  # two batches
    fitted = train(tmp_path / "fitted", overfit=1, epochs=60, optimizer_args={"lr": 0.05})
    assert fitted.num_test_samples == 8
    found = [row["train_loss"] for row in rows(tmp_path / "fitted") if row["kind"] == "epoch"]
    assert found[-1] < found[0] / 4
