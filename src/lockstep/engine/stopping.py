"""Callbacks that end the training, by a metric, a time or a number of steps, or that freeze parameters at first."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, final

from torch import nn

from lockstep.engine.callbacks import Callback, StateOwner, is_of_cut_epoch

_LOWER_IS_BETTER = frozenset({"loss", "error", "perplexity", "mse", "mae", "rmse"})
_HIGHER_IS_BETTER = frozenset({
    "accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "score", "bleu", "r2", "map", "iou",
})  # fmt: skip
_TURNS_ROUND = frozenset({"neg", "negative", "minus"})
"""Words with which a name says the opposite: neg_log_loss."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


class MetricCallback(Callback):
    """A callback that looks at one metric of the evaluations, and lets it be found out where they never have it."""

    def __init__(self, metric: str, mode: Literal["min", "max"] | None) -> None:
        if mode not in {None, "min", "max"}:
            raise ValueError(f"mode is {mode!r}, expected 'min' if a lower {metric} is better, or 'max'. (LS526)")
        self.metric = metric
        self.mode = mode or conclude_mode(metric)
        self._given_instead: list[str] | None = None

    def on_epoch(self, trainer: Any, epoch: int) -> None:  # noqa: ARG002 - the name is the moment's
        """Refuse to go on where the evaluations after the epoch before had other metrics."""
        if self._given_instead:
            raise ValueError(
                f"{type(self).__name__} waits for the metric {self.metric!r}, but evaluations have given "
                f"{', '.join(self._given_instead)}. Name one of these. (LS526)"
            )
        self._given_instead = None

    def on_evaluate(self, trainer: Any, values: Mapping[str, float]) -> None:
        if self.metric in values:
            self._given_instead = []
            if not is_of_cut_epoch(trainer):
                self._look(trainer, float(values[self.metric]))
        elif self._given_instead is None:
            self._given_instead = list(values)

    def _look(self, trainer: Any, value: float) -> None:
        """Look at the metric's value."""


@final
class EarlyStopping(MetricCallback):
    """Ends the training when a metric has not become better for some evaluations.

        trainer = ls.Trainer(
            model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[ls.EarlyStopping("accuracy", patience=5)]
        )

    When to stop, and what it costs: Prechelt, "Early Stopping - But When?" (1998).

    Args:
        metric: Its name, as `on_evaluate` gets it.
        patience: How many evaluations in a row without an improvement end the training.
        min_delta: By how much a value must be better than the best one to count as an improvement.
        mode: "min" if lower is better, "max" if higher is; None to conclude it from the metric's name.

    Attributes:
        best: The best value; None before the first.
        num_bad: How many evaluations in a row had none that was better.

    Raises:
        ValueError: An argument is out of range, or the mode cannot be concluded from the metric's name.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience is {patience!r}, expected a whole number of evaluations, 1 or more. (LS526)")
        if not (min_delta >= 0 and math.isfinite(min_delta)):
            raise ValueError(f"min_delta is {min_delta!r}, expected 0 or more. (LS526)")
        super().__init__(metric, mode)
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.num_bad = 0
        self._owner = StateOwner()

    def on_start(self, trainer: Any) -> None:
        if self._owner.change_to(trainer.model):
            self.best, self.num_bad, self._given_instead = None, 0, None
        self._end_if_exhausted(trainer)

    def _look(self, trainer: Any, value: float) -> None:
        sign = 1.0 if self.mode == "max" else -1.0
        is_better = self.best is None or sign * value > sign * self.best + self.min_delta
        if is_better and not math.isnan(value):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        self._end_if_exhausted(trainer)

    def _end_if_exhausted(self, trainer: Any) -> None:
        if self.num_bad >= self.patience:
            best = "had no value" if self.best is None else f"was best with {self.best:.6g}"
            trainer.request_end(f"{self.metric} {best}, and not better in {self.num_bad} evaluations since")

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back, unless they are of another metric, with which no value can be compared."""
        mine = {"metric": self.metric, "mode": self.mode}
        if all(state_dict.get(name, value) == value for name, value in mine.items()):
            self._owner.forget()
            self.best, self.num_bad = state_dict["best"], int(state_dict["num_bad"])


@final
class MaxSteps(Callback):
    """Ends the training after some steps of the run, resumed or not.

        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[ls.MaxSteps(1000)])

    Args:
        steps: How many.

    Raises:
        ValueError: Less than one.
    """

    def __init__(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"max_steps is {steps!r}, expected a whole number of steps, 1 or more. (LS526)")
        self.steps = steps

    def on_start(self, trainer: Any) -> None:
        self._check(trainer)

    def on_step(self, trainer: Any, result: Any) -> None:  # noqa: ARG002 - the name is the moment's
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        num_left = self.steps - trainer.global_step
        if num_left <= 1:
            trainer.request_end(f"max_steps is {self.steps}", after_next_step=num_left == 1)


@final
class MaxTime(Callback):
    """Ends the training after a time, which goes on counting when the run is resumed; all workers end after one step.

        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[ls.MaxTime(3600)])

    Args:
        seconds: How long; from the first step on, evaluations and saves included.
        clock: Returns seconds.

    Raises:
        ValueError: Not more than zero.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise ValueError(f"max_time is {seconds!r} seconds, expected more than 0. (LS526)")
        self.seconds = float(seconds)
        self._clock = clock
        self._before = 0.0
        self._began: float | None = None
        self._owner = StateOwner()

    def on_start(self, trainer: Any) -> None:
        if self._owner.change_to(trainer.model):
            self._before = 0.0
        self._began = self._clock()
        self._check(trainer)

    def on_step(self, trainer: Any, result: Any) -> None:  # noqa: ARG002 - the name is the moment's
        self._check(trainer)

    def on_evaluate(self, trainer: Any, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the name is the moment's
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if self.elapsed() >= self.seconds:
            trainer.request_end(f"max_time, {self.seconds:g} s, is over")

    def elapsed(self) -> float:
        """Return for how many seconds the run has trained."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; a run that goes on after a load that has failed goes on counting."""
        self._owner.forget()
        self._before = float(state_dict["elapsed"])
        self._began = None if self._began is None else self._clock()


@final
class Freeze(Callback):
    """Freezes parameters until an epoch begins, and trains them from then on.

        freeze = ls.Freeze("body.*", until_epoch=3)
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[freeze])

    The optimizer is made over all parameters as ever: those that are frozen have no gradient, and it leaves them out.
    Whether a parameter is frozen follows from the place in the data, so there is no state to save.

    Args:
        names: A pattern of parameter names, or several: `"backbone.*"`. `*` stands for anything.
        until_epoch: The first epoch, counted from 0, in which they are trained.

    Raises:
        ValueError: In `on_start`: no parameter that is to be trained has such a name, or every one.
    """

    def __init__(self, names: str | Sequence[str], *, until_epoch: int) -> None:
        if isinstance(until_epoch, bool) or not isinstance(until_epoch, int) or until_epoch < 1:
            raise ValueError(f"until_epoch is {until_epoch!r}, expected a whole number of epochs, 1 or more. (LS526)")
        self.names = [names] if isinstance(names, str) else list(names)
        self.until_epoch = until_epoch
        self._model: nn.Module | None = None
        self._frozen: list[nn.Parameter] = []

    def on_start(self, trainer: Any) -> None:
        if self._model is not trainer.model:  # else they may be frozen by now, and would not be found
            self._model, self._frozen = trainer.model, self._find(trainer.model)
        self._set(trainer.cursor.epoch)

    def on_epoch(self, trainer: Any, epoch: int) -> None:
        del epoch
        self._set(trainer.cursor.epoch)

    def _set(self, epoch: int) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(epoch >= self.until_epoch)

    def _find(self, model: nn.Module) -> list[nn.Parameter]:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for pattern in self.names:
            if not any(fnmatchcase(name, pattern) for name in trained):
                raise ValueError(
                    f"Freeze is to freeze {pattern!r}, but no trained parameter has such a name. Their names "
                    f"begin with {', '.join(dict.fromkeys(name.partition('.')[0] for name in trained))}. (LS526)"
                )
        found = [each for name, each in trained.items() if any(fnmatchcase(name, pattern) for pattern in self.names)]
        if len(found) == len(trained):
            raise ValueError(
                f"Freeze is to freeze {', '.join(self.names)}: every parameter. Nothing would be trained. (LS526)"
            )
        return found


def conclude_mode(metric: str) -> Literal["min", "max"]:
    mode = mode_of_name(metric)
    if mode is None:
        raise ValueError(
            f"Whether a lower or a higher {metric} is better cannot be concluded from its name. Give mode: "
            "'min' or 'max'. (LS526)"
        )
    return mode


def mode_of_name(metric: str) -> Literal["min", "max"] | None:
    """Return whether lower ("min") or higher values of a metric are better; None if its name does not say it."""
    words = {word.lower() for word in [*_WORD.findall(metric), *_WORD.findall(metric.lower())]}  # mAP is a word, too
    if words & _TURNS_ROUND:
        return None
    if words & _LOWER_IS_BETTER:
        return "min"
    return "max" if words & _HIGHER_IS_BETTER else None
