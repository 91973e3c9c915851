"""`metrics.jsonl`: one JSON object per line, for steps and for epochs."""

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.errors import RunDirectoryError
from lockstep.events import CheckpointSaved, EpochFinished, Event, RunStarted, StepFinished


@final
class MetricsFile:
    """A recorder that appends to a file; `record` returns after the line was written to the page cache.

    Args:
        path: The file.
        may_fail: If a line cannot be written, warn and continue. After a success the next failure warns again.

    Raises:
        RunDirectoryError: In `record`: the file cannot be written, and `may_fail` is False.
    """

    def __init__(self, path: Path, *, may_fail: bool = False) -> None:
        self._path = path
        self._may_fail = may_fail
        self._is_failing = False
        # If a killed process left an incomplete last line, the first record starts on a new line.
        self._lead = "" if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n") else "\n"

    def record(self, event: Event) -> None:
        """Append the event, if it is a step or an epoch."""
        line = _as_line(event)
        if line is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self._lead}{json.dumps(line, allow_nan=False)}\n")
        except OSError as error:
            self._lead = "\n"  # a part of the line may have been written
            self._fail(error)
        else:
            self._lead, self._is_failing = "", False

    def _fail(self, error: OSError) -> None:
        if not self._may_fail:
            raise RunDirectoryError(
                f"{self._path} cannot be written: {error}. Earlier checkpoints are intact. Free disk space, then "
                "continue the run with --resume."
            ) from error
        if not self._is_failing:
            warnings.warn(
                f"{self._path} cannot be written: {error}. The training continues. Lines will be missing until the "
                "file can be written again.",
                stacklevel=3,
            )
        self._is_failing = True

    def rewind(self, global_step: int) -> None:
        """Remove the lines after update `global_step`, from which the run is resumed.

        Raises:
            RunDirectoryError: The file cannot be written; it is unchanged.
        """
        if self._path.exists():
            kept = [row for row in read_metrics(self._path) if row["global_step"] <= global_step]
            try:
                atomic_write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
            except OSError as error:
                raise RunDirectoryError(
                    f"{self._path} cannot be written: {error}. Free disk space, then continue the run with --resume."
                ) from error
            self._lead = ""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics file; skips incomplete lines of killed processes."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def sum_epoch(path: Path, epoch: int) -> tuple[float, float]:
    """Return the sum of loss times weight, and the sum of weights, over an epoch's steps in a metrics file.

    Adds in the order of the steps, so that the epoch's mean has the same bits as in a run without interruption.
    """
    loss = weight = 0.0
    for row in read_metrics(path) if path.exists() else ():
        if row["kind"] == "step" and row["epoch"] == epoch and row.get("weight"):
            loss += row["loss"] * row["weight"]
            weight += row["weight"]
    return loss, weight


def _as_line(event: Event) -> dict[str, Any] | None:
    match event:
        case StepFinished():
            return {
                "kind": "step",
                "epoch": event.epoch,
                "step": event.step,
                "global_step": event.global_step,
                "loss": _finite(event.loss),
                "weight": event.weight,
            }
        case EpochFinished():
            test = {f"test_{name}": _finite(value) for name, value in event.test.items()}
            return {
                "kind": "epoch",
                "epoch": event.epoch,
                "global_step": event.global_step,
                "train_loss": _finite(event.train_loss),
                **test,
                "samples_per_second": event.samples_per_second,
                "learning_rate": event.learning_rate,
            }
        case RunStarted() | CheckpointSaved():
            return None


def _finite(value: float) -> float | None:
    """Return a finite number or None, because JSON has no NaN; the loss of a skipped step is not finite."""
    return value if math.isfinite(value) else None
