"""Averages of a model's weights over the steps (EMA) or the epochs (SWA) of a run, kept beside the model's own.

Each worker averages the same bits in the same order, so the average has the same bits on all, on any number of workers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lockstep.checkpoint.file import state_digest
from lockstep.engine.callbacks import Callback, StateOwner
from lockstep.errors import CheckpointError
from lockstep.torch_private.modules import foreach_copy_, foreach_lerp_, non_persistent_buffer_names

_RUNNING_STATISTIC = re.compile(r"(.*_)?(mean|average|avg|var|variance|std)")


class AveragedWeights(Callback):
    """A callback that keeps an average of the model's weights.

    Averaged are the parameters, and of the buffers those that say that they are running statistics: BatchNorm's, and
    all others whose name ends with `mean`, `average`, `avg`, `var`, `variance` or `std`. Every other buffer has the
    value that the model's has: a queue and its pointer, the vectors of a spectral norm, a codebook, a counter.
    Give it to `Trainer.evaluate` as `weights`, to evaluate the average.

    Attributes:
        tensors: The average by the names of the model's `state_dict`; empty before the first step.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._owner = StateOwner()

    def on_start(self, trainer: Any) -> None:
        if self._owner.change_to(trainer.model):
            self._begin_anew()
        live = LiveTensors(trainer.model).read()
        devices = {name: value.device for name, value in live.all().items()}
        self.tensors = {name: value.to(devices.get(name, value.device)) for name, value in self.tensors.items()}
        _counterparts(self.tensors, live.averaged, is_averaged=True)
        _counterparts(self.tensors, live.copied, is_averaged=False)

    def _begin_anew(self) -> None:
        self.tensors = {}

    def digest(self) -> str:
        """Return the SHA-256 of what it has besides whole numbers, 64 hex digits; the same on every worker (local)."""
        return state_digest({name: value for name, value in self.tensors.items() if _is_inexact(value)})

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors)} if self.tensors else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._owner.forget()
        self.tensors = {name: value.detach().clone() for name, value in state_dict["tensors"].items()}

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Put the average in the place of a model's weights (local): of the one that is trained only at the end.

        Raises:
            CheckpointError: The model has other tensors.
            ValueError: Nothing was averaged yet.
        """
        if not self._has_averaged():
            raise ValueError(
                f"{type(self).__name__} has averaged nothing yet, so there is nothing to copy: the run has taken no "
                "step, or for SWA has ended no epoch from start_epoch on, counted from 0. (LS526)"
            )
        put_weights(model, self.tensors)

    def _average_in(self, values: "LiveValues", weight: float) -> None:
        """Move the average to the model's values by this part of the way; what is not averaged becomes the model's."""
        averages = _counterparts(self.tensors, values.averaged, is_averaged=True)
        pairs = zip(averages, values.averaged.values(), strict=True)
        foreach_lerp_(averages, [value.to(average.dtype) for average, value in pairs], weight)
        copies = _counterparts(self.tensors, values.copied, is_averaged=False)
        if copies:
            foreach_copy_(copies, list(values.copied.values()))

    def _has_averaged(self) -> bool:
        return bool(self.tensors)


@final
class EMA(AveragedWeights):
    """The exponential moving average of the weights: `average = decay * average + (1 - decay) * weights` in each step.

        ema = ls.EMA(0.999)
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[ema])
        trainer.step(batch)
        ema.copy_to(Net())

    A step that is skipped leaves it as it is. (Polyak and Juditsky, "Acceleration of Stochastic Approximation by
    Averaging", 1992.)

    Args:
        decay: Between 0 and 1; 0.999 averages over about a thousand steps.

    Raises:
        ValueError: The decay is out of range.
    """

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(
                f"decay of the EMA is {decay!r}, expected a number from 0 to below 1, such as 0.999. (LS526)"
            )
        self.decay = float(decay)
        self._live: LiveTensors | None = None

    def on_start(self, trainer: Any) -> None:
        super().on_start(trainer)
        self._live = None  # it may have been another trainer's

    @torch.no_grad()
    def on_step(self, trainer: Any, result: Any) -> None:
        if result.is_skipped:
            return
        if self._live is None:
            self._live = LiveTensors(trainer.model)
        self._average_in(self._live.read(), 1 - self.decay)


@final
class SWA(AveragedWeights):
    """The mean of the weights at the ends of epochs (stochastic weight averaging); until it begins, the last of them.

        swa = ls.SWA(start_epoch=15)    # Izmailov et al., "Averaging Weights Leads to Wider Optima", arXiv:1803.05407
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0, callbacks=[swa])

    Running statistics of BatchNorm are averaged as well. Those of the averaged weights are better: see
    `Trainer.update_batchnorm`.

    Args:
        start_epoch: The first epoch, counted from 0, whose end is in the mean.

    Attributes:
        num_averaged: How many epochs are in the mean.

    Raises:
        ValueError: The epoch is below zero.
    """

    def __init__(self, start_epoch: int) -> None:
        super().__init__()
        if isinstance(start_epoch, bool) or not isinstance(start_epoch, int) or start_epoch < 0:
            raise ValueError(f"start_epoch of SWA is {start_epoch!r}, expected a whole number, 0 or more. (LS526)")
        self.start_epoch = start_epoch
        self.num_averaged = 0
        self._before_update: dict[str, Tensor] = {}

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.num_averaged, self._before_update = 0, {}

    def set_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Use these statistics of BatchNorm, until another epoch is averaged in (local)."""
        self._before_update = {name: self.tensors[name] for name in statistics} | self._before_update
        self.tensors.update(statistics)

    @torch.no_grad()
    def on_epoch(self, trainer: Any, epoch: int) -> None:
        """Average the weights in, from the first epoch on; until then the average is the weights after the last epoch.

        Else a metric of it would be that of weights that nothing has trained, and look as if it stagnated.
        """
        self.tensors.update(self._before_update)
        self._before_update = {}
        self.num_averaged += epoch >= self.start_epoch
        self._average_in(LiveTensors(trainer.model).read(), 1 / max(1, self.num_averaged))

    def _has_averaged(self) -> bool:
        return self.num_averaged > 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_averaged": self.num_averaged, "before_update": dict(self._before_update)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"tensors": {}, **state_dict})
        self.num_averaged = int(state_dict["num_averaged"])
        self._before_update = {name: value.detach().clone() for name, value in state_dict["before_update"].items()}


def tensors_of(weights: AveragedWeights | None, callbacks: Sequence[Callback]) -> Mapping[str, Tensor]:
    if weights is None:
        return {}
    if not isinstance(weights, AveragedWeights):
        raise TypeError(
            f"weights is {weights!r}, expected an average of the weights: the ls.EMA or ls.SWA among the trainer's "
            "callbacks. (LS526)"
        )
    if not weights.tensors and not any(weights is each for each in callbacks):
        raise ValueError(
            f"weights is an {type(weights).__name__} that has averaged nothing and is not among the trainer's "
            "callbacks, so the model's own weights would be evaluated. Make the trainer with callbacks=[...] that "
            "holds it. (LS526)"
        )
    return weights.tensors


@torch.no_grad()
def put_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a model, by the names of its `state_dict`; those not named keep their values (local)."""
    live = LiveTensors(model).read().all()
    for name, value in tensors.items():
        if name not in live or live[name].shape != value.shape:
            raise CheckpointError(
                f"The averaged weights have a {name} of shape {list(value.shape)}, and the model has "
                f"{'one of ' + str(list(live[name].shape)) if name in live else 'none'}. "
                "They are of another model. (LS708)"
            )
    for name, value in tensors.items():
        live[name].copy_(value)


@contextmanager
def weights_in_place(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    if not tensors:
        yield
        return
    own = {name: value.detach().clone() for name, value in LiveTensors(model).read().all().items()}
    put_weights(model, tensors)
    try:
        yield
    finally:
        put_weights(model, own)


class LiveValues(NamedTuple):
    averaged: Mapping[str, Tensor]
    copied: Mapping[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        return {**self.averaged, **self.copied}


@final
class LiveTensors:
    """Parameters stay the same objects; a forward may put other tensors in the place of buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name: each for name, each in model.named_parameters(remove_duplicate=False) if _is_inexact(each)
        }
        self._buffers = [
            (f"{prefix}.{name}".lstrip("."), module, name, _RUNNING_STATISTIC.fullmatch(name) and _is_inexact(buffer))
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in non_persistent_buffer_names(module)
        ]

    def read(self) -> LiveValues:
        """Return them as they are now; `data` may be another tensor than the last time."""
        averaged = {name: each.data for name, each in self._parameters.items()}
        copied: dict[str, Tensor] = {}
        for name, module, own, is_averaged in self._buffers:
            (averaged if is_averaged else copied)[name] = getattr(module, own)
        return LiveValues(averaged, copied)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _counterparts(averages: dict[str, Tensor], values: Mapping[str, Tensor], *, is_averaged: bool) -> list[Tensor]:
    """Return the average of each value; one that there is not yet, or that has grown, begins with the value."""
    for name, value in values.items():
        if name not in averages or averages[name].shape != value.shape:
            dtype = torch.promote_types(value.dtype, torch.float32) if is_averaged else value.dtype
            averages[name] = value.detach().to(dtype, copy=True)
    return [averages[name] for name in values]
