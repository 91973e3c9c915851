"""Ranks of one host that tell each other what they call, over shared memory, whatever then carries the data."""

import threading
from collections.abc import Sequence
from typing import final

from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers, PeerState
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.errors import GroupError, PeerLostError


@final
class SharedMemoryComparer:
    """Agreement of ranks on one host."""

    def __init__(self, memory: Memory, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._exchange = PhaseExchange(memory, peers)
        self._run_lock = threading.Lock()

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call (collective).

        Raises:
            CollectiveMismatchError: They differ; on every rank alike.
            PeerLostError: A rank is lost.
            CollectiveTimeoutError: A rank does not come in time.
        """
        if self._peers.broken is not None:
            raise self._peers.broken.with_traceback(None)  # the old one would keep frames and their tensors alive
        with self._run_lock:
            try:
                self._exchange.compare_calls(call)
            except GroupError:
                raise  # on every rank alike, or the other ranks know it from where it was found
            except BaseException as error:
                # Ctrl-C, as a rule: this rank may be a phase behind the others from here on.
                self._peers.fail(error, call)
                raise

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of `error` (local)."""
        self._peers.leave(PeerState.FAILED, f"{type(error).__name__}: {error}")

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, or None (local)."""
        return self._peers.find_lost(peers)

    def send_exit_notice(self) -> None:
        """Tell the other ranks that this one goes, and which exception it handles, if it does (local)."""
        self._peers.leave_normally()

    def close(self) -> None:
        """Leave, and give back the memory (local)."""
        self._peers.leave(PeerState.LEFT)
        self._peers.close()
        self._memory.close()
