"""The group around torch's backends that compares the calls of all ranks before it makes them.

Gloo and NCCL compare nothing: ranks that call different collectives get sums of unrelated tensors, hang or abort. So a
group around them compares the calls first, as the shm backend does: over shared memory where the ranks are on one host,
else over Gloo. How is said by `Checking`. [`shm/comparison.py`] Where hosts have several ranks, sums of CPU tensors go
another way. [`hosts_carrier.py`]

Messages between two ranks (`send`, `recv`) are not compared. An error of the backend that comes from the loss of a rank
names that rank.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from lockstep.comm.capabilities import GroupCapabilities
from lockstep.comm.collectives import (
    ALL_REDUCE,
    Collective,
    CollectiveCall,
    add_collectives,
    refuse_one_output_twice,
    split_operation,
)
from lockstep.comm.gloo import GlooComparer
from lockstep.comm.group import LockstepGroup
from lockstep.comm.hosts import Checking, GroupBackends, known_hosts
from lockstep.comm.hosts_carrier import HostsCarrier
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.shm.arithmetic import reduction
from lockstep.comm.shm.collectives import as_stored, check_writable, flatten, is_plain, read_allocation, write_back
from lockstep.comm.shm.comparison import SharedMemoryComparer
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.torch_backends import TorchBackends, type_of_backend
from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError
from lockstep.shards.tree import Node
from lockstep.torch_private.compiler import keep_compiler_out_of_methods
from lockstep.torch_private.groups import (
    backend_of,
    describe_group,
    name_group,
    register_backend,
    set_default_backend,
)

Result = TypeVar("Result")
Comparer = SharedMemoryComparer | GlooComparer
"""How the ranks of a group compare their calls: over shared memory, or over a Gloo group between hosts."""


@final
@keep_compiler_out_of_methods
@add_collectives
class CheckedProcessGroup(LockstepGroup):
    """Torch's backends for some devices, with calls that are compared first."""

    def __init__(self, comparer: Comparer, asked: GroupBackends, backends: TorchBackends) -> None:
        super().__init__(asked, comparer.peers, backends, _close, comparer, backends)
        self._comparer = comparer
        self._carrier: HostsCarrier | None = None
        backends.check = comparer.check
        self._compares = asked.checking.compares
        for device, name in backends.names.items():
            place = torch.device(device)
            register_backend(self, place, type_of_backend(name), backend_of(self._inner(), place))
        set_default_backend(self, type_of_backend(next(iter(backends.names.values()))))

    def carry_sums(self, carrier: HostsCarrier, local: ShmProcessGroup, lane: LockstepGroup | None) -> None:
        """Let `carrier` make sums of CPU tensors, with these groups of some ranks (local, before the first call)."""
        self._carrier = carrier
        self._runner = local.runner_for(self._events)
        self.parts = (local,) if lane is None else (local, lane)

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work | None:
        """Compare one call of the table's, then make it (collective)."""
        call = collective.read(arguments, keywords)
        refuse_one_output_twice(call)
        if self._carrier is not None and _is_plain_sum(collective, call):
            reduction(ReduceOp.SUM, call.outputs[0].dtype.to_real())  # raises if no rank can add these
            description = collective.describe(call, self._global_ranks)
            sum_ranks = partial(_sum_ranks, self._carrier, call.outputs[0], description)
            return self._carry(description, sum_ranks, call.outputs, is_async=call.is_async)
        number = self._events.take_number()
        arguments, finish = _in_rows(call)
        made = collective.methods[0], arguments, call.name
        if not self._compares:
            return self._forward(*made, finish=finish)
        description = collective.describe(call, self._global_ranks)
        if self._carrier is not None and collective is ALL_REDUCE:
            description += b" over Gloo"  # a sparse tensor, say, which must not meet a dense one that is carried
        action = partial(self._forward, *made, self._events.begin(number, description, call.outputs), finish)
        return self._compare_then(self._comparer.begin_call, description, action)

    def compare_calls(self, call: bytes) -> None:
        self._events.take_number()
        self._compare_then(self._comparer.compare_calls, call, lambda: None)

    def ordered_all_reduce(  # what is reduced, and what is compared
        self,
        parts: Sequence[Tensor],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
        *,
        is_async: bool,
    ) -> Work | None:
        """Sum subtrees of shards over several hosts, as the shm backend does on one (collective)."""
        carrier = self._carrier
        assert carrier is not None  # see `capabilities`
        partials = dict(zip(layout[self.rank()], parts, strict=True))
        action = partial(carrier.sum_in_order, partials, out, layout, num_shards, call)
        return self._carry(call, action, [out], is_async=is_async)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has reached it; with Gloo rank 0 names the ranks that have not (collective)."""
        self._inner().monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._send("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._send("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._send("recv_anysource", tensors, tag)

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros in ordinary memory; a shm group returns one in its own memory (local)."""
        return torch.zeros(read_allocation(size, dtype, device), dtype=dtype, device="cpu")

    @property
    def capabilities(self) -> GroupCapabilities:
        hosts = known_hosts(self)
        return GroupCapabilities(
            is_host_local=hosts is not None and hosts.is_one_host,
            adds_in_order=self._carrier is not None,
            compares_calls=self._compares,
            reports_exits=True,
        )

    def shutdown(self) -> None:
        if self._carrier is not None and not self._runner.work_queue.is_idle:
            # A thread of this rank waits in it for ranks of other hosts, and they for that thread.
            error = GroupError(
                f"Rank {self._global_ranks[self.rank()]} destroyed the process group before it had waited for its "
                "asynchronous calls. Call wait() on each first. (LS204)"
            )
            self.report_failure(error)
            self.end_calls(error)
        super().shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "checked"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        super().setGroupName(name)
        name_group(self._inner(), name)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        super().setGroupDesc(description)
        describe_group(self._inner(), description)

    def _carry(
        self,
        call: bytes,
        action: Callable[[], None],
        tensors: Sequence[Tensor],
        *,
        is_async: bool,
    ) -> Work | None:
        """Let the carrier compare a call and make it, after those before it, in whichever thread waits for it."""
        self.raise_if_broken()
        check_writable(tensors)

        def guarded() -> None:
            try:
                action()
            except CollectiveMismatchError:
                raise  # on every rank alike
            except BaseException as error:
                raise self._end_for_all(call, error) from error

        return self._runner.start(call, guarded, tensors, is_async=is_async)

    def _end_for_all(self, call: bytes, error: BaseException) -> BaseException:
        """Tell the ranks of all hosts, which may not notice in any other way; return the error to raise."""
        found = error
        if isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and not isinstance(error, GroupError)):
            found = self._peers.find_any_failed() or error  # where it began: this rank may know only what followed
        self.report_failure(found)
        self.end_calls(found if isinstance(found, GroupError) else _describe_end(call, found))
        return found

    def _compare_then(self, compare: Callable[[bytes], None], call: bytes, action: Callable[[], Result]) -> Result:
        self.raise_if_broken()
        try:
            if self._carrier is None:
                compare(call)
            else:  # in one order with the calls that it carries
                self._carry(call, partial(self._carrier.compare_calls, call), [], is_async=False)
            return action()
        except CollectiveMismatchError:
            if self.asked.checking is not Checking.WAIT:
                self._torch.abort()
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            # The other ranks may be in a call that this rank has not made, and its next call would be another one.
            self._peers.broken = _describe_end(call, error)
            self._peers.report_failure(error)
            self._torch.is_ended = True
            raise

    def _forward(
        self,
        method: str,
        arguments: Sequence[Any],
        name: str,
        event: int | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        return self._torch.call(
            self._inner(),
            method,
            arguments,
            name=name,
            is_on_device=self._torch.has_device,
            on_end=None if event is None else partial(self._events.end, event),
            finish=finish,
        )

    def _send(self, method: str, *arguments: Any) -> Work:
        OPEN_GROUPS.count_message()
        return self._forward(method, arguments, method)

    def _inner(self) -> Any:
        self.raise_if_broken()
        return self._torch.all


def _is_plain_sum(collective: Collective, call: CollectiveCall) -> bool:
    if collective is not ALL_REDUCE or len(call.outputs) != 1 or split_operation(call.op) != (ReduceOp.SUM, None):
        return False
    return is_plain(call.outputs[0])


def _in_rows(call: CollectiveCall) -> tuple[Sequence[Any], Callable[[], None] | None]:
    """Return the arguments with copies of CPU tensors that do not lie in a row, and what writes those back, if any.

    Gloo reads and writes as many elements as a tensor has from where it begins, whatever its strides, without a word.
    """
    copies = {
        id(each): each.data.resolve_conj().resolve_neg().contiguous()
        for each in (*call.outputs, *call.inputs)
        if is_plain(each) and as_stored(each) is not each
    }
    if not copies:
        return call.arguments, None

    def replaced(value: Any) -> Any:
        return [replaced(each) for each in value] if isinstance(value, list | tuple) else copies.get(id(value), value)

    def write_all() -> None:
        for output in call.outputs:
            if id(output) in copies:
                write_back(output, copies[id(output)])

    return replaced(call.arguments), write_all


def _sum_ranks(carrier: HostsCarrier, tensor: Tensor, call: bytes) -> None:
    flat = flatten(tensor)
    carrier.sum_ranks(torch.view_as_real(flat).view(-1) if flat.is_complex() else flat, call)
    write_back(tensor, flat)


def _describe_end(call: bytes, error: BaseException) -> GroupError:
    return GroupError(f"{call.decode()} was ended on this rank by {type(error).__name__}. (LS213)")


def _close(comparer: Comparer, backends: TorchBackends) -> None:
    backends.watch.close()
    comparer.close()
    backends.close()
