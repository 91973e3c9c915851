"""Are the gradients numbers? Asked closely, where `lockstep.reduce.finite_check` has a suspicion."""

from collections.abc import Iterable

from torch import nn


def are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether no gradient is infinite or not a number; on a GPU this waits for the device."""
    return not any(_is_bad(parameter) for parameter in parameters)


def name_nonfinite(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the name of the first parameter whose gradient is infinite or not a number; empty if none is."""
    return next((name for name, parameter in parameters if _is_bad(parameter)), "")


def _is_bad(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and not bool(parameter.grad.isfinite().all())
