"""Which gradient lies where in which bucket. Pure: descriptions in, a plan out.

Gradients arrive roughly in the reverse of the order in which parameters were registered, and that is the order in which
buckets travel (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3). They are filled from the end: the last one
is small, for nothing of the backward is left to hide its way.

A bucket of n parameters:

    offset 0                                                                         num_elements
    | gradient 0 | pad | gradient 1 | pad | ... | gradient n-1 | pad | used counts | status trailer |
    ^ every gradient starts on a multiple of 64 bytes                | n numbers   | in the last bucket only

[Note: used-parameter counts] After the gradients each bucket carries one number per parameter: how many ranks had a
gradient for it. It costs no message of its own, and distinguishes a parameter that no rank used (its `.grad` must stay
untouched) from one whose gradients happen to add up to zero. The number is compared with zero only: in bfloat16 the
ones of 300 ranks add up to 256, but never to zero.

`lockstep.reduce.status` has the content of the status trailer, and how it is sent otherwise.

A communication hook must see gradients and nothing else, and a sparse gradient has no place for numbers: with either,
buckets hold gradients without gaps, and counts and trailer are sent in a message of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ALIGNMENT_BYTES = 64
"""Where a gradient may start: a cache line, so that kernels treat each the same wherever it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Its strides, which its gradient gets too."""
    dtype: torch.dtype
    device: torch.device
    num_elements: int
    is_sparse: bool = False
    """Whether its gradient is sparse; such a one has a bucket of its own."""

    def __str__(self) -> str:
        """Show what ranks compare, in one line."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        kind = ", sparse gradient" if self.is_sparse else ""
        return f"{self.name} ({shape}, {self.dtype}, strides {list(self.stride)}{kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLimits:
    """When a bucket is full. A bucket closes with the gradient that takes it to its limit or over."""

    sizes_bytes: tuple[int, ...] = (1 << 20, 25 << 20)
    """Limits of the last bucket to be sent, of the one before it, ..., for each dtype and device; the last limit is
    that of all the rest. The default is torch's."""

    def limit_bytes(self, number: int) -> int:
        return self.sizes_bytes[min(number, len(self.sizes_bytes) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    parameter: int
    """Index of the parameter in registration order."""
    offset: int
    """First element in the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    dtype: torch.dtype
    device: torch.device
    slots: tuple[SlotPlan, ...]
    """Its gradients, in the order in which they are expected."""
    is_sparse: bool
    """Whether its one gradient is sparse; then it has no buffer."""
    num_gradient_elements: int
    """Length of the part with the gradients; used-parameter counts begin here if the bucket carries them."""
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPlan:
    buckets: tuple[BucketPlan, ...]
    """In the order in which they are sent."""
    has_extra_message: bool
    """Whether used-parameter counts and status trailer have a message of their own; else they are in the buckets."""
    trailer_length: int
    """How many numbers the last message carries besides gradients and counts."""


def plan_buckets(
    specs: Sequence[ParameterSpec],
    limits: BucketLimits,
    *,
    order: Sequence[int] = (),
    trailer_length: int = 0,
    only_gradients: bool = False,
    has_extra_message: bool = False,
) -> ReductionPlan:
    """Return buckets as they are sent; `order` is that in which gradients arrive, else the reverse of registration."""
    if order and sorted(order) != list(range(len(specs))):
        raise ValueError(f"The order {list(order)} is not one of {len(specs)} gradients: each must be named once.")
    members = _assign(specs, limits, order or range(len(specs) - 1, -1, -1))
    has_extra_message = has_extra_message or only_gradients or any(spec.is_sparse for spec in specs)
    buckets = [_lay_out(specs, group, has_counts=not has_extra_message, align=not only_gradients) for group in members]
    if not has_extra_message:
        buckets[-1] = replace(buckets[-1], num_elements=buckets[-1].num_elements + trailer_length)
    return ReductionPlan(buckets=tuple(buckets), has_extra_message=has_extra_message, trailer_length=trailer_length)


def _assign(specs: Sequence[ParameterSpec], limits: BucketLimits, order: Sequence[int]) -> list[list[int]]:
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    num_closed: dict[tuple[torch.dtype, torch.device], int] = {}
    filled: list[list[int]] = []
    for index in reversed(order):
        spec = specs[index]
        if spec.is_sparse:
            filled.append([index])
            continue
        key = (spec.dtype, spec.device)
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + spec.num_elements * spec.dtype.itemsize
        number = num_closed.get(key, 0)
        if sizes[key] >= limits.limit_bytes(number):
            filled.append(open_buckets.pop(key))
            sizes[key], num_closed[key] = 0, number + 1
    # A bucket is sent when its last gradient is expected, which was the first to be put in.
    place = {index: number for number, index in enumerate(order)}
    members = sorted([*filled, *open_buckets.values()], key=lambda indices: place[indices[0]])
    return [indices[::-1] for indices in members]


def _lay_out(specs: Sequence[ParameterSpec], members: Sequence[int], *, has_counts: bool, align: bool) -> BucketPlan:
    first = specs[members[0]]
    step = max(ALIGNMENT_BYTES // first.dtype.itemsize, 1) if align else 1
    slots = []
    offset = 0
    for index in members:
        slots.append(SlotPlan(parameter=index, offset=offset))
        offset += -(-specs[index].num_elements // step) * step
    return BucketPlan(
        dtype=first.dtype,
        device=first.device,
        slots=tuple(slots),
        is_sparse=first.is_sparse,
        num_gradient_elements=offset,
        num_elements=offset + len(slots) * has_counts,
    )
