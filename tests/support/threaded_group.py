"""A process group whose ranks are threads of one process. [`tests.support.turns`]

It is as adversarial as a group may be, so that what relies on luck with a real one fails here:

- a call changes its outputs in `wait()`, or when a future of it is waited for, and not before;
- with `poisons`, outputs hold NaN until then, or bytes 0x5A where there is no NaN;
- tensors that were written between call and `wait()`, inputs too, are an error of `wait()`;
- a message is sent when its receive was called, so two ranks that both wait for a send first are an error;
- ranks compare their collectives, and differing ones are an error on every rank.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from tests.support import collectives
from tests.support.collectives import Combine, PerRank
from tests.support.fake_device import untracked
from tests.support.memory_accesses import is_on_device
from tests.support.threaded_work import Collective, GroupState, ThreadedWork
from torch import Tensor
from torch.distributed import Store, Work

from lockstep.comm.calls import describe_call, explain_mismatch
from lockstep.comm.group import PythonProcessGroup
from lockstep.errors import CollectiveMismatchError, GroupError


@final
class ThreadedProcessGroup(PythonProcessGroup):
    """A group of threads; the methods are those of `torch.distributed.ProcessGroup`.

    Args:
        state: What the ranks share.
        rank: Which of them this is.
    """

    def __init__(self, state: GroupState, rank: int) -> None:
        super().__init__(rank, len(state.threads))
        self.state = state
        self._nums_collectives = {False: 0, True: 0}
        self._num_subgroups: dict[tuple[int, ...], int] = {}
        self._is_closed = False

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
        tensors = _listed(tensors)
        message = self.state.send(self.rank(), dst, tag, _copies(tensors)[0])
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

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "ThreadedProcessGroup":
        return self

    def get_group_store(self) -> Store:
        return self.state.store

    def _get_sequence_number_for_group(self) -> int:
        return sum(self._nums_collectives.values())

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
        given = _copies(inputs)
        # As in a group with a backend for each kind of device, which are in step each by itself.
        on_device = any(map(is_on_device, (*inputs, *outputs)))
        number = self._nums_collectives[on_device]
        self._nums_collectives[on_device] += 1
        collective = self.state.join((on_device, number), self.rank(), described, given)
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


def _combine(collective: Collective, combine: Combine) -> PerRank:
    if len(set(collective.described.values())) > 1:
        raise explain_mismatch(collective.described)
    if collective.received is None:
        given = [collective.given[rank] for rank in sorted(collective.given)]
        with torch.no_grad():
            collective.received = combine(given)
    return collective.received


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    with untracked():
        return [tensor.detach().clone() for tensor in tensors]


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _root(opts: Any) -> int:
    root: int = getattr(opts, "rootRank", opts)
    return root
