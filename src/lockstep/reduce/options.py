"""How a reducer reduces."""

from dataclasses import dataclass

import torch

from lockstep.reduce.plan import BucketLimits

_TORCHS_LIMITS = BucketLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """What the owner of a reducer chooses."""

    limits: BucketLimits = _TORCHS_LIMITS
    """Sizes of the buckets."""
    average: bool = True
    """Divide by the number of ranks (before adding, as torch does, so that half precision does not overflow)."""
    as_view: bool = True
    """Whether `.grad` is a view into its bucket as torch understands it; it lies there in any case."""
    dtype: torch.dtype | None = None
    """Reduce in this dtype; None for that of each parameter."""
    follows_arrival: bool = True
    """Whether to plan anew in the order of arrival. [Note: order of arrival]"""
    skips_unused: bool = False
    """Whether buckets of which nothing arrived are not sent; all ranks must use the same parameters then."""
