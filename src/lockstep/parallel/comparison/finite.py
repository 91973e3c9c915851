"""Gradients that are not finite: on which rank, in which parameter, and what becomes of the optimizer's step.

A mean with a NaN of one rank is NaN on all. So each rank looks at its own gradients before they are reduced, and what
it finds travels with the status. A step with them would make every parameter NaN. But a backward with them is no
mistake yet: a GradScaler looks for them and leaves the step out, and a script may clear them. So the step is looked at.

Here for the CPU; for other devices `lockstep.parallel.comparison.finite_on_device`.
"""

import logging
from collections.abc import Sequence
from typing import Final, Literal, Protocol, final

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import LossError
from lockstep.processes.user_line import user_line
from lockstep.reduce import GroupStatus
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.tensor_bits import is_finite

_LOGGER = logging.getLogger("lockstep")

NONFINITE_ADVICE: Final = (
    "Look for a sample that is not finite, for a logarithm or square root of zero, or for a division by it; or try a "
    'smaller learning rate. Wrap with nonfinite="skip" to leave such steps out.'
)


class FiniteCheck(Protocol):
    """Looks for gradients that are not finite, on one rank."""

    def know(self, names: list[str]) -> None:
        """Say by which names the parameters are numbered, the same on all ranks (local)."""

    def look_at(self, bucket: Bucket) -> None:
        """Look at gradients that are about to be reduced (local)."""

    def take_number(self) -> int:
        """Return the number of the first parameter that was found, from 1 on; 0 for none (local)."""

    def note(self, status: GroupStatus, num_reductions: int) -> None:
        """Note what was found on all ranks in a reduction (local)."""

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Look at a step; a `LossError`, for this one or the last one, is raised on every rank alike."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Put back what was changed for a step (local)."""


@final
class FiniteGradients:
    """Looks for gradients on the CPU that are not finite (a `FiniteCheck`)."""

    def __init__(self, nonfinite: Literal["stop", "skip"]) -> None:
        self._skips = nonfinite == "skip"
        self._names: list[str] = []
        self._own = 0
        self._found = ""
        self._hidden: list[tuple[nn.Parameter, object]] = []

    def know(self, names: list[str]) -> None:
        self._names = names

    def look_at(self, bucket: Bucket) -> None:
        odd = "" if self._own else bucket.name_nonfinite()
        if odd in self._names:
            self._own = 1 + self._names.index(odd)

    def take_number(self) -> int:
        number, self._own = self._own, 0
        return number

    def note(self, status: GroupStatus, num_reductions: int) -> None:
        self._found = describe_nonfinite(status, self._names, num_reductions)

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        if not self._found or getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer is given what a GradScaler has found
        if all(is_finite(each.grad) for each in parameters if each.grad is not None):
            return
        if self._skips:
            _LOGGER.warning("%s, so that optimizer step changes nothing. (LS312)", self._found)
            self._hidden = [(each, each.grad) for each in parameters]
            for each in parameters:
                each.grad = None
            return
        raise LossError(
            f"{self._found}, and the mean over the ranks with it; the optimizer's step at {user_line()} would make "
            f"parameters NaN on all of them. {NONFINITE_ADVICE} (LS312)"
        )

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - one steps at a time
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient  # type: ignore[assignment]


def describe_nonfinite(status: GroupStatus, names: Sequence[str], backward: int) -> str:
    """Return in words which gradients were not finite on which ranks; empty if all were (pure)."""
    places = [
        f"of {names[min(number, len(names)) - 1]} on rank {rank}"
        for rank, number in enumerate(status.nonfinite)
        if number
    ]
    return f"In backward {backward} the gradient {' and '.join(places)} was not finite" if places else ""
