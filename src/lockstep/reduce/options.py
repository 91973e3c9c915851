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
    num_shards: int | None = None
    """Add in the order of the tree over so many shards, of which each rank runs several; None for the group's order.
    With it gradients are dense, and what is accumulated without synchronising is left to `Partials`."""
    compares_buffers: bool = True
    """Whether buffers must agree between ranks when the model is seen to have changed."""
    skips_unused: bool = False
    """Whether buckets of which nothing arrived are not sent; all ranks must use the same parameters then."""
