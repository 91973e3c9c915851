"""A process group around one of torch's that compares the calls of all ranks before it makes them.

Gloo and NCCL trust their callers: ranks that call different collectives get sums of unrelated tensors, or hang. This
group makes them agree first, as the shm backend always does: over shared memory where the ranks are on one host, else
over a Gloo group of its own. That costs one small exchange per call, and a call waits for all ranks to make it.

Messages between two ranks (`send`, `recv`) are handed on unchecked.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from lockstep.comm.calls import LONGEST_CALL, explain_mismatch
from lockstep.comm.capabilities import GroupCapabilities
from lockstep.comm.collectives import Collective, add_collectives
from lockstep.comm.gloo import gloo_connected_in_time
from lockstep.comm.hosts import GroupMembers, GroupSetUp, known_hosts
from lockstep.comm.shm.arguments import read_allocation
from lockstep.comm.shm.set_up import make_shared_memory_comparer
from lockstep.compiler import keep_compiler_out_of_methods
from lockstep.errors import GroupError, PeerLostError
from lockstep.torch_private import backend_of, register_backend, set_default_backend, set_timeout

Result = TypeVar("Result")
_BACKEND_TYPES: Final = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


class CallComparer(Protocol):
    """How ranks tell each other what they call."""

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call (collective).

        Raises:
            CollectiveMismatchError: They differ; on every rank alike.
            PeerLostError: A rank is lost.
        """

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of `error`."""

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, if that is known."""

    def send_exit_notice(self) -> None:
        """Tell the other ranks that this one goes, and which exception it handles, if it does."""

    def close(self) -> None:
        """Let go of what it holds."""


@final
class GlooComparer:
    """Agreement of ranks on several hosts."""

    def __init__(self, store: Store, rank: int, timeout: timedelta, names: Sequence[int]) -> None:
        self._store = store
        self._names = names
        self._name = names[rank]
        size = len(names)
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("compare/gloo", store), rank, size, timeout)

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call (collective)."""
        mine = torch.zeros(LONGEST_CALL, dtype=torch.uint8, device="cpu")
        mine[: len(call)] = torch.frombuffer(bytearray(call), dtype=torch.uint8)
        pages = [torch.empty_like(mine) for _ in self._names]
        try:
            self._gloo.allgather([pages], [mine]).wait()
        except RuntimeError as error:
            raise self._explain_lost(call, error) from error
        calls = {name: bytes(page.tolist()).rstrip(b"\0") for name, page in zip(self._names, pages, strict=True)}
        if any(other != call for other in calls.values()):
            raise explain_mismatch(calls)

    def report_failure(self, error: BaseException) -> None:
        """Leave word in the store, which outlives this rank unless this rank holds it."""
        try:
            self._store.set("failure_reason", f"{self._name} {type(error).__name__}: {error}")
        except RuntimeError:  # the store is lost, and no rank can read it
            return

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:  # noqa: ARG002 - the protocol's
        """Return None: processes of other hosts are not watched."""
        return None

    def send_exit_notice(self) -> None:
        """Leave word of the exception that is being handled, as in a `finally`, if there is one."""
        error = sys.exc_info()[1]
        if error is not None:
            self.report_failure(error)

    def close(self) -> None:
        """Let go of the Gloo group."""
        self._gloo = None

    def _explain_lost(self, call: bytes, error: RuntimeError) -> PeerLostError:
        try:
            said = self._store.get("failure_reason").decode() if self._store.check(["failure_reason"]) else ""
        except RuntimeError:  # the rank that holds the store is lost too
            said = ""
        if said:
            rank, _, reason = said.partition(" ")
            return PeerLostError(f"Rank {rank} failed: {reason}", rank=int(rank))
        return PeerLostError(f"A rank was lost, or did not reach {call.decode()}: {error}")


@final
@keep_compiler_out_of_methods
@add_collectives
class CheckedProcessGroup(ProcessGroup):
    """Torch's backends for the devices that were asked for, which compare every call first.

    Every collective has the name, the arguments and the meaning that `torch.distributed.ProcessGroup` gives it.

    Args:
        inner: The group that makes the calls.
        comparer: How ranks agree on a call.
        backends: Names of the backends by device, for `backend_names`.
        names: What messages call each rank: its rank in the default group.
    """

    def __init__(
        self, inner: ProcessGroup, comparer: CallComparer, backends: Mapping[str, str], names: Sequence[int]
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this form
        self._inner: Any = inner
        self._names = names
        self._comparer = comparer
        self._broken: GroupError | None = None
        self.backend_names = dict(backends)
        """Backend of each device."""
        for device, name in backends.items():
            place = torch.device(device)
            backend = backend_of(inner, place)
            register_backend(self, place, _BACKEND_TYPES[name], backend)
        set_default_backend(self, _BACKEND_TYPES[next(iter(backends.values()))])
        self._close = weakref.finalize(self, _close, os.getpid(), comparer, inner)

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work:
        """Compare one call of the table's, then make it (collective)."""
        call = collective.read(arguments, keywords)
        description = collective.describe(call, self._names)
        return self._compare_then(description, lambda: self._forward(collective.methods[0], call.arguments))

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call, which is not one of this group's own (collective)."""
        self._compare_then(call, lambda: None)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send, unchecked."""
        return self._forward("send", (tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive, unchecked."""
        return self._forward("recv", (tensors, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive from any rank, unchecked."""
        return self._forward("recv_anysource", (tensors, tag))

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros, in memory like any other: what a shm group gives from its own (local)."""
        return torch.zeros(read_allocation(size, dtype, device), dtype=dtype, device="cpu")

    @property
    def capabilities(self) -> GroupCapabilities:
        """What the group can do beside torch's collectives (local)."""
        hosts = known_hosts(self)
        return GroupCapabilities(
            is_host_local=hosts is not None and hosts.is_one_host, compares_calls=True, reports_exits=True
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name, as torch wants it."""
        return "checked"

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of `error` (local)."""
        self._comparer.report_failure(error)

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, if that is known (local)."""
        return self._comparer.find_lost(peers) if self._close.alive else None

    def shutdown(self) -> None:
        """Leave the group; torch calls it on destroy (local)."""
        if self._close.alive:
            self._comparer.send_exit_notice()
        self._close()
        self._inner = None

    def _compare_then(self, call: bytes, action: Callable[[], Result]) -> Result:
        self._require_inner()
        try:
            self._comparer.compare_calls(call)
            return action()
        except (KeyboardInterrupt, SystemExit) as error:
            # The others may be in a call that this rank has not made: its next one would meet that.
            self._broken = GroupError(f"{call.decode()} was ended on this rank by {type(error).__name__}.")
            self._comparer.report_failure(error)
            raise

    def _forward(self, name: str, arguments: Sequence[Any]) -> Work:
        work: Work = getattr(self._require_inner(), name)(*(value for value in arguments if value is not None))
        return work

    def _require_inner(self) -> Any:
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # the old one would keep frames and their tensors alive
        if self._inner is None:
            raise GroupError("This process group was destroyed; make a new one to go on.")
        return self._inner


def check_group(
    store: Store,
    rank: int,
    timeout: timedelta,
    backends: Mapping[str, str],
    members: GroupMembers,
    set_up: GroupSetUp,
) -> CheckedProcessGroup:
    """Make a checked group (collective over its ranks).

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        timeout: How long a call may take.
        backends: Name of torch's backend for each device type.
        members: Who the ranks are.
        set_up: When the group must be made, and what is known of its hosts.

    Raises:
        GroupError: A backend that cannot be checked; some rank did not connect in time.
    """
    size = len(members.names)
    inner = ProcessGroup(store, rank, size)
    makers: Mapping[str, Callable[[Store], Any]] = {
        "gloo": lambda place: dist.ProcessGroupGloo(place, rank, size, timeout),
        "nccl": lambda place: dist.ProcessGroupNCCL(place, rank, size, _nccl_options(timeout)),
    }
    made: dict[str, Any] = {}
    with ExitStack() as until_made:
        if "gloo" in backends.values():
            until_made.enter_context(gloo_connected_in_time(store, rank, members, set_up.deadline))
        for device, name in backends.items():
            if name not in makers:
                raise GroupError(f"check=True knows the backends gloo and nccl (and shm checks always), not {name!r}.")
            if name not in made:
                made[name] = makers[name](PrefixStore(f"inner/{name}", store))
            register_backend(inner, torch.device(device), _BACKEND_TYPES[name], made[name])
    set_default_backend(inner, _BACKEND_TYPES[next(iter(backends.values()))])
    shared = make_shared_memory_comparer(PrefixStore("compare/shm", store), rank, timeout, members, set_up)
    comparer: CallComparer = shared if shared is not None else GlooComparer(store, rank, timeout, members.names)
    return CheckedProcessGroup(inner, comparer, backends, members.names)


def _nccl_options(timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    return options


def _close(pid: int, comparer: CallComparer, inner: ProcessGroup) -> None:
    if os.getpid() == pid:  # a forked child has copies of these, but is no member
        comparer.close()
        inner.shutdown()
