"""Listing runs: what directories say of runs that finished, failed, were stopped, killed or are running."""

import json
from pathlib import Path
from typing import Any

import torch
from tests.support.manifests import manifest

from lockstep.checkpoint.file import save_checkpoint
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.checkpoint.step_files import checkpoint_name
from lockstep.cli.runs import _format, _measured
from lockstep.runs.directory import lock_run
from lockstep.runs.listing import ListedRun, find_differences, forget_ending, list_runs, read_ending, write_ending


def make_run(
    folder: Path, *, epoch: int, lr: float = 0.1, step: int = 0, started: str = "2026-01-01", **more: Any
) -> Path:
    folder.mkdir(parents=True)
    config = {"model": "m:N", "data": "m:d", "epochs": 3, "optimizer_args": {"lr": lr}, "run_dir": str(folder)}
    config |= {"data_args": {}} | more
    (folder / "config.yaml").write_text("model: m:N\n")
    worker = {"host": "h", "device": "cpu", "pid": 7}
    (folder / "environment.json").write_text(json.dumps([{"started": started, "workers": [worker]}]))
    rows: list[dict[str, Any]] = [{"kind": "step", "epoch": epoch, "step": 4, "global_step": 15}]
    rows.insert(0, {"kind": "epoch", "epoch": 0, "global_step": 10, "train_loss": 2.0, "test_accuracy": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = manifest(epoch=epoch, step=step, global_step=10, digest="d" * 64, config=config)
    save_checkpoint(
        folder / checkpoint_name(10), Checkpoint(model={"w": torch.ones(1)}, optimizer={}, manifest=written)
    )
    return folder


def states(folder: Path) -> dict[str, str]:
    return {run.path.name: run.state for run in list_runs([folder])}


def test_each_state_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "over", epoch=3)
    write_ending(make_run(tmp_path / "late", epoch=3), "stopped")
    write_ending(make_run(tmp_path / "broken", epoch=1), "failed", "KeyError: x\nmore")
    write_ending(make_run(tmp_path / "deep" / "waiting", epoch=1), "stopped")
    make_run(tmp_path / "gone", epoch=1)
    (tmp_path / "no run").mkdir()
    with lock_run(make_run(tmp_path / "busy", epoch=1)):
        assert states(tmp_path) == {
            "over": "finished",
            "late": "finished",
            "broken": "failed",
            "waiting": "stopped",
            "gone": "killed",
            "busy": "running",
        }
    assert next(run.reason for run in list_runs([tmp_path]) if run.state == "failed") == "KeyError: x"


def test_a_running_run_tells_where_and_how_far(tmp_path: Path) -> None:
    with lock_run(make_run(tmp_path / "busy", epoch=1)):
        (run,) = list_runs([tmp_path / "busy"])
    assert (run.epoch, run.step, run.epochs) == (1, 5, 3)
    assert run.workers == ["h: cpu, process 7"]
    assert run.holder is not None
    assert run.holder.startswith("process ")
    assert run.metrics == {"accuracy": 0.25}
    assert run.digest == "d" * 64


def test_what_files_of_another_version_do_not_say_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "busy", epoch=1)
    (folder / "environment.json").write_text(json.dumps([{"workers": [{"host": "h"}]}]))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "global_step": 15}) + "\n")
    with lock_run(folder):
        (run,) = list_runs([tmp_path])
    assert (run.epoch, run.step, run.workers) == (1, 0, [])


def test_only_what_differs_between_runs_of_a_model_is_listed_the_latest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", epoch=3, lr=0.1, started="2026-01-01")
    make_run(tmp_path / "b", epoch=3, lr=0.2, started="2026-01-02")
    runs: list[ListedRun] = list_runs([tmp_path])
    assert [run.path.name for run in runs] == ["b", "a"]
    assert "data_args" not in runs[0].config  # nothing is in it, and nothing differs where another run has something
    runs[0].config["warmup"], runs[1].config["warmup"] = 0, 0.0  # a default, and what was read
    runs[0].config["report"] = False  # what a run shows is no difference
    assert find_differences(runs) == [{"optimizer_args.lr": 0.2}, {"optimizer_args.lr": 0.1}]


def test_a_run_that_goes_on_has_no_ending(tmp_path: Path) -> None:
    write_ending(tmp_path, "failed", "why")
    assert read_ending(tmp_path) is not None
    forget_ending(tmp_path)
    assert read_ending(tmp_path) is None
    write_ending(tmp_path / "removed", "failed", "why")


def test_the_metrics_by_which_a_run_decides_are_shown_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", epoch=3, keep_best="-ema_val_loss", early_stopping={"metric": "val_loss"})
    names = ["loss", "f1", "auc", "dice", "iou", "wer"]
    row = {"train_loss": 1.0, "samples_per_second": 5.0, "learning_rate": 0.1, "kind": "epoch", "global_step": 20}
    row |= {"epoch": 2, "latest_loss": 0.75} | {f"test_{name}": 0.5 for name in names}
    (folder / "metrics.jsonl").write_text(json.dumps(row | {"val_loss": 0.25, "ema_val_loss": None}) + "\n")
    (run,) = list_runs([tmp_path])
    assert list(run.metrics) == ["latest_loss", *names, "val_loss", "ema_val_loss"]
    assert _measured(run) == ["ema_val_loss not finite", "val_loss 0.25", "latest_loss 0.75", "loss 0.5", "and 5 more"]


def test_each_accuracy_is_shown_in_percent() -> None:
    assert [_format(name, 0.25) for name in ("accuracy", "ema_accuracy", "loss")] == ["25.00%", "25.00%", "0.25"]
