"""How a run ended, and what run directories say of their runs: state, progress, metrics, where. Needs no torch."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.checkpoint.step_files import find_checkpoints, peek_manifest
from lockstep.errors import CheckpointError
from lockstep.runs.directory import CONFIG_NAME, ENDED_NAME, ENVIRONMENT_NAME, METRICS_NAME, find_holder, read_starts

_DEPTH = 3
_TAIL_BYTES = 1 << 18
_MAX_REASON = 300
_NOT_COMPARED = frozenset(
    {"run_dir", "resume", "report", "save_code", "trackers", "keep", "save_every", "async_save", "on_save_error"}
)
"""Keys that say nothing of what a run computes, only what it saves and shows."""

NOT_MEASURED = frozenset({"kind", "epoch", "global_step", "train_loss", "samples_per_second", "learning_rate"})
"""What a row of an epoch has besides what the evaluation of each set has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    path: Path
    state: str
    """running, finished, stopped, interrupted, failed, or killed: the launcher has ended without saying how."""
    reason: str
    epoch: int
    """Epochs that are done."""
    step: int
    """Steps of the next one that are done."""
    epochs: int | None
    """Epochs in all, if the config is readable."""
    metrics: Mapping[str, float | None]
    digest: str | None
    started: str | None
    """When it was started last, ISO 8601."""
    holder: str | None
    workers: Sequence[str]
    """Where its workers were started last: "host: cpu, process 1234"."""
    config: Mapping[str, Any]
    """Its config, flat: `optimizer_args.lr` is a key."""


def list_runs(folders: Sequence[Path]) -> list[ListedRun]:
    """Return the runs under some folders, the one started last first (local).

    Their files may be of another version of Lockstep: what they do not say is left out.
    """
    found = {path.resolve(): path for folder in folders for path in _find(folder, _DEPTH)}
    return sorted((_look(path) for path in found.values()), key=lambda run: run.started or "", reverse=True)


def find_differences(runs: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """Return for each run those config values that are not the same in all runs of the same model and data."""
    found: list[dict[str, Any]] = []
    for run in runs:
        alike = [other for other in runs if _kind(other) == _kind(run)]
        keys = dict.fromkeys(key for other in alike for key in other.config)
        varying = [key for key in keys if len({_comparable(other.config.get(key)) for other in alike}) > 1]
        found.append({key: run.config.get(key) for key in varying if key not in _NOT_COMPARED})
    return found


def _comparable(value: Any) -> str:
    """Return a config value as text; a default of 0 and a 0.0 that was read are the same."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _kind(run: ListedRun) -> tuple[Any, Any]:
    return run.config.get("model"), run.config.get("data")


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / CONFIG_NAME).is_file() and ((folder / METRICS_NAME).exists() or (folder / ENVIRONMENT_NAME).exists()):
        yield folder
        return
    if depth == 0 or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _find(path, depth - 1)


def _look(path: Path) -> ListedRun:
    manifest = _read_newest(path)
    config = manifest.get("config") or _read_yaml(path)
    start = next(iter(read_starts(path)), {})
    holder = find_holder(path)
    epochs = config.get("epochs")
    epoch, step = manifest.get("epoch", 0), manifest.get("step", 0)
    rows = _read_last_rows(path)
    latest = rows.get("step", {})
    if holder is not None and {"epoch", "step"} <= latest.keys():
        epoch, step = max((epoch, step), (latest["epoch"], latest["step"] + 1))
    row = rows.get("epoch", {})
    metrics = {name.removeprefix("test_"): value for name, value in row.items() if name not in NOT_MEASURED}
    state, reason = _find_state(path, holder, is_over=bool(epochs) and epoch >= epochs)
    return ListedRun(
        path=path,
        state=state,
        reason=reason,
        epoch=epoch,
        step=step,
        epochs=epochs,
        metrics=metrics or manifest.get("metrics") or {},
        digest=manifest.get("digest"),
        started=start.get("started"),
        holder=holder,
        workers=[
            f"{each['host']}: {each['device']}, process {each['pid']}"
            for each in start.get("workers", [])
            if {"host", "device", "pid"} <= each.keys()
        ],
        config=dict(_flatten(config)),
    )


def _find_state(path: Path, holder: str | None, *, is_over: bool) -> tuple[str, str]:
    ending = read_ending(path)
    if holder is not None and ending is None:  # the one that has ended it still draws
        return "running", ""
    if ending is not None and not (is_over and ending.state == "stopped"):  # asked after its last step
        return ending.state, ending.reason
    return ("finished" if is_over else "killed"), ""


def _read_newest(path: Path) -> Mapping[str, Any]:
    for checkpoint in find_checkpoints(path):
        try:
            return peek_manifest(checkpoint)
        except CheckpointError:
            continue
    return {}


def recorded_config(path: Path) -> Mapping[str, Any]:
    """Return the config of a run directory or a checkpoint (local); empty where none can be read."""
    if path.is_dir():
        return _read_newest(path).get("config") or _read_yaml(path)
    try:
        return peek_manifest(path).get("config") or {}
    except CheckpointError:
        return {}


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        found = YAML(typ="safe", pure=True).load((path / CONFIG_NAME).read_text("utf-8"))
    except (OSError, YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_last_rows(path: Path) -> dict[str, Any]:
    """Return the last row of each kind in metrics.jsonl, as far as they are near its end."""
    try:
        with (path / METRICS_NAME).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    rows: dict[str, Any] = {}
    for line in lines:
        try:
            row = json.loads(line)
            rows[row["kind"]] = row
        except (ValueError, LookupError, TypeError):  # the first line is cut, and the last may be unfinished
            continue
    return rows


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A run that has reached its end; the same on every worker, but for `finish`."""

    digest: str
    fingerprint: str
    """What the digest depends on besides code and data."""
    test: Mapping[str, float]
    shown: str
    """Which metric says most: the accuracy, or else the loss, of the test set, or else of the first of the others."""
    num_test_samples: float
    """Over how many samples (or tokens) it is the mean."""
    num_right: float | None
    """How many of them are right; None without accuracy."""
    is_saved: bool
    finish: str | None
    """What the config's `finish` function returned, on rank 0."""
    others: Sequence[str] = ()
    """Which of the metrics are of another set than the test set; their names begin with the set's."""
    end_reason: str = ""
    """Why a callback has ended the run before its last epoch; empty if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """A run that has stopped on request before its last epoch."""

    checkpoint: Path
    """The checkpoint from which the run can be resumed; it is on the disk."""
    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """The next step in it, from 0."""
    num_steps: int | None
    """Steps of an epoch; None for a stream whose end is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding:
    """What the file `.ended` says; it is not there while the run goes on, or if its launcher was killed."""

    state: str
    """finished, stopped, interrupted or failed."""
    reason: str = ""
    time: str = ""


def write_ending(run_dir: Path, state: str, reason: str = "") -> None:
    """Note how a run ended (local); a directory that was removed, or cannot be written, is left alone."""
    line = next(iter(reason.splitlines()), "")[:_MAX_REASON]
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    if run_dir.is_dir():
        with suppress(OSError):
            atomic_write_text(
                run_dir / ENDED_NAME, json.dumps(asdict(RunEnding(state=state, reason=line, time=now))) + "\n"
            )


def forget_ending(run_dir: Path) -> None:
    """Remove the note of an earlier ending, because the run goes on (local)."""
    with suppress(OSError):
        (run_dir / ENDED_NAME).unlink(missing_ok=True)


def read_ending(run_dir: Path) -> RunEnding | None:
    try:
        return RunEnding(**json.loads((run_dir / ENDED_NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
