"""Which gradient lies where in which bucket. Pure: descriptions in, a plan out.

Gradients arrive roughly in the reverse of the order in which parameters were registered, so buckets are filled in
that order; the first one is small, so that something is on its way early in backward (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2.3).

A bucket of n parameters:

    offset 0                                                                         num_elements
    | gradient 0 | pad | gradient 1 | pad | ... | gradient n-1 | pad | presence 0 .. n-1 |
    ^ every gradient starts on a multiple of 64 bytes              ^ [Note: presence]

[Note: presence] After the gradients each bucket carries one number per parameter: how many ranks had a gradient for
it. It costs no message of its own, and tells a parameter that nobody used (its `.grad` must stay untouched) from one
whose gradients happen to add up to zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT_BYTES = 64
"""Where a gradient may start: a cache line, so that kernels treat each the same wherever it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What the plan needs to know of a parameter."""

    name: str
    """Full name in the module."""
    shape: tuple[int, ...]
    """Its shape."""
    stride: tuple[int, ...]
    """Its strides, which its gradient gets too."""
    dtype: torch.dtype
    """Its dtype; a bucket has one."""
    device: torch.device
    """Its device; a bucket has one."""
    num_elements: int
    """How many numbers it has."""

    def __str__(self) -> str:
        """Show what ranks compare, in one line."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} ({shape}, {self.dtype}, strides {list(self.stride)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLimits:
    """When a bucket is full. A bucket closes with the gradient that takes it to its limit or over."""

    first_bytes: int = 1 << 20
    """Limit of the first bucket of each dtype and device."""
    other_bytes: int = 25 << 20
    """Limit of the others; torch's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Where one gradient lies."""

    parameter: int
    """Index of the parameter in registration order."""
    offset: int
    """First element in the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """The layout of one bucket."""

    dtype: torch.dtype
    """Of every element."""
    device: torch.device
    """Where the buffer lies."""
    slots: tuple[SlotPlan, ...]
    """Its gradients, in the order in which they are expected."""
    presence_offset: int
    """First of the `len(slots)` presence numbers."""
    num_elements: int
    """Length of the buffer."""


def describe_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterSpec]:
    """Describe named parameters."""
    return [
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=parameter.dtype,
            device=parameter.device,
            num_elements=parameter.numel(),
        )
        for name, parameter in parameters
    ]


def plan_buckets(specs: Sequence[ParameterSpec], limits: BucketLimits) -> list[BucketPlan]:
    """Lay out the gradients of `specs`, given in registration order, in buckets in the order they should travel."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    opened: set[tuple[torch.dtype, torch.device]] = set()
    closed: list[list[int]] = []
    for index in reversed(range(len(specs))):
        key = (specs[index].dtype, specs[index].device)
        members = open_buckets.setdefault(key, [])
        members.append(index)
        limit = limits.other_bytes if key in opened else limits.first_bytes
        if sum(specs[member].num_elements for member in members) * key[0].itemsize >= limit:
            closed.append(open_buckets.pop(key))
            opened.add(key)
    # A bucket travels when its last gradient is expected, hence sorted by the smallest index.
    everything = sorted([*closed, *open_buckets.values()], key=min, reverse=True)
    return [_lay_out(specs, members) for members in everything]


def _lay_out(specs: Sequence[ParameterSpec], members: Sequence[int]) -> BucketPlan:
    first = specs[members[0]]
    align = max(ALIGNMENT_BYTES // first.dtype.itemsize, 1)
    slots = []
    offset = 0
    for index in members:
        slots.append(SlotPlan(parameter=index, offset=offset))
        offset += -(-specs[index].num_elements // align) * align
    return BucketPlan(
        dtype=first.dtype,
        device=first.device,
        slots=tuple(slots),
        presence_offset=offset,
        num_elements=offset + len(slots),
    )
