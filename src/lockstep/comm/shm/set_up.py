"""Making what processes of one host share: a group, or a comparison of calls only."""

from datetime import timedelta

from torch.distributed import Store

from lockstep.comm.hosts import GroupHosts, GroupMembers, GroupSetUp
from lockstep.comm.shm.call_comparer import SharedMemoryComparer
from lockstep.comm.shm.file_layout import PAGE, FileLayout
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.published_calls import NUM_BYTES
from lockstep.comm.shm.rendezvous import NotShared, connect_ranks
from lockstep.comm.shm.torch_backends import NO_ACCELERATORS, AcceleratorBackends


def make_shm_group(
    store: Store,
    rank: int,
    timeout: timedelta,
    members: GroupMembers,
    set_up: GroupSetUp,
    accelerators: AcceleratorBackends = NO_ACCELERATORS,
) -> tuple[ShmProcessGroup | NotShared, GroupHosts]:
    """Make a group of processes of one host (collective over its ranks).

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        timeout: How long a call may take.
        members: Who the ranks are.
        set_up: When the group must be made, and what is known of its hosts.
        accelerators: What carries the tensors of accelerators.

    Returns:
        The group, or why there is none; and where the ranks are.

    Raises:
        GroupError: Some rank did not connect in time.
        PeerLostError: A rank was lost before all had come.
    """
    layout = FileLayout(len(members.names))
    handles, hosts = connect_ranks(store, rank, layout, set_up.deadline, members, set_up.hosts)
    if isinstance(handles, NotShared):
        return handles, hosts
    return ShmProcessGroup(store, rank, handles, layout, timeout, members.names, accelerators), hosts


def make_shared_memory_comparer(
    store: Store, rank: int, timeout: timedelta, members: GroupMembers, set_up: GroupSetUp, *, waits: bool
) -> SharedMemoryComparer | None:
    """Connect ranks that only compare calls (collective); None if they are not on one host.

    Args:
        store: A store for this alone.
        rank: Number of this process in the group.
        timeout: How long a call may take.
        members: Who the ranks are.
        set_up: When the ranks must be connected, and what is known of their hosts.
        waits: Whether every call waits for all ranks to make it.

    Raises:
        GroupError: Some rank did not connect in time.
        PeerLostError: A rank was lost before all had come.
    """
    layout = FileLayout(len(members.names), send_buffer_bytes=NUM_BYTES, slot_bytes=PAGE)
    handles, _ = connect_ranks(store, rank, layout, set_up.deadline, members, set_up.hosts)
    if isinstance(handles, NotShared):
        return None
    memory = Memory(handles.descriptor, layout, rank)
    peers = Peers(memory, rank, handles, timeout.total_seconds(), members.names)
    return SharedMemoryComparer(memory, peers, waits=waits)
