"""Phases: the one way in which the ranks of a group hand each other data.

In a phase every rank writes into its send buffer, waits until all have (`end_phase`), and reads from the others'.
There are two send buffers per rank, used in turn, so one exchange of semaphores per phase is enough:

    rank 0   write A0 | end 0 | read A1, write B0 | end 1 | read B1, write A0 | end 2 | ...
    rank 1   write A1 | end 0 | read A0, write B1 | end 1 | read B0, write A1 | end 2 | ...

A is written again only after phase 1 has ended, and a rank ends phase 1 only when it has read A. The first phase of a
call carries its description, and every rank compares all of them: either all go on or all raise.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.calls import LONGEST_CALL, explain_mismatch
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers
from lockstep.errors import CollectiveMismatchError
from lockstep.processes.user_line import find_user_line

NOWHERE = -1
"""The location of a tensor that is not in the group's memory."""


@final
class PhaseExchange:
    def __init__(self, memory: Memory, peers: Peers) -> None:
        self.rank = peers.rank
        self.size = peers.size
        self.names = peers.names
        self.send_buffer_bytes = memory.layout.send_buffer_bytes
        self.memory = memory
        self._peers = peers
        self._parity = 0
        self._call = b""
        self.caller: str | int | None = None
        """Where the call was made: the user's line, or the thread that waits for the call; None for this thread."""
        self._pages = [
            [memory.address + memory.layout.call(rank, parity) for rank in range(peers.size)] for parity in (0, 1)
        ]

    def send_buffer(self, dtype: torch.dtype) -> Tensor:
        """Return what this rank writes before the phase ends, as a flat tensor."""
        return self.memory.send_buffer(self.rank, self._parity, dtype)

    def received(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Return what `rank` wrote in the last phase, as a flat tensor; to be read before this phase ends."""
        return self.memory.send_buffer(rank, 1 - self._parity, dtype)

    def end_phase(self, timeout_seconds: float | None = None) -> None:
        """End a phase (collective), in the time that the group allows or in another."""
        self._peers.end_phase(self._call, timeout_seconds)
        self._parity = 1 - self._parity

    def compare_calls(self, call: bytes, location: int = NOWHERE, timeout_seconds: float | None = None) -> list[int]:
        """End the first phase of a call, in which every rank publishes what it calls (collective).

        Return the location in its heap that each rank gave for the call's tensor. If the calls differ, all ranks raise.
        """
        self._call = call
        pages, page = self._publish(call, location, timeout_seconds)
        locations = [location] * self.size
        for rank, address in enumerate(pages):
            if rank != self.rank:
                other = ctypes.string_at(address, len(page))
                if other[8:] != page[8:]:
                    raise self._explain_mismatch(pages)  # every rank finds a difference, so every rank is here
                locations[rank] = struct.unpack_from("<q", other)[0]
        return locations

    def _publish(self, text: bytes, location: int, timeout_seconds: float | None) -> tuple[list[int], bytes]:
        """End a phase in which every rank publishes a text; return where the texts are, and this rank's page."""
        pages = self._pages[self._parity]
        page = struct.pack("<qi", location, len(text)) + text
        ctypes.memmove(pages[self.rank], page, len(page))
        self.end_phase(timeout_seconds)
        return pages, page

    def _explain_mismatch(self, pages: Sequence[int]) -> CollectiveMismatchError:
        """Exchange the lines of the users' code too, and return the error for different calls (collective)."""
        calls = [_read_call(where) for where in pages]
        line = self.caller if isinstance(self.caller, str) else find_user_line(self.caller)
        places, _ = self._publish(line.encode()[:LONGEST_CALL], NOWHERE, None)
        lines = [_read_call(where).decode(errors="replace") for where in places]
        return explain_mismatch(dict(zip(self.names, calls, strict=True)), dict(zip(self.names, lines, strict=True)))


def _read_call(address: int) -> bytes:
    length = struct.unpack("<i", ctypes.string_at(address + 8, 4))[0]
    return ctypes.string_at(address + 12, min(max(length, 0), LONGEST_CALL))
