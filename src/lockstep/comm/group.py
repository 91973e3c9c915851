"""Process groups written in Python: what they have in common, whoever carries their tensors."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup

from lockstep.comm.hosts import GroupBackends
from lockstep.comm.open_calls import CallEvents, describe_destroyed
from lockstep.comm.torch_backends import GroupPeers, TorchBackends
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.forking import finalize_here
from lockstep.torch_private.compiler import keep_compiler_out_of_methods


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
        self.parts: tuple[LockstepGroup, ...] = ()
        """Groups of some of its ranks, which carry calls for it."""
        self._close: weakref.finalize[Any, Any] = finalize_here(self, close, *closed)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls were made; the name is torch's."""
        return self._events.num_calls

    def __repr__(self) -> str:
        """Return what torch's errors show."""
        return super().__repr__() if self._close.alive else describe_destroyed(self)

    def note_place(self, line: str) -> None:
        """Let messages name the line at which this group was made, of several that there are."""
        self._peers.made_at = f" made at {line}" if line else ""
        for part in self.parts:
            part.note_place(line)

    @property
    def timeout(self) -> timedelta:
        return self._torch.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call may take, those of torch's backends too (local)."""
        self._peers.set_timeout(timeout)
        self._torch.set_timeout(timeout)
        for part in self.parts:
            part.set_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        self._peers.report_failure(error)
        for part in self.parts:
            part.report_failure(error)

    def raise_if_broken(self) -> None:
        """Raise the error of a group that cannot be used any more; after a read of what a call wrote (local)."""
        self._peers.raise_if_broken()
        if self._torch.is_closed:
            raise GroupError("This process group was destroyed; make a new one to go on. (LS204)")

    def send_exit_notice(self) -> None:
        """Report to the other ranks that this one makes no more calls; its tensors stay usable (local)."""
        self._peers.send_exit_notice()
        for part in self.parts:
            part.send_exit_notice()

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        return self._peers.find_lost(peers) if self._close.alive else None

    def end_calls(self, error: GroupError) -> None:
        """Let all calls of this rank raise `error`, those that wait now too (local, any thread)."""
        self._peers.end_calls(error)
        self._torch.end_calls(error)
        for part in self.parts:
            part.end_calls(error)

    def shutdown(self) -> None:
        """Leave the group; torch calls it on destroy (local). GroupError: an ended call may still write."""
        for part in self.parts:
            part.shutdown()
        if self._close.alive:
            self._peers.send_exit_notice()
            self._torch.wait_for_ended()
        self._close()
