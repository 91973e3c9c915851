"""The layout of a recording's files.

    0        header: what does not change, then what may (rank, generation, bytes of text, end)
    4096     texts: each a length in two bytes, then UTF-8; an event refers to one by its place, 0 for none
    69632    the ring: events of 64 bytes; event number n is in slot n % capacity

[Note: a torn event] An event begins and ends with its number + 1, which are written first and last. A reader copies the
ring twice and takes an event whose two copies are equal and whose two numbers are the same. All others were being
written. A slot that was never used has 0 in both.
"""

import struct
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final

MAGIC: Final = b"LOCKSREC"
VERSION: Final = 1
RECORDING_NAME: Final = "recording"
"""The folder within a run directory."""
HEADER_BYTES: Final = 4096
TEXT_BYTES: Final = 65536
RING_START: Final = HEADER_BYTES + TEXT_BYTES
EVENT_BYTES: Final = 64
EVENT: Final = struct.Struct("@8q")
"""Number + 1, begin, end (0 while under way), kind and text, step, index, size, number + 1."""
END_WORD: Final = 2
"""Which of the eight words of an event is its end."""
TEXT_SHIFT: Final = 16
"""The fourth word is the kind, plus the place of the text shifted by this."""
GROUP_SHIFT: Final = 40
"""The index of a collective is the number of the call in its group, plus the number of the group shifted by this."""
MOST_TEXT: Final = 400
"""So many bytes of a text are kept."""

FIXED: Final = struct.Struct("@8s4I2q3q64s64s40s")
"""Magic, version, capacity, process, signal for stacks, start of the process in ticks, owner, wall clock and monotonic
clock when it was opened, their resolution, name of the host, name of the program, boot of the host."""
_NUM_NUMBERS: Final = 8
"""So many numbers of a header do not change: those up to the monotonic clock."""
CHANGING_START: Final = 512
CHANGING: Final = struct.Struct("@6q")
"""Rank, world size, generation, bytes of text, end on the monotonic clock (0 while it is open), exit code."""


class EventKind(IntEnum):
    """What an event is about; the numbers are written to files and never change their meaning."""

    STARTED = 1
    ENDED = 2
    PHASE = 3
    """A phase of a step began, index = its `StepPhase`; the one before has ended with that."""
    SHARD = 4
    """Forward and backward of shard `index`."""
    LOADING = 5
    BUCKET = 6
    """A bucket of gradients from being sent to being complete; index = its number."""
    COLLECTIVE = 7
    """A call of a group; index = its number in this process."""
    WAITING = 8
    """A wait for rank `index`, -1 for any; the text says in which call."""
    SAVING = 9
    """A checkpoint is copied or written; the text says which of them."""
    EVALUATING = 10
    FORWARD = 11
    """A forward through a wrapper."""
    BACKWARD = 12
    """A backward of a wrapper, until its gradients are reduced."""
    GENERATION = 13
    """This process is in another set of workers; index = its generation."""
    WORKER_STARTED = 14
    """The launcher started a worker; index = its number, size = its process."""
    WORKER_ENDED = 15
    """A worker ended; index = its number, size = its process, the text says how."""
    LINE = 16
    """The line of the user's code from which the event before was waited for."""
    STALL = 17
    REDUCING = 18
    """From the last gradient of a backward until all are reduced: what communication adds to a step."""
    USAGE = 19
    """What a worker has used, as the launcher saw it: index = its process, size = the number, text = of what."""
    CALLBACK = 20
    """A moment of the user's callback; the text names both."""


class StepPhase(IntEnum):
    """What a trainer is doing, the number of an event of the kind `PHASE`; the numbers never change their meaning."""

    IDLE = 1
    PREPARE = 2
    COMPUTE = 3
    REDUCE = 4
    AGREE = 5
    COMMIT = 6
    CLOSED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """Its fields are in the order of `FIXED` and `CHANGING`."""

    version: int = VERSION
    capacity: int
    pid: int
    stack_signal: int
    """The signal on which it writes its Python stacks; 0 for none."""
    start_ticks: int
    """When it started, in ticks since the boot of its host: with it, a number of a process is unique."""
    worker: int
    """Number of the worker among those that its launcher started; -1 for the launcher."""
    opened_wall_ns: int
    opened_ns: int
    """When the recording began, by the host's monotonic clock, on which all events are."""
    host: str
    program: str
    """Name of the program, without folder and arguments."""
    boot: str
    """Boot of the host: monotonic clocks of processes of one boot agree."""
    rank: int
    world_size: int
    generation: int = 0
    ended_ns: int = 0
    """When it ended its recording itself; 0 if it did not."""
    exit_code: int = -1
    """With which exit code, if it is known; else -1."""


def file_bytes(capacity: int) -> int:
    return RING_START + capacity * EVENT_BYTES


def pack_fixed(header: FileHeader) -> bytes:
    numbers = astuple(header)[:_NUM_NUMBERS]
    texts = header.host.encode()[:64], header.program.encode()[:64], header.boot.encode()[:40]
    return FIXED.pack(MAGIC, *numbers, 0, *texts)


def parse_header(data: bytes) -> FileHeader:
    """Return the header that the first bytes of a file hold; `ValueError` if it is no recording of this version."""
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a file of a recording, or one that was being made.")
    fixed = FIXED.unpack_from(data)
    version, capacity = fixed[1:3]
    if version != VERSION:
        raise ValueError(f"a recording of version {version}; this Lockstep reads version {VERSION}.")
    if capacity < 1 or capacity & (capacity - 1):
        raise ValueError(f"a damaged file: its ring has {capacity} places, expected a power of two.")
    rank, world_size, generation, _, ended_ns, exit_code = CHANGING.unpack_from(data, CHANGING_START)
    texts = (text.rstrip(b"\0").decode(errors="replace") for text in fixed[10:13])
    values = (*fixed[1 : 1 + _NUM_NUMBERS], *texts, rank, world_size, generation, ended_ns, exit_code)
    return FileHeader(**dict(zip((each.name for each in fields(FileHeader)), values, strict=True)))


def read_text(texts: bytes, place: int) -> str:
    """Return a text by its place; empty for none, or a place that holds none."""
    if not 0 < place <= len(texts) - 2:
        return ""
    (length,) = struct.unpack_from("<H", texts, place)
    return texts[place + 2 : place + 2 + length].decode(errors="replace")
