"""What the training loop of a run keeps beside the trainer, and a worker that joins needs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, final

from lockstep.engine.restoring import Stateful
from lockstep.engine.state_file import Scheduler
from lockstep.runs.saving import RunSaver
from lockstep.runs.step_losses import EpochSums


@final
class FitState:
    """The state of the loop between two steps, on one worker; `scheduler` is one that the trainer does not step."""

    def __init__(
        self,
        sums: EpochSums,
        saver: RunSaver,
        scheduler: Scheduler | None,
        others: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        self._sums = sums
        self._saver = saver
        self._scheduler = scheduler
        self._others = others

    def state_dict(self) -> dict[str, Any]:
        """Return what a new worker needs (local)."""
        return {
            "loss": self._sums.loss,
            "weight": self._sums.weight,
            "saver": self._saver.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` has returned on another worker (local)."""
        self._sums.loss, self._sums.weight = state["loss"], state["weight"]
        self._saver.load_state_dict(state["saver"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for name, each in self._others.items():
            each.load_state_dict(state["others"][name])
