"""Making what processes of one host share: a group, or a comparison of calls only."""

from datetime import timedelta

from torch.distributed import Store

from lockstep.comm.hosts import GroupHosts, GroupMembers, GroupSetUp
from lockstep.comm.shm.call_comparer import SharedMemoryComparer
from lockstep.comm.shm.comparison import NUM_BYTES
from lockstep.comm.shm.file_layout import PAGE, FileLayout
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.rendezvous import NotShared, connect_ranks
from lockstep.comm.shm.torch_beside import NO_ACCELERATORS, AcceleratorBackends


def make_shm_group(
    store: Store,
    rank: int,
    timeout: timedelta,
    members: GroupMembers,
    set_up: GroupSetUp,
    accelerators: AcceleratorBackends = NO_ACCELERATORS,
) -> tuple[ShmProcessGroup | NotShared, GroupHosts]:
    """Make a group of processes of one host (collective over its ranks); return it or why not, and the ranks' hosts."""
    layout = FileLayout(len(members.names))
    handles, hosts = connect_ranks(store, rank, layout, set_up.deadline, members, set_up.hosts)
    if isinstance(handles, NotShared):
        return handles, hosts
    return ShmProcessGroup(store, rank, handles, layout, timeout, members.names, accelerators), hosts


def make_shared_memory_comparer(
    store: Store, rank: int, timeout: timedelta, members: GroupMembers, set_up: GroupSetUp, *, waits: bool
) -> SharedMemoryComparer | None:
    """Connect ranks that only compare calls (collective); None if they are not on one host."""
    layout = FileLayout(len(members.names), send_buffer_bytes=NUM_BYTES, slot_bytes=PAGE)
    handles, _ = connect_ranks(store, rank, layout, set_up.deadline, members, set_up.hosts)
    if isinstance(handles, NotShared):
        return None
    memory = Memory(handles.descriptor, layout, rank)
    peers = Peers(memory, rank, handles, timeout.total_seconds(), members.names)
    return SharedMemoryComparer(memory, peers, waits=waits)
