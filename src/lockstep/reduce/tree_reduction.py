"""How a bucket is reduced where ranks run several shards each: as sums of partials, in the order of the tree.

The message of a bucket holds the sum that the last shard's gradients were added to; partials that this rank keeps
beside it, because they belong elsewhere in the tree, are messages of their own. [Note: reduction order] in
`lockstep.shards.tree`.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import OrderedReductions, World
from lockstep.reduce.bucket_set import Bucket
from lockstep.reduce.partials import Partials
from lockstep.reduce.reduction import (
    Finish,
    dense_message,
    gather_segments,
    own_segment,
    segment_length,
    wait_for,
)
from lockstep.shards import Node, add_in_tree_order


@final
class TreeReduction:
    """Adds up the partials of all ranks."""

    scale = 1.0
    is_one_at_a_time = False
    runs_users_code = False

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._ordered = OrderedReductions(world, num_shards)
        self._partials = Partials()
        self._has_nothing = False
        self._nodes: Sequence[Sequence[Node]] = [[(rank, rank + 1)] for rank in range(world.world_size)]

    def expect(self, partials: Partials, nodes: Sequence[Sequence[Node]]) -> None:
        """Let the next reductions be those of all shards (local).

        `nodes` are the subtrees whose sums each rank will have: those it keeps, then that with the gradients to come.
        """
        self._partials, self._nodes = partials, nodes
        self._has_nothing = False

    def expect_nothing(self) -> None:
        """Let this rank's part of what is still to be reduced be empty."""
        self._partials, self._has_nothing = Partials(), True

    def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:  # noqa: ARG002
        """Start to add up a bucket (collective)."""
        messages = self._messages(bucket)
        partials = dict(zip(self._nodes[self._world.rank], messages, strict=True))
        return self._ordered.start(partials, messages[-1], self._nodes, waits=waits)

    def reduce_scatter(self, bucket: Bucket, *, index: int, is_last: bool) -> Finish:  # noqa: ARG002
        """Start to send each rank the partials of its segment, and to add up those of this rank's (collective)."""
        messages = self._messages(bucket)
        message = messages[-1]
        size, own = segment_length(message, self._world), own_segment(message, self._world)
        sent = [
            part
            for parts in zip(*(_split(each, size, self._world) for each in messages), strict=True)
            for part in parts
        ]
        num_received = sum(len(nodes) for nodes in self._nodes)
        received = torch.empty(num_received * own.numel(), dtype=message.dtype, device=message.device)
        work = dist.all_to_all_single(
            received,
            torch.cat(sent),
            [len(nodes) * own.numel() for nodes in self._nodes],
            [part.numel() * len(messages) for part in _split(message, size, self._world)],
            group=self._world.group,
            async_op=True,
        )
        nodes = [node for held in self._nodes for node in held]

        def finish() -> None:
            wait_for(work)
            parts = dict(zip(nodes, received.view(num_received, own.numel()), strict=True))
            own.copy_(add_in_tree_order(parts, self._num_shards, torch.add))

        return finish

    def all_gather(self, bucket: Bucket) -> Finish:
        """Start to gather the segments (collective)."""
        return gather_segments(dense_message(bucket), self._world)

    def _messages(self, bucket: Bucket) -> list[Tensor]:
        """Return what this rank holds of a bucket, in the order of its nodes."""
        if self._has_nothing:
            # The message, which is of zeros, in place of each, because there may be no memory for others. Not if it has
            # the status, which would be added several times; the last bucket is a small one.
            has_status = bucket.message.numel() > bucket.gradients.numel() + bucket.used_counts.numel()
            others = torch.zeros_like(bucket.message) if has_status else bucket.message
            return [*[others] * (len(self._nodes[self._world.rank]) - 1), bucket.message]
        return [*bucket.add(self._partials), bucket.message]


def _split(message: Tensor, size: int, world: World) -> list[Tensor]:
    return [message[size * rank : size * (rank + 1)] for rank in range(world.world_size)]
