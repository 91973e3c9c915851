"""Trackers: what shows runs elsewhere, such as TensorBoard. They follow `metrics.jsonl`, which stays the source.

    a run begins, or is resumed      metrics.jsonl ends with the step to continue from
    each tracker starts              it removes what is later, and says up to which update it is complete
    the rows after that update       are given to it from the file
    each event from then on          is given to it as it comes, after it was written to the file

So a tracker that was killed with its process has neither a gap nor a doubled step afterwards.
`known.py` has what a tracker does and those that a config names, `callback.py` the same for a loop of one's own.
"""

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.errors import ConfigError, LockstepError
from lockstep.events import Event, RunStarted
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.report.metrics_file import key_of, key_of_row, read_metrics, row_of
from lockstep.report.trackers.known import Ending, TrackedRun, Tracker, check_trackers, make_trackers
from lockstep.runs.directory import TRACKED_NAME
from lockstep.secrets import hide_values

__all__ = ["Following", "TrackedRun", "Tracker", "check_trackers", "make_trackers"]

_KINDS = {"step", "epoch", "evaluation"}
_NOT_SHOWN = {"kind", "epoch", "step", "global_step", "weight"}


@final
class Following:
    """A recorder that gives what it records to trackers; a context at whose end they are closed.

    Each event must be in the file `metrics` before it is recorded here. `make` is called by the first one. Set `ending`
    to how the run ends, if no exception says otherwise.
    """

    def __init__(
        self, make: Callable[[], Sequence[tuple[str, Tracker]]], metrics: Path, config: Mapping[str, Any]
    ) -> None:
        self._make = make
        self._metrics = metrics
        self._config = hide_values(config)
        self._trackers: list[tuple[str, Tracker]] | None = None
        self.ending: Ending = "finished"

    def record(self, event: Event) -> None:
        if self._trackers is None:
            rows = list(read_metrics(self._metrics)) if self._metrics.exists() else []
            self._trackers = self._start(rows, may_fail=not isinstance(event, RunStarted))
            if key_of(event) in {key_of_row(row) for row in rows}:
                return
        row = row_of(event) if self._trackers else None
        if row is not None:
            for each in list(self._trackers):
                self._give(each, [row])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> None:
        ending: Ending = self.ending if kind is None else "failed"
        for name, tracker in self._trackers or ():
            try:
                tracker.end(ending)
            except Exception as failure:  # noqa: BLE001 - must not hide how the run ended
                _warn(name, failure)
        self._trackers = []

    def _start(self, rows: Sequence[Mapping[str, Any]], *, may_fail: bool) -> list[tuple[str, Tracker]]:
        self._trackers = []
        made = self._make()
        if not made:
            return self._trackers
        folder = self._metrics.parent
        run = TrackedRun(
            name=folder.resolve().name,
            key=_read_key(folder),
            folder=folder,
            config=self._config,
            global_step=max((row["global_step"] for row in rows), default=0),
        )
        for name, tracker in made:
            try:
                complete = tracker.start(run)
            except Exception as error:
                if may_fail:
                    _warn(name, error)
                    continue
                if isinstance(error, LockstepError):
                    raise
                raise ConfigError(
                    f"The tracker {name} cannot be started: {type(error).__name__}: {error}. Mend that, or leave it "
                    "out of trackers. (LS817)"
                ) from error
            self._trackers.append((name, tracker))
            self._give((name, tracker), [row for row in rows if row["global_step"] > complete])
        return self._trackers

    def _give(self, named: tuple[str, Tracker], rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._trackers is not None
        name, tracker = named
        try:
            for row in rows:
                if values := _values_of(row):
                    tracker.log(row["global_step"], values)
        except Exception as error:  # noqa: BLE001 - a service that cannot be reached must not end a training
            self._trackers.remove(named)
            _warn(name, error)


def _values_of(row: Mapping[str, Any]) -> dict[str, float]:
    kind = row["kind"]
    if kind not in _KINDS:
        return {}
    return {
        f"{kind}/{name}": float(value)
        for name, value in row.items()
        if name not in _NOT_SHOWN and isinstance(value, int | float)
    }


def _read_key(folder: Path) -> str:
    path = folder / TRACKED_NAME
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(4))
    return path.read_text("utf-8")


def _warn(name: str, error: BaseException) -> None:
    warnings.warn(
        f"The tracker {name} is left out from here on: {type(error).__name__}: {error}. The training continues, and "
        "metrics.jsonl has everything; the next resume brings the tracker up to date. (LS817)",
        stacklevel=stacklevel_of_user(),
    )
