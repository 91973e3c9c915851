"""What a run directory says of its run, as the page shows it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.step_files import find_checkpoints, peek_manifest
from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.recording.file_format import RECORDING_NAME
from lockstep.recording.reading import FileEvents, read_recording
from lockstep.report.metrics_file import read_metrics
from lockstep.runs.directory import METRICS_NAME, read_starts
from lockstep.runs.listing import ListedRun, list_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    name: str
    listed: ListedRun
    steps: Sequence[Mapping[str, Any]]
    epochs: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    """The rows of evaluations that a loop of the user's own has made."""
    changes: Sequence[Mapping[str, Any]]
    """The rows of workers that were lost, joined or left."""
    starts: Sequence[Mapping[str, Any]]
    checkpoints: Mapping[str, Mapping[str, Any]]
    """The manifest of each checkpoint file, by its name; those that cannot be read are left out."""
    recording: Sequence[FileEvents]
    """The files of workers and launcher, those of workers first; empty if nothing was recorded."""

    @property
    def marks(self) -> list[Mapping[str, Any]]:
        """The rows of epochs and of evaluations, in the order of their steps."""
        return sorted((*self.epochs, *self.evaluations), key=lambda row: int(row["global_step"]))

    @property
    def launcher(self) -> FileEvents | None:
        return next((each for each in self.recording if each.is_launchers), None)

    @property
    def workers(self) -> list[FileEvents]:
        files = sorted(
            (each for each in self.recording if not each.is_launchers),
            key=lambda each: (each.header.opened_wall_ns, each.header.generation),
        )
        last = files[-1:]  # a run that was resumed has files of the workers before
        newest = max((each.header.generation for each in files if _is_of_one_start(each, *last)), default=0)
        found = {each.header.rank: each for each in files if _is_of_one_start(each, *last)}
        return [each for _, each in sorted(found.items()) if each.header.generation == newest]


def _is_of_one_start(file: FileEvents, last: FileEvents) -> bool:
    """Return whether a worker was there with the one that was started last: it recorded until then, or later."""
    ended = int(max(file.table["begin"].max(), file.table["end"].max())) if len(file.table) else file.header.opened_ns
    return file.header.boot == last.header.boot and ended >= last.header.opened_ns


def read_run(directory: Path, name: str) -> RunData:
    """Read a run directory; the run may be going on."""
    listed = next((run for run in list_runs([directory]) if run.path.resolve() == directory.resolve()), None)
    if listed is None:
        raise RunDirectoryError(
            f"{directory} is no run directory: it has no config.yaml. "
            "`lockstep runs` lists those that there are. (LS701)"
        )
    metrics = directory / METRICS_NAME
    rows = list(read_metrics(metrics)) if metrics.exists() else []
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("step", "epoch", "evaluation", "workers")}
    recording = directory / RECORDING_NAME
    return RunData(
        name=name,
        listed=listed,
        steps=kinds["step"],
        epochs=kinds["epoch"],
        evaluations=kinds["evaluation"],
        changes=kinds["workers"],
        starts=read_starts(directory),
        checkpoints=_read_checkpoints(directory),
        recording=read_recording(recording) if recording.is_dir() else [],
    )


def _read_checkpoints(directory: Path) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for path in find_checkpoints(directory):
        with suppress(CheckpointError):
            found[path.name] = peek_manifest(path)
    return found
