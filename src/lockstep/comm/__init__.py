"""Communication: process groups and what is built on their collectives.

A *group* is a `torch.distributed.ProcessGroup`; there is no other interface to communication in Lockstep. A
*world* is the place of one worker: its rank, how many workers there are, and the group, or None when it is alone.

Invariants: one default group per process; tearing down twice is fine; code that takes a world works without a
group, as the only worker.
"""

from lockstep.comm.backends import register_backends
from lockstep.comm.bootstrap.process_group import destroy_process_group, init_process_group, join_world, launched_world
from lockstep.comm.calls import calls_for
from lockstep.comm.capabilities import GroupCapabilities, capabilities_of, raise_if_broken
from lockstep.comm.lost_ranks import report_failure, send_exit_notices
from lockstep.comm.messages import TensorBroadcast, TensorLayout, allocate_buffer, broadcast_tensors
from lockstep.comm.ordered import OrderedReductions, ordered_all_reduce, ordered_hook
from lockstep.comm.ring import ring_all_reduce, ring_hook
from lockstep.comm.world import World, current_world
from lockstep.torch_private.groups import store_of as group_store

register_backends()

__all__ = [
    "GroupCapabilities",
    "OrderedReductions",
    "TensorBroadcast",
    "TensorLayout",
    "World",
    "allocate_buffer",
    "broadcast_tensors",
    "calls_for",
    "capabilities_of",
    "current_world",
    "destroy_process_group",
    "group_store",
    "init_process_group",
    "join_world",
    "launched_world",
    "ordered_all_reduce",
    "ordered_hook",
    "raise_if_broken",
    "report_failure",
    "ring_all_reduce",
    "ring_hook",
    "send_exit_notices",
]
