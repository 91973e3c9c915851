"""Evaluating a saved model, and predicting with it: on threaded workers, and continued after an interruption."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.threaded_ranks import run_ranks

from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.events import Recorders
from lockstep.report.metrics_file import MetricsFile
from lockstep.runs import predict
from lockstep.runs.config import parse_config
from lockstep.runs.evaluate import Evaluation, evaluate_saved
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult
from lockstep.runs.opening import SavedRun, find_saved_run
from lockstep.runs.predict import predict_saved
from lockstep.runs.predictions import (
    PredictRequest,
    check_table_path,
    describe_job,
    find_parts,
    open_parts,
    part_name,
    remove_parts,
    write_table,
)

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.register_buffer("num_calls", torch.zeros(()))
        self.generator = torch.Generator()
    def forward(self, inputs):  # what it leaves behind would let a slice depend on those before it
        self.num_calls += 1
        return self.layers(inputs) + self.num_calls + torch.rand((), generator=self.generator)

def inputs(seed, number):
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))

def data():
    first, second = inputs(0, 40), inputs(1, 21)
    return TensorDataset(first, first.argmax(1)), TensorDataset(second, second.argmax(1))

def as_list():
    return list(data())

def by_name():
    train, test = data()
    return {"train": train, "val": test}

def new():
    return TensorDataset(inputs(2, 21))

class Named(TensorDataset):
    files = [f"folder/{number}.png" for number in range(21)]

def named():
    return Named(inputs(2, 21))

def part():
    return torch.utils.data.Subset(named(), list(range(20, -1, -1)))

def scalar_each(output):
    return {"largest": output.amax(1), "all": output.double()}

def ragged(output):
    return output.new_zeros(len(output), len(output))

def total(output):
    return output.sum()
"""
CPU = torch.device("cpu")
VALUES = {
    "ema": {"decay": 0.5},
    "model": "saved_model:Net",
    "data": "saved_model:data",
    "batch_size": 8,
    "num_shards": 3,
    "epochs": 1,
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "saved_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    config = parse_config(VALUES, "config")
    result = fit(config, device=CPU, run_dir=folder, recorder=MetricsFile(folder / "metrics.jsonl"))
    assert isinstance(result, FitResult)
    yield folder, result
    sys.modules.pop("saved_model")


def evaluate(saved: SavedRun, data: str | None, weights: str | None = None, **changes: Any) -> Evaluation:
    return evaluate_saved(saved.config.model_copy(update=changes), saved.checkpoint, data, CPU, weights)


def test_an_evaluation_has_the_values_of_the_training_on_any_number_of_workers(run_dir: Any) -> None:
    folder, result = run_dir
    saved = find_saved_run(folder)
    for workers in (1, 2, 3):
        for found in run_ranks(workers, lambda _: evaluate(saved, "test"), has_default_group=True):
            assert found.metrics == {name: result.test[name] for name in ("loss", "accuracy")}
            assert found.num_samples == 21
            assert found.digest == result.digest == saved.digest


def test_other_data_can_be_evaluated(run_dir: Any, tmp_path: Path) -> None:
    saved = find_saved_run(run_dir[0])
    assert evaluate(saved, "train").num_samples == 40
    averaged = evaluate(saved, "test", "ema")
    assert averaged.metrics == {name: run_dir[1].test[f"ema_{name}"] for name in averaged.metrics}
    early = find_saved_run(run_dir[0], ["swa={start_epoch: 3}", "epochs=4", "max_steps=2"]).config
    (tmp_path / "early").mkdir()
    fit(early, device=CPU, run_dir=tmp_path / "early", recorder=Recorders([]))
    with pytest.raises(CheckpointError, match=r"no weights named 'swa', only its own and ema.*the end of its start"):
        evaluate(find_saved_run(tmp_path / "early"), "test", "swa")  # not those of the beginning
    assert evaluate(saved, "saved_model:data", drop_last=True, batch_size=64, warmup=3.0).num_samples == 21
    # It took as many of the other data, from the training set.
    assert evaluate(saved, "saved_model:data", overfit=1).num_samples == 21
    with pytest.raises(CheckpointError, match="no weights named 'swa', only its own and ema"):
        evaluate(saved, "test", "swa")
    assert evaluate(saved, "saved_model:data").metrics["loss"] == run_dir[1].test["loss"]
    with pytest.raises(ConfigError, match="expected train, test, or the import path"):
        evaluate(saved, "tets")


def test_a_run_without_a_test_set_is_evaluated_and_predicted_on_another_one(run_dir: Any, tmp_path: Path) -> None:
    config = parse_config(VALUES | {"data": "saved_model:by_name"}, "config")
    (tmp_path / "val").mkdir()
    fit(config, device=CPU, run_dir=tmp_path / "val", recorder=MetricsFile(tmp_path / "val" / "metrics.jsonl"))
    found = evaluate(find_saved_run(tmp_path / "val"), None)
    assert (found.data, found.num_samples) == ("val", 21)
    assert evaluate(find_saved_run(run_dir[0]), None).data == "test"
    predict_all(request_of(tmp_path / "val", tmp_path / "parts", data=None))
    assert {"target", "class"} <= set(table(tmp_path / "parts", tmp_path / "val.npz"))


def test_a_damaged_checkpoint_is_not_evaluated(run_dir: Any) -> None:
    saved = find_saved_run(run_dir[0])
    content = bytearray(saved.checkpoint.read_bytes())
    content[-3] ^= 1
    saved.checkpoint.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        evaluate(saved, "test")


def request_of(
    folder: Path, parts: Path, *, start: int = 0, data: str | None = "saved_model:new", **values: Any
) -> PredictRequest:
    saved = find_saved_run(folder)
    parts.mkdir(exist_ok=True)
    given: dict[str, Any] = {"weights": None, "output_function": None, "has_targets": True, **values}
    return PredictRequest(saved=saved, data=data, parts=parts, start=start, **given)


def predict_quietly(request: PredictRequest) -> int:
    return predict_saved(request, CPU, lambda *_: None)


def predict_all(request: PredictRequest, workers: int = 1) -> None:
    found = run_ranks(workers, lambda _: predict_quietly(request), has_default_group=True)
    assert found == [21] * workers


def table(parts: Path, path: Path) -> dict[str, Any]:
    write_table(path, [each for each, _ in find_parts(parts)])
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_predictions_are_in_the_order_of_the_data_on_any_number_of_workers(run_dir: Any, tmp_path: Path) -> None:
    expected = None
    for workers in (1, 2, 3):
        predict_all(request_of(run_dir[0], tmp_path / f"parts-{workers}"), workers)
        found = table(tmp_path / f"parts-{workers}", tmp_path / f"{workers}.npz")
        expected = expected or found
        assert {name: values.tobytes() for name, values in found.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }
    assert expected is not None
    assert expected["index"].tolist() == list(range(21))
    assert expected["output"].shape == (21, 3)
    assert expected["class"].tolist() == expected["output"].argmax(1).tolist()


def test_predictions_continue_after_the_last_part(
    run_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_all(request_of(run_dir[0], tmp_path / "whole"))
    monkeypatch.setattr(predict, "_PART_SECONDS", 0.0)
    interrupted = request_of(run_dir[0], tmp_path / "parts")

    def interrupt(done: int, _all: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_saved(interrupted, CPU, interrupt)
    start = open_parts(tmp_path / "parts", {}) or find_parts(tmp_path / "parts")[-1][1]
    assert start == 16
    predict_all(request_of(run_dir[0], tmp_path / "parts", start=start), workers=2)
    assert len(find_parts(tmp_path / "parts")) == 3
    whole, continued = table(tmp_path / "whole", tmp_path / "a.npz"), table(tmp_path / "parts", tmp_path / "b.npz")
    assert all(whole[name].tobytes() == continued[name].tobytes() for name in whole)
    predict_all(request_of(run_dir[0], tmp_path / "parts", start=21))  # nothing is left to do
    remove_parts(tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_parts_are_removed_with_what_a_killed_write_left_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    open_parts(folder, {})
    (folder / part_name(0, 3)).touch()
    stale, other = folder / f".{part_name(3, 6)}.{'0' * 32}.tmp", folder / "notes.txt"
    stale.touch()
    other.touch()
    remove_parts(folder)
    assert list(folder.iterdir()) == [other]
    other.unlink()
    remove_parts(folder)
    assert not folder.exists()


def test_accumulated_shards_are_slices_of_a_prediction_too(run_dir: Any, tmp_path: Path) -> None:
    found = []
    for number, shards in enumerate((["num_shards=4"], ["num_shards=2", "accumulate=2"], ["num_shards=2"])):
        saved = find_saved_run(run_dir[0], shards)
        predict_all(replace(request_of(run_dir[0], tmp_path / f"{number}"), saved=saved))
        found.append(table(tmp_path / f"{number}", tmp_path / f"{number}.npz")["output"].tobytes())
    assert found[0] == found[1] != found[2]


def test_targets_are_written_and_a_function_may_choose_what_is(run_dir: Any, tmp_path: Path) -> None:
    predict_all(request_of(run_dir[0], tmp_path / "p", data="test", output_function="saved_model:scalar_each"))
    found = table(tmp_path / "p", tmp_path / "p.npz")
    assert list(found) == ["index", "target", "largest", "all"]
    assert found["all"].dtype == np.float64
    write_table(tmp_path / "p.csv", [each for each, _ in find_parts(tmp_path / "p")])
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0] == "index,target,largest,all_0,all_1,all_2"
    assert float(lines[3].split(",")[3]) == found["all"][2, 0]
    with pytest.raises(ConfigError, match=r"has shape \[\] for \d samples, expected one row for each sample"):
        predict_quietly(request_of(run_dir[0], tmp_path / "q", output_function="saved_model:total"))
    with pytest.raises(ConfigError, match=r"shapes output \[3\], those of others output \[2\], and a file needs"):
        predict_quietly(request_of(run_dir[0], tmp_path / "q", output_function="saved_model:ragged"))
    for number, width in enumerate((2, 3)):
        np.savez(tmp_path / f"{number}.npz", output=np.zeros((6, width)))
    for name in ("r.csv", "r.npz"):
        with pytest.raises(UsageError, match=r"1.npz has rows of other shapes than .*0.npz"):
            write_table(tmp_path / name, [tmp_path / "0.npz", tmp_path / "1.npz"])
        assert not (tmp_path / name).exists()
    with pytest.raises(ConfigError, match="--data is 'val', which this run does not have: expected train, test, or"):
        predict_quietly(request_of(run_dir[0], tmp_path / "q", data="val"))


@pytest.mark.parametrize("data", ["train", "test", "saved_model:as_list", "saved_model:by_name"])
def test_predictions_are_of_the_set_that_an_evaluation_takes(run_dir: Any, tmp_path: Path, data: str) -> None:
    saved = find_saved_run(run_dir[0], ["data=saved_model:as_list"])  # as random_split returns them
    request = replace(request_of(run_dir[0], tmp_path / "parts", data=data), saved=saved)
    assert predict_quietly(request) == (40 if data == "train" else 21)
    assert evaluate(saved, data).num_samples == (40 if data == "train" else 21)


@pytest.mark.parametrize(
    ("overrides", "option", "said"),
    [
        (["data_args={seed: 3}"], {}, "data_args"),
        (["data=saved_model:as_list", "collate=saved_model:new"], {}, "collate, data"),
        ([], {"data": "saved_model:new"}, "--data"),
        ([], {"weights": "ema"}, "--weights"),
    ],
)
def test_a_prediction_of_something_else_does_not_continue(
    run_dir: Any, tmp_path: Path, overrides: list[str], option: dict[str, Any], said: str
) -> None:
    def job(overrides: list[str], **option: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"data": "test", "weights": None, "output_function": None, "has_targets": True}
        saved = find_saved_run(run_dir[0], overrides, workers=3)
        return describe_job(PredictRequest(saved=saved, parts=tmp_path, **given | option))

    open_parts(tmp_path / "parts", job([]))
    (tmp_path / "parts" / part_name(0, 3)).touch()
    open_parts(tmp_path / "parts", job(["epochs=7", "metric=saved_model:total"]))
    with pytest.raises(UsageError, match=f"another prediction, with another {said}\\. Delete"):
        open_parts(tmp_path / "parts", job(overrides, **option))


def test_parquet_has_the_same_rows(run_dir: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
    predict_all(request_of(run_dir[0], tmp_path / "p"))
    write_table(tmp_path / "p.parquet", [each for each, _ in find_parts(tmp_path / "p")])
    found = parquet.read_table(tmp_path / "p.parquet").to_pydict()
    assert found["output"] == table(tmp_path / "p", tmp_path / "p.npz")["output"].tolist()


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "there.csv").write_text("")
    for name, said in (("x.txt", "ends with"), ("there.csv", "exists already"), ("no/x.csv", "no folder")):
        with pytest.raises(UsageError, match=said):
            check_table_path(tmp_path / name)
    for data in ("mine:typo", "mine:a"):  # of the first there is no part
        assert open_parts(tmp_path / "parts", {"data": data}) == 0
    (tmp_path / "parts" / part_name(0, 3)).touch()
    assert open_parts(tmp_path / "parts", {"data": "mine:a"}) == 3
    with pytest.raises(UsageError, match="another prediction, with another data"):
        open_parts(tmp_path / "parts", {"data": "mine:b"})


def test_predictions_name_the_files_of_samples(run_dir: Any, tmp_path: Path) -> None:
    predict_all(request_of(run_dir[0], tmp_path / "whole", data="saved_model:named"), workers=2)
    predict_all(request_of(run_dir[0], tmp_path / "part", data="saved_model:part"))
    for name in ("whole", "part"):
        write_table(tmp_path / f"{name}.csv", [path for path, _ in find_parts(tmp_path / name)])
    whole, part = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("whole", "part"))
    assert whole[0].startswith("index,path,class,output_0")
    assert [line.split(",")[1] for line in whole[1:]] == [f"folder/{number}.png" for number in range(21)]
    assert [line.split(",")[1] for line in part[1:]] == [f"folder/{number}.png" for number in range(20, -1, -1)]
