"""Commands of `lockstep` that a test runs in its own process, and runs that nobody disturbs, to compare with."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.report.metrics_file import MetricsFile
from lockstep.runs.config import read_config
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult


class Said(NamedTuple):
    """How a command ended, and what it wrote, that of its workers included."""

    code: int
    stdout: str
    stderr: str

    @property
    def digest(self) -> str:
        """What a training that has ended well shows last."""
        assert self.code == 0, self.stderr
        [line] = [line for line in self.stdout.splitlines() if line.startswith("digest ")]
        return line.removeprefix("digest ")


Command = Callable[..., Said]


@pytest.fixture
def lockstep_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run commands in this process, which spares the start of one, and in the folder of the test; their workers are
    processes all the same.
    """

    def call(*arguments: str) -> Said:
        result = CliRunner().invoke(app, arguments)
        of_workers = capfd.readouterr()
        return Said(result.exit_code, result.stdout + of_workers.out, result.stderr + of_workers.err)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))  # a command puts the folder of its config first
        yield call


def train_undisturbed(config: Path, run_dir: Path, *overrides: str) -> str:
    """Train by a config, and the modules beside it, in this process; return the digest."""
    run_dir.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(config.parent)
        result = fit(
            read_config(config, overrides),
            device=torch.device("cpu"),
            run_dir=run_dir,
            recorder=MetricsFile(run_dir / "metrics.jsonl"),
            code=config.parent,
        )
        for module in config.parent.glob("*.py"):
            sys.modules.pop(module.stem, None)
    assert isinstance(result, FitResult)
    return result.digest


def rows_of(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return what a run has recorded, of all kinds if none is given, but for how fast it was."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name != "samples_per_second"}
        for row in found
        if not kinds or row["kind"] in kinds
    ]
