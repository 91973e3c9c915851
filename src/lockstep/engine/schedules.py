"""Learning rates: schedules by name with a warm-up, one that follows a metric, and groups by names of parameters."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, final

from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LambdaLR

from lockstep.engine.optimizers import separate_optimizers
from lockstep.engine.stopping import MetricCallback

ScheduleName = Literal["constant", "cosine", "linear"]


def make_schedule(
    optimizer: Optimizer,
    kind: ScheduleName,
    *,
    num_steps: int,
    warmup: float = 0,
    final: float = 0.0,
) -> LambdaLR:
    """Return a scheduler for `Trainer(scheduler=...)`, which steps it once per step.

    Half a period of a cosine as in Loshchilov and Hutter, "SGDR" (2017); the warm-up is linear, as in Goyal et al.,
    "Accurate, Large Minibatch SGD" (2017).

        schedule = ls.make_schedule(optimizer, "cosine", num_steps=1000, warmup=0.05)
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, scheduler=schedule)

    Args:
        optimizer: The optimizer; its rates are those after the warm-up.
        kind: "constant", "linear" or "cosine".
        num_steps: Steps of the whole run: epochs times `len(loader)`.
        warmup: Steps of the warm-up, or a part of the run between 0 and 1.
        final: By what the rate is multiplied at the end.

    Raises:
        ValueError: An argument is out of range.
    """
    if kind not in {"constant", "linear", "cosine"}:
        raise ValueError(f"The schedule is {kind!r}, expected 'constant', 'linear' or 'cosine'. (LS527)")
    if num_steps < 1:
        raise ValueError(f"num_steps of a schedule is {num_steps}, expected the steps of the run, 1 or more. (LS527)")
    steps = round(warmup * num_steps) if 0 < warmup < 1 else warmup
    if isinstance(warmup, bool) or steps != int(steps) or not 0 <= steps < num_steps:
        raise ValueError(
            f"warmup is {warmup!r}, expected fewer steps than the run has ({num_steps}), or a part of it between 0 "
            "and 1. (LS527)"
        )
    if not 0 <= final <= 1:
        raise ValueError(f"final is {final!r}, expected a factor from 0 to 1. (LS527)")
    return LambdaLR(optimizer, Schedule(kind, num_steps, int(steps), float(final)))


@final
class Schedule:
    """By what the learning rate is multiplied in each step; an object whose attributes are saved with the scheduler."""

    def __init__(self, kind: ScheduleName, num_steps: int, warmup: int, final: float) -> None:
        self.kind, self.num_steps, self.warmup, self.final = kind, num_steps, warmup, final

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return 1.0
        part = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        left = 0.5 * (1 + math.cos(math.pi * part)) if self.kind == "cosine" else 1 - part
        return self.final + (1 - self.final) * left

    def options(self) -> dict[str, object]:
        """Return that from which the rates follow; of a constant one a warm-up that has begun goes on."""
        return {"kind": self.kind} if self.kind == "constant" else dict(vars(self))


def end_of(scheduler: Any) -> int | None:
    """After how many steps the rate is at its end: torch's cosine then rises again. None where it is not known."""
    own = next((each for each in getattr(scheduler, "lr_lambdas", ()) if isinstance(each, Schedule)), None)
    return getattr(scheduler, "T_max", None) if own is None or own.kind == "constant" else own.num_steps


def parameter_groups(
    model: nn.Module, options: Mapping[str, Mapping[str, Any]] | None = None, *, no_decay: bool = False
) -> list[dict[str, Any]]:
    """Return the trained parameters of a model in groups, for an optimizer.

        optimizer = torch.optim.AdamW(ls.parameter_groups(model, {"head.*": {"lr": 1e-3}}, no_decay=True), lr=1e-4)

    Args:
        model: The model.
        options: Options of the optimizer by patterns of parameter names, in which `*` stands for anything. The first
            pattern that a name has decides.
        no_decay: Whether biases and the parameters of normalizations (those with one dimension or none) get
            `weight_decay` 0, unless their pattern says otherwise.

    Raises:
        TypeError: The options of a pattern are not keys and values.
        ValueError: A pattern decides for no parameter.
    """
    options = options or {}
    for pattern, given in options.items():
        if not isinstance(given, Mapping):
            raise TypeError(
                f"The parameter group {pattern!r} has {given!r}, expected options of the optimizer with their values, "
                "such as {'lr': 0.01}. (LS527)"
            )
    found: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            pattern = next((each for each in options if fnmatchcase(name, each)), "")
            found.setdefault((pattern, no_decay and parameter.ndim <= 1), []).append(parameter)
    for pattern in options:
        if not any(each == pattern for each, _ in found):
            names = ", ".join(list(dict(model.named_parameters()))[:5])
            raise ValueError(
                f"The parameter group {pattern!r} has no parameters: no trained one has such a name, or an earlier "
                f"pattern has taken them. Names are {names}, ... (LS527)"
            )
    return [
        {"params": parameters, **({"weight_decay": 0.0} if is_flat else {}), **options.get(pattern, {})}
        for (pattern, is_flat), parameters in found.items()
    ]


@final
class ReduceLROnPlateau(MetricCallback):
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
        super().__init__(metric, mode)
        self.optimizer = optimizer
        self.scheduler = torch_schedulers.ReduceLROnPlateau(optimizer, self.mode, **options)

    def on_start(self, trainer: Any) -> None:
        """Check that nothing else sets the rate."""
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

    def _look(self, trainer: Any, value: float) -> None:
        del trainer
        self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)
