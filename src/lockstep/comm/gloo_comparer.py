"""Comparing the calls of ranks that are on several hosts: a Gloo group of its own exchanges the descriptions."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.calls import explain_mismatch, pack_text, unpack_text
from lockstep.comm.gloo import connect_gloo
from lockstep.comm.process_ends import exchange_processes
from lockstep.comm.user_line import find_user_line
from lockstep.errors import GroupError, PeerLostError, describe_exception

_CONNECTION_WORDS: Final = ("connection", "peer", "socket", "pipe")
"""What errors of Gloo contain that come from the end of a connection."""
_EXIT_SECONDS: Final = 2.0
"""How long after that the end of a process may be seen, or what the launcher announces."""
_LOOK_SECONDS: Final = 0.02


@final
class GlooComparer:
    """The calls of ranks on several hosts, all of which wait for each other in every call; `store` is theirs alone."""

    def __init__(self, store: Store, rank: int, timeout: timedelta, names: Sequence[int]) -> None:
        self.waits = True
        self._store = store
        self._names = names
        self._name = names[rank]
        self._broken: GroupError | None = None
        self._ends = exchange_processes(PrefixStore("compare/processes", store), rank, len(names))
        place = PrefixStore("compare/gloo", store)
        self._gloo: Any
        self._gloo, self._sockets = connect_gloo(
            place, len(names), lambda: dist.ProcessGroupGloo(place, rank, len(names), timeout), self.find_any_lost
        )

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call (collective)."""
        self.raise_if_broken()
        try:
            calls = self._exchange(call)
            if all(other == call for other in calls):
                return
            lines = [line.decode(errors="replace") for line in self._exchange(find_user_line().encode())]
        except RuntimeError as error:
            raise self._explain_lost(call, error) from error
        raise explain_mismatch(dict(zip(self._names, calls, strict=True)), dict(zip(self._names, lines, strict=True)))

    def publish_call(self, call: bytes) -> None:
        """Compare a call as `compare_calls` does: between hosts there is no cheaper way (collective)."""
        self.compare_calls(call)

    def check(self) -> None:
        """Do nothing: ranks wait for each other in every comparison (local)."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        """Store the exception; the store outlives this rank unless this rank holds it (local)."""
        try:
            self._store.set("failure_reason", f"{self._name} {describe_exception(error)}")
        except RuntimeError:  # the store is lost, and no rank can read it
            return

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` whose process has ended; those of other hosts are not watched (local)."""
        return self._explain_ended(self._ends.find_ended(peers))

    def explain_error(self, error: RuntimeError) -> GroupError | None:
        """Return the error for the rank whose loss is the cause of an error of the backend, if one was lost (local).

        The kernel closes the connections of a process before it reports its end: so this waits a moment.
        """
        if not any(word in str(error).lower() for word in _CONNECTION_WORDS):
            return None if self._broken is None else self._broken.with_traceback(None)
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._broken is None and time.monotonic() < deadline:
            lost = self._find_stored() or self._explain_ended(self._ends.find_ended(seconds=_LOOK_SECONDS))
            if lost is not None:
                return lost
        if self._broken is not None:
            return self._broken.with_traceback(None)
        return PeerLostError(f"The connection to another rank has ended, which was lost or has exited: {error} (LS203)")

    def _explain_ended(self, peer: int | None) -> PeerLostError | None:
        if peer is None:
            return None
        name, pid = self._names[peer], self._ends.pids[peer]
        stored = self._find_stored()
        if stored is not None and stored.rank == name:
            return stored
        return PeerLostError(
            f"Rank {name} (process {pid}) is lost: its process has ended, but rank {self._name} still needs it. If it "
            "was killed or has crashed, look at its log, and in the system log for a lack of memory. (LS203)",
            rank=name,
        )

    def end_calls(self, error: GroupError) -> None:
        """Let all comparisons of this rank raise `error`, those that wait now too (local, any thread)."""
        if self._broken is None:
            self._broken = error
        self._sockets.shut_down()

    def _find_stored(self) -> PeerLostError | None:
        try:
            stored = self._store.get("failure_reason").decode() if self._store.check(["failure_reason"]) else ""
        except RuntimeError:  # the rank that holds the store is lost too
            stored = ""
        rank, _, reason = stored.partition(" ")
        return PeerLostError(f"Rank {rank} failed: {reason} (LS203)", rank=int(rank)) if stored else None

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for a rank that has stored why it failed, or whose process has ended, or None (local)."""
        return self._find_stored() or self._explain_ended(self._ends.find_ended())

    def find_any_failed(self) -> PeerLostError | None:
        """Return the error for a rank that has stored why it failed, or None (local)."""
        return self._find_stored()

    def mark_broken(self, error: PeerLostError) -> None:
        """Let `raise_if_broken` raise `error`; the rank that failed has stored it for the others (local)."""
        self._broken = error

    def raise_if_broken(self) -> None:
        """Raise the error of a rank that is known to be lost (local)."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    def send_exit_notice(self) -> None:
        """Store the exception that is being handled, as in a `finally`, if there is one (local)."""
        error = sys.exc_info()[1]
        if error is not None:
            self.report_failure(error)

    def close(self) -> None:
        self._gloo = None

    def _exchange(self, text: bytes) -> list[bytes]:
        mine = pack_text(text)
        pages = [torch.empty_like(mine) for _ in self._names]
        self._gloo.allgather([pages], [mine]).wait()
        return [unpack_text(page) for page in pages]

    def _explain_lost(self, call: bytes, error: RuntimeError) -> GroupError:
        if self._broken is not None:
            return self._broken.with_traceback(None)
        lost = self.explain_error(error)
        if lost is not None:
            return lost
        return self._find_stored() or PeerLostError(
            f"A rank was lost, or did not reach {call.decode()}: {error} (LS203)"
        )
