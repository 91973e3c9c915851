"""The process group over shared memory: torch's collectives, on the phases and channels of this package.

`ProcessGroup` is torch's interface for a group written in Python: Python calls these methods directly, torch's C++ code
(its DistributedDataParallel, functional collectives) through a trampoline. What has no form in shared memory (sparse
tensors, tensors on other devices) is done by a backend of torch within the group.

Every method has the name, the arguments and the meaning that `torch.distributed.ProcessGroup` gives it; every rank of
the group must call, `send` and `recv` excepted. All raise, beside what a bad argument raises:

- `CollectiveMismatchError` on every rank alike, if ranks make different calls; the group stays usable;
- `PeerLostError`, if a rank is lost; the group is broken then, and later calls raise the same;
- `CollectiveTimeoutError`, if the group's timeout passes; likewise.
"""

from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store, Work

from lockstep.comm.calls import describe_call, purpose_of_calls
from lockstep.comm.capabilities import GroupCapabilities
from lockstep.comm.collectives import (
    ALL_REDUCE,
    Collective,
    CollectiveCall,
    add_collectives,
    refuse_one_output_twice,
)
from lockstep.comm.group import LockstepGroup
from lockstep.comm.hosts import GroupBackends, GroupHosts, GroupMembers, GroupSetUp
from lockstep.comm.open_calls import OPEN_GROUPS, CallEvents
from lockstep.comm.shm import collectives
from lockstep.comm.shm.arithmetic import BY_TORCH, reduction
from lockstep.comm.shm.collectives import (
    as_stored,
    check_dense,
    check_writable,
    describe_message,
    flatten,
    is_plain,
    read_allocation,
    read_one,
    write_back,
)
from lockstep.comm.shm.comparison import NUM_BYTES, SharedMemoryComparer
from lockstep.comm.shm.file_layout import PAGE, FileLayout
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.messages import PointToPoint
from lockstep.comm.shm.peers import Peers, PeerState
from lockstep.comm.shm.phases import PhaseExchange, PreparedCall
from lockstep.comm.shm.programs import barrier, is_short, one_part_each, reduce_short
from lockstep.comm.shm.rendezvous import NotShared, connect_ranks
from lockstep.comm.shm.work import CallRunner, WorkQueue
from lockstep.comm.torch_backends import TorchBackends
from lockstep.errors import CollectiveTimeoutError, GroupError
from lockstep.shards.tree import Node
from lockstep.torch_private.compiler import keep_compiler_out_of_methods

_CLOSING_SECONDS: Final = 1.0
_MOST_SHORT_SUMS: Final = 1024
_SUM: Final = ReduceOp.SUM


@final
@keep_compiler_out_of_methods
@add_collectives
class ShmProcessGroup(LockstepGroup):
    def __init__(  # what a group is made of
        self,
        store: Store,
        memory: Memory,
        peers: Peers,
        timeout: timedelta,
        asked: GroupBackends,
    ) -> None:
        self._store = store
        self._short_sums: dict[Hashable, PreparedCall] = {}
        self._memory = memory
        self.exchange = PhaseExchange(memory, peers)
        self._work_queue = work_queue = WorkQueue("lockstep-collectives")
        self._point_to_point = PointToPoint(memory, peers)
        backends = TorchBackends(store, peers.rank, timeout, asked.of_torch, peers)
        super().__init__(asked, peers, backends, _close, peers, memory, work_queue, self._point_to_point, backends)
        self._runner = CallRunner(self.exchange, peers, work_queue, self._events)

    # -- Collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        """Replace one dense or sparse tensor by its reduction over all ranks, in the order of the tree.

        Of a short sum like one before nothing is worked out again; of one rank alone all are short.
        """
        tensor = tensors[0]
        is_usual = opts is not None and len(tensors) == 1 and is_plain(tensor) and as_stored(tensor) is tensor
        if is_usual and opts.reduceOp == _SUM:  # its != takes half as long again
            key = tensor.dtype, tensor.shape, purpose_of_calls()
            prepared = self._short_sums.get(key) or self._prepare_short_sum(key, tensors, opts)
            if prepared is not None:
                arguments = prepared, tensor.data_ptr()
                return self._runner.start(
                    prepared.call, self.exchange.run_at, tensors, arguments, is_async=opts.asyncOp
                )
        return self.make_call(ALL_REDUCE, [tensors, opts], {})

    def _prepare_short_sum(self, key: Hashable, tensors: Sequence[Tensor], opts: Any) -> PreparedCall | None:
        """Return what makes a sum like this one, and keep it; None if it is not a short one."""
        (tensor,) = tensors
        exchange, how = self.exchange, reduction(_SUM, tensor.dtype)
        parts = one_part_each(exchange.size, how.kind, tensor.element_size() // how.width)
        count = tensor.numel() * how.width
        is_alone = exchange.size == 1
        if how.kind == BY_TORCH or not (is_alone or is_short(exchange.ranks, parts, count)):
            return None
        call = ALL_REDUCE.describe(ALL_REDUCE.read([tensors, opts], {}), self._global_ranks)
        program = barrier() if is_alone else reduce_short(exchange.ranks, parts, count)
        if len(self._short_sums) >= _MOST_SHORT_SUMS:
            self._short_sums.clear()
        found = self._short_sums[key] = exchange.prepare(program, call)
        return found

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work | None:
        """Make one call of the table's (collective)."""
        call = collective.read(arguments, keywords)
        if collective.root:
            self._check_rank(f"{call.name}: the root", call.root)
        check, run = collectives.BY_NAME[call.name]
        if check is not None:
            check(self.exchange, call)
        refuse_one_output_twice(call)
        tensors = collective.compared_tensors(call)
        for tensor in tensors:
            if not is_plain(tensor):
                return self._call_torch(collective, call, tensor)
        check_writable(call.outputs)
        if collective.reduces:
            op = call.op
            call.reductions = [reduction(op, tensor.dtype) for tensor in tensors]
        call.description = collective.describe(call, self._global_ranks)
        return self._runner.start(call.description, run, call.outputs, (self.exchange, call), is_async=call.is_async)

    def _call_torch(self, collective: Collective, call: CollectiveCall, tensor: Tensor) -> Work | None:
        """Make a call of which shared memory cannot carry `tensor`."""
        if collective.is_coalesced:
            raise ValueError(
                f"{call.name}: a tensor is {tensor.layout} on {tensor.device}, expected dense tensors on the CPU. Make "
                "a call for each tensor. (LS207)"
            )
        method = collective.methods[0]
        if tensor.device.type != "cpu":
            self.raise_if_broken()
            if self.asked.checking.compares:
                self._runner.compare(collective.describe(call, self._global_ranks))
            else:
                self._events.take_number()
            return self._call_on_device(tensor, method, call.arguments, call.name)
        if method != "allreduce" or tensor.layout is not torch.sparse_coo:
            check_dense(call.name, tensor)  # Gloo would refuse it too, but only when the others wait
        elif call.op != ReduceOp.SUM:
            raise ValueError(f"{call.name}: sparse tensors can be summed over ranks, and {call.op} is not SUM. (LS207)")
        call.description = describe_call(call.name, ((tensor.dtype, tensor.shape),), "sparse, sum")

        def action() -> None:
            self.exchange.compare_calls(call.description)
            self._torch.on(tensor.device).allreduce(*call.arguments).wait()

        return self._runner.start(call.description, action, call.outputs, is_async=call.is_async)

    def _call_on_device(self, tensor: Tensor, method: str, arguments: Sequence[Any], name: str) -> Work:
        backend = self._torch.on(tensor.device)
        return self._torch.call(backend, method, arguments, name=name, is_on_device=True)

    def ordered_all_reduce(  # what torch hands a collective, and what is compared
        self,
        parts: Sequence[Tensor],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
        *,
        is_async: bool,
    ) -> Work | None:
        """Sum subtrees of shards in the order of the tree, several on each rank, into `out` on every rank.

        `parts` are flat, contiguous and like `out`; they are not written to, unless one is `out`. `layout` has the
        nodes of each rank, in the order of its parts; together they cover every shard once.
        """
        check_writable([out])
        how = reduction(ReduceOp.SUM, out.dtype)
        arguments = self.exchange, parts, out, layout, num_shards, how, call
        return self._runner.start(call, collectives.ordered_all_reduce, [out], arguments, is_async=is_async)

    def compare_calls(self, call: bytes) -> None:
        self._runner.compare(call)

    def runner_for(self, events: CallEvents) -> CallRunner:
        """Return what runs the calls of a group that this one is a part of, in one order with its own (local)."""
        return CallRunner(self.exchange, self._peers, self._work_queue, events)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Return when every rank has reached it; the error of a rank that waits too long names those that have not."""
        call = describe_call("monitored_barrier", ())
        seconds = None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()

        def action() -> None:
            try:
                self.exchange.compare_calls(call, timeout_seconds=seconds)
            except CollectiveTimeoutError as error:
                raise CollectiveTimeoutError(
                    f"Rank {self._peers.global_rank} timed out in monitoredBarrier. {error}"
                ) from error

        self._runner.start(call, action, [], is_async=False)

    # -- Messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send one tensor to rank `dst`; complete when it was received."""
        OPEN_GROUPS.count_message()
        (tensor,) = tensors = read_one(tensors)
        self._check_rank("send: the receiver", dst)
        if not is_plain(tensor):
            check_dense("send", tensor)
            return self._call_on_device(tensor, "send", (tensors, dst, tag), "send")
        self.raise_if_broken()
        return self._point_to_point.send(flatten(tensor), dst, tag, describe_message(tensor), tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive one tensor of rank `src`, of the dtype and number of elements that it sends."""
        OPEN_GROUPS.count_message()
        (tensor,) = tensors = read_one(tensors)
        self._check_rank("recv: the sender", src)
        if not is_plain(tensor):
            check_dense("recv", tensor)
            return self._call_on_device(tensor, "recv", (tensors, src, tag), "recv")
        return self._receive(tensor, [src], tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive one tensor of whichever rank sends one with this tag first."""
        OPEN_GROUPS.count_message()
        (tensor,) = read_one(tensors)
        check_dense("recv", tensor)
        return self._receive(tensor, [peer for peer in range(self.size()) if peer != self.rank()], tag)

    # -- Capabilities --------------------------------------------------------------------------------------------

    capabilities = GroupCapabilities(
        owns_memory=True,
        adds_in_order=True,
        is_host_local=True,
        runs_in_callers_thread=True,
        compares_calls=True,
        reports_exits=True,
    )

    # -- Memory --------------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros in the group's memory; an all-reduce of such tensors copies nothing (local)."""
        self.raise_if_broken()
        shape = read_allocation(size, dtype, device)
        return self._memory.allocate(shape.numel(), dtype).view(shape)

    # -- Life ----------------------------------------------------------------------------------------------------

    def get_group_store(self) -> Store:
        return self._store

    def abort(self) -> None:
        """Leave the group at once; calls under way fail here and on the other ranks (local)."""
        self._peers.publish_state(PeerState.FAILED, "it aborted the group")
        self._peers.broken = GroupError(f"Rank {self._peers.global_rank} has aborted this group. (LS204)")
        self.shutdown()

    # -- Within --------------------------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", *self.asked.of_torch)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself for the CPU: torch reads a backend's properties from it."""
        return self if device.type == "cpu" else self._torch.on(device)

    def _receive(self, tensor: Tensor, sources: Sequence[int], tag: int) -> Work:
        self.raise_if_broken()
        check_writable([tensor])
        flat = flatten(tensor)
        return self._point_to_point.receive(
            flat,
            sources,
            tag,
            describe_message(tensor),
            [tensor],
            lambda: write_back(tensor, flat),
        )

    def _check_rank(self, who: str, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(f"{who} is rank {rank} of the group, expected 0 to {self.size() - 1}. (LS209)")


def _close(
    peers: Peers, memory: Memory, work_queue: WorkQueue, point_to_point: PointToPoint, backends: TorchBackends
) -> None:
    backends.watch.close()
    peers.publish_state(PeerState.LEFT)
    if peers.broken is None:
        peers.broken = GroupError("This process group was destroyed; make a new one to go on. (LS204)")
    work_queue.close(_CLOSING_SECONDS)
    point_to_point.close(_CLOSING_SECONDS)
    backends.close()
    peers.close()
    memory.close()


def make_shm_group(
    store: Store,
    rank: int,
    timeout: timedelta,
    members: GroupMembers,
    set_up: GroupSetUp,
    asked: GroupBackends,
) -> tuple[ShmProcessGroup | NotShared, GroupHosts]:
    """Make a group of processes of one host (collective over its ranks); return it or why not, and the ranks' hosts."""
    layout = FileLayout(len(members.global_ranks))
    found, hosts = _share_memory(store, rank, timeout, members, set_up, layout)
    return found if isinstance(found, NotShared) else ShmProcessGroup(store, *found, timeout, asked), hosts


def make_shared_memory_comparer(
    store: Store, rank: int, timeout: timedelta, members: GroupMembers, set_up: GroupSetUp, *, waits: bool
) -> SharedMemoryComparer | None:
    """Connect ranks that only compare calls (collective); None if they are not on one host."""
    layout = FileLayout(len(members.global_ranks), send_buffer_bytes=NUM_BYTES, slot_bytes=PAGE)
    found, _ = _share_memory(store, rank, timeout, members, set_up, layout)
    return None if isinstance(found, NotShared) else SharedMemoryComparer(*found, waits=waits)


def _share_memory(
    store: Store, rank: int, timeout: timedelta, members: GroupMembers, set_up: GroupSetUp, layout: FileLayout
) -> tuple[tuple[Memory, Peers] | NotShared, GroupHosts]:
    found, hosts = connect_ranks(store, rank, layout, set_up.deadline, members, set_up.hosts)
    if isinstance(found, NotShared):
        return found, hosts
    memory, ends = found
    return (memory, Peers(memory, rank, ends, timeout.total_seconds(), members.global_ranks)), hosts
