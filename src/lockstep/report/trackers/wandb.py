"""Weights & Biases, online or offline."""

import shutil
from collections.abc import Mapping
from typing import Any, final

from lockstep.report.trackers.protocol import Ending, TrackedRun


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
        """Send what is queued."""
        self._run.finish(exit_code=1 if ending == "failed" else 0)
