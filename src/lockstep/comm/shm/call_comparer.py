"""Comparing the calls of ranks on one host over shared memory, whatever carries the data then."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import final

from lockstep.comm.shm.comparison import PublishedCalls
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.shm.rank_states import PeerState
from lockstep.errors import GroupError, PeerLostError


@final
class SharedMemoryComparer:
    def __init__(self, memory: Memory, peers: Peers, *, waits: bool) -> None:
        self.waits = waits
        self._memory = memory
        self._peers = peers
        self._exchange = PhaseExchange(memory, peers)
        self._published = PublishedCalls(memory, peers)
        self._run_lock = threading.Lock()

    def compare_calls(self, call: bytes) -> None:
        self.raise_if_broken()
        with self._run_lock:
            try:
                if self.waits:
                    self._exchange.compare_calls(call)
                else:
                    self._published.publish(call)
                    self._published.wait_for_all(call)
            except GroupError:
                raise  # on every rank alike, or published by the rank that found it
            except BaseException as error:
                # Ctrl-C, as a rule: this rank may be a phase behind the others from here on.
                self._peers.fail(error, call)
                raise

    def publish_call(self, call: bytes) -> None:
        self.raise_if_broken()
        with self._run_lock:
            self._published.publish(call)

    def check(self) -> None:
        self.raise_if_broken()
        with self._run_lock:
            self._published.check()

    def raise_if_broken(self) -> None:
        if self._peers.broken is not None:
            raise self._peers.broken.with_traceback(None)  # the old one would keep frames and their tensors alive

    def set_timeout(self, timeout: timedelta) -> None:
        self._peers.timeout_seconds = timeout.total_seconds()

    def report_failure(self, error: BaseException) -> None:
        self._peers.publish_failure(error)

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        return self._peers.find_lost(peers)

    def explain_error(self, error: RuntimeError) -> GroupError | None:
        return self._peers.explain_error(error)

    def end_calls(self, error: GroupError) -> None:
        self._peers.end_calls(error)

    def find_any_lost(self) -> PeerLostError | None:
        return self._peers.find_any_lost()

    def find_any_failed(self) -> PeerLostError | None:
        return self._peers.find_any_failed()

    def mark_broken(self, error: PeerLostError) -> None:
        self._peers.mark_broken(error)

    def send_exit_notice(self) -> None:
        self._peers.publish_exit()

    def close(self) -> None:
        self._peers.publish_state(PeerState.LEFT)
        self._peers.close()
        self._memory.close()
