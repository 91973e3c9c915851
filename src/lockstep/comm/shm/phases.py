"""Phases: the one way in which the ranks of a group hand each other data, in `native/shm.c`.

Python looks after what takes long: while a phase is not over, `native/shm.c` returns from time to time, and the other
ranks, the time and Ctrl-C are checked. The first phase of a call carries its description, and every rank compares all
of them: either all go on or all raise.
"""

import ctypes
import struct
from array import array
from collections.abc import Sequence
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
_FIRST_SPIN_NS: Final = 20_000
DONE, WAITING, DIFFERENT, HAS_PLACES, NEEDS_TORCH = range(5)


class Exchange(ctypes.Structure):
    """The structure of this name in `native/shm.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counter", "pages", "buffers", "scratch", "stop", "reached")),
        *((name, ctypes.c_int64) for name in ("page_bytes", "buffer_bytes", "size", "rank")),
        *((name, ctypes.c_int64) for name in ("spin_ns", "spins_from", "pause_ns")),
        *((name, ctypes.c_uint32) for name in ("arrivals", "parity", "has_arrived", "may_spin", "has_core")),
    )


@final
class PreparedCall(ctypes.Structure):
    """A program and what it is run with, to be run once or, with other addresses in its table, again.

    It begins with the structure of this name in `native/shm.c`.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("exchange_address", "program_address", "table_address")),
        ("text", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("length", "location", "at")),
    )

    def __init__(self, exchange: int, program: Program, addresses: Sequence[int], call: bytes, location: int) -> None:
        self.program = program
        self.table = array("q", addresses)
        self.call = call
        self.address = ctypes.addressof(self)
        super().__init__(exchange, program.address, self.table.buffer_info()[0], call, len(call), location)


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
        self.may_spin = False
        """Whether a wait for a phase spins: set while the caller of a blocking call runs it itself."""
        self._num_scratch, self._scratch = 0, ctypes.create_string_buffer(0)
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
            spin_ns=_FIRST_SPIN_NS,
            has_core=peers.has_core,
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
        code = self._go(PreparedCall(self._state_address, program, addresses, call, location), how, timeout_seconds)
        if code == DIFFERENT:
            raise self._explain_mismatch()
        return code == HAS_PLACES

    def prepare(self, program: Program, call: bytes) -> PreparedCall:
        """Return a call of one tensor, which is replaced, for `run_at`."""
        return PreparedCall(self._state_address, program, (0, 0), call, NOWHERE)

    def run_at(self, prepared: PreparedCall, address: int) -> None:
        """Run what was prepared, on a tensor at `address` (collective); a rank alone has its result."""
        if self.size > 1:
            prepared.table[0] = prepared.table[1] = address
            if self._go(prepared) == DIFFERENT:
                raise self._explain_mismatch()

    def find_line(self) -> str:
        """Return the line of the user's code that made the call which runs now."""
        return self.caller if isinstance(self.caller, str) else find_user_line(self.caller)

    def compare_calls(self, call: bytes, timeout_seconds: float | None = None) -> None:
        """Return when every rank has made this call, or raise on all alike if they differ (collective)."""
        if self.size > 1:
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
        prepared: PreparedCall,
        how: tuple[Reduction, torch.dtype] | None = None,
        timeout_seconds: float | None = None,
    ) -> int:
        """Run a program, and return why it has stopped (collective)."""
        if prepared.program.num_scratch > self._num_scratch:
            self._num_scratch = prepared.program.num_scratch
            self._scratch = ctypes.create_string_buffer(self._num_scratch * _BLOCK_BYTES)
            self._state.scratch = ctypes.addressof(self._scratch)
        prepared.at = 0
        self._state.may_spin = self.may_spin
        try:
            code: int = self._library.lockstep_run(prepared.address)
            while True:
                if code == WAITING:
                    code = self._wait(prepared, timeout_seconds)
                elif code == NEEDS_TORCH:
                    self._reduce_by_torch(prepared, how)
                    code = self._library.lockstep_run(prepared.address)
                else:
                    return code
        except BaseException:
            # The phase failed here, so the others must not find it over.
            self._library.lockstep_withdraw(self._state_address)
            raise

    def _wait(self, prepared: PreparedCall, timeout_seconds: float | None) -> int:
        """Look after the other ranks until the phase is over; return why the program has stopped then."""
        code = WAITING
        missing = self._missing()
        with self._peers.long_wait(prepared.call, missing[0] if missing else None, timeout_seconds) as wait:
            while code == WAITING:
                wait.look(self._missing)
                code = self._library.lockstep_run(prepared.address)
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

    def _reduce_by_torch(self, prepared: PreparedCall, how: tuple[Reduction, torch.dtype] | None) -> None:
        assert how is not None
        row = programs.read_reduction(prepared.program, prepared.at)

        def tensor(place: int) -> Tensor:
            base, offset = divmod(place, 1 << programs.PLACE_BITS)
            if base < 2 * self.size:
                parity = self._state.parity if base < self.size else 1 - self._state.parity
                start = self.memory.address + self.memory.layout.send_buffer(base % self.size, parity)
            else:
                start = prepared.table[base - 2 * self.size]
            return tensor_at(start + offset, how[1], row.num_elements)

        copies = [tensor(place) for place in row.copies]
        reduce_into(tensor(row.out), [tensor(place) for place in row.parts], how[0], row.steps, copies)
        prepared.at += row.row_length

    def _explain_mismatch(self) -> CollectiveMismatchError:
        """Exchange the lines of the users' code too, and return the error for different calls (collective)."""
        calls = self._read_pages()
        self._go(self.prepare(programs.barrier(), self.find_line().encode()[:LONGEST_CALL]))
        lines = [line.decode(errors="replace") for line in self._read_pages()]
        return explain_mismatch(
            dict(zip(self.global_ranks, calls, strict=True)),
            dict(zip(self.global_ranks, lines, strict=True)),
            made_at=self._peers.made_at,
        )

    def _read_pages(self) -> list[bytes]:
        return [read_text(self._page(rank) + _TEXT, LONGEST_CALL) for rank in range(self.size)]
