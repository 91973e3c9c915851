"""What an ordered all-reduce works on: flat tensors, and who holds which partials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lockstep.comm.messages import flatten
from lockstep.comm.world import World
from lockstep.shards.tree import Node

PartialLayout = Sequence[Sequence[Node]]
"""The nodes that each rank holds, in rank order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlatReduction:
    """One reduction of flat tensors."""

    partials: dict[Node, Tensor]
    """What this rank holds: 1-D, contiguous, real, one length."""
    out: Tensor
    """Where the result goes: likewise; may be one of the partials."""
    layout: list[list[Node]]
    """Sorted nodes of every rank: the order in which a rank sends them and its peers receive them."""
    num_shards: int
    world: World


def is_one_addition(reduction: FlatReduction) -> bool:
    """Whether any all-reduce is in the order of the tree, and rounds as torch does. [Note: one addition]."""
    return is_one_addition_each(reduction.layout, reduction.out.dtype)


def is_one_addition_each(layout: PartialLayout, dtype: torch.dtype) -> bool:
    """Return the same, of a layout and a dtype."""
    return [len(nodes) for nodes in layout] == [1, 1] and dtype in {torch.float32, torch.float64}


def flatten_reduction(
    partials: Mapping[Node, Tensor], out: Tensor, num_shards: int, layout: PartialLayout, world: World
) -> FlatReduction:
    """Return a reduction of flat tensors: copies, where one is not contiguous or shorter than there are ranks."""
    return FlatReduction(
        partials={node: flatten(partial, world.world_size) for node, partial in partials.items()},
        out=flatten(out, world.world_size),
        layout=[sorted(nodes) for nodes in layout],
        num_shards=num_shards,
        world=world,
    )
