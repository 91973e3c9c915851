"""Comparing the calls of ranks that are on several hosts: a Gloo group of its own exchanges the descriptions."""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.calls import explain_mismatch, pack_text, unpack_text
from lockstep.comm.user_line import find_user_line
from lockstep.errors import PeerLostError


@final
class GlooComparer:
    """The calls of ranks on several hosts, all of which wait for each other in every call.

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        timeout: How long a comparison may take.
        names: What messages call each rank: its rank in the default group.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta, names: Sequence[int]) -> None:
        self.waits = True
        self._store = store
        self._names = names
        self._name = names[rank]
        self._broken: PeerLostError | None = None
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("compare/gloo", store), rank, len(names), timeout)

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call (collective)."""
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
        """Change how long a comparison may take (local)."""
        self._gloo.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        """Store the exception; the store outlives this rank unless this rank holds it (local)."""
        try:
            self._store.set("failure_reason", f"{self._name} {type(error).__name__}: {error}")
        except RuntimeError:  # the store is lost, and no rank can read it
            return

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:  # noqa: ARG002 - the protocol's
        """Return None: processes of other hosts are not watched (local)."""
        return None

    def explain_error(self, error: RuntimeError) -> PeerLostError | None:  # noqa: ARG002 - the protocol's
        """Return the error for the rank that has stored why it failed, if one has (local)."""
        return self._find_stored()

    def _find_stored(self) -> PeerLostError | None:
        try:
            stored = self._store.get("failure_reason").decode() if self._store.check(["failure_reason"]) else ""
        except RuntimeError:  # the rank that holds the store is lost too
            stored = ""
        rank, _, reason = stored.partition(" ")
        return PeerLostError(f"Rank {rank} failed: {reason}", rank=int(rank)) if stored else None

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for a rank that has stored why it failed, or None (local)."""
        return self._find_stored()

    def find_any_failed(self) -> PeerLostError | None:
        """Return the same (local)."""
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
        """Free the Gloo group (local)."""
        self._gloo = None

    def _exchange(self, text: bytes) -> list[bytes]:
        mine = pack_text(text)
        pages = [torch.empty_like(mine) for _ in self._names]
        self._gloo.allgather([pages], [mine]).wait()
        return [unpack_text(page) for page in pages]

    def _explain_lost(self, call: bytes, error: RuntimeError) -> PeerLostError:
        return self._find_stored() or PeerLostError(f"A rank was lost, or did not reach {call.decode()}: {error}")
