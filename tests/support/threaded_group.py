"""A process group whose ranks are threads of one process. [`tests.support.turns`]

It is as adversarial as a group may be, so that what relies on luck with a real one fails here:

- a call changes its outputs in `wait()`, or when a future of it is waited for, and not before;
- with `poisons`, outputs hold NaN until then, or bytes 0x5A where there is no NaN;
- tensors that were written between call and `wait()`, inputs too, are an error of `wait()`;
- a message is sent when its receive was called, so two ranks that both wait for a send first are an error;
- ranks compare their collectives, and differing ones are an error on every rank.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
from tests.support import collectives
from tests.support.collectives import Combine, PerRank
from tests.support.turns import Turns
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, Store, Work

from lockstep.comm.calls import describe_call, explain_mismatch
from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError

_POISON = 0x5A


class UnsafeAccessError(AssertionError):
    """A tensor was written while a call that uses it was under way."""


@final
@dataclass(slots=True)
class _Collective:
    """One collective of all ranks."""

    described: dict[int, bytes] = field(default_factory=dict)
    """By every rank that has called."""
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    """Copies of what they send."""
    received: PerRank | None = None
    """What every rank receives."""


@final
@dataclass(slots=True, eq=False)
class _Message:
    """One message, as its sender describes it, its receiver, or both."""

    sources: Collection[int]
    """Which rank sends; for a receive from any rank all of them."""
    target: int
    tag: int
    tensor: Tensor | None = None
    """What is sent; None before it is."""
    is_received: bool = False
    """Whether the receive was called."""


@final
class GroupState:
    """What the ranks of one group share.

    Args:
        turns: Who runs.
        threads: Number, among the threads, of each rank of the group.
        poisons: Whether outputs hold poison until `wait()`.
    """

    def __init__(self, turns: Turns, threads: Sequence[int], *, poisons: bool) -> None:
        self.turns = turns
        self.threads = tuple(threads)
        self.poisons = poisons
        self.store: Store = HashStore()
        self.broken: GroupError | None = None
        self._lock = threading.RLock()
        self._collectives: dict[int, _Collective] = {}
        self._open_messages: list[_Message] = []
        self._subgroups: dict[tuple[tuple[int, ...], int], GroupState] = {}

    def join(self, number: int, rank: int, described: bytes, given: list[Tensor]) -> _Collective:
        """Take part in collective `number` of the group."""
        with self._lock:
            collective = self._collectives.setdefault(number, _Collective())
            collective.described[rank] = described
            collective.given[rank] = given
            if len(collective.described) == len(self.threads):
                del self._collectives[number]  # nobody else comes; those that have come hold it
        self.turns.notify()
        return collective

    def send(self, source: int, target: int, tag: int, tensor: Tensor) -> _Message:
        """Send a message; it is that of the oldest receive that fits."""
        with self._lock:
            for message in self._open_messages:
                if (
                    message.tensor is None
                    and message.target == target
                    and message.tag == tag
                    and source in message.sources
                ):
                    self._open_messages.remove(message)
                    break
            else:
                message = _Message(sources=(source,), target=target, tag=tag)
                self._open_messages.append(message)
            message.sources, message.tensor = (source,), tensor
        self.turns.notify()
        return message

    def receive(self, sources: Collection[int], target: int, tag: int) -> _Message:
        """Receive a message: the oldest that fits."""
        with self._lock:
            for message in self._open_messages:
                is_fitting = message.target == target and message.tag == tag and set(message.sources) <= set(sources)
                if message.tensor is not None and is_fitting:
                    self._open_messages.remove(message)
                    break
            else:
                message = _Message(sources=tuple(sources), target=target, tag=tag)
                self._open_messages.append(message)
            message.is_received = True
        self.turns.notify()
        return message

    def wait_for(self, rank: int, missing: Callable[[], Collection[int]], what: str) -> None:
        """Wait until `rank` misses nobody, or the group has failed; then raise what it failed with."""

        def threads_missing() -> list[int]:
            return [] if self.broken is not None else [self.threads[peer] for peer in missing()]

        if self.broken is None:
            try:
                self.turns.wait_for(self.threads[rank], threads_missing, what)
            except GroupError as error:
                self.broken = self.broken or error
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raise what the group failed with, anew: each rank adds its own traceback."""
        if isinstance(self.broken, PeerLostError):
            raise PeerLostError(str(self.broken), rank=self.broken.rank)
        if self.broken is not None:
            raise type(self.broken)(str(self.broken))

    def subgroup(self, threads: tuple[int, ...], number: int) -> "GroupState":
        """Return what the ranks share of the `number`-th group of these threads."""
        with self._lock:
            made = GroupState(self.turns, threads, poisons=self.poisons)
            return self._subgroups.setdefault((threads, number), made)


@final
class ThreadedWork(Work):
    """One call of one rank, complete when it was waited for.

    Args:
        group: What the ranks of the group share.
        rank: Who called.
        what: Name of the call, for messages.
        inputs: What is read until then.
        outputs: What is written then.
    """

    def __init__(
        self, group: GroupState, rank: int, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._group = group
        self._rank = rank
        self._what = what
        self._outputs = [tensor.detach() for tensor in outputs]
        memory = {_memory_of(tensor) for tensor in outputs}
        kept = [tensor.detach() for tensor in inputs if _memory_of(tensor) not in memory]
        self.missing: Callable[[], Collection[int]] = tuple
        self.receive: Callable[[], Sequence[Tensor]] = tuple
        self._error: BaseException | None = None
        self._is_done = False
        self._source = -1
        self._futures: list[torch.futures.Future[list[Tensor]]] = []
        if group.poisons:
            for tensor in self._outputs:
                _poison(tensor)
        self._watched = [(tensor, tensor.clone()) for tensor in (*kept, *self._outputs)]

    def finish(self) -> None:
        """Wait for the others and write the outputs; an error is kept."""
        if self._is_done:
            return
        try:
            self._group.wait_for(self._rank, self.missing, self._what)
            for tensor, before in self._watched:
                _require_same(tensor, before, f"Rank {self._rank}: a tensor of {self._what}")
            received = self.receive()
            assert len(received) in {0, len(self._outputs)}
            for output, tensor in zip(self._outputs, received, strict=False):
                _write(tensor, output)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it, and the future has it
            self._error = error
        self._is_done = True
        self._watched = []
        for future in self._futures:
            self._settle(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the others, and write the outputs.

        Raises:
            GroupError: The call failed.
            UnsafeAccessError: A tensor was written meanwhile.
        """
        self.finish()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return self._is_done

    def is_success(self) -> bool:
        """Return whether it was waited for, and did not fail."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return why it failed, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that it writes."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as on a CPU."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as on a CPU."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future of the tensors; the call completes when it, or one made of it by `then`, is waited for."""
        future: torch.futures.Future[list[Tensor]] = _WaitingFuture(self.finish)
        if self._is_done:
            self._settle(future)
        else:
            self._futures.append(future)
        return future

    def _settle(self, future: "torch.futures.Future[list[Tensor]]") -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


class _WaitingFuture(torch.futures.Future[Any]):
    """A future that calls `finish`, which completes it, when it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self) -> Any:
        self._finish()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = _WaitingFuture(self._finish)

        def deliver(done: Any) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:  # noqa: BLE001 - who waits for it gets it
                following.set_exception(error)

        self.add_done_callback(deliver)
        return following


@final
class ThreadedProcessGroup(ProcessGroup):
    """A group of threads; the methods are those of `torch.distributed.ProcessGroup`.

    Args:
        state: What the ranks share.
        rank: Which of them this is.
    """

    def __init__(self, state: GroupState, rank: int) -> None:
        super().__init__(rank, len(state.threads))  # type: ignore[call-arg]  # torch's stub lacks this form
        self.state = state
        self._num_collectives = 0
        self._num_subgroups: dict[tuple[int, ...], int] = {}
        self._is_closed = False
        self._name = ""

    def make_subgroup(self, ranks: Sequence[int]) -> "ThreadedProcessGroup":
        """Return a new group of some ranks of this one; each of them calls, also when this group is broken."""
        threads = tuple(self.state.threads[rank] for rank in ranks)
        number = self._num_subgroups[threads] = self._num_subgroups.get(threads, 0) + 1
        return ThreadedProcessGroup(self.state.subgroup(threads, number), list(ranks).index(self.rank()))

    # -- Collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = _listed(tensors)
        return self._reduce_all("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._reduce_all("all_reduce_coalesced", tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensors, root = _listed(tensors), _root(opts)
        outputs = [] if root == self.rank() else tensors
        return self._start("broadcast", tensors, outputs, collectives.broadcast(root), f"from rank {root}")

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors, root, operation = _listed(tensors), _root(opts), opts.reduceOp
        outputs = tensors if root == self.rank() else []
        combine = collectives.reduce_to(operation, root)
        return self._start("reduce", tensors, outputs, combine, f"{collectives.kind_of(operation)}, to rank {root}")

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        (outputs,) = output_tensors
        return self._start("all_gather", input_tensors, outputs, collectives.all_gather)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        return self._start("all_gather_into_tensor", [input], [output], collectives.all_gather_single)

    def allgather_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        outputs = [tensor for tensors in zip(*output_tensors, strict=True) for tensor in tensors]
        return self._start("all_gather_coalesced", input_tensors, outputs, collectives.all_gather)

    def all_gather_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        name = "all_gather_into_tensor_coalesced"
        return self._start(name, input_tensors, output_tensors, collectives.all_gather_single)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        (inputs,), operation = input_tensors, opts.reduceOp
        combine = collectives.reduce_scatter(operation)
        return self._start("reduce_scatter", inputs, output_tensors, combine, str(collectives.kind_of(operation)))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self._scatter_reduced("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        return self._scatter_reduced("reduce_scatter_tensor_coalesced", output_tensors, input_tensors, opts)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        return self._start("all_to_all", input_tensors, output_tensors, collectives.all_to_all, compares=False)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        rows = [len(input) // self.size()] * self.size() if not input_split_sizes else list(input_split_sizes)
        return self._start(
            "all_to_all_single", input.split(rows), [output], collectives.all_to_all_single, compares=False
        )

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        root = _root(opts)
        outputs = output_tensors[0] if root == self.rank() else []
        return self._start("gather", input_tensors, outputs, collectives.gather_to(root), f"to rank {root}")

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        root = _root(opts)
        inputs = input_tensors[0] if root == self.rank() else []
        combine = collectives.scatter_from(root)
        return self._start("scatter", inputs, output_tensors, combine, f"from rank {root}", compares=False)

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", [], [], lambda given: [[] for _ in given])

    # Names of torch before 2.13, which its C++ code and other libraries still call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- Messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        self._check_usable()
        (tensor,) = tensors = _listed(tensors)
        message = self.state.send(self.rank(), dst, tag, tensor.detach().clone())
        work = ThreadedWork(self.state, self.rank(), f"a send to rank {dst}", tensors, [])
        work.missing = lambda: () if message.is_received else (dst,)
        return work

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._receive(tensors, [src], tag, f"a receive from rank {src}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        return self._receive(tensors, peers, tag, "a receive from any rank")

    # -- Life ----------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "threaded"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "ThreadedProcessGroup":
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False

    def get_group_store(self) -> Store:
        return self.state.store

    def abort(self) -> None:
        self.state.broken = self.state.broken or GroupError(f"Rank {self.rank()} has aborted this group.")
        self.state.turns.notify()

    def shutdown(self) -> None:
        self._is_closed = True

    # -- Within --------------------------------------------------------------------------------------------------

    def _reduce_all(self, name: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        operation = getattr(opts, "reduceOp", torch.distributed.ReduceOp.SUM)
        return self._start(
            name, tensors, tensors, collectives.all_reduce(operation), str(collectives.kind_of(operation))
        )

    def _scatter_reduced(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        combine = collectives.reduce_scatter_single(opts.reduceOp)
        return self._start(name, inputs, outputs, combine, str(collectives.kind_of(opts.reduceOp)))

    def _start(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        combine: Combine,
        detail: str = "",
        *,
        compares: bool = True,
    ) -> Work:
        self._check_usable()
        kinds = tuple((tensor.dtype, tensor.shape) for tensor in inputs) if compares else ()
        described = describe_call(name, kinds, detail)
        given = [tensor.detach().clone() for tensor in inputs]
        number, self._num_collectives = self._num_collectives, self._num_collectives + 1
        collective = self.state.join(number, self.rank(), described, given)
        work = ThreadedWork(self.state, self.rank(), described.decode(), inputs, outputs)
        work.missing = lambda: [rank for rank in range(self.size()) if rank not in collective.described]
        work.receive = lambda: _combine(collective, combine)[self.rank()]
        return work

    def _receive(self, tensors: Any, sources: Sequence[int], tag: int, what: str) -> Work:
        self._check_usable()
        (tensor,) = tensors = _listed(tensors)
        message = self.state.receive(sources, self.rank(), tag)
        work = ThreadedWork(self.state, self.rank(), what, [], tensors)
        work.missing = lambda: () if message.tensor is not None else message.sources

        def receive() -> Sequence[Tensor]:
            sent = message.tensor
            assert sent is not None
            if (sent.dtype, sent.numel()) != (tensor.dtype, tensor.numel()):
                raise CollectiveMismatchError(
                    f"{what}: it sends {sent.dtype} {list(sent.shape)}, and rank {self.rank()} receives {tensor.dtype} "
                    f"{list(tensor.shape)}."
                )
            return [sent]

        work.receive = receive
        return work

    def _check_usable(self) -> None:
        self.state.raise_if_broken()
        if self._is_closed:
            raise GroupError("This process group was destroyed; make a new one to go on.")


def _combine(collective: _Collective, combine: Combine) -> PerRank:
    if len(set(collective.described.values())) > 1:
        raise explain_mismatch(collective.described)
    if collective.received is None:
        given = [collective.given[rank] for rank in sorted(collective.given)]
        with torch.no_grad():
            collective.received = combine(given)
    return collective.received


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _root(opts: Any) -> int:
    root: int = getattr(opts, "rootRank", opts)
    return root


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _poison(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.data.logical_not_()
    else:
        tensor.data.fill_(_POISON)


def _require_same(tensor: Tensor, before: Tensor, name: str) -> None:
    if not _are_same(tensor, before):
        raise UnsafeAccessError(f"{name} was written before the call was waited for.")


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bits."""
    if one.layout is not torch.strided:
        return bool(torch.equal(one.to_dense(), other.to_dense()))
    if one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _write(tensor: Tensor, output: Tensor) -> None:
    """Copy as a backend does, whose writes autograd does not see."""
    if output.layout is not torch.strided:
        output.data.copy_(tensor)
        return
    if tensor.numel() != output.numel():
        raise CollectiveMismatchError(
            f"{tensor.numel()} elements are sent to a tensor of shape {list(output.shape)}, {output.numel()} elements."
        )
    with torch.inference_mode(output.is_inference()):
        output.data.copy_(tensor.reshape(output.shape))
