"""The other ranks of a group: waiting for them, and detecting that they have exited.

A wait spins or yields briefly, then sleeps in the kernel for short times [`native/shm.c`]; after each it reads the
peer's state and checks whether its process still runs.

state page of a rank:   state | lost rank | length, text: why it left | length, text: the call it waits in
"""

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from traceback import format_exception
from typing import Final, final

from lockstep.comm.lost_ranks import EXIT_SECONDS, ProcessEnds, may_come_from_loss
from lockstep.comm.shm import native
from lockstep.comm.shm.file_layout import PAGE
from lockstep.comm.shm.memory import Memory, read_text, write_text
from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError, clause, describe_exception
from lockstep.processes.forking import call_in_children, this_process
from lockstep.processes.user_line import find_user_line
from lockstep.recording import EventKind, own_recorder

_POLL_NS: Final = 50_000_000
_GRACE_SECONDS: Final = 0.3
_SPIN_NS: Final = 20_000
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
class Counter:
    """A counter in the group's memory: one rank adds to it, another takes what was added, one after another."""

    def __init__(self, peers: "Peers", place: int) -> None:
        self._library = native.load()
        self._peers = peers
        self._address = peers.address + place
        self._taken = 0

    def add(self) -> None:
        self._library.lockstep_raise(self._address)

    def is_empty(self) -> bool:
        return bool(self._library.lockstep_read(self._address) == self._taken)

    def try_take(self) -> bool:
        if self.is_empty():
            return False
        self._taken = (self._taken + 1) & 0xFFFFFFFF
        return True

    def take_all(self) -> None:
        self._taken = self._library.lockstep_read(self._address)

    def sleep(self, spin_ns: int = 0) -> None:
        """Return when there is something to take, or after a short time."""
        target = (self._taken + 1) & 0xFFFFFFFF
        self._library.lockstep_wait(self._address, target, spin_ns, _POLL_NS, self._peers.stop_address)


@final
class LongWait:
    """A wait that takes long already; what it waits for may never come."""

    def __init__(self, peers: "Peers", call: bytes, timeout_seconds: float | None, *, everyone: bool) -> None:
        self._peers = peers
        self._call = call
        self._limit = timeout_seconds
        self._everyone = everyone
        self._started = time.monotonic() - _POLL_NS / 1e9
        self._lost_since: float | None = None

    def look(self, find_missing: Callable[[], Sequence[int]]) -> None:
        """Raise if this wait will not end: a missing rank is lost, or any where all are needed, or it is late.

        What ranks did before they were lost counts, so the missing ones are asked for again.
        """
        peers = self._peers
        peers.raise_if_broken()
        missing = find_missing()
        lost = peers.first_lost(missing)
        if lost is not None and lost in find_missing():
            peers.check([lost])
        if self._everyone:
            self._lost_since = peers.check_killed(self._lost_since)
        self.check_time(f"rank {peers.global_ranks[missing[0]]}" if missing else "its end")

    def look_for_any(self, sources: Sequence[int], take: Callable[[], int | None]) -> int | None:
        """Do the same for a wait for any of several ranks; those that have left end it when all have."""
        peers = self._peers
        peers.raise_if_broken()
        if all(peers.first_lost([peer]) is not None for peer in sources):
            found = take()
            if found is not None:
                return found
            peers.check(sources)
        self._lost_since = peers.check_killed(self._lost_since)
        self.check_time("any rank")
        return None

    def check_time(self, awaited: str) -> None:
        limit = self._peers.timeout_seconds if self._limit is None else self._limit
        if time.monotonic() - self._started > limit:
            raise self._peers.time_out(self._call, awaited, limit)


@final
class Peers:
    def __init__(
        self, memory: Memory, rank: int, ends: ProcessEnds, timeout_seconds: float, global_ranks: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = memory.layout.size
        self.timeout_seconds = timeout_seconds
        self.made_at = ""
        """ made at train.py:7", where it is not the default group."""
        self.broken: GroupError | None = None
        """Why this process cannot use the group; a forked child is not a rank of its parent's group."""
        self._stop = ctypes.c_int32(0)
        self.stop_address = ctypes.addressof(self._stop)
        """Of a number that ends the sleeps of all threads of this process once it is not 0."""
        call_in_children(self._break_in_child)
        self._recorder = own_recorder()
        self._memory = memory  # which is mapped as long as this is there
        self.address = memory.address
        self.layout = memory.layout
        self._member = this_process()
        self._ends = ends
        self._others = [peer for peer in range(self.size) if peer != rank]
        """The ranks that are watched, until the group is left."""
        self.global_ranks = global_ranks
        """The number of each rank in messages: its rank in the default group."""
        self.global_rank = global_ranks[rank]
        self.has_core = self.size <= len(os.sched_getaffinity(0))
        """Whether there is a core for every rank; else a wait for a message sleeps, one for a phase yields first."""

    def _break_in_child(self) -> None:
        if self.broken is None:
            self.broken = GroupError(
                f"This process was forked from rank {self.global_rank} of the group and is no rank itself. Make the "
                "calls in the parent, or give the child a group of its own. (LS205)"
            )

    def wait(self, peer: int, counter: Counter, call: bytes) -> None:
        """Wait until there is something to take at a counter that `peer` adds to, and take it."""
        if counter.try_take():
            return
        counter.sleep(_SPIN_NS if self.has_core else 0)
        if counter.try_take():
            return

        def find_missing() -> list[int]:
            return [peer] if counter.is_empty() else []

        with self.long_wait(call, peer, everyone=False) as wait:
            while not counter.try_take():
                wait.look(find_missing)
                counter.sleep()

    def wait_for_any(self, peers: Sequence[int], counter: Counter, call: bytes, take: Callable[[], int | None]) -> int:
        """Return the rank whose message `take` finds; it is called again after each addition to the counter.

        A rank that was killed or failed ends the wait, though another may still send: the group is broken.
        """
        counter.take_all()
        source = take()
        if source is not None:
            return source
        with self.long_wait(call) as wait:
            while True:
                counter.sleep()
                counter.take_all()
                source = take()
                if source is None:
                    source = wait.look_for_any(peers, take)
                if source is not None:
                    return source

    @contextmanager
    def long_wait(
        self, call: bytes, peer: int | None = None, timeout_seconds: float | None = None, *, everyone: bool = True
    ) -> Iterator[LongWait]:
        """Let the other ranks and the recorder know what this one waits in."""
        self._publish_waiting(call)
        event = self._record_wait(-1 if peer is None else self.global_ranks[peer], call)
        try:
            yield LongWait(self, call, timeout_seconds, everyone=everyone)
        finally:
            self._recorder.end(event)
        self._publish_waiting(b"")  # after an error the text stays, for the messages of the other ranks

    def check(self, peers: Sequence[int]) -> None:
        """Raise if one of `peers` is lost, and name the rank that was lost first; the group is broken then."""
        lost = self.first_lost(peers)
        if lost is not None:
            raise self._break(lost)

    def time_out(self, call: bytes, awaited: str, timeout_seconds: float) -> CollectiveTimeoutError:
        """Return the error of a wait that took too long, with what every rank waits for."""
        doing = "; ".join(self._describe_waiting(peer) for peer in range(self.size) if peer != self.rank)
        of_group = f", which was{self.made_at}" if self.made_at else ""
        error = CollectiveTimeoutError(
            f"Rank {self.global_rank} waited {timeout_seconds:g} s in {call.decode()} for {awaited}. {doing}{of_group}."
            " Every rank must make the same calls in the same order; if one is only slow, give a longer timeout to "
            "init_process_group. (LS202)"
        )
        self.publish_state(PeerState.TIMED_OUT, str(error))
        self.broken = error
        return error

    def publish_state(self, state: PeerState, reason: str = "", lost: int = 0) -> None:
        """Publish that this rank left the group and why; only the first call counts, and none from a forked child."""
        if this_process() != self._member:
            return
        page = self.address + self.layout.state(self.rank)
        if self._read_state(self.rank)[0] is PeerState.JOINED:
            write_text(page + _REASON, reason.encode(), _TEXT_BYTES)
            ctypes.memmove(page + 4, struct.pack("<i", lost), 4)
            native.load().lockstep_fence()  # the text before the state
            ctypes.memmove(page, struct.pack("<i", state), 4)

    def first_lost(self, peers: Sequence[int]) -> int | None:
        """Return one of `peers` that has left in whatever way, or None."""
        for peer in peers:
            if self._read_state(peer)[0] is not PeerState.JOINED or self._has_ended(peer):
                native.load().lockstep_fence()  # what it did before that is seen by whoever looks now
                return peer
        return None

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
            if self._has_ended(peer) or (peer != self.rank and self._read_state(peer)[0] is PeerState.LEFT):
                return self._explain(peer)
        return None

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for the rank that was lost, failed or left first, or None; does not break the group."""
        return self._explain(self.first_lost(self._others))

    def find_any_failed(self) -> PeerLostError | None:
        """Return the same for a rank that was killed or failed, and did not just leave."""
        return self._explain(self._find_killed())

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
        return None if peer is None else self._error_of(self._find_cause(peer))

    def end_calls(self, error: GroupError) -> None:
        """Let all calls of this rank raise `error`, those that wait now too (local, any thread)."""
        if self.broken is None:
            self.broken = error
        self._stop.value = 1
        layout, others = self.layout, range(self.size)
        places = [layout.arrivals, layout.messages(self.rank)]
        places += [place for peer in others for place in (layout.full(peer, self.rank), layout.free(self.rank, peer))]
        for place in places:
            native.load().lockstep_wake(self.address + place)

    def fail(self, error: BaseException, call: bytes) -> None:
        """Publish that `call` failed on this rank with `error`, at an unknown point of it: the group is broken."""
        self.broken = broken = GroupError(f"{call.decode()} ended on this rank with {_describe(error)}. (LS213)")
        self.publish_state(PeerState.FAILED, describe_exception(error))
        # As text, not as the cause: the cause would keep its frames, and their tensors, alive.
        broken.add_note("".join(format_exception(error)))

    def close(self) -> None:
        self._ends.close()
        self._others = []

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

    def check_killed(self, lost_since: float | None) -> float | None:
        """Raise if a rank was killed or failed longer than the grace period ago; return when that was first seen."""
        killed = self._find_killed()
        if killed is None:
            return None
        # The awaited rank may have finished its own wait for the lost rank: give it time to post.
        now = time.monotonic()
        lost_since = now if lost_since is None else lost_since
        if now - lost_since > _GRACE_SECONDS:
            raise self._break(killed)
        return lost_since

    def _break(self, peer: int) -> GroupError:
        """Mark the group as broken because `peer` is lost or timed out, and publish it; return the error."""
        peer = self._find_cause(peer)
        state, _, reason = self._read_state(peer)
        error: GroupError = self._error_of(peer)
        if state is PeerState.TIMED_OUT:
            error = CollectiveTimeoutError(reason)  # no rank was lost: both ends of a wait raise the same error
        self.publish_state(PeerState.BROKEN, str(error), peer)
        self.broken = error
        return error

    def _read_state(self, peer: int) -> tuple[PeerState, int, str]:
        """Return the state of a rank, the rank that it has lost, and why it left."""
        page = self.address + self.layout.state(peer)
        state, lost = struct.unpack("<ii", ctypes.string_at(page, 8))
        reason = read_text(page + _REASON, _TEXT_BYTES).decode(errors="replace") if state else ""
        return PeerState(state), lost, reason

    def _publish_waiting(self, call: bytes) -> None:
        """Publish the call that this rank waits in; empty for none."""
        write_text(self.address + self.layout.state(self.rank) + _WAITING, call, _TEXT_BYTES)

    def _describe_waiting(self, peer: int) -> str:
        page = self.address + self.layout.state(peer)
        waiting = read_text(page + _WAITING, _TEXT_BYTES).decode(errors="replace")
        name = self.global_ranks[peer]
        return f"Rank {name} waits in {waiting}" if waiting else f"Rank {name} is not in a call of this group"

    def _has_ended(self, peer: int) -> bool:
        return self._ends.find_ended([peer]) is not None

    def _find_killed(self) -> int | None:
        """Return a rank that was killed or has failed, and did not just leave, or None."""
        for peer in self._others:
            if self._read_state(peer)[0] is not PeerState.LEFT and self.first_lost([peer]) is not None:
                return peer
        return None

    def _find_cause(self, peer: int) -> int:
        """Return the rank that was lost first: a rank that is BROKEN names the rank that it lost."""
        seen = {self.rank}
        while peer not in seen:
            seen.add(peer)
            state, lost, _ = self._read_state(peer)
            if state is PeerState.BROKEN and lost != self.rank:
                peer = lost
        return peer

    def _error_of(self, peer: int) -> PeerLostError:
        return PeerLostError(self._explain_lost(peer), rank=self.global_ranks[peer])

    def _explain_lost(self, peer: int) -> str:
        state, _, reason = self._read_state(peer)
        name = self.global_ranks[peer]
        if state in {PeerState.FAILED, PeerState.TIMED_OUT}:
            return f"Rank {name} failed: {reason} (LS203)"
        if state is PeerState.LEFT and reason:
            return (
                f"Rank {name} has left the group, which rank {self.global_rank} still needs, while it handled "
                f"{reason} (LS203)"
            )
        if state is PeerState.LEFT:
            return (
                f"Rank {name} has left the group (it destroyed it, or its script ended), but rank {self.global_rank} "
                "still needs it. Every rank must make the same calls; look for a loop that is longer on some ranks, or "
                "a batch that one has skipped. (LS203)"
            )
        return (
            f"Rank {name} (process {self._ends.pids[peer]}) is lost: its process exited without reporting an error. It "
            "was killed or crashed, or ended by os._exit and did not destroy the group, as forked children of "
            "multiprocessing do. Look at its log, and in the system log for a lack of memory. (LS203)"
        )


def _describe(error: BaseException) -> str:
    text = clause(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
