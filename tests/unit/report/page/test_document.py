"""The page of a run."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.doctor.slow import SlowReport, TimeUse
from lockstep.errors import RunDirectoryError
from lockstep.report import page
from lockstep.report.page import by_metric, figures, make_page
from lockstep.report.page.figures import draw_curve
from lockstep.report.page.run_data import read_run
from lockstep.report.page.texts import TEXTS

MEGABYTE = 1_000_000


def write_run(path: Path, *, num_steps: int = 20, **config: Any) -> Path:
    """A run directory as a training leaves it, without checkpoints and recording."""
    path.mkdir()
    settings = {"model": "mine:Net", "data": "mine:data", "epochs": 2, "num_shards": 4, "batch_size": 64} | config
    (path / "config.yaml").write_text(json.dumps(settings))
    (path / "environment.json").write_text(
        json.dumps([{"started": "2026-01-01T00:00:00+00:00", "command": "lockstep train <mine>.yaml"}])
    )
    place = {"epoch": 0, "global_step": num_steps}
    rows = [
        {"kind": "step", "epoch": 0, "step": n, "global_step": n + 1, "loss": 1 / (n + 1), "learning_rate": 0.1}
        for n in range(num_steps)
    ]
    epoch = {"kind": "epoch", "train_loss": 0.5, "test_loss": 0.4, "test_accuracy": 0.9, "samples_per_second": 10.0}
    lost = [{"rank": 1, "pid": 7, "reason": "killed by SIGKILL"}]
    workers = {"kind": "workers", "step": 3, "generation": 1, "lost": lost, "joined": [], "left": [], "seconds": 0.25}
    lines = [*rows, place | epoch, place | workers]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_page_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    page = make_page([read_run(write_run(tmp_path / "a"), "a")])
    own = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=", own)
    assert "killed by SIGKILL" in page
    assert "0.25 s" in page


def test_what_a_run_says_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    page = make_page([read_run(write_run(tmp_path / "a", model="<script>alert(1)</script>"), "<b>a</b>")])
    assert "<script>alert" not in page
    assert "lockstep train &lt;mine&gt;.yaml" in page
    assert "<b>a</b>" not in page


def test_ten_thousand_steps_are_below_two_megabytes(tmp_path: Path) -> None:
    page = make_page([read_run(write_run(tmp_path / "a", num_steps=10_000), "a")])
    assert len(page.encode()) < 2 * MEGABYTE


def test_losses_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    rows[3] = json.dumps(json.loads(rows[3]) | {"loss": None})
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    plot = draw_curve([read_run(run, "a")], "loss", ())
    [line] = plot.renderers
    assert len(line.data_source.data["y"]) == 19
    assert np.isfinite(line.data_source.data["y"]).all()


def test_a_peak_and_a_dip_stay_where_fewer_steps_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MOST_POINTS", 10)
    run = write_run(tmp_path / "a")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[9]["loss"], rows[14]["loss"] = 7.0, -3.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [line] = draw_curve([read_run(run, "a")], "loss", ()).renderers
    drawn = dict(zip(line.data_source.data["x"].tolist(), line.data_source.data["y"].tolist(), strict=True))
    assert len(drawn) <= 10
    assert (drawn[10], drawn[15]) == (7.0, -3.0)


def test_several_runs_show_what_differs_between_them(tmp_path: Path) -> None:
    names = ("a", "b")
    runs = [
        read_run(write_run(tmp_path / name, batch_size=size), name) for name, size in zip(names, (64, 32), strict=True)
    ]
    page = make_page(runs)
    [differences] = re.findall(r'<section id="differences">(.*?)</section>', page, re.DOTALL)
    assert "batch_size" in differences
    assert "num_shards" not in differences


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (["val_loss", "val_top_2"], {"loss": ["val_loss"], "top_2": ["val_top_2"]}),
        (["test_loss", "val_loss"], {"loss": ["test_loss", "val_loss"]}),
        (["val_loss", "val_l1_loss"], {"loss": ["val_loss"], "l1_loss": ["val_l1_loss"]}),
        (["test_loss", "test_ema_loss", "test_f1", "ema_val_f1", "ema_val_loss"],
         {"loss": ["test_loss", "ema_val_loss"], "ema_loss": ["test_ema_loss"], "f1": ["test_f1", "ema_val_f1"]}),
        (["epoch", "train_loss", "score"], {"score": ["score"]}),
    ],
)  # fmt: skip
def test_a_metric_of_several_sets_is_one_figure(columns: list[str], figures: dict[str, list[str]]) -> None:
    assert by_metric(columns) == figures


def test_a_run_with_a_validation_set_alone_has_its_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"test_', '"val_'))
    page = make_page([read_run(run, "a")])
    assert "<h3>val accuracy</h3>" in page
    assert "val loss" in page


def test_the_bars_are_what_the_doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"loading": 0.5, "waiting": 0.25, "callbacks": 0.125, "own code": 0.125}
    use = TimeUse(rank=1, num_steps=9, seconds=8.0, shares=shares, came_last=0.0)
    found = SlowReport(text="Loading bounds the step.", bound="loading", behind=None, workers=(use,))
    monkeypatch.setattr(page, "find_slow", lambda *_: found)
    made = make_page([read_run(write_run(tmp_path / "a"), "a")])
    assert "Loading bounds the step." in made
    assert [each in made for each in ("loading: 4.00 s, 50.0%", "others: 2.00 s, 25.0%", "rest: 2.00 s, 25.0%")] == [
        True
    ] * 3


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    assert "mine:Net" in make_page([read_run(run, "a")])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run directory"):
        read_run(tmp_path, "a")


def test_each_text_is_in_both_languages() -> None:
    for english, chinese in TEXTS.values():
        assert english
        assert chinese


def test_evaluations_of_a_loop_of_the_users_own_are_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    rows = [{"kind": "evaluation", "global_step": step, "val_score": 1.0 / step} for step in (5, 10)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    plot = draw_curve([read_run(run, "a")], None, ("val_score",))
    [line, _dots] = plot.renderers
    assert line.data_source.data["x"].tolist() == [5, 10]
    assert "val score" in make_page([read_run(run, "a")])
