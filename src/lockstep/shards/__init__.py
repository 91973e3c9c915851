"""Shards: the fixed parts of the work of a step, and which worker runs which.

A run has `num_shards` shards, whatever the number of workers. Each worker runs a contiguous range of shards. The random
state of a shard is derived from the seed, the epoch, the step and the shard's number.

Invariants: all modules are pure. Exactly one worker runs each shard. Even ranges differ in length by at most one and
are in rank order. The samples of a shard do not depend on the number of workers.
"""

from lockstep.shards.assignment import derive_seed, even_ranges, shard_range, split_evenly
from lockstep.shards.tree import (
    Node,
    ShardTask,
    add_in_tree_order,
    completed_nodes,
    partial_nodes,
    partial_nodes_by_size,
    plan_shard_tasks,
    sum_in_tree_order,
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
    "sum_in_tree_order",
]
