"""What each rank of a shared-memory group says of itself, and whether its process still runs.

state page of a rank:   state | lost rank | length, text: why it left | length, text: the call it waits in
"""

import ctypes
import os
import select
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, final

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.file_layout import PAGE, PHASE
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.rendezvous import GroupHandles
from lockstep.errors import PeerLostError
from lockstep.processes.forking import this_process

_TEXT_BYTES: Final = PAGE // 2 - 32
_REASON: Final = 8
_WAITING: Final = PAGE // 2


class PeerState(IntEnum):
    """State of a rank: it starts as JOINED and changes at most once."""

    JOINED = 0
    LEFT = 1
    """It destroyed the group, or its script ended."""
    FAILED = 2
    """It failed with an exception; the reason names it."""
    BROKEN = 3
    """It cannot continue because another rank is lost."""
    TIMED_OUT = 4
    """A wait timed out; the reason names the awaited rank, the call, and what the other ranks were doing."""


@final
class RankStates:
    def __init__(self, memory: Memory, rank: int, handles: GroupHandles, global_ranks: Sequence[int]) -> None:
        self._memory = memory
        self._rank = rank
        self._global_ranks = global_ranks
        self._global_rank = global_ranks[rank]
        self._member = this_process()
        self._pids = handles.pids
        self._pidfds = handles.pidfds

    def publish(self, state: PeerState, reason: str = "", lost: int = 0) -> None:
        """Publish that this rank left the group and why; only the first call counts, and none from a forked child."""
        if this_process() != self._member:
            return
        page = self._memory.address + self._memory.layout.state(self._rank)
        if self.read(self._rank)[0] is PeerState.JOINED:
            _write_text(page + _REASON, reason.encode())
            ctypes.memmove(page + 4, struct.pack("<i", lost), 4)
            own = self._memory.layout.semaphore(PHASE, self._rank, self._rank)
            semaphores.post(self._memory.address + own)  # orders the text before the state
            ctypes.memmove(page, struct.pack("<i", state), 4)

    def read(self, peer: int) -> tuple[PeerState, int, str]:
        """Return the state of a rank, the rank that it has lost, and why it left."""
        page = self._memory.address + self._memory.layout.state(peer)
        state, lost = struct.unpack("<ii", ctypes.string_at(page, 8))
        return PeerState(state), lost, _read_text(page + _REASON) if state else ""

    def publish_waiting(self, call: bytes) -> None:
        """Publish the call that this rank waits in; empty for none."""
        _write_text(self._memory.address + self._memory.layout.state(self._rank) + _WAITING, call)

    def describe_waiting(self, peer: int) -> str:
        waiting = _read_text(self._memory.address + self._memory.layout.state(peer) + _WAITING)
        name = self._global_ranks[peer]
        return f"Rank {name} waits in {waiting}" if waiting else f"Rank {name} is not in a call of this group"

    def find_lost(self, peers: Sequence[int]) -> int | None:
        """Return one of `peers` that has left in whatever way, or None."""
        for peer in peers:
            if self.read(peer)[0] is not PeerState.JOINED or self.has_ended(peer):
                return peer
        return None

    def find_killed(self) -> int | None:
        """Return a rank that was killed or has failed, and did not just leave, or None."""
        for peer in self._pidfds:
            if self.read(peer)[0] is not PeerState.LEFT and self.find_lost([peer]) is not None:
                return peer
        return None

    def has_ended(self, peer: int) -> bool:
        if peer not in self._pidfds:  # this rank
            return False
        poll = select.poll()
        poll.register(self._pidfds[peer], select.POLLIN)
        return bool(poll.poll(0))

    def find_first_lost(self, peer: int) -> int:
        """Return the rank that was lost first: a rank that is BROKEN names the rank that it lost."""
        seen = {self._rank}
        while peer not in seen:
            seen.add(peer)
            state, lost, _ = self.read(peer)
            if state is PeerState.BROKEN and lost != self._rank:
                peer = lost
        return peer

    def error_of(self, peer: int) -> PeerLostError:
        return PeerLostError(self._explain_lost(peer), rank=self._global_ranks[peer])

    def others(self) -> list[int]:
        return [*self._pidfds]

    def close(self) -> None:
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds = {}

    def _explain_lost(self, peer: int) -> str:
        state, _, reason = self.read(peer)
        name = self._global_ranks[peer]
        if state in {PeerState.FAILED, PeerState.TIMED_OUT}:
            return f"Rank {name} failed: {reason} (LS203)"
        if state is PeerState.LEFT and reason:
            return (
                f"Rank {name} has left the group, which rank {self._global_rank} still needs, while it handled "
                f"{reason} (LS203)"
            )
        if state is PeerState.LEFT:
            return (
                f"Rank {name} has left the group (it destroyed it, or its script ended), but rank {self._global_rank} "
                "still needs it. Every rank must make the same calls; look for a loop that is longer on some ranks, or "
                "a batch that one has skipped. (LS203)"
            )
        return (
            f"Rank {name} (process {self._pids.get(peer)}) is lost: its process exited without reporting an error. It "
            "was killed or crashed, or ended by os._exit and did not destroy the group, as forked children of "
            "multiprocessing do. Look at its log, and in the system log for a lack of memory. (LS203)"
        )


def _write_text(address: int, text: bytes) -> None:
    cut = text[:_TEXT_BYTES]
    ctypes.memmove(address, struct.pack("<i", len(cut)) + cut, 4 + len(cut))


def _read_text(address: int) -> str:
    length = struct.unpack("<i", ctypes.string_at(address, 4))[0]
    return ctypes.string_at(address + 4, min(max(length, 0), _TEXT_BYTES)).decode(errors="replace")
