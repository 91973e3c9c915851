"""Metrics and trackers for a loop of one's own: a callback of `Trainer`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.callbacks import Callback
from lockstep.errors import RunDirectoryError
from lockstep.events import Evaluated, Recorder, RunStarted
from lockstep.report.metrics_file import MetricsFile, Succession
from lockstep.report.trackers import Following
from lockstep.report.trackers.known import check_trackers, make_trackers
from lockstep.runs.config import NamedTracker
from lockstep.runs.directory import METRICS_NAME
from lockstep.runs.fit import EpochSums, StepLosses


@final
class Track(Callback):
    """Writes `metrics.jsonl` in a folder, and gives its rows to trackers; rank 0 alone writes.

    A folder belongs to one run: a trainer that has loaded a state continues its file after the step of that state, and
    later rows are removed. A trainer at its beginning needs a folder without rows.

    Args:
        trackers: As in a config: names or import paths, each alone or as `{name: options}`.
        folder: The folder; it is made.
        config: What trackers show as the config of the run.

    Raises:
        ConfigError: A package is missing, or an option is wrong.
    """

    def __init__(
        self, trackers: Sequence[NamedTracker], folder: str | Path, config: Mapping[str, Any] | None = None
    ) -> None:
        check_trackers(trackers)
        self._named = trackers
        self._path = Path(folder) / METRICS_NAME
        self._config = config or {}
        self._recorder: Recorder | None = None
        self._following: Following | None = None
        self._losses: StepLosses | None = None

    def on_start(self, trainer: Any) -> None:
        """Open the file, and on rank 0 the trackers.

        Raises:
            RunDirectoryError: The trainer is at its beginning, but the folder has rows of a run; or it cannot be
                written.
        """
        self.on_end(trainer)
        metrics = MetricsFile(self._path)
        if trainer.world.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if trainer.global_step == 0 and self._path.exists() and self._path.stat().st_size:
                raise RunDirectoryError(
                    f"{self._path} has rows of a run, but this trainer is at its beginning. Choose another folder, "
                    "delete this one, or load the run's state before the first step. (LS817)"
                )
            metrics.rewind(trainer.global_step)
        following = Following(lambda: make_trackers(self._named), self._path, self._config)
        self._following = following
        self._recorder = Succession(lambda: trainer.world.rank == 0, metrics, lambda: following)
        parameters = list(trainer.model.parameters())
        is_late = is_asynchronous(parameters[0].device)
        self._losses = StepLosses(EpochSums(), self._recorder, is_late=is_late)
        self._recorder.record(
            RunStarted(
                world_size=trainer.world.world_size,
                device=str(parameters[0].device),
                num_shards=trainer.num_shards,
                num_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                num_train_samples=0,
                num_test_samples=0,
                first_epoch=trainer.cursor.epoch,
                num_epochs=0,
                num_steps=0,
                first_step=trainer.cursor.step,
            )
        )

    def on_step(self, trainer: Any, result: Any) -> None:
        """Record the step; where the device is asynchronous, when the next one was launched."""
        if self._losses is not None:
            self._losses.add(result, trainer.global_step)

    def on_evaluate(self, trainer: Any, values: Mapping[str, float]) -> None:
        """Record the evaluation."""
        if self._losses is not None and self._recorder is not None:
            self._losses.record_last()
            self._recorder.record(Evaluated(global_step=trainer.global_step, values=values))

    def on_save(self, trainer: Any, path: Any) -> None:
        """Record the last step, which a run that is resumed here needs."""
        del trainer, path
        if self._losses is not None:
            self._losses.record_last()

    def on_end(self, trainer: Any) -> None:
        """Close the trackers."""
        del trainer
        if self._losses is not None and self._following is not None:
            self._losses.record_last()
            self._following.__exit__(None, None, None)
        self._losses = self._following = self._recorder = None
