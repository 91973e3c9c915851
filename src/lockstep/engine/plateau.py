"""A learning rate that falls when a metric does not become better any more."""

from collections.abc import Mapping
from typing import Any, Literal, final

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from lockstep.engine.callbacks import Callback, is_of_cut_epoch
from lockstep.engine.metric_names import conclude_mode
from lockstep.engine.optimizers import separate_optimizers


@final
class ReduceLROnPlateau(Callback):
    """Multiplies the learning rate by `factor` when a metric has not become better in some evaluations.

    `torch.optim.lr_scheduler.ReduceLROnPlateau` as a callback, stepped with the mean over the whole data set that
    `Trainer.evaluate` gives on every worker: a metric of one worker's part would give each worker a rate of its own.

        trainer = ls.Trainer(..., callbacks=[ls.ReduceLROnPlateau(optimizer, "accuracy", patience=2)])

    Args:
        optimizer: The trainer's.
        metric: Its name, as `on_evaluate` gets it.
        mode: "min" if lower is better, "max" if higher is; None to conclude it from the metric's name.
        options: Those of torch's class: `factor`, `patience`, `threshold`, `cooldown`, `min_lr`, ...

    Attributes:
        scheduler: Torch's scheduler.

    Raises:
        TypeError: Torch's class has no such option.
        ValueError: An argument is out of range, or the mode cannot be concluded from the metric's name.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        metric: str = "loss",
        *,
        mode: Literal["min", "max"] | None = None,
        **options: Any,
    ) -> None:
        if mode not in {None, "min", "max"}:
            raise ValueError(f"mode is {mode!r}, expected 'min' if a lower {metric} is better, or 'max'. (LS526)")
        self.metric, self.optimizer = metric, optimizer
        self.scheduler = torch_schedulers.ReduceLROnPlateau(optimizer, mode or conclude_mode(metric), **options)
        self._missed: list[str] | None = None

    def on_start(self, trainer: Any) -> None:
        """Check that nothing else sets the rate.

        Raises:
            ValueError: The trainer has a scheduler, which would overwrite the rate in the next step, or another
                optimizer.
        """
        used, scheduler = trainer.optimizer, trainer.scheduler
        if not any(each is self.optimizer for each in separate_optimizers(used)):
            raise ValueError(
                "ReduceLROnPlateau was made for another optimizer than the trainer's. Give it that one. (LS503)"
            )
        if isinstance(scheduler, Mapping):  # that of this one of several optimizers
            scheduler = next((scheduler.get(name) for name, each in used.parts.items() if each is self.optimizer), None)
        if scheduler is not None:
            raise ValueError(
                f"ReduceLROnPlateau and the scheduler {type(scheduler).__name__} would both set the learning "
                "rate, and what the first has changed the second would overwrite in the next step. "
                "Use one of them. (LS503)"
            )

    def on_epoch(self, trainer: Any, epoch: int) -> None:  # noqa: ARG002 - the name is the moment's
        """Check that the evaluations after the epoch before had the metric.

        Raises:
            ValueError: They had other ones.
        """
        if self._missed:
            raise ValueError(
                f"ReduceLROnPlateau waits for the metric {self.metric!r}, but evaluations have given "
                f"{', '.join(self._missed)}. Name one of these. (LS526)"
            )
        self._missed = None

    def on_evaluate(self, trainer: Any, values: Mapping[str, float]) -> None:
        """Give the metric to the scheduler."""
        if self.metric in values:
            self._missed = []
            if not is_of_cut_epoch(trainer):
                self.scheduler.step(float(values[self.metric]))
        elif self._missed is None:
            self._missed = list(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.scheduler.load_state_dict(state_dict)
