"""The other ranks of a group: signalling them, waiting for them, and detecting that they have exited.

A wait spins briefly where every rank has a core, then sleeps in the kernel for short times; after each it reads
the peer's state and checks whether its process still runs.

state page of a rank:   state | lost rank | length, text: why it left | length, text: the call it waits in
"""

import ctypes
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from traceback import format_exception
from typing import Final, final

from lockstep.comm.lost_ranks import EXIT_SECONDS, may_come_from_loss
from lockstep.comm.shm import semaphores
from lockstep.comm.shm.file_layout import PAGE, PHASE
from lockstep.comm.shm.memory import Memory, read_text, write_text
from lockstep.comm.shm.rendezvous import GroupHandles
from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError, clause, describe_exception
from lockstep.processes.forking import call_in_children, this_process
from lockstep.processes.user_line import find_user_line
from lockstep.recording import EventKind, own_recorder

_POLL_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 0.3
_NUM_SPINS: Final = 150
_LONG_SPIN_SECONDS: Final = 0.0005
_EXIT_POLL_SECONDS: Final = 0.01
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
            write_text(page + _REASON, reason.encode(), _TEXT_BYTES)
            ctypes.memmove(page + 4, struct.pack("<i", lost), 4)
            own = self._memory.layout.semaphore(PHASE, self._rank, self._rank)
            semaphores.post(self._memory.address + own)  # orders the text before the state
            ctypes.memmove(page, struct.pack("<i", state), 4)

    def read(self, peer: int) -> tuple[PeerState, int, str]:
        """Return the state of a rank, the rank that it has lost, and why it left."""
        page = self._memory.address + self._memory.layout.state(peer)
        state, lost = struct.unpack("<ii", ctypes.string_at(page, 8))
        reason = read_text(page + _REASON, _TEXT_BYTES).decode(errors="replace") if state else ""
        return PeerState(state), lost, reason

    def publish_waiting(self, call: bytes) -> None:
        """Publish the call that this rank waits in; empty for none."""
        write_text(self._memory.address + self._memory.layout.state(self._rank) + _WAITING, call, _TEXT_BYTES)

    def describe_waiting(self, peer: int) -> str:
        page = self._memory.address + self._memory.layout.state(peer)
        waiting = read_text(page + _WAITING, _TEXT_BYTES).decode(errors="replace")
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


@final
class Peers:
    def __init__(
        self, memory: Memory, rank: int, handles: GroupHandles, timeout_seconds: float, global_ranks: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = memory.layout.size
        self.timeout_seconds = timeout_seconds
        self.broken: GroupError | None = None
        """Why this process cannot use the group; a forked child is not a rank of its parent's group."""
        self._sleepers = semaphores.Sleepers()
        call_in_children(self._break_in_child)
        self._recorder = own_recorder()
        self._memory = memory
        self._states = RankStates(memory, rank, handles, global_ranks)
        self.global_ranks = global_ranks
        """The number of each rank in messages: its rank in the default group."""
        self.global_rank = global_ranks[rank]
        others = [peer for peer in range(self.size) if peer != rank]
        self._posts = [self.semaphore(PHASE, rank, peer) for peer in others]
        self._waits = [(peer, self.semaphore(PHASE, peer, rank)) for peer in others]
        self.has_core = self.size <= len(os.sched_getaffinity(0))
        """Whether there is a core for every rank, so that a wait may spin."""
        self.spins_longer = False
        """Whether a wait for a phase spins longer: set while the caller of a blocking call runs it itself."""

    def _break_in_child(self) -> None:
        if self.broken is None:
            self.broken = GroupError(
                f"This process was forked from rank {self.global_rank} of the group and is no rank itself. Make the "
                "calls in the parent, or give the child a group of its own. (LS205)"
            )

    def semaphore(self, kind: int, source: int, target: int) -> int:
        """Return the address of a semaphore that `source` posts for `target`."""
        return self._memory.address + self._memory.layout.semaphore(kind, source, target)

    def end_phase(self, call: bytes, timeout_seconds: float | None = None) -> None:
        """Signal every rank that this one has finished the phase, and wait until all have (collective)."""
        for address in self._posts:
            semaphores.post(address)
        try:
            for peer, address in self._waits:
                if not semaphores.try_wait(address):
                    self.wait(peer, address, call, everyone=True, timeout_seconds=timeout_seconds)
        except BaseException:
            # The phase failed here, so a slower rank must not see it as complete: take back the unread signals.
            for address in self._posts:
                semaphores.try_wait(address)
            raise

    def wait(  # the arguments of a wait, two of them optional
        self, peer: int, address: int, call: bytes, *, everyone: bool = False, timeout_seconds: float | None = None
    ) -> None:
        """Wait until `peer` has posted the semaphore at `address`; with `everyone`, the loss of any rank ends it."""
        if self.has_core and self._spin(address, everyone and self.spins_longer):
            return
        started = time.monotonic()
        if self._sleepers.sleep(address, _POLL_SECONDS):
            return
        self._states.publish_waiting(call)
        event = self._record_wait(self.global_ranks[peer], call)
        try:
            self._wait_long(peer, address, call, started, everyone, timeout_seconds)
        finally:
            self._recorder.end(event)
        self._states.publish_waiting(b"")  # after an error the text stays, for the messages of the other ranks

    def wait_for_any(self, peers: Sequence[int], address: int, call: bytes, take: Callable[[], int | None]) -> int:
        """Return the rank whose message `take` finds; it is called again after each post of the semaphore at `address`.

        A rank that was killed or failed ends the wait, though another may still send: the group is broken. Ranks that
        have left end it when all have.
        """
        started = time.monotonic()
        lost_since: float | None = None
        self._states.publish_waiting(call)
        event = self._record_wait(-1, call)
        try:
            while (source := take()) is None:
                if self._sleepers.sleep(address, _POLL_SECONDS):
                    continue
                self.raise_if_broken()
                if all(self._states.find_lost([peer]) is not None for peer in peers):
                    source = take()
                    if source is not None:
                        break
                    self.check(peers)
                lost_since = self._check_killed(lost_since)
                self._check_time(started, call, "any rank")
        finally:
            self._recorder.end(event)
        self._states.publish_waiting(b"")  # after an error the text stays, for the messages of the other ranks
        return source

    def check(self, peers: Sequence[int]) -> None:
        """Raise if one of `peers` is lost, and name the rank that was lost first; the group is broken then."""
        lost = self._states.find_lost(peers)
        if lost is not None:
            raise self._break(lost)

    def time_out(self, call: bytes, awaited: str, timeout_seconds: float) -> CollectiveTimeoutError:
        """Return the error of a wait that took too long, with what every rank waits for."""
        doing = "; ".join(self._states.describe_waiting(peer) for peer in range(self.size) if peer != self.rank)
        error = CollectiveTimeoutError(
            f"Rank {self.global_rank} waited {timeout_seconds:g} s in {call.decode()} for {awaited}. {doing}. Every "
            "rank must make the same calls in the same order; if one is only slow, give a longer timeout to "
            "init_process_group. (LS202)"
        )
        self.publish_state(PeerState.TIMED_OUT, str(error))
        self.broken = error
        return error

    def publish_state(self, state: PeerState, reason: str = "", lost: int = 0) -> None:
        self._states.publish(state, reason, lost)

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken.with_traceback(None)  # the old one would keep frames and their tensors alive

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_seconds = timeout.total_seconds()

    def report_failure(self, error: BaseException) -> None:
        """Publish that this rank exits because of `error`; if that is the loss of a rank, publish that one."""
        if isinstance(error, PeerLostError) and error.rank in self.global_ranks:
            self.publish_state(PeerState.BROKEN, str(error), [*self.global_ranks].index(error.rank))
        else:
            self.publish_state(PeerState.FAILED, describe_exception(error))

    def send_exit_notice(self) -> None:
        """Publish that this rank leaves, with the exception that it is handling, if there is one."""
        error = sys.exc_info()[1]
        self.publish_state(PeerState.LEFT, "" if error is None else describe_exception(error))

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no more calls, or None; does not break the group."""
        for peer in peers:
            if self._states.has_ended(peer) or (peer != self.rank and self._states.read(peer)[0] is PeerState.LEFT):
                lost = self._states.find_first_lost(peer)
                return self._states.error_of(lost)
        return None

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for the rank that was lost, failed or left first, or None; does not break the group."""
        return self._explain(self._states.find_lost(self._states.others()))

    def find_any_failed(self) -> PeerLostError | None:
        """Return the same for a rank that was killed or failed, and did not just leave."""
        return self._explain(self._states.find_killed())

    def mark_broken(self, error: PeerLostError) -> None:
        """Mark the group as broken because of a lost rank, and publish it."""
        self.publish_state(PeerState.BROKEN, str(error), [*self.global_ranks].index(error.rank))
        self.broken = error

    def explain_error(self, error: RuntimeError) -> GroupError | None:
        """Return the error for the rank whose loss is the cause of an error of torch's backend, if one was lost.

        The kernel closes the connections of a process before it reports its end: so this waits a moment.
        """
        if self.broken is not None:
            return self.broken.with_traceback(None)
        if not may_come_from_loss(error):
            return None
        end = time.monotonic() + EXIT_SECONDS
        while (lost := self.find_any_lost()) is None and time.monotonic() < end:
            time.sleep(_EXIT_POLL_SECONDS)
        return lost

    def _explain(self, peer: int | None) -> PeerLostError | None:
        if peer is None:
            return None
        lost = self._states.find_first_lost(peer)
        return self._states.error_of(lost)

    def end_calls(self, error: GroupError) -> None:
        """Let all calls of this rank raise `error`, those that wait now too (local, any thread)."""
        if self.broken is None:
            self.broken = error
        self._sleepers.end()

    def fail(self, error: BaseException, call: bytes) -> None:
        """Publish that `call` failed on this rank with `error`, at an unknown point of it: the group is broken."""
        self.broken = broken = GroupError(f"{call.decode()} ended on this rank with {_describe(error)}. (LS213)")
        self.publish_state(PeerState.FAILED, describe_exception(error))
        # As text, not as the cause: the cause would keep its frames, and their tensors, alive.
        broken.add_note("".join(format_exception(error)))

    def close(self) -> None:
        self._states.close()

    def _record_wait(self, rank: int, call: bytes) -> int:
        """Record a wait that is long already, and the line of the user's code; return the event's number."""
        recorder = self._recorder
        if not recorder.is_open:
            return 0
        line = find_user_line(threading.main_thread().ident)
        event = recorder.begin(EventKind.WAITING, rank, 0, recorder.text(call))
        if not line.startswith("<"):
            recorder.mark(EventKind.LINE, 0, 0, recorder.text(line))
        return event

    def _wait_long(
        self, peer: int, address: int, call: bytes, started: float, everyone: bool, timeout_seconds: float | None
    ) -> None:
        lost_since: float | None = None
        while True:
            self.raise_if_broken()
            if self._states.find_lost([peer]) is not None:
                if semaphores.try_wait(address):
                    return
                self.check([peer])
            if everyone:
                lost_since = self._check_killed(lost_since)
            self._check_time(started, call, f"rank {self.global_ranks[peer]}", timeout_seconds)
            if self._sleepers.sleep(address, _POLL_SECONDS):
                return

    def _spin(self, address: int, spins_longer: bool) -> bool:
        for _ in range(_NUM_SPINS):
            if semaphores.try_wait(address):
                return True
        # Sleeping and waking takes about as long as this spin; other threads and processes may use the core meanwhile.
        end = time.perf_counter() + _LONG_SPIN_SECONDS
        while spins_longer and time.perf_counter() < end:
            semaphores.yield_core()
            if semaphores.try_wait(address):
                return True
        return False

    def _check_killed(self, lost_since: float | None) -> float | None:
        """Raise if a rank was killed or failed longer than the grace period ago; return when that was first seen."""
        killed = self._states.find_killed()
        if killed is None:
            return None
        # The awaited rank may have finished its own wait for the lost rank: give it time to post.
        now = time.monotonic()
        lost_since = now if lost_since is None else lost_since
        if now - lost_since > _GRACE_SECONDS:
            raise self._break(killed)
        return lost_since

    def _check_time(self, started: float, call: bytes, awaited: str, timeout_seconds: float | None = None) -> None:
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if time.monotonic() - started > limit:
            raise self.time_out(call, awaited, limit)

    def _break(self, peer: int) -> GroupError:
        """Mark the group as broken because `peer` is lost or timed out, and publish it; return the error."""
        peer = self._states.find_first_lost(peer)
        state, _, reason = self._states.read(peer)
        error: GroupError = self._states.error_of(peer)
        if state is PeerState.TIMED_OUT:
            error = CollectiveTimeoutError(reason)  # no rank was lost: both ends of a wait raise the same error
        self.publish_state(PeerState.BROKEN, str(error), peer)
        self.broken = error
        return error


def _describe(error: BaseException) -> str:
    text = clause(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
