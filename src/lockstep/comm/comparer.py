"""What compares the calls of the ranks of a group: over shared memory, or over a Gloo group between hosts."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from lockstep.errors import GroupError, PeerLostError


class CallComparer(Protocol):
    """How the ranks of a group compare their calls."""

    waits: bool
    """Whether a call waits for all ranks to make it; then the group stays usable after a mismatch."""

    def publish_call(self, call: bytes) -> None:
        """Compare a call with those that the other ranks have made by now, without waiting for them.

        If they differ, this rank raises here, and those that have made theirs in `check`.
        """

    def check(self) -> None:
        """Raise if another rank has made a different call, or was lost; while this rank waits for the backend."""

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call, or raise on all alike if they differ (collective)."""

    def raise_if_broken(self) -> None:
        """Raise the error of a group of which a rank is known to be lost (local)."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a comparison may take (local)."""

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one exits because of `error` (local)."""

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no more calls, if that is known (local)."""

    def explain_error(self, error: RuntimeError) -> GroupError | None:
        """Return the error for the rank whose loss is the cause of an error of torch's backend, if one was lost."""

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for a rank that was lost, failed or left, if that is known (local)."""

    def find_any_failed(self) -> PeerLostError | None:
        """Return the same for a rank that was killed or failed, and did not just leave (local)."""

    def mark_broken(self, error: PeerLostError) -> None:
        """Let later comparisons raise `error`, and publish it (local)."""

    def end_calls(self, error: GroupError) -> None:
        """Let all comparisons of this rank raise `error`, those that wait now too (local, any thread)."""

    def send_exit_notice(self) -> None:
        """Report to the other ranks that this one exits, and which exception it handles, if it does (local)."""

    def close(self) -> None:
        """Free what it holds (local)."""
