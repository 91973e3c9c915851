"""Phases: the one way in which the ranks of a group hand each other data, in `native/shm.c`.

Python looks after what takes long: while a phase is not over, `native/shm.c` returns from time to time, and the other
ranks, the time and Ctrl-C are checked. The first phase of a call carries its description, and every rank compares all
of them: either all go on or all raise.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from lockstep.comm.calls import LONGEST_CALL, explain_mismatch
from lockstep.comm.shm import native, programs
from lockstep.comm.shm.arithmetic import Reduction, reduce_into
from lockstep.comm.shm.file_layout import HEAP_SPAN, PAGE
from lockstep.comm.shm.memory import Memory, read_text, tensor_at
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.programs import Program, Ranks
from lockstep.errors import CollectiveMismatchError, GroupError
from lockstep.processes.user_line import find_user_line

NOWHERE: Final = -1
"""The location of a tensor that is not in the group's memory."""
_TEXT: Final = 8
"""Where the text of a page begins, after the location."""
_BLOCK_BYTES: Final = 16 << 10
_LONGEST_SPIN_NS: Final = 100_000
_FIRST_SPIN_NS: Final = 20_000
DONE, WAITING, DIFFERENT, HAS_PLACES, NEEDS_TORCH = range(5)


class Exchange(ctypes.Structure):
    """The structure of this name in `native/shm.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counter", "pages", "buffers", "scratch", "stop", "reached")),
        *((name, ctypes.c_int64) for name in ("page_bytes", "buffer_bytes", "size", "rank", "at")),
        *((name, ctypes.c_int64) for name in ("most_spin_ns", "spin_ns")),
        *((name, ctypes.c_uint32) for name in ("arrivals", "parity", "has_arrived", "may_spin")),
    )


@final
class PhaseExchange:
    def __init__(self, memory: Memory, peers: Peers) -> None:
        layout = memory.layout
        self.rank = peers.rank
        self.size = peers.size
        self.global_ranks = peers.global_ranks
        self.ranks = Ranks(peers.size, peers.rank, layout.send_buffer_bytes)
        self.memory = memory
        self._peers = peers
        self.caller: str | int | None = None
        """Where the call was made: the user's line, or the thread that waits for the call; None for this thread."""
        self._scratch = ctypes.create_string_buffer(0)
        self._library = native.load()
        base = memory.address
        self._state = Exchange(
            counter=base + layout.arrivals,
            pages=base + layout.call(0, 0),
            buffers=base + layout.send_buffer(0, 0),
            reached=base + layout.reached(0),
            page_bytes=PAGE,
            buffer_bytes=layout.send_buffer_bytes,
            size=peers.size,
            rank=peers.rank,
            stop=peers.stop_address,
            most_spin_ns=_LONGEST_SPIN_NS if peers.has_core else 0,
            spin_ns=_FIRST_SPIN_NS if peers.has_core else 0,
        )
        self._state_address = ctypes.addressof(self._state)

    def run(
        self,
        program: Program,
        addresses: Sequence[int] = (),
        call: bytes = b"",
        location: int = NOWHERE,
        *,
        how: tuple[Reduction, torch.dtype] | None = None,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Run a program over memory at `addresses` (collective); return whether it has stopped at a location.

        `call` is compared in a program that begins a call, and is what messages name in any; `how` is to reduce what
        only torch can. If the calls differ, all ranks raise.
        """
        code = self._go(program, addresses, call, location, how=how, timeout_seconds=timeout_seconds)
        if code == DIFFERENT:
            raise self._explain_mismatch()
        return code == HAS_PLACES

    def find_line(self) -> str:
        """Return the line of the user's code that made the call which runs now."""
        return self.caller if isinstance(self.caller, str) else find_user_line(self.caller)

    def compare_calls(self, call: bytes, timeout_seconds: float | None = None) -> None:
        """Return when every rank has made this call, or raise on all alike if they differ (collective)."""
        self.run(programs.barrier(), (), call, timeout_seconds=timeout_seconds)

    def locations(self, num_bytes: int) -> list[int]:
        """Return the location in its heap that each rank has published in the phase that is over; checked."""
        found = [struct.unpack_from("<q", ctypes.string_at(self._page(rank), _TEXT))[0] for rank in range(self.size)]
        for rank, location in enumerate(found):
            if location != NOWHERE and not 0 <= location <= HEAP_SPAN - num_bytes:
                raise GroupError(
                    f"Rank {self.global_ranks[rank]} has published {location} as the place of a tensor in the group's "
                    "memory, which is not in it. Some program has overwritten that memory. (LS213)"
                )
        return found

    def _go(
        self,
        program: Program,
        addresses: Sequence[int],
        call: bytes,
        location: int = NOWHERE,
        *,
        how: tuple[Reduction, torch.dtype] | None = None,
        timeout_seconds: float | None = None,
    ) -> int:
        """Run a program, and return why it has stopped (collective)."""
        if program.num_scratch * _BLOCK_BYTES > len(self._scratch):
            self._scratch = ctypes.create_string_buffer(program.num_scratch * _BLOCK_BYTES)
            self._state.scratch = ctypes.addressof(self._scratch)
        state = self._state
        state.at = 0
        state.may_spin = self._peers.may_spin
        table = array("q", addresses)
        arguments = (self._state_address, program.address, table.buffer_info()[0], call, len(call), location)
        try:
            code: int = self._library.lockstep_run(*arguments)
            while code in {NEEDS_TORCH, WAITING}:
                if code == NEEDS_TORCH:
                    self._reduce_by_torch(program, addresses, how)
                    code = self._library.lockstep_run(*arguments)
                else:
                    code = self._wait(call, lambda: self._library.lockstep_run(*arguments), timeout_seconds)
        except BaseException:
            # The phase failed here, so the others must not find it over.
            self._library.lockstep_withdraw(self._state_address)
            raise
        return code

    def _wait(self, call: bytes, go_on: Callable[[], int], timeout_seconds: float | None) -> int:
        """Look after the other ranks until the phase is over; return why `go_on` has returned then."""
        code = WAITING
        missing = self._missing()
        with self._peers.long_wait(call, missing[0] if missing else None, timeout_seconds) as wait:
            while code == WAITING:
                wait.look(self._missing)
                code = go_on()
        return code

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to the end of the phase in which this one waits."""
        words = [
            ctypes.c_uint32.from_address(self.memory.address + self.memory.layout.reached(rank)).value
            for rank in range(self.size)
        ]
        return [rank for rank, word in enumerate(words) if (word - self._state.arrivals) & 1 << 31]

    def _page(self, rank: int) -> int:
        """Return where the page of a rank is that was published in the phase that is over."""
        return self.memory.address + self.memory.layout.call(rank, 1 - self._state.parity)

    def _reduce_by_torch(
        self, program: Program, addresses: Sequence[int], how: tuple[Reduction, torch.dtype] | None
    ) -> None:
        assert how is not None
        row = programs.read_reduction(program, self._state.at)

        def tensor(place: int) -> Tensor:
            base, offset = divmod(place, 1 << programs.PLACE_BITS)
            if base < 2 * self.size:
                parity = self._state.parity if base < self.size else 1 - self._state.parity
                start = self.memory.address + self.memory.layout.send_buffer(base % self.size, parity)
            else:
                start = addresses[base - 2 * self.size]
            return tensor_at(start + offset, how[1], row.num_elements)

        copies = [tensor(place) for place in row.copies]
        reduce_into(tensor(row.out), [tensor(place) for place in row.parts], how[0], row.steps, copies)
        self._state.at += row.row_length

    def _explain_mismatch(self) -> CollectiveMismatchError:
        """Exchange the lines of the users' code too, and return the error for different calls (collective)."""
        calls = self._read_pages()
        self._go(programs.barrier(), (), self.find_line().encode()[:LONGEST_CALL])
        lines = [line.decode(errors="replace") for line in self._read_pages()]
        return explain_mismatch(
            dict(zip(self.global_ranks, calls, strict=True)), dict(zip(self.global_ranks, lines, strict=True))
        )

    def _read_pages(self) -> list[bytes]:
        return [read_text(self._page(rank) + _TEXT, LONGEST_CALL) for rank in range(self.size)]
