"""How a reducer reduces."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.devices.transfer import is_asynchronous
from lockstep.reduce.plan import BucketLimits

_TORCHS_LIMITS = BucketLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """What the owner of a reducer chooses."""

    purpose: str
    """What is reduced, in words: ranks compare it, and errors show it."""
    limits: BucketLimits = _TORCHS_LIMITS
    as_view: bool = True
    """Whether `.grad` is a view into its bucket as torch understands it; it lies there in any case."""
    dtype: torch.dtype | None = None
    """Reduce in this dtype; None for that of each parameter."""
    follows_arrival: bool = True
    """Whether to plan anew in the order of arrival. [Note: order of arrival]"""
    holds_partials: bool = False
    """Whether what `.grad` holds before a backward is a partial sum of the same step; then gradients are dense."""
    compares_buffers: bool = True
    """Whether buffers must agree between ranks when the model has changed."""
    skips_unused: bool = False
    """Whether buckets of which nothing arrived are not sent; all ranks must use the same parameters then."""
    is_asynchronous: Callable[[torch.device], bool] = is_asynchronous
    """Whether work on a device goes on after the call that starts it; tests let the CPU count as such."""
