"""Shards: the fixed slices of a step's work, and who runs them.

A run has `num_shards` shards, whatever the number of workers. Every worker runs a contiguous range of them, in
order; the random state of a shard follows from the seed, the place in the data and the shard's number.

Invariants: pure (numbers in, numbers out); every shard is run by exactly one worker; ranges are as even as they
can be and in rank order; what a shard works on does not depend on the number of workers.
"""

from lockstep.shards.assignment import even_ranges, shard_range, split_evenly
from lockstep.shards.seeds import derive_seed
from lockstep.shards.tree import (
    Node,
    ShardTask,
    add_in_tree_order,
    completed_nodes,
    partial_nodes,
    partial_nodes_by_size,
    plan_shard_tasks,
)

__all__ = [
    "Node",
    "ShardTask",
    "add_in_tree_order",
    "completed_nodes",
    "derive_seed",
    "even_ranges",
    "partial_nodes",
    "partial_nodes_by_size",
    "plan_shard_tasks",
    "shard_range",
    "split_evenly",
]
