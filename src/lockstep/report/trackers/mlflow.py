"""MLflow, in a local store or on a server."""

import time
from collections.abc import Mapping
from typing import Any, Final, final

from lockstep.report.trackers.protocol import Ending, TrackedRun

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
        """Queue the numbers, and send the queue now and then."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = {name: value for name, value in values.items() if (name, global_step) not in self._present}
        self._queued += [Metric(name, value, now, global_step) for name, value in new.items()]
        if len(self._queued) >= _MAX_QUEUED or time.monotonic() - self._sent > _MAX_SECONDS:
            self._send()

    def end(self, ending: Ending) -> None:
        """Send what is queued, and say how the run ended."""
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
