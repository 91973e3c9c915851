"""What is printed and written at the end of `lockstep train`."""

import json
from pathlib import Path

import pytest

from lockstep.cli import train
from lockstep.report import page
from lockstep.report.page import run_data


def write_metrics(folder: Path) -> None:
    rows = [
        {"kind": "epoch", "epoch": epoch, "global_step": epoch, "train_loss": loss, "learning_rate": 0.1}
        for epoch, loss in enumerate((1.0, 0.25, 1.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_first_last_lowest_and_highest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path)
    train._show_summary(tmp_path)
    [_, row, *_] = capsys.readouterr().out.splitlines()
    # Of equal ones the first, which is best.ckpt.
    assert row.split() == ["train", "loss", "1", "1", "0.25", "(epoch", "2)", "1", "(epoch", "1)"]


def test_a_report_that_fails_is_told_of_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("figures of a kind that Bokeh refuses")

    write_metrics(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setattr(run_data, "read_run", fail)
    monkeypatch.setattr(page, "write_page", fail)
    train._write_report(tmp_path)
    said = capsys.readouterr().err
    assert "ValueError: figures of a kind that Bokeh refuses" in said
    assert f"lockstep report {tmp_path}" in said
