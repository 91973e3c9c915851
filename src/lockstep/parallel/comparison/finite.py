"""Gradients that are not finite: on which rank, in which parameter, and what becomes of the optimizer's step.

A mean with a NaN of one rank is NaN on all. So each rank looks at its own gradients before they are reduced, and what
it finds travels with the status. A step with them would make every parameter NaN. But a backward with them is no
mistake yet: a GradScaler looks for them and leaves the step out, and a script may clear them. So the step is looked at.

On an asynchronous device, to read a gradient is to wait for the device. So two things are computed there and copied to
pinned memory, and the host reads them when it has launched the next backward: then the device has work to do meanwhile.

    backward N      the largest magnitude of each gradient of this rank, before it is reduced
    step N          that of each gradient which the optimizer is given: the mean, the same on all ranks. If one is not
                    finite, the device itself leaves the step of a fused optimizer out.
    backward N + 1  the host reads what backward N has left; it travels with this status, so all know rank and parameter
    step N + 1      the host reads what step N has left, and raises or logs

Where the device cannot leave a step out (an optimizer without `fused=True`, or the first step of a parameter, whose
state is not made yet), `nonfinite="skip"` waits for the device in each step, and "stop" raises after that step.
"""

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.devices.transfer import record_event
from lockstep.errors import LossError
from lockstep.parallel.comparison.check import Check, Reduced
from lockstep.processes.user_line import CodeLine, user_line
from lockstep.reduce import GroupStatus, RankStatus
from lockstep.reduce.buckets import Bucket, SparseBucket
from lockstep.reduce.tensor_bits import is_finite
from lockstep.torch_private.modules import foreach_norm, has_step_on_device, optimizer_step_pre_hooks

_LOGGER = logging.getLogger("lockstep")

NONFINITE_ADVICE: Final = (
    "Look for a sample that is not finite, for a logarithm or square root of zero, or for a division by it; or try a "
    'smaller learning rate. Wrap with nonfinite="skip" to leave such steps out.'
)


class FiniteCheck(Check, ABC):
    """Looks for gradients that are not finite, on one rank; its number travels in a field of its own."""

    num_backwards_late = 0
    """How many backwards later all ranks learn what was found."""

    def __init__(self, nonfinite: Literal["stop", "skip"]) -> None:
        self._skips = nonfinite == "skip"
        self._names: list[str] = []
        """By which the parameters are numbered, the same on all ranks."""
        self.delayed: dict[int, str] = {}
        """Names, by identity, of parameters that are in no bucket: at a step their mean is looked at."""
        self._found = ""
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []

    def know(self, named: Sequence[tuple[str, nn.Parameter]], module: nn.Module | None) -> None:  # noqa: ARG002
        self._names = [name for name, _ in named]

    def fill_in(self, status: RankStatus) -> RankStatus:
        number = self.take_number()
        return replace(status, nonfinite=number) if number else status

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is not None:
            backward = reduction.number - self.num_backwards_late
            self._found = describe_nonfinite(reduction.status, self._names, backward)

    @abstractmethod
    def take_number(self) -> int:
        """Return the number of the first parameter that was found, from 1 on; 0 for none."""

    @abstractmethod
    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Look at a step; a `LossError`, for this one or the last one, is raised on every rank alike."""

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - one steps at a time
        """Put back what was changed for a step (local)."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient

    def describe_delayed(self, parameter: nn.Parameter) -> str:
        return (
            f"The gradient of {self.delayed[id(parameter)]}, which delay_all_reduce_named_params holds back, was not "
            "finite on one of the ranks"
        )

    def _hide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let an optimizer's step change nothing."""
        self._hidden = [(each, each.grad) for each in parameters]
        for each in parameters:
            each.grad = None


@final
class FiniteGradients(FiniteCheck):
    def __init__(self, nonfinite: Literal["stop", "skip"]) -> None:
        super().__init__(nonfinite)
        self._own = 0

    def look_at(self, bucket: Bucket) -> None:
        odd = "" if self._own else bucket.name_nonfinite()
        if odd in self._names:
            self._own = 1 + self._names.index(odd)

    def take_number(self) -> int:
        number, self._own = self._own, 0
        return number

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        if not (self._found or self.delayed) or getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer is given what a GradScaler has found
        looked_at = parameters if self._found else [each for each in parameters if id(each) in self.delayed]
        odd = next((each for each in looked_at if each.grad is not None and not is_finite(each.grad)), None)
        if odd is None:
            return
        found = self._found or self.describe_delayed(odd)
        if self._skips:
            _LOGGER.warning("%s, so that optimizer step changes nothing. (LS312)", found)
            self._hide(parameters)
            return
        raise LossError(
            f"{found}, and the mean over the ranks with it; the optimizer's step at {user_line()} would make "
            f"parameters NaN on all of them. {NONFINITE_ADVICE} (LS312)"
        )


def describe_nonfinite(status: GroupStatus, names: Sequence[str], backward: int) -> str:
    """Return in words which gradients were not finite on which ranks; empty if all were (pure)."""
    places = [
        f"of {names[min(number, len(names)) - 1]} on rank {rank}"
        for rank, number in enumerate(status.nonfinite)
        if number
    ]
    return f"In backward {backward} the gradient {' and '.join(places)} was not finite" if places else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedUpdate:
    largest: Tensor
    """The largest magnitude in each gradient, on the host after `arrival`."""
    arrival: torch.Event
    parameters: Sequence[nn.Parameter]
    """Those that had a gradient."""
    is_left_out: bool
    """Whether the device left the step out if one was not finite."""
    line: CodeLine

    def read(self) -> Sequence[bool]:
        """Return whether the gradient of each parameter was finite, when that has arrived."""
        self.arrival.synchronize()
        return [math.isfinite(value) for value in self.largest.tolist()]


@final
class FiniteGradientsOnDevice(FiniteCheck):
    num_backwards_late = 1

    def __init__(self, nonfinite: Literal["stop", "skip"]) -> None:
        super().__init__(nonfinite)
        self._numbers: dict[str, int] = {}
        self._looked: list[tuple[Sequence[str], Tensor]] = []
        self._devices: set[torch.device] = set()
        self._before: tuple[Sequence[torch.Event], Sequence[tuple[Sequence[str], Tensor]]] | None = None
        self._launched: weakref.WeakKeyDictionary[Optimizer, _LaunchedUpdate] = weakref.WeakKeyDictionary()
        self._updated: weakref.WeakKeyDictionary[Optimizer, tuple[object, set[nn.Parameter]]] = (
            weakref.WeakKeyDictionary()
        )
        self._marks: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()

    def know(self, named: Sequence[tuple[str, nn.Parameter]], module: nn.Module | None) -> None:
        super().know(named, module)
        self._numbers = {name: number for number, name in enumerate(self._names, start=1)}

    def look_at(self, bucket: Bucket) -> None:
        if isinstance(bucket, SparseBucket):
            return
        slots = [slot for slot in bucket.slots if slot.place.numel() > 0]
        if slots:
            largest = _largest([slot.place for slot in slots])
            self._looked.append(([slot.name for slot in slots], _copy_to_host(largest)))
            self._devices.add(largest.device)

    def take_number(self) -> int:
        before, looked = self._before, self._looked
        self._before, self._looked = None, []
        if looked:
            self._before = [record_event(device) for device in self._devices], looked
        if before is None:
            return 0
        events, parts = before
        for event in events:
            event.synchronize()
        for names, largest in parts:
            for name, value in zip(names, largest.tolist(), strict=True):
                if not math.isfinite(value):
                    return self._numbers.get(name, 0)
        return 0

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Judge the last step of this optimizer, and launch a look at this one."""
        self._unmark(optimizer)
        self._judge(optimizer)
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer is given what a GradScaler has found
        held = [each for each in parameters if each.grad is not None and not each.grad.is_sparse and each.numel() > 0]
        if not held:
            return
        largest = _largest([each.grad for each in held if each.grad is not None])
        can_be_left_out = self._can_be_left_out(optimizer, held)
        step = _LaunchedUpdate(
            largest=_copy_to_host(largest),
            arrival=record_event(largest.device),
            parameters=held,
            is_left_out=can_be_left_out,
            line=user_line(),
        )
        if can_be_left_out:
            mark = (~largest.isfinite().all()).float()
            fused: Any = optimizer
            fused.grad_scale, fused.found_inf = None, mark
            self._marks[optimizer] = mark
        elif self._skips and not all(step.read()):
            self._log_skipped(step, "changes")
            self._hide(parameters)
            return
        else:
            self._updated[optimizer] = optimizer.state, {*self._updated_parameters(optimizer), *held}
        self._launched[optimizer] = step

    def after_step(self, optimizer: Optimizer) -> None:
        self._unmark(optimizer)
        super().after_step(optimizer)

    def _can_be_left_out(self, optimizer: Optimizer, held: Sequence[nn.Parameter]) -> bool:
        return (
            has_step_on_device(optimizer)
            and not optimizer_step_pre_hooks(optimizer)
            and self._updated_parameters(optimizer).issuperset(held)
            and len({each.device for each in held}) == 1
        )

    def _updated_parameters(self, optimizer: Optimizer) -> set[nn.Parameter]:
        """Return the parameters whose state a step has made: one that is left out would leave it without values."""
        state, updated = self._updated.get(optimizer, (None, set()))
        return updated if state is optimizer.state else set()

    def _unmark(self, optimizer: Optimizer) -> None:
        mark = self._marks.pop(optimizer, None)
        fused: Any = optimizer
        if mark is not None and getattr(optimizer, "found_inf", None) is mark:
            del fused.grad_scale, fused.found_inf

    def _judge(self, optimizer: Optimizer) -> None:
        step = self._launched.pop(optimizer, None)
        if step is None or all(step.read()):
            return
        if self._skips:
            self._log_skipped(step, "changed")
            return
        became = (
            "changed nothing: the device left it out"
            if step.is_left_out
            else "has made parameters NaN on all of them: load a checkpoint"
        )
        raise LossError(
            f"{self._describe(step)}, and the mean over the ranks with it. The optimizer's step at {step.line} "
            f"{became}. This is known one step later, because the device is not waited for. {NONFINITE_ADVICE} (LS312)"
        )

    def _log_skipped(self, step: _LaunchedUpdate, verb: str) -> None:
        _LOGGER.warning("%s, so the optimizer's step at %s %s nothing. (LS312)", self._describe(step), step.line, verb)

    def _describe(self, step: _LaunchedUpdate) -> str:
        parameter = step.parameters[list(step.read()).index(False)]
        if id(parameter) in self.delayed:
            return self.describe_delayed(parameter)
        return self._found or f"A mean gradient of shape {tuple(parameter.shape)} was not finite"


@torch.no_grad()
def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor: finite if all numbers are, and never too large to be held."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return torch.stack([each.float().to(real[0].device) for each in foreach_norm(real, ord=math.inf)])


def _copy_to_host(largest: Tensor) -> Tensor:
    """Start to copy to pinned memory; it has arrived after an event that is recorded now."""
    on_host = torch.empty(largest.shape, pin_memory=True)
    return on_host.copy_(largest, non_blocking=True)
