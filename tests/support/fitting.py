"""Runs that a config describes, of a module that a test writes, in one process."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.processes.stop_signals import StopRequest
from lockstep.report.metrics_file import MetricsFile
from lockstep.runs.config import parse_config
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult, StopResult
from lockstep.runs.saving import Resume


@contextmanager
def importable(name: str, text: str, folder: Path) -> Iterator[None]:
    """Write a module, and let it be imported."""
    (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop(name, None)


def fit_or_stop(
    folder: Path, values: Mapping[str, Any], resume: Resume | None = None, stop: StopRequest | None = None
) -> FitResult | StopResult:
    """Train on the CPU what the values of a config say, until the end or a request to stop."""
    folder.mkdir(exist_ok=True)
    return fit(
        parse_config(values, "config"),
        device=torch.device("cpu"),
        run_dir=folder,
        recorder=MetricsFile(folder / "metrics.jsonl"),
        resume=resume,
        stop=stop,
    )


def fit_to_the_end(folder: Path, values: Mapping[str, Any], checkpoint: Path | None = None) -> FitResult:
    """Train on the CPU what the values of a config say, from a checkpoint on."""
    resume = None
    if checkpoint is not None:
        resume = Resume(path=checkpoint, allowed=frozenset(), epoch_loss=0, epoch_weight=0)
    result = fit_or_stop(folder, values, resume)
    assert isinstance(result, FitResult)
    return result


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
