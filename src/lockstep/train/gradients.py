"""Are the gradients numbers? Asked once per step, in one pass over them and without waiting for the device."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def flag_nonfinite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a tensor of one number, which is not 0 if any of the gradients is infinite or not a number.

    The operator is that of a GradScaler, here with a scale of 1: it is the only one that looks at all of them at once.
    """
    found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        by_dtype.setdefault(real.dtype, []).append(real)
    for alike in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, scale)
    return found


def name_nonfinite(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the name of the first parameter whose gradient is infinite or not a number; empty if none is."""
    bad = (name for name, parameter in parameters if parameter.grad is not None and not parameter.grad.isfinite().all())
    return next(bad, "")
