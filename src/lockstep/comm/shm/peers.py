"""The other ranks of a group: telling them, waiting for them, and noticing when they are gone.

A wait spins briefly where every rank has a core, then sleeps in the kernel for short times; after each it looks at what
the peer says of itself in its state page and whether its process still lives.

    state page of a rank:   state | lost rank | length, text: why it left | length, text: what it waits for
"""

import ctypes
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from traceback import format_exception
from typing import Final, final

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.file_layout import PAGE, PHASE
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.rendezvous import GroupHandles
from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError

_POLL_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 0.3
_NUM_SPINS: Final = 150
_LONG_SPIN_SECONDS: Final = 0.0005
_TEXT_BYTES: Final = PAGE // 2 - 32
_REASON: Final = 8
_WAITING: Final = PAGE // 2


class PeerState(IntEnum):
    """How a rank is: JOINED until it becomes one of the others, once."""

    JOINED = 0
    LEFT = 1
    """It destroyed the group, or its script ended."""
    FAILED = 2
    """An exception ended it; the reason says which."""
    BROKEN = 3
    """It cannot go on because another rank is lost."""
    TIMED_OUT = 4
    """It waited too long; the reason says for whom and in which call, and what the others were doing."""


@final
class Peers:
    """The other ranks, as one of them sees them."""

    def __init__(
        self, memory: Memory, rank: int, handles: GroupHandles, timeout_seconds: float, names: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = memory.layout.size
        self.timeout_seconds = timeout_seconds
        self._broken: GroupError | None = None
        self._member = os.getpid()
        self._memory = memory
        self._pids = handles.pids
        self._pidfds = handles.pidfds
        self.names = names
        """What messages call each rank: its rank in the default group."""
        self.name = names[rank]
        others = [peer for peer in range(self.size) if peer != rank]
        self._posts = [self.semaphore(PHASE, rank, peer) for peer in others]
        self._waits = [(peer, self.semaphore(PHASE, peer, rank)) for peer in others]
        self.has_core = self.size <= len(os.sched_getaffinity(0))
        """Whether every rank has a core of its own, so that a wait may spin."""
        self.spins_longer = False
        """Whether a wait for a phase spins longer: set while the caller of a blocking call runs it itself."""

    @property
    def broken(self) -> GroupError | None:
        """Why this process cannot use the group any more, or never could: a forked child has a copy, but is no rank."""
        if self._broken is None and os.getpid() != self._member:
            self._broken = GroupError(
                f"This process was forked from rank {self.name} of the group and is no rank itself. Make its calls in "
                "the parent, or give the child a group of its own."
            )
        return self._broken

    @broken.setter
    def broken(self, error: GroupError) -> None:
        self._broken = error

    def semaphore(self, kind: int, source: int, target: int) -> int:
        """Return the address of a semaphore that `source` posts for `target`."""
        return self._memory.address + self._memory.layout.semaphore(kind, source, target)

    def end_phase(self, call: bytes, timeout_seconds: float | None = None) -> None:
        """Tell every rank that this one has come so far, and wait until all have (collective).

        Raises:
            PeerLostError: A rank is lost.
            CollectiveTimeoutError: A rank did not come in time.
        """
        for address in self._posts:
            semaphores.post(address)
        try:
            for peer, address in self._waits:
                if not semaphores.try_wait(address):
                    self.wait(peer, address, call, everyone=True, timeout_seconds=timeout_seconds)
        except BaseException:
            # Who comes later must not find complete a phase that failed here: take back what it has not taken yet.
            for address in self._posts:
                semaphores.try_wait(address)
            raise

    def wait(  # what a wait is, and two ways in which one may differ
        self, peer: int, address: int, call: bytes, *, everyone: bool = False, timeout_seconds: float | None = None
    ) -> None:
        """Wait until `peer` has posted the semaphore at `address`.

        Args:
            peer: The rank that posts.
            address: The semaphore.
            call: What this rank is doing, for messages.
            everyone: Whether the death of any rank ends the wait, not only that of `peer`.
            timeout_seconds: How long to wait, if not as long as the group allows.
        """
        if self.has_core and self._spin(address, everyone and self.spins_longer):
            return
        started = time.monotonic()
        if semaphores.wait(address, _POLL_SECONDS):
            return
        self._say_waiting(call)
        self._wait_long(peer, address, call, started, everyone, timeout_seconds)
        self._say_waiting(b"")  # after an error it stays, for the messages of the others

    def wait_for_any(self, peers: Sequence[int], address: int, call: bytes, take: Callable[[], int | None]) -> int:
        """Return the rank whose message `take` finds; it is asked again when the semaphore at `address` is posted.

        A rank that was killed or failed ends the wait, though another may still send: the group is broken. Ranks that
        have left end it when all have.

        Args:
            peers: The ranks that may send.
            address: The semaphore.
            call: What this rank is doing, for messages.
            take: Takes a message if one is here, and returns who sent it, or None.
        """
        started = time.monotonic()
        lost_since: float | None = None
        self._say_waiting(call)
        while (source := take()) is None:
            if semaphores.wait(address, _POLL_SECONDS):
                continue
            self._check_broken()
            if all(self._find_lost([peer]) is not None for peer in peers):
                source = take()
                if source is not None:
                    break
                self.check(peers)
            lost_since = self._check_killed(lost_since)
            self._check_time(started, call, "any rank")
        self._say_waiting(b"")
        return source

    def check(self, peers: Sequence[int]) -> None:
        """Raise if one of `peers` is lost.

        Raises:
            PeerLostError: Naming the rank that was lost first.
            CollectiveTimeoutError: It has waited too long, and given up.
        """
        lost = self._find_lost(peers)
        if lost is not None:
            raise self._break(lost)

    def time_out(self, call: bytes, awaited: str, timeout_seconds: float) -> CollectiveTimeoutError:
        """Return the error of a wait that took too long, with what every rank waits for."""
        doing = "; ".join(self._describe_waiting(peer) for peer in range(self.size) if peer != self.rank)
        error = CollectiveTimeoutError(
            f"Rank {self.name} waited {timeout_seconds:g} s in {call.decode()} for {awaited}. {doing}. Every rank "
            "must make the same calls in the same order; if one is only slow, give a longer timeout to "
            "init_process_group."
        )
        self.leave(PeerState.TIMED_OUT, str(error))
        self.broken = error
        return error

    def leave(self, state: PeerState, reason: str = "", lost: int = 0) -> None:
        """Tell the others that this rank is out; what was said first stays, and a forked child says nothing."""
        if os.getpid() != self._member:
            return
        page = self._memory.address + self._memory.layout.state(self.rank)
        if self._read_state(self.rank)[0] is PeerState.JOINED:
            _write_text(page + _REASON, reason.encode())
            ctypes.memmove(page + 4, struct.pack("<i", lost), 4)
            semaphores.post(self.semaphore(PHASE, self.rank, self.rank))  # orders the text before the state
            ctypes.memmove(page, struct.pack("<i", state), 4)

    def leave_normally(self) -> None:
        """Tell the others that this rank goes; and which exception it handles, as in a `finally`, if it does."""
        error = sys.exc_info()[1]
        self.leave(PeerState.LEFT, "" if error is None else f"{type(error).__name__}: {error}")

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, or None; nothing is broken by it."""
        for peer in peers:
            if self._has_ended(peer) or (peer != self.rank and self._read_state(peer)[0] is PeerState.LEFT):
                lost = self._trace(peer)
                return PeerLostError(self._explain_lost(lost), rank=self.names[lost])
        return None

    def fail(self, error: BaseException, call: bytes) -> None:
        """Tell the others that `error` ended `call` on this rank, nobody knows where in it: the group is broken."""
        self.broken = broken = GroupError(f"{call.decode()} ended on this rank with {_describe(error)}.")
        self.leave(PeerState.FAILED, f"{type(error).__name__}: {error}")
        # In words, and not as its cause: that would keep its frames, and their tensors, alive.
        broken.add_note("".join(format_exception(error)))

    def close(self) -> None:
        """Stop watching the processes."""
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds = {}

    def _wait_long(
        self, peer: int, address: int, call: bytes, started: float, everyone: bool, timeout_seconds: float | None
    ) -> None:
        lost_since: float | None = None
        while True:
            self._check_broken()
            if self._find_lost([peer]) is not None:
                if semaphores.try_wait(address):
                    return
                self.check([peer])
            if everyone:
                lost_since = self._check_killed(lost_since)
            self._check_time(started, call, f"rank {self.names[peer]}", timeout_seconds)
            if semaphores.wait(address, _POLL_SECONDS):
                return

    def _spin(self, address: int, spins_longer: bool) -> bool:
        for _ in range(_NUM_SPINS):
            if semaphores.try_wait(address):
                return True
        # To sleep and be woken takes about as long as this; other threads and processes get the core meanwhile.
        end = time.perf_counter() + _LONG_SPIN_SECONDS
        while spins_longer and time.perf_counter() < end:
            semaphores.give_way()
            if semaphores.try_wait(address):
                return True
        return False

    def _check_broken(self) -> None:
        if self.broken is not None:
            raise self.broken.with_traceback(None)  # the old one would keep frames and their tensors alive

    def _check_killed(self, lost_since: float | None) -> float | None:
        """Raise if some rank was killed or failed a while ago; return since when one is."""
        killed = self._find_killed()
        if killed is None:
            return None
        # The awaited rank may be past its own wait for the dead one: leave it the time to post.
        now = time.monotonic()
        lost_since = now if lost_since is None else lost_since
        if now - lost_since > _GRACE_SECONDS:
            raise self._break(killed)
        return lost_since

    def _check_time(self, started: float, call: bytes, awaited: str, timeout_seconds: float | None = None) -> None:
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if time.monotonic() - started > limit:
            raise self.time_out(call, awaited, limit)

    def _find_lost(self, peers: Sequence[int]) -> int | None:
        for peer in peers:
            if self._read_state(peer)[0] is not PeerState.JOINED or self._has_ended(peer):
                return peer
        return None

    def _find_killed(self) -> int | None:
        for peer in self._pidfds:
            if self._read_state(peer)[0] is not PeerState.LEFT and self._find_lost([peer]) is not None:
                return peer
        return None

    def _has_ended(self, peer: int) -> bool:
        if peer not in self._pidfds:  # it is this one
            return False
        poll = select.poll()
        poll.register(self._pidfds[peer], select.POLLIN)
        return bool(poll.poll(0))

    def _break(self, peer: int) -> GroupError:
        """Take a peer for lost, or what it waited for too long for late, and tell the others."""
        peer = self._trace(peer)
        state, _, reason = self._read_state(peer)
        error: GroupError = PeerLostError(self._explain_lost(peer), rank=self.names[peer])
        if state is PeerState.TIMED_OUT:
            error = CollectiveTimeoutError(reason)  # nobody was lost: both ends of a wait raise the same
        self.leave(PeerState.BROKEN, str(error), peer)
        self.broken = error
        return error

    def _trace(self, peer: int) -> int:
        """Follow who lost whom to the first rank that was lost."""
        seen = {self.rank}
        while peer not in seen:
            seen.add(peer)
            state, lost, _ = self._read_state(peer)
            if state is PeerState.BROKEN and lost != self.rank:
                peer = lost
        return peer

    def _explain_lost(self, peer: int) -> str:
        state, _, reason = self._read_state(peer)
        name = self.names[peer]
        if state in {PeerState.FAILED, PeerState.TIMED_OUT}:
            return f"Rank {name} failed: {reason}"
        if state is PeerState.LEFT and reason:
            return f"Rank {name} has left the group, which rank {self.name} still needs, while it handled {reason}"
        if state is PeerState.LEFT:
            return (
                f"Rank {name} has left the group (it destroyed it, or its script ended), but rank {self.name} still "
                "needs it. Every rank must make the same calls; look for a loop that is longer on some ranks."
            )
        return (
            f"Rank {name} (process {self._pids.get(peer)}) is lost: its process exited without reporting an error. It "
            "was killed or crashed, or ended by os._exit and did not destroy the group, as forked children of "
            "multiprocessing do. Look at its log; the system log says if it ran out of memory."
        )

    def _read_state(self, peer: int) -> tuple[PeerState, int, str]:
        page = self._memory.address + self._memory.layout.state(peer)
        state, lost = struct.unpack("<ii", ctypes.string_at(page, 8))
        return PeerState(state), lost, _read_text(page + _REASON) if state else ""

    def _say_waiting(self, call: bytes) -> None:
        _write_text(self._memory.address + self._memory.layout.state(self.rank) + _WAITING, call)

    def _describe_waiting(self, peer: int) -> str:
        waiting = _read_text(self._memory.address + self._memory.layout.state(peer) + _WAITING)
        name = self.names[peer]
        return f"Rank {name} waits in {waiting}" if waiting else f"Rank {name} is not in a call of this group"


def _describe(error: BaseException) -> str:
    text = str(error).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _write_text(address: int, text: bytes) -> None:
    cut = text[:_TEXT_BYTES]
    ctypes.memmove(address, struct.pack("<i", len(cut)) + cut, 4 + len(cut))


def _read_text(address: int) -> str:
    length = struct.unpack("<i", ctypes.string_at(address, 4))[0]
    return ctypes.string_at(address + 4, min(max(length, 0), _TEXT_BYTES)).decode(errors="replace")
