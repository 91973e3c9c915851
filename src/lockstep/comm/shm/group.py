"""The process group over shared memory: torch's collectives, on the rounds and channels of this room.

`ProcessGroup` is torch's interface for a group written in Python: Python calls these methods directly, torch's C++ code
(its DistributedDataParallel, functional collectives) through a trampoline. What has no form in shared memory (sparse
tensors, tensors on other devices) goes to an inner group of a backend that has one.

Every method has the name, the arguments and the meaning that `torch.distributed.ProcessGroup` gives it; every rank of
the group must call, `send` and `recv` excepted. All raise, beside what a bad argument raises:

- `CollectiveMismatchError` on every rank alike, if ranks make different calls; the group stays usable;
- `PeerLostError`, if a rank is lost; the group is broken then, and later calls raise the same;
- `CollectiveTimeoutError`, if the group's timeout passes; likewise.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed import BarrierOptions, PrefixStore, ProcessGroup, ReduceOp, Store, Work

from lockstep.comm.calls import TORCH_NAMES, describe_call
from lockstep.comm.shm import collectives
from lockstep.comm.shm.arguments import (
    check_alike,
    check_writable,
    describe_message,
    describe_tensors,
    flatten,
    is_plain,
    premultiply,
    read_allocation,
    read_list,
    read_one,
    read_reduce_op,
    read_root,
    write_back,
)
from lockstep.comm.shm.arithmetic import Reduction, reduction, schedule_nodes
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers, PeerState
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.shm.pipeline import PartialReduction
from lockstep.comm.shm.point_to_point import PointToPoint
from lockstep.comm.shm.rendezvous import GroupHandles, GroupMembers, NotShared, connect_ranks
from lockstep.comm.shm.torch_backends import TorchBackends
from lockstep.comm.shm.work_queue import WorkQueue
from lockstep.compiler import keep_compiler_out_of_methods
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError, PeerLostError
from lockstep.shards.tree import Node

_CLOSING_SECONDS: Final = 1.0


@final
@keep_compiler_out_of_methods
class ShmProcessGroup(ProcessGroup):
    """A group of processes of one host, over shared memory.

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        handles: What the ranks have when they have met.
        layout: What their shared file looks like.
        timeout: How long a call may take.
        names: What messages call each rank: its rank in the default group.
    """

    def __init__(  # what a group is made of
        self,
        store: Store,
        rank: int,
        handles: GroupHandles,
        layout: FileLayout,
        timeout: timedelta,
        names: Sequence[int],
    ) -> None:
        super().__init__(rank, layout.size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._store = store
        self._names = names
        self._name = ""
        self._description = ""
        self._memory = Memory(handles.descriptor, layout, rank)
        self._peers = Peers(self._memory, rank, handles, timeout.total_seconds(), names)
        self._exchange = PhaseExchange(self._memory, self._peers)
        self._work_queue = WorkQueue("lockstep-collectives")
        self._point_to_point = PointToPoint(self._memory, self._peers)
        self._torch_backends = TorchBackends(PrefixStore("inner", store), rank, layout.size, timeout)
        self._close = weakref.finalize(
            self,
            _close,
            os.getpid(),
            self._peers,
            self._memory,
            self._work_queue,
            self._point_to_point,
            self._torch_backends,
        )

    # -- Collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Replace one dense or sparse tensor by its reduction over all ranks, in the order of the tree."""
        (tensor,) = tensors = read_one(tensors)
        if not is_plain(tensor):
            return self._elsewhere("allreduce", tensor, tensors, (tensors, opts), opts)
        how = reduction(read_reduce_op(opts), tensor.dtype)
        call = describe_call("all_reduce", ((tensor.dtype, tensor.shape),), how.name)

        def action() -> None:
            flat = premultiply(tensor, how)
            collectives.all_reduce(self._exchange, flat, how, call)
            write_back(tensor, flat)

        return self._start(call, action, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Do `allreduce` for each tensor, as one call."""
        self._check_plain("all_reduce_coalesced", tensors)
        hows = [reduction(read_reduce_op(opts), tensor.dtype) for tensor in tensors]
        call = describe_call("all_reduce_coalesced", describe_tensors(tensors), hows[0].name if hows else "")

        def action() -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                flat = premultiply(tensor, how)
                collectives.all_reduce(self._exchange, flat, how, call)
                write_back(tensor, flat)

        return self._start(call, action, tensors, opts)

    def ordered_all_reduce(  # what torch hands a collective, and what is compared
        self,
        parts: Sequence[Tensor],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
        opts: Any = None,
    ) -> Work:
        """Sum subtrees of shards in the order of the tree, several on each rank, into `out` on every rank.

        Args:
            parts: What this rank holds: flat and contiguous, of the length and dtype of `out`; left alone, unless one
                is `out`.
            out: Where the sum goes.
            layout: The nodes that each rank holds, in the order of its parts; together they cover every shard once.
            num_shards: Number of shards.
            call: Description of the call, compared with those of the other ranks.
            opts: Torch's options; whether the caller waits at once.
        """
        placed = sorted((node, (rank, slot)) for rank, nodes in enumerate(layout) for slot, node in enumerate(nodes))
        how = reduction(ReduceOp.SUM, out.dtype)
        described = PartialReduction(
            parts=[part.data for part in parts],
            out=out.data,
            how=how,
            holders=[holder for _, holder in placed],
            steps=schedule_nodes(tuple(node for node, _ in placed), num_shards),
            num_slots=max(len(nodes) for nodes in layout),
        )
        action = partial(collectives.ordered_all_reduce, self._exchange, described, call)
        return self._start(call, action, [out], opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Replace one tensor by the root's."""
        (tensor,) = tensors = read_one(tensors)
        root = self._check_rank("broadcast: the root", read_root(opts))
        if not is_plain(tensor):
            return self._elsewhere("broadcast", tensor, tensors, (tensors, opts), opts)
        call = describe_call("broadcast", ((tensor.dtype, tensor.shape),), f"from rank {self._names[root]}")

        def action() -> None:
            flat = flatten(tensor)
            collectives.broadcast(self._exchange, flat, root, call)
            write_back(tensor, flat)

        return self._start(call, action, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Work:
        """Replace one tensor, on the root, by its reduction over all ranks."""
        (tensor,) = tensors = read_one(tensors)
        root = self._check_rank("reduce: the root", read_root(opts))
        if not is_plain(tensor):
            return self._elsewhere("reduce", tensor, tensors, (tensors, opts, *rest), opts)
        how = reduction(read_reduce_op(rest[0] if rest else opts), tensor.dtype)
        call = describe_call("reduce", ((tensor.dtype, tensor.shape),), f"{how.name}, to rank {self._names[root]}")

        def action() -> None:
            flat = premultiply(tensor, how)
            collectives.reduce(self._exchange, flat, how, root, call)
            if self.rank() == root:
                write_back(tensor, flat)

        return self._start(call, action, tensors, opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Collect one tensor of every rank, in rank order, in a list of tensors of its shape."""
        (tensor,), outputs = read_one(input_tensors), read_list(output_tensors)
        self._check_count("all_gather", "output", outputs)
        if not is_plain(tensor):
            return self._elsewhere("allgather", tensor, outputs, (output_tensors, input_tensors, opts), opts)
        check_alike("all_gather", tensor, outputs)
        call = describe_call("all_gather", ((tensor.dtype, tensor.shape),))
        return self._start(call, lambda: self._gather(outputs, tensor, call), outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        """Collect one tensor of every rank, one after another in rank order, in one tensor."""
        if not is_plain(input):
            return self._elsewhere("_allgather_base", input, [output], (output, input, opts), opts)
        self._check_whole("all_gather_into_tensor", output, input)
        call = describe_call("all_gather_into_tensor", ((input.dtype, input.shape),))
        return self._start(call, lambda: self._gather_single(output, input, call), [output], opts)

    def allgather_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Do `allgather` for each input, as one call; `output_tensors[rank][i]` takes input i of that rank."""
        self._check_plain("all_gather_coalesced", input_tensors)
        self._check_count("all_gather_coalesced", "rows of output", output_tensors)
        for row in output_tensors:
            if len(row) != len(input_tensors):
                raise ValueError(
                    f"all_gather_coalesced: a row of {len(row)} output tensors, expected one per input of "
                    f"{len(input_tensors)}."
                )
            for output, tensor in zip(row, input_tensors, strict=True):
                check_alike("all_gather_coalesced", tensor, [output])
        call = describe_call("all_gather_coalesced", describe_tensors(input_tensors))
        everything = [tensor for row in output_tensors for tensor in row]

        def action() -> None:
            for number, tensor in enumerate(input_tensors):
                self._gather([row[number] for row in output_tensors], tensor, call)

        return self._start(call, action, everything, opts)

    def all_gather_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Do `all_gather_single` for each pair, as one call."""
        self._check_plain("all_gather_into_tensor_coalesced", input_tensors)
        for output, tensor in zip(output_tensors, input_tensors, strict=True):
            self._check_whole("all_gather_into_tensor_coalesced", output, tensor)
        call = describe_call("all_gather_into_tensor_coalesced", describe_tensors(input_tensors))

        def action() -> None:
            for output, tensor in zip(output_tensors, input_tensors, strict=True):
                self._gather_single(output, tensor, call)

        return self._start(call, action, output_tensors, opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Reduce the r-th tensor of every rank's list into the output of rank r."""
        (output,), inputs = read_one(output_tensors), read_list(input_tensors)
        self._check_count("reduce_scatter", "input", inputs)
        if not is_plain(output):
            return self._elsewhere("reduce_scatter", output, [output], (output_tensors, input_tensors, opts), opts)
        check_alike("reduce_scatter", output, inputs)
        how = reduction(read_reduce_op(opts), output.dtype)
        call = describe_call("reduce_scatter", ((output.dtype, output.shape),), how.name)
        return self._start(call, lambda: self._reduce_scatter(output, inputs, how, call), [output], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """Reduce one tensor, cut into one equal piece per rank, so that rank r has piece r of the result."""
        if not is_plain(output):
            return self._elsewhere("_reduce_scatter_base", output, [output], (output, input, opts), opts)
        self._check_whole("reduce_scatter_tensor", input, output)
        how = reduction(read_reduce_op(opts), output.dtype)
        call = describe_call("reduce_scatter_tensor", ((output.dtype, output.shape),), how.name)
        return self._start(call, lambda: self._reduce_scatter_single(output, input, how, call), [output], opts)

    def reduce_scatter_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Do `reduce_scatter_single` for each pair, as one call."""
        self._check_plain("reduce_scatter_tensor_coalesced", input_tensors)
        for output, tensor in zip(output_tensors, input_tensors, strict=True):
            self._check_whole("reduce_scatter_tensor_coalesced", tensor, output)
        hows = [reduction(read_reduce_op(opts), output.dtype) for output in output_tensors]
        call = describe_call(
            "reduce_scatter_tensor_coalesced", describe_tensors(output_tensors), hows[0].name if hows else ""
        )

        def action() -> None:
            for output, tensor, how in zip(output_tensors, input_tensors, hows, strict=True):
                self._reduce_scatter_single(output, tensor, how, call)

        return self._start(call, action, output_tensors, opts)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Send the q-th input to rank q, and take the r-th output from rank r; shapes may differ by pair."""
        self._check_count("all_to_all", "output", output_tensors)
        self._check_count("all_to_all", "input", input_tensors)
        odd = next((tensor for tensor in input_tensors if not is_plain(tensor)), None)
        if odd is not None:
            return self._elsewhere("alltoall", odd, output_tensors, (output_tensors, input_tensors, opts), opts)
        call = describe_call("all_to_all", ((input_tensors[0].dtype, torch.Size([])),))

        def action() -> None:
            flats = [flatten(output) for output in output_tensors]
            collectives.all_to_all(self._exchange, flats, [flatten(piece) for piece in input_tensors], call)
            for output, flat in zip(output_tensors, flats, strict=True):
                write_back(output, flat)

        return self._start(call, action, output_tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Do `alltoall` with the rows of one tensor: equal shares, or as many rows per rank as the splits say."""
        if not is_plain(input):
            arguments = (output, input, output_split_sizes, input_split_sizes, opts)
            return self._elsewhere("alltoall_base", input, [output], arguments, opts)
        sent = self._split_sizes("input", input, input_split_sizes)
        received = self._split_sizes("output", output, output_split_sizes)
        row = torch.Size(input.shape[1:]) if input.dim() else torch.Size([])
        call = describe_call("all_to_all_single", ((input.dtype, torch.Size([])),), f"rows of {list(row)}")

        def action() -> None:
            flat = flatten(output)
            pieces = flatten(input).split(sent)
            collectives.all_to_all(self._exchange, flat.split(received), pieces, call)
            write_back(output, flat)

        return self._start(call, action, [output], opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Collect one tensor of every rank, in rank order, on the root."""
        (tensor,), outputs = read_one(input_tensors), read_list(output_tensors)
        root = self._check_rank("gather: the root", read_root(opts))
        if not is_plain(tensor):
            return self._elsewhere("gather", tensor, outputs, (output_tensors, input_tensors, opts), opts)
        if self.rank() == root:
            self._check_count("gather", "output", outputs)
            check_alike("gather", tensor, outputs)
        elif outputs:
            raise ValueError(
                f"gather to rank {self._names[root]}: rank {self._peers.name} gives output tensors, expected none."
            )
        call = describe_call("gather", ((tensor.dtype, tensor.shape),), f"to rank {self._names[root]}")
        return self._start(call, lambda: self._gather(outputs or None, tensor, call), outputs, opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Give every rank one tensor of the root's list."""
        (output,), inputs = read_one(output_tensors), read_list(input_tensors)
        root = self._check_rank("scatter: the root", read_root(opts))
        if not is_plain(output):
            return self._elsewhere("scatter", output, [output], (output_tensors, input_tensors, opts), opts)
        if self.rank() == root:
            self._check_count("scatter", "input", inputs)
            check_alike("scatter", output, inputs)
        elif inputs:
            raise ValueError(
                f"scatter from rank {self._names[root]}: rank {self._peers.name} gives input tensors, expected none."
            )
        call = describe_call("scatter", ((output.dtype, output.shape),), f"from rank {self._names[root]}")

        def action() -> None:
            flat = flatten(output)
            sources = [flatten(piece) for piece in inputs] if self.rank() == root else None
            collectives.scatter(self._exchange, flat, sources, root, call)
            write_back(output, flat)

        return self._start(call, action, [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        """Return when every rank has come here."""
        call = describe_call("barrier", ())
        return self._start(call, lambda: self._agree(call), [], opts)

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call, which is not one of this group's own (collective)."""
        options = BarrierOptions()
        options.asyncOp = False
        self._start(call, lambda: self._agree(call), [], options).wait()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Return when every rank has come here; the error of one that waits too long names who does not come.

        Args:
            timeout: How long to wait; None for the group's.
            wait_all_ranks: Accepted because torch does: the error says of every rank what it waits for.
        """
        call = describe_call("monitored_barrier", ())
        seconds = None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()

        def action() -> None:
            try:
                self._exchange.compare_calls(call, timeout_seconds=seconds)
            except CollectiveTimeoutError as error:
                raise CollectiveTimeoutError(
                    f"Rank {self._peers.name} timed out in monitoredBarrier. {error}"
                ) from error

        options = BarrierOptions()
        options.asyncOp = False
        self._start(call, action, [], options).wait()

    # Names of torch before 2.13, which its C++ code and other libraries still call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- Messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send one tensor to rank `dst`; complete when it was received."""
        (tensor,) = tensors = read_one(tensors)
        self._check_rank("send: the receiver", dst)
        if not is_plain(tensor):
            _check_dense("send", tensor)
            return self._torch_backends.send(tensors, dst, tag)
        self._check_usable()
        return self._point_to_point.send(
            collectives.as_bytes(flatten(tensor)), dst, tag, describe_message(tensor), tensors
        )

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive one tensor of rank `src`, of the dtype and number of elements that it sends."""
        (tensor,) = tensors = read_one(tensors)
        self._check_rank("recv: the sender", src)
        if not is_plain(tensor):
            _check_dense("recv", tensor)
            return self._torch_backends.recv(tensors, src, tag)
        return self._receive(tensor, [src], tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive one tensor of whichever rank sends one with this tag first."""
        (tensor,) = read_one(tensors)
        _check_dense("recv", tensor)
        return self._receive(tensor, [peer for peer in range(self.size()) if peer != self.rank()], tag)

    # -- Memory --------------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` works for the device: for the CPU."""
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros in the group's memory; an all-reduce of such tensors copies nothing (local).

        Args:
            size: Number of elements of a flat tensor, or a shape.
            dtype: Their dtype.
            device: The CPU, or None.

        Raises:
            TypeError: A size or dtype that is none.
            ValueError: A negative size, or another device.
            GroupError: The group was destroyed or is broken, or this process is a forked child of a rank.
        """
        self._check_usable()
        shape = read_allocation(size, dtype, device)
        return self._memory.allocate(shape.numel(), dtype).view(shape)

    # -- Life ----------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return `"shm"`."""
        return "shm"

    # Torch keeps name and description in the backends of a group, of which this one has none.
    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description that the group was made with."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Take the description that the group is made with."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "ShmProcessGroup":
        """Return the group itself, which is what torch's Python code asks a backend's abilities of."""
        if device.type != "cpu":
            raise RuntimeError(f"The shm backend has no backend of its own for {device}.")
        return self

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` works: no, `new_group` does."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether single calls can be collected into one: no, the coalesced collectives work as such."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """Whether calls can be estimated instead of made: no."""
        return False

    def get_group_store(self) -> Store:
        """Return the store that the group was made with (local)."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may take (local)."""
        self._peers.timeout_seconds = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of `error` (local)."""
        self._peers.leave(PeerState.FAILED, f"{type(error).__name__}: {error}")

    def leave(self) -> None:
        """Tell the other ranks that this one makes no more calls; what they have of it stays (local)."""
        self._peers.leave_normally()

    def abort(self) -> None:
        """Leave the group at once; calls under way fail here and on the other ranks (local)."""
        self._peers.leave(PeerState.FAILED, "it aborted the group")
        self._peers.broken = GroupError(f"Rank {self._peers.name} has aborted this group.")
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group and give back its memory and descriptors; torch calls it on destroy (local)."""
        if self._close.alive:
            self._peers.leave_normally()
        self._close()

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, or None (local)."""
        return self._peers.find_lost(peers) if self._close.alive else None

    # -- Within --------------------------------------------------------------------------------------------------

    def _start(self, call: bytes, action: Callable[[], None], tensors: Sequence[Tensor], opts: Any) -> Work:
        self._check_usable()
        check_writable(tensors)

        def guarded() -> None:
            self._check_usable()
            self._peers.spins_longer = not self._work_queue.is_in_background
            try:
                action()
            except CollectiveMismatchError:
                raise  # on every rank alike, between two rounds: the group is as good as before
            except GroupError:
                raise  # told to the others where it was found
            except BaseException as error:
                self._peers.fail(error, call)  # without this the others would wait for rounds that never come
                raise

        run = guarded
        if any(tensor.is_inference() for tensor in tensors):
            run = torch.inference_mode()(guarded)
        if getattr(opts, "asyncOp", True):
            return self._work_queue.put(run, tensors)
        return self._work_queue.run(run, tensors)

    def _check_usable(self) -> None:
        if self._peers.broken is not None:
            raise self._peers.broken.with_traceback(None)
        if not self._close.alive:
            raise GroupError("This process group was destroyed; make a new one to go on.")

    def _agree(self, call: bytes) -> None:
        self._exchange.compare_calls(call)

    def _gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, call: bytes) -> None:
        flats = None if outputs is None else [flatten(output) for output in outputs]
        collectives.gather(self._exchange, flats, flatten(tensor), call)
        for output, flat in zip(outputs or (), flats or (), strict=True):
            write_back(output, flat)

    def _gather_single(self, output: Tensor, tensor: Tensor, call: bytes) -> None:
        flat = flatten(output)
        pieces = flat.split(max(tensor.numel(), 1)) if flat.numel() else [flat] * self.size()
        collectives.gather(self._exchange, pieces, flatten(tensor), call)
        write_back(output, flat)

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], how: Reduction, call: bytes) -> None:
        flat = flatten(output)
        pieces = [premultiply(piece, how) for piece in inputs]
        collectives.reduce_scatter(self._exchange, flat, pieces, how, call)
        write_back(output, flat)

    def _reduce_scatter_single(self, output: Tensor, tensor: Tensor, how: Reduction, call: bytes) -> None:
        flat, whole = flatten(output), premultiply(tensor, how)
        pieces = whole.split(max(flat.numel(), 1)) if whole.numel() else [whole] * self.size()
        collectives.reduce_scatter(self._exchange, flat, pieces, how, call)
        write_back(output, flat)

    def _receive(self, tensor: Tensor, sources: Sequence[int], tag: int) -> Work:
        self._check_usable()
        check_writable([tensor])
        flat = flatten(tensor)
        return self._point_to_point.receive(
            collectives.as_bytes(flat),
            sources,
            tag,
            describe_message(tensor),
            [tensor],
            lambda: write_back(tensor, flat),
        )

    def _elsewhere(
        self, name: str, tensor: Tensor, tensors: Sequence[Tensor], arguments: tuple[Any, ...], opts: Any
    ) -> Work:
        """Let an inner group do what has no form in shared memory; first the ranks agree that all mean this.

        Args:
            name: What to do.
            tensor: The one that has no such form.
            tensors: What the call fills.
            arguments: Those of the call.
            opts: Torch's options.
        """
        if tensor.device.type != "cpu":
            return self._torch_backends.call(tensor.device, name, arguments)
        operation = getattr(arguments[-1], "reduceOp", None)
        if name != "allreduce" or tensor.layout is not torch.sparse_coo:
            _check_dense(name, tensor)  # Gloo would refuse it too, but only when the others wait
        elif operation is not None and operation != ReduceOp.SUM:
            raise ValueError(f"{name}: sparse tensors can be summed over ranks, and {operation} is not SUM.")
        detail = "sparse" if operation is None else f"sparse, {reduction(operation, tensor.dtype).name}"
        call = describe_call(TORCH_NAMES.get(name, name), ((tensor.dtype, tensor.shape),), detail)

        def action() -> None:
            self._exchange.compare_calls(call)
            self._torch_backends.call(tensor.device, name, arguments).wait()

        return self._start(call, action, tensors, opts)

    def _check_rank(self, who: str, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"{who} is rank {rank} of the group, expected 0 to {self.size() - 1}.")
        return rank

    def _check_plain(self, name: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if not is_plain(tensor):
                raise ValueError(
                    f"{name}: a tensor is {tensor.layout} on {tensor.device}, expected dense tensors on the CPU. Make "
                    "a call for each tensor."
                )

    def _check_count(self, name: str, role: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name}: {len(tensors)} {role} tensors, expected one per rank of {self.size()}.")

    def _check_whole(self, name: str, whole: Tensor, piece: Tensor) -> None:
        if whole.numel() != piece.numel() * self.size() or whole.dtype != piece.dtype:
            raise ValueError(
                f"{name}: one tensor is {whole.dtype} {list(whole.shape)} and the other {piece.dtype} "
                f"{list(piece.shape)}; the first must have the dtype and {self.size()} times the elements of the other."
            )

    def _split_sizes(self, role: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise ValueError(f"all_to_all_single: {rows} {role} rows do not divide among {self.size()} ranks.")
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single: {role} splits {list(splits)} must be {self.size()} numbers that add up to {rows}."
            )
        row = tensor.numel() // max(rows, 1)
        return [count * row for count in splits]


def make_shm_group(
    store: Store, rank: int, size: int, timeout: timedelta, members: GroupMembers
) -> ShmProcessGroup | NotShared:
    """Make a group of processes of one host (collective over its ranks), or say why they are not.

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        size: Number of ranks.
        timeout: How long to wait for the others, and later how long a call may take.
        members: Who they are.

    Raises:
        GroupError: Some rank did not come in time.
        PeerLostError: A rank was lost before all had met.
    """
    layout = FileLayout(size)
    handles = connect_ranks(store, rank, layout, timeout, members)
    if isinstance(handles, NotShared):
        return handles
    return ShmProcessGroup(store, rank, handles, layout, timeout, members.names)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name}: the tensor has layout {tensor.layout}, expected a dense one; sparse ones can only be summed over "
            "all ranks. Give tensor.to_dense()."
        )


def _close(  # everything but the group itself, which this must not keep alive
    pid: int, peers: Peers, memory: Memory, work_queue: WorkQueue, point_to_point: PointToPoint, inner: TorchBackends
) -> None:
    if os.getpid() != pid:
        return  # a forked child has copies of these, but is no member
    peers.leave(PeerState.LEFT)
    if peers.broken is None:
        peers.broken = GroupError("This process group was destroyed; make a new one to go on.")
    work_queue.close(_CLOSING_SECONDS)
    point_to_point.close(_CLOSING_SECONDS)
    inner.close()
    peers.close()
    memory.close()
