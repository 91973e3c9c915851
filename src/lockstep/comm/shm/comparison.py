"""Comparing the calls of ranks on one host over shared memory, whatever carries the data then.

Without waiting for the others, every rank publishes its calls, and compares them with those that it finds.

    rank 0                                          rank 1
    1 publishes call n
    2 finds no call n of rank 1 yet
    3 makes it in the backend                       1 publishes its call n
                                                    2 finds another call n of rank 0: raises, and does not make its own
    4 waits for the backend in short steps;
      finds that rank 1 has raised: raises too

A rank publishes before it reads, so of two ranks with different calls at least one finds the difference before it makes
its own: no data of one is taken for data of the other. Afterwards the group cannot be used, because the backend of one
rank is in a call that the other does not make.

    of each rank:   number of calls | call that differs, + 1 | length, line of the user's code | ring of the last calls
"""

import ctypes
import hashlib
import struct
import threading
import time
from functools import lru_cache
from typing import Final, final

from lockstep.comm.calls import LONGEST_CALL, explain_mismatch
from lockstep.comm.shm import native
from lockstep.comm.shm.file_layout import PAGE
from lockstep.comm.shm.memory import Memory, read_text
from lockstep.comm.shm.peers import Peers, PeerState
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.errors import CollectiveMismatchError, GroupError
from lockstep.processes.user_line import find_user_line

_NUM_SLOTS: Final = 256
_FURTHEST: Final = _NUM_SLOTS - 1
"""How many calls a rank may be ahead of another: the slot that the other one still compares is not written."""
_SLOT_BYTES: Final = 1024
_WORDS_PER_SLOT: Final = _SLOT_BYTES // 8
_LINE: Final = 3 * 8
_RING: Final = PAGE
NUM_BYTES: Final = _RING + _NUM_SLOTS * _SLOT_BYTES
"""What each rank needs: its send buffer in the shared file must be as long."""
_COUNT, _DIFFERS, _LINE_LENGTH = range(3)
_LINE_SECONDS: Final = 2.0
"""How long a rank that raises waits for the lines of the others."""
_POLL_SECONDS: Final = 0.0005
_LAST_POLL_SECONDS: Final = 0.01
_LOST_SECONDS: Final = 0.5
"""How long a call may take that has everything it needs from a rank that was lost."""


@final
class SharedMemoryComparer:
    """Compares calls in one of two ways; with `waits`, a call waits for all ranks, and a mismatch breaks nothing."""

    def __init__(self, memory: Memory, peers: Peers, *, waits: bool) -> None:
        self._waits = waits
        self._memory = memory
        self.peers = self._peers = peers
        self._exchange = PhaseExchange(memory, peers)
        self._run_lock = threading.Lock()
        self._addresses = [memory.address + memory.layout.send_buffer(rank, 0) for rank in range(peers.size)]
        self._headers = [(ctypes.c_int64 * 3).from_address(address) for address in self._addresses]
        words = ctypes.c_int64 * (_NUM_SLOTS * _WORDS_PER_SLOT)
        self._rings = [words.from_address(address + _RING) for address in self._addresses]
        self._own = self._headers[peers.rank]
        self._others = [
            (header, ring)
            for rank, (header, ring) in enumerate(zip(self._headers, self._rings, strict=True))
            if rank != peers.rank
        ]
        self._order = native.load().lockstep_fence  # between what this rank writes, and what it reads
        self._count = 0
        self._digest = 0
        self._lost_since: float | None = None

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call, or raise on all alike if they differ (collective)."""
        self._peers.raise_if_broken()
        with self._run_lock:
            try:
                if self._waits:
                    self._exchange.compare_calls(call)
                else:
                    self._publish(call)
                    self._wait_for_calls(call, self._count)
                    self._compare()
            except GroupError:
                raise  # on every rank alike, or published by the rank that found it
            except BaseException as error:
                # Ctrl-C, as a rule: this rank may be a phase behind the others from here on.
                self._peers.fail(error, call)
                raise

    def begin_call(self, call: bytes) -> None:
        """Do the same; without `waits`, compare only with the ranks that have made this call by now.

        If they differ, this rank raises here, and those that have made theirs in `check`.
        """
        if self._waits:
            self.compare_calls(call)
            return
        self._peers.raise_if_broken()
        with self._run_lock:
            self._publish(call)

    def check(self) -> None:
        """Raise if another rank has made a different call, or was lost; while this rank waits for the backend."""
        self._peers.raise_if_broken()
        if not self._waits:
            with self._run_lock:
                self._check()

    def close(self) -> None:
        self._peers.publish_state(PeerState.LEFT)
        self._peers.close()
        self._memory.close()

    def _publish(self, call: bytes) -> None:
        number = self._count
        self._wait_for_calls(call, number - _FURTHEST + 1)
        slot = number % _NUM_SLOTS
        self._digest, packed = _pack(call)
        ctypes.memmove(self._addresses[self._peers.rank] + _RING + slot * _SLOT_BYTES, packed, len(packed))
        self._order()
        self._count = self._own[_COUNT] = number + 1
        self._order()
        self._compare()

    def _wait_for_calls(self, call: bytes, count: int) -> None:
        """Return when every rank has published so many calls."""
        started, pause = time.monotonic(), _POLL_SECONDS
        while behind := [rank for rank, header in enumerate(self._headers) if header[_COUNT] < count]:
            self._check()
            limit = self._peers.timeout_seconds
            if time.monotonic() - started > limit:
                raise self._peers.time_out(call, f"rank {self._peers.global_ranks[behind[0]]}", limit)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _check(self) -> None:
        self._compare()
        self._peers.check([rank for rank, header in enumerate(self._headers) if header[_COUNT] < self._count])
        lost = self._peers.find_any_failed()
        if lost is None:
            return
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since > _LOST_SECONDS:
            self._peers.mark_broken(lost)
            raise lost

    def _compare(self) -> None:
        """Compare the last call of this rank with those of the others, as far as they have come."""
        count, index = self._count, (self._count - 1) % _NUM_SLOTS * _WORDS_PER_SLOT
        for header, ring in self._others:
            if 0 < header[_DIFFERS] <= count:
                raise self._explain(header[_DIFFERS] - 1)
            if 0 < count <= header[_COUNT] and ring[index] != self._digest:
                raise self._explain(count - 1)

    def _explain(self, number: int) -> CollectiveMismatchError:
        """Publish that call `number` differs and where this rank makes it; return the error."""
        line = find_user_line().encode()[:LONGEST_CALL]
        ctypes.memmove(self._addresses[self._peers.rank] + _LINE, line, len(line))
        self._own[_LINE_LENGTH] = len(line)
        self._order()
        self._own[_DIFFERS] = number + 1
        here = [rank for rank, header in enumerate(self._headers) if header[_COUNT] > number]
        end = time.monotonic() + _LINE_SECONDS
        while any(not self._headers[rank][_DIFFERS] for rank in here) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        global_ranks = self._peers.global_ranks
        calls = {global_ranks[rank]: self._read_call(rank, number) for rank in here}
        lines = {global_ranks[rank]: self._read_line(rank) for rank in here if self._headers[rank][_DIFFERS]}
        error = explain_mismatch(calls, lines, made_at=self._peers.made_at)
        self._peers.broken = CollectiveMismatchError(str(error))  # a copy, without traceback
        return error

    def _read_call(self, rank: int, number: int) -> bytes:
        return read_text(self._addresses[rank] + _RING + number % _NUM_SLOTS * _SLOT_BYTES + 8, LONGEST_CALL)

    def _read_line(self, rank: int) -> str:
        length = min(max(self._headers[rank][_LINE_LENGTH], 0), LONGEST_CALL)
        return ctypes.string_at(self._addresses[rank] + _LINE, length).decode(errors="replace")


@lru_cache(maxsize=4096)
def _pack(call: bytes) -> tuple[int, bytes]:
    """Return a number that stands for the call, and what is published."""
    digest = hashlib.blake2b(call, digest_size=8).digest()
    return struct.unpack("<q", digest)[0], digest + struct.pack("<i", len(call)) + call
