"""`metrics.jsonl`: one JSON object per line, for steps, for epochs, and for workers that were lost, joined or left.

Each object has a "kind" ("step", "epoch" or "workers") and a "global_step". Who reads it leaves out other kinds.
"""

import contextlib
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, final

from lockstep.checkpoint.atomic_write import atomic_write_text, remove_half_line
from lockstep.errors import RunDirectoryError
from lockstep.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    LoadingProcessLost,
    Recorder,
    RecordingTakenOver,
    RunStarted,
    StepAudited,
    StepFinished,
    WorkersChanged,
)
from lockstep.processes.user_line import stacklevel_of_user

RowKey = tuple[str, int]
"""What there is one row for: the kind, and the step or the generation of workers."""

_NUM_REMEMBERED = 32
"""More than there are events between two calls in which workers wait for each other."""


class SucceededFile(Protocol):
    """A file that one worker after the other appends rows to."""

    def record(self, event: Event) -> None: ...

    def take_over(self) -> frozenset[RowKey]:
        """Continue the file of a process that has ended: remove a half row; return what the last whole rows are for."""

    def key_of(self, event: Event) -> RowKey | None:
        """Return what the row of an event is for; None where it has none, or need not be written later."""


@final
class MetricsFile:
    """A recorder that appends to a file; `record` returns after the line was written to the page cache.

    With `may_fail` the first of several lines that cannot be written is a warning, and no error.
    """

    def __init__(self, path: Path, *, may_fail: bool = False) -> None:
        self._path = path
        self._may_fail = may_fail
        self._is_failing = False
        # If a killed process left an incomplete last line, the first record starts on a new line.
        self._lead = "" if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n") else "\n"

    def record(self, event: Event) -> None:
        line = row_of(event)
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
                "continue the run with --resume. (LS818)"
            ) from error
        if not self._is_failing:
            warnings.warn(
                f"{self._path} cannot be written: {error}. The training continues. Lines will be missing until the "
                "file can be written again. (LS818)",
                stacklevel=stacklevel_of_user(),
            )
        self._is_failing = True

    def take_over(self) -> frozenset[RowKey]:
        try:
            lines = remove_half_line(self._path)
        except OSError as error:
            self._fail(error)
            return frozenset()
        self._lead = ""
        return frozenset(map(key_of_row, _parse(lines)))

    def key_of(self, event: Event) -> RowKey | None:
        return key_of(event)

    def rewind(self, global_step: int) -> None:
        """Remove the lines after update `global_step`, from which the run is resumed."""
        if self._path.exists():
            kept = [row for row in read_metrics(self._path) if row["global_step"] <= global_step]
            try:
                atomic_write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
            except OSError as error:
                self._fail(error)
            self._lead = ""


@final
class Succession:
    """A recorder on every worker, of which one writes at a time; one that begins to write calls `show`, once.

    If the one that writes is lost, the next one continues without a missing or a doubled row:

        rank 0, until it is killed       the next rank 0
        --------------------------       ---------------
        row of step 6                    remembers the event of step 6
        row of ste                       remembers the event of step 7
                                         step 8 continues without rank 0
                                         removes the half row, writes those of 7 and 8

    Every worker makes the same calls, so every worker sees the same events. One that was ahead when it was killed may
    have written a row that the others reach only later: that row is left out then.
    """

    def __init__(self, is_recording: Callable[[], bool], file: SucceededFile, show: Callable[[], Recorder]) -> None:
        self._is_recording = is_recording
        self._file = file
        self._show = show
        self._shown: Recorder | None = None
        self._run: RunStarted | None = None
        self._remembered: deque[Event] = deque(maxlen=_NUM_REMEMBERED)
        self._written: frozenset[RowKey] = frozenset()

    def record(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
        if not self._is_recording():
            if self._file.key_of(event) is not None:
                self._remembered.append(event)
            return
        if self._shown is None:
            self._shown = self._show()
            if not isinstance(event, RunStarted | RecordingTakenOver):
                self._take_over(self._shown, event.global_step)
        self._write(self._shown, event)

    def _take_over(self, shown: Recorder, global_step: int) -> None:
        self._written = self._file.take_over()
        if self._run is not None:
            shown.record(RecordingTakenOver(run=self._run, global_step=global_step))
        for event in self._remembered:
            self._write(shown, event)
        self._remembered.clear()

    def _write(self, shown: Recorder, event: Event) -> None:
        if self._file.key_of(event) not in self._written:
            self._file.record(event)
            shown.record(event)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    return _parse(path.read_text(encoding="utf-8").splitlines())


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


def key_of(event: Event) -> RowKey | None:
    row = row_of(event)
    return None if row is None else key_of_row(row)


def key_of_row(row: Mapping[str, Any]) -> RowKey:
    kind = row["kind"]
    if kind == "evaluation":  # there may be some of other sets after the same update
        kind = " ".join(sorted(row))
    if row.get("is_loading"):  # several may be lost in one generation of workers
        return "loading", row["lost"][0]["pid"]
    return kind, row["generation"] if kind == "workers" else row["global_step"]


def row_of(event: Event) -> dict[str, Any] | None:
    match event:
        case StepFinished():
            return {
                "kind": "step",
                **_place_of(event),
                "loss": _finite(event.loss),
                "weight": event.weight,
                **({} if event.learning_rate is None else {"learning_rate": event.learning_rate}),
                **({} if event.grad_norm is None else {"grad_norm": _finite(event.grad_norm)}),
            }
        case EpochFinished():
            return {
                "kind": "epoch",
                "epoch": event.epoch,
                "global_step": event.global_step,
                "train_loss": _finite(event.train_loss),
                **{name: _finite(value) for name, value in event.measured.items()},
                "samples_per_second": event.samples_per_second,
                "learning_rate": event.learning_rate,
            }
        case Evaluated():
            values = {name: _finite(value) for name, value in event.values.items()}
            return {**values, "kind": "evaluation", "global_step": event.global_step}
        case WorkersChanged():
            return {
                "kind": "workers",
                **_place_of(event),
                "generation": event.generation,
                "lost": [{"rank": each.rank, "pid": each.pid, "reason": each.reason} for each in event.lost],
                "joined": [{"rank": rank, "pid": pid} for rank, pid in event.joined],
                "left": [{"rank": rank, "pid": pid} for rank, pid in event.left],
                "repeats_step": event.repeats_step,
                "seconds": event.seconds,
                "shards": [[shards.start, shards.stop] for shards in event.shards],
            }
        case LoadingProcessLost(process=lost):
            return {
                "kind": "workers",
                **_place_of(event),
                "generation": event.generation,
                "is_loading": True,
                "lost": [{"rank": lost.rank, "pid": lost.pid, "reason": f"its loading process was {lost.reason}"}],
                "joined": [],
                "left": [],
                "repeats_step": False,
            }
        case RunStarted() | CheckpointSaved() | RecordingTakenOver() | StepAudited():
            return None


def _place_of(event: StepFinished | WorkersChanged | LoadingProcessLost) -> dict[str, int]:
    return {"epoch": event.epoch, "step": event.step, "global_step": event.global_step}


def _finite(value: float) -> float | None:
    """Return a finite number or None, because JSON has no NaN; the loss of a skipped step is not finite."""
    return value if math.isfinite(value) else None


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
