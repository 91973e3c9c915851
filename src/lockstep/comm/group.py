"""Process groups written in Python, and the one around torch's backends that compares the calls of all ranks first.

Gloo and NCCL compare nothing: ranks that call different collectives get sums of unrelated tensors, hang or abort. So a
group around them compares the calls first, as the shm backend does: over shared memory where the ranks are on one host,
else over a Gloo group of its own. How is said by `Checking`. [`shm/comparison.py`]

Messages between two ranks (`send`, `recv`) are not compared. An error of the backend that comes from the loss of a rank
names that rank.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.comm.capabilities import GroupCapabilities
from lockstep.comm.collectives import Collective, add_collectives, refuse_one_output_twice
from lockstep.comm.gloo import GlooComparer
from lockstep.comm.hosts import Checking, GroupBackends, known_hosts
from lockstep.comm.open_calls import OPEN_GROUPS, CallEvents, describe_destroyed
from lockstep.comm.shm.arguments import read_allocation
from lockstep.comm.shm.comparison import SharedMemoryComparer
from lockstep.comm.torch_backends import GroupPeers, TorchBackends, type_of_backend
from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError
from lockstep.processes.forking import finalize_here
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


class PythonProcessGroup(ProcessGroup):
    """A group without a C++ backend for CPU tensors, with the properties that torch reads from such a backend."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shm"

    # Torch keeps name and description in the backends of a group, of which it may have none.
    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

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


@keep_compiler_out_of_methods
class LockstepGroup(PythonProcessGroup):
    """A group that knows when its ranks are lost, with backends of torch for tensors that it does not carry itself.

    Every method has the name, the arguments and the meaning that `torch.distributed.ProcessGroup` gives it.
    """

    def __init__(
        self,
        asked: GroupBackends,
        peers: GroupPeers,
        backends: TorchBackends,
        close: Callable[..., None],
        *closed: Any,
    ) -> None:
        """`close` is called with what is `closed` when the group is left, or collected."""
        super().__init__(peers.rank, len(peers.global_ranks))
        self.asked = asked
        self._peers: Any = peers
        self._global_ranks = peers.global_ranks
        self._torch = backends
        self._events = CallEvents(peers.global_ranks)
        self._close: weakref.finalize[Any, Any] = finalize_here(self, close, *closed)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls were made; the name is torch's."""
        return self._events.num_calls

    def __repr__(self) -> str:
        """Return what torch's errors show."""
        return super().__repr__() if self._close.alive else describe_destroyed(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may take, those of torch's backends too (local)."""
        self._peers.set_timeout(timeout)
        self._torch.set_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        self._peers.report_failure(error)

    def raise_if_broken(self) -> None:
        """Raise the error of a group that cannot be used any more; after a read of what a call wrote (local)."""
        self._peers.raise_if_broken()
        if self._torch.is_closed:
            raise GroupError("This process group was destroyed; make a new one to go on. (LS204)")

    def send_exit_notice(self) -> None:
        """Report to the other ranks that this one makes no more calls; its tensors stay usable (local)."""
        self._peers.send_exit_notice()

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        return self._peers.find_lost(peers) if self._close.alive else None

    def end_calls(self, error: GroupError) -> None:
        """Let all calls of this rank raise `error`, those that wait now too (local, any thread)."""
        self._peers.end_calls(error)
        self._torch.end_calls(error)

    def shutdown(self) -> None:
        """Leave the group; torch calls it on destroy (local). GroupError: an ended call may still write."""
        if self._close.alive:
            self._peers.send_exit_notice()
            self._torch.wait_for_ended()
        self._close()


@final
@keep_compiler_out_of_methods
@add_collectives
class CheckedProcessGroup(LockstepGroup):
    """Torch's backends for some devices, with calls that are compared first."""

    def __init__(self, comparer: Comparer, asked: GroupBackends, backends: TorchBackends) -> None:
        super().__init__(asked, comparer.peers, backends, _close, comparer, backends)
        backends.check = comparer.check
        self._comparer = comparer
        self._compares = asked.checking.compares
        for device, name in backends.names.items():
            place = torch.device(device)
            register_backend(self, place, type_of_backend(name), backend_of(self._inner(), place))
        set_default_backend(self, type_of_backend(next(iter(backends.names.values()))))

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work:
        """Compare one call of the table's, then make it (collective)."""
        call = collective.read(arguments, keywords)
        refuse_one_output_twice(call)
        number = self._events.take_number()
        made = collective.methods[0], call.arguments, call.name
        if not self._compares:
            return self._forward(*made)
        description = collective.describe(call, self._global_ranks)
        action = partial(self._forward, *made, self._events.begin(number, description, call.outputs))
        return self._compare_then(self._comparer.begin_call, description, action)

    def compare_calls(self, call: bytes) -> None:
        self._events.take_number()
        self._compare_then(self._comparer.compare_calls, call, lambda: None)

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
            compares_calls=self._compares,
            reports_exits=True,
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "checked"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        super().setGroupName(name)
        name_group(self._inner(), name)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        super().setGroupDesc(description)
        describe_group(self._inner(), description)

    def _compare_then(self, compare: Callable[[bytes], None], call: bytes, action: Callable[[], Result]) -> Result:
        self.raise_if_broken()
        try:
            compare(call)
            return action()
        except CollectiveMismatchError:
            if self.asked.checking is not Checking.WAIT:
                self._torch.abort()
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            # The other ranks may be in a call that this rank has not made, and its next call would be another one.
            self._peers.broken = GroupError(
                f"{call.decode()} was ended on this rank by {type(error).__name__}. (LS213)"
            )
            self._peers.report_failure(error)
            self._torch.is_ended = True
            raise

    def _forward(self, method: str, arguments: Sequence[Any], name: str, event: int | None = None) -> Work:
        return self._torch.call(
            self._inner(),
            method,
            arguments,
            name=name,
            is_on_device=self._torch.has_device,
            on_end=None if event is None else partial(self._events.end, event),
        )

    def _send(self, method: str, *arguments: Any) -> Work:
        OPEN_GROUPS.count_message()
        return self._forward(method, arguments, method)

    def _inner(self) -> Any:
        self.raise_if_broken()
        return self._torch.all


def _close(comparer: Comparer, backends: TorchBackends) -> None:
    backends.watch.close()
    comparer.close()
    backends.close()
