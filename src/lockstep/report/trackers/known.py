"""What a tracker does, and the trackers that a config names. Needs no torch, until one is made."""

import importlib
import importlib.util
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, final

from lockstep.errors import ConfigError
from lockstep.runs.config import NamedTracker
from lockstep.runs.importing import call_object, import_object

Ending = Literal["finished", "stopped", "failed"]
"""How a run has ended: at its end, on request, or with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    name: str
    """The name to show: that of the run directory."""
    key: str
    """Eight letters and digits; the same after each resume, another one for each run directory."""
    folder: Path
    config: Mapping[str, Any]
    global_step: int
    """Updates that the run has; greater than 0 if it is resumed."""


class Tracker(Protocol):
    """Shows a run elsewhere. Only rank 0 has one; if it is lost, the next rank 0 makes one of its own.

    A tracker whose method raises during the training is left out from then on, with a warning; the next resume brings
    it up to date.
    """

    def start(self, run: TrackedRun) -> int:
        """Open the run, the same one as before a resume, and leave nothing in it after update `run.global_step`.

        Returns:
            Up to which update the run holds everything. What is later follows by `log`; 0 for an empty run.
        """

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        """Take numbers of an update (local).

        Args:
            global_step: Updates since the run began.
            values: Finite numbers by name: `step/loss`, `epoch/test_accuracy`.
        """

    def end(self, ending: Ending) -> None:
        """Write what is not written yet, and close the run."""


_KNOWN = {
    "tensorboard": ("lockstep.report.trackers.known:TensorBoard", ("tensorboard", "tensorboardX")),
    "wandb": ("lockstep.report.trackers.known:WandB", ("wandb",)),
    "mlflow": ("lockstep.report.trackers.known:MLflow", ("mlflow",)),
}
"""By name: the class, and the packages of which it needs one."""


def check_trackers(named: Sequence[NamedTracker]) -> None:
    """Check that the packages of trackers are installed, and their options known; imports none of them."""
    missing = []
    for name, options in map(_split, named):
        if name in _KNOWN:
            path, packages = _KNOWN[name]
            if not any(importlib.util.find_spec(package) for package in packages):
                missing.append(packages[0])
            call_object(f"trackers.{name}", import_object("trackers", path), **options)
    if missing:
        listed = " and ".join(missing)
        raise ConfigError(
            f"trackers needs {listed}, which {'is' if len(missing) == 1 else 'are'} not installed. Install with: "
            f"pip install 'lockstep-ddp[trackers]' (or pip install {' '.join(missing)}), or leave it out of "
            "trackers. (LS817)"
        )


def make_trackers(named: Sequence[NamedTracker]) -> list[tuple[str, Tracker]]:
    check_trackers(named)
    return [(name, _make(name, options)) for name, options in map(_split, named)]


def _make(name: str, options: dict[str, Any]) -> Tracker:
    path, _ = _KNOWN.get(name, (name, ()))
    found = import_object("trackers", path)
    made: Any = call_object("trackers", found, **options) if isinstance(found, type) or options else found
    absent = [method for method in ("start", "log", "end") if not callable(getattr(made, method, None))]
    if absent:
        raise ConfigError(
            f"trackers names {name!r}, a {type(made).__name__} without {' and '.join(absent)}. A tracker has the "
            "methods start(run), log(global_step, values) and end(ending): see docs/trackers.md. (LS817)"
        )
    tracker: Tracker = made
    return tracker


def _split(named: NamedTracker) -> tuple[str, dict[str, Any]]:
    return next(iter(named.items())) if isinstance(named, dict) else (named, {})


_RUN_TAG: Final = "lockstep.run"
_MAX_QUEUED: Final = 500
_MAX_SECONDS: Final = 5.0
_MAX_PARAMETERS: Final = 100
_MAX_TEXT: Final = 500
_STATUS: Final = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@final
class MLflow:
    """Logs to MLflow, some rows at a time.

    A resumed run continues under its id. MLflow cannot remove numbers: if it has some that are later than the step
    from which the run is resumed, its run is deleted (MLflow keeps deleted runs until `mlflow gc`) and written anew.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "lockstep") -> None:
        self._uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._id = ""
        self._present: set[tuple[str, int]] = set()
        self._queued: list[Any] = []
        self._sent = time.monotonic()

    def start(self, run: TrackedRun) -> int:
        """Open or continue the run that has the key of the run directory as a tag."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        place = self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([place], filter_string=f"tags.`{_RUN_TAG}` = '{run.key}'")
        self._present = {each for before in found[:1] for each in self._read(before)}
        last = max((step for _, step in self._present), default=0)
        if found and last <= run.global_step:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return max(last - 1, 0)  # an epoch's row has the step of its last update
        if found:
            self._client.delete_run(found[0].info.run_id)
        self._present = set()
        self._id = self._client.create_run(place, run_name=run.name, tags={_RUN_TAG: run.key}).info.run_id
        self._log_parameters(run.config)
        return 0

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = {name: value for name, value in values.items() if (name, global_step) not in self._present}
        self._queued += [Metric(name, value, now, global_step) for name, value in new.items()]
        if len(self._queued) >= _MAX_QUEUED or time.monotonic() - self._sent > _MAX_SECONDS:
            self._send()

    def end(self, ending: Ending) -> None:
        self._send()
        self._client.set_terminated(self._id, status=_STATUS[ending])

    def _send(self) -> None:
        if self._queued:
            self._client.log_batch(self._id, metrics=self._queued)
        self._queued, self._sent = [], time.monotonic()

    def _read(self, before: Any) -> set[tuple[str, int]]:
        names = before.data.metrics
        return {
            (name, entry.step) for name in names for entry in self._client.get_metric_history(before.info.run_id, name)
        }

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:_MAX_TEXT]) for name, value in config.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MAX_PARAMETERS])


@final
class TensorBoard:
    """Writes event files, with `torch.utils.tensorboard`, or with tensorboardX where tensorboard is not installed.

    After a resume the file is written anew from `metrics.jsonl`, so that each step is in it once for every program
    that reads it, and nothing is missing that a killed process had not written yet. Without `folder` it is in
    `tensorboard` in the run directory.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> int:
        """Begin a file, in place of those that this run has written before."""
        is_installed = importlib.util.find_spec("tensorboard") is not None
        module = importlib.import_module("torch.utils.tensorboard" if is_installed else "tensorboardX")
        folder = run.folder / "tensorboard" if self._folder is None else Path(self._folder)
        ending = f".{run.key}.lockstep"
        before = list(folder.glob(f"events.out.tfevents.*{ending}"))
        for path in before:
            path.unlink()
        # purge_step: a TensorBoard that has read the old files drops what it knows.
        self._writer = module.SummaryWriter(str(folder), purge_step=0 if before else None, filename_suffix=ending)
        self._writer.add_text("config", "\n\n".join(f"{name}: {value}" for name, value in run.config.items()))
        return 0

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers; a thread of the writer's writes them."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step)

    def end(self, ending: Ending) -> None:
        del ending
        self._writer.close()


@final
class WandB:
    """Logs to Weights & Biases; `options` are further arguments of `wandb.init`.

    Offline (`mode: offline`) a resumed run is written anew from `metrics.jsonl`, in place of the folder that was not
    synchronized yet. Online a run continues under its id: steps that the service has already are not sent again.
    """

    def __init__(self, project: str = "lockstep", **options: Any) -> None:
        self._options = {"project": project, **options}
        self._run: Any = None
        self._first_step = 0

    def start(self, run: TrackedRun) -> int:
        """Open or continue the run whose id is the key of the run directory."""
        import wandb

        for before in (run.folder / "wandb").glob(f"offline-run-*-{run.key}"):
            if not any(before.glob("*.synced")):
                shutil.rmtree(before)
        usual = {"id": run.key, "name": run.name, "dir": str(run.folder), "resume": "allow", "config": dict(run.config)}
        self._run = wandb.init(**{**usual, **self._options})
        self._first_step = 0 if self._run.offline else int(self._run.starting_step)
        return min(max(self._first_step - 1, 0), run.global_step)

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers; another process sends them."""
        if global_step >= self._first_step:
            self._run.log(dict(values), step=global_step)

    def end(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "failed" else 0)
