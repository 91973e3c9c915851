"""The streams and events of a device that is not there, and what they make sure of. [`asynchronous_device`]"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Self, final

import torch
from tests.support.memory_accesses import Access, Clock, covers, find_unknown, is_on_device, mark, merge, part_of
from torch import Tensor

NAME: Final = "privateuseone:0"
"""How torch spells the device: that of a backend of somebody else's, of which there is none here."""
DEVICE: Final = torch.device(NAME)
_HOST: Final = 0
_MUCH: Final = 10
"""As many operations as are something to do for a device."""
_NOT_THE_CALLER: Final = str(Path(torch.__file__).parent), str(Path(__file__).parent), "<"
_CURRENT: Final = threading.local()


class StreamError(AssertionError):
    """Something was used where it may not be there yet."""


class BlockingReadError(AssertionError):
    """The host waited for the device where it may not."""


@final
class FakeStream:
    """A stream of the device, as `torch.Stream`."""

    def __init__(self, owner: "FakeDevice", number: int) -> None:
        self.stream_id = number
        self.device = DEVICE
        self.clock: Clock = {number: 0}
        self._owner = owner
        self._before: list[FakeStream] = []

    def __enter__(self) -> Self:
        self._before.append(self._owner.stream)
        self._owner.stream = self
        return self

    def __exit__(self, *_error: object) -> None:
        self._owner.stream = self._before.pop()

    def wait_stream(self, other: "FakeStream") -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        merge(self.clock, event.clock)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = FakeEvent(self._owner) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._owner.wait_on_host(self.clock, "a stream")

    def query(self) -> bool:
        return covers(self._owner.host.clock, self.clock)

    def is_capturing(self) -> bool:
        """Return whether operations are recorded, not run: optimizers ask from torch 2.15 on."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id and other._owner is self._owner

    def __hash__(self) -> int:
        return hash((self.stream_id, id(self._owner)))


@final
class FakeEvent:
    """An event of the device, as `torch.Event`; `query` is true when the host has waited for it."""

    def __init__(self, owner: "FakeDevice") -> None:
        self.clock: Clock = {}
        self._owner = owner

    def record(self, stream: FakeStream | None = None) -> None:
        """Stand for all that the stream has by now.

        Where none is named, torch takes that of the current device: this one stands for a process that has another
        current device, whose stream has nothing to do.
        """
        if stream is not None:
            self.clock = dict(stream.clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._owner.stream).wait_event(self)

    def synchronize(self) -> None:
        if self._owner.is_late(self.clock):
            merge(self._owner.host.clock, self.clock)
            return
        self._owner.wait_on_host(self.clock, "an event")

    def query(self) -> bool:
        return covers(self._owner.host.clock, self.clock)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


@final
class FakeDevice:
    """What the streams of the device of one thread do.

    Attributes:
        name: How to name it, for `Module.to` and `device=`.
        stream: The current one.
        host: What the host knows.
        waits: What the host has waited for, in order.
    """

    def __init__(self) -> None:
        self.name = NAME
        self.host = FakeStream(self, _HOST)
        self._streams = [self.host]
        self.stream = self.new_stream()
        self.waits: list[str] = []
        self.is_paused = False
        self._is_waiting_an_error = False
        self._at_beginning: Clock = {}
        self._new_is_on_device: bool | None = None

    def new_stream(self) -> FakeStream:
        """Return another stream; it comes after nothing."""
        stream = FakeStream(self, len(self._streams))
        self._streams.append(stream)
        return stream

    @contextmanager
    def no_blocking_reads(self) -> Iterator[None]:
        """Within, it is an error that the host waits for the device.

        It may wait for an event that was recorded before, once it has given the device something to do within: that
        leaves the device no time without work.
        """
        self._is_waiting_an_error = True
        self._at_beginning = dict(self.stream.clock)
        try:
            yield
        finally:
            self._is_waiting_an_error = False
            self._at_beginning = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is followed: for what stands for the outside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def new_tensors(self, *, is_on_device: bool | None) -> Iterator[None]:
        """Within, new tensors are there, or here; None for where their inputs are."""
        before, self._new_is_on_device = self._new_is_on_device, is_on_device
        try:
            yield
        finally:
            self._new_is_on_device = before

    def synchronize(self) -> None:
        for stream in self._streams[1:]:
            self.wait_on_host(stream.clock, "the device")

    def wait_on_host(self, clock: Clock, what: str) -> None:
        """Let the host wait until `clock`."""
        self.waits.append(f"{what} in {_caller()}")
        if self._is_waiting_an_error:
            raise BlockingReadError(f"The host waits for {self.waits[-1]}.")
        merge(self.host.clock, clock)

    def is_late(self, clock: Clock) -> bool:
        """Whether `clock` lies before the present `no_blocking_reads`, in which the stream has got more to do."""
        number, before = self.stream.stream_id, self._at_beginning
        return bool(before) and covers(before, clock) and self.stream.clock[number] >= before[number] + _MUCH

    def read_on_host(self, tensor: Tensor, what: str) -> None:
        """Let the host read a tensor, which waits if it is on the device."""
        if is_on_device(tensor):
            self.follow([tensor], [], what)
            self.wait_on_host(self.stream.clock, f"{what} of a tensor on the device")
        else:
            self.follow([tensor], [], what)

    def follow(self, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        """Follow one operation: on the current stream, or on the host if no tensor is on the device."""
        reads, writes = list(reads), list(writes)
        on_device = {is_on_device(tensor) for tensor in (*reads, *writes) if tensor.dim() or is_on_device(tensor)}
        if len(on_device) > 1:
            raise StreamError(f"{what}: some tensors are on the CPU, and others on {NAME}.")
        self.run(self.stream if True in on_device else self.host, reads, writes, what)

    def run(self, stream: FakeStream, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        merge(stream.clock, self.host.clock)  # what the host has done or waited for comes before what it queues
        read, written = [part_of(tensor) for tensor in reads], [part_of(tensor) for tensor in writes]
        for memory, start, stop in (*read, *written):
            late = find_unknown(memory.writes, start, stop, stream.clock)
            if late is not None:
                raise StreamError(
                    f"{what} on {_name(stream.stream_id)}: what {_name(late.stream)} writes may not be there yet. Let "
                    "it wait for that stream, or for an event of it."
                )
        for memory, start, stop in written:
            late = find_unknown(memory.reads, start, stop, stream.clock)
            if late is not None:
                raise StreamError(
                    f"{what} on {_name(stream.stream_id)}: it writes what {_name(late.stream)} may still read."
                )
        stream.clock[stream.stream_id] += 1
        count = stream.clock[stream.stream_id]
        for memory, start, stop in read:
            memory.reads.append(Access(start, stop, stream.stream_id, count))
        for memory, start, stop in written:
            memory.writes = [access for access in memory.writes if not access.is_within(start, stop)]
            memory.reads = [access for access in memory.reads if not access.is_within(start, stop)]
            memory.writes.append(Access(start, stop, stream.stream_id, count))

    def made(self, tensors: Iterable[Tensor], *, on_device: bool) -> None:
        """Note where new tensors are."""
        place = on_device if self._new_is_on_device is None else self._new_is_on_device
        for tensor in tensors:
            mark(tensor, is_on_device=place)


def current_device() -> FakeDevice | None:
    """Return the device of this thread, or None."""
    device: FakeDevice | None = getattr(_CURRENT, "device", None)
    return device


@contextmanager
def as_current(device: FakeDevice) -> Iterator[None]:
    assert current_device() is None, "this thread has a device already"
    _CURRENT.device = device
    try:
        yield
    finally:
        del _CURRENT.device


@contextmanager
def untracked() -> Iterator[None]:
    """Do what is no part of a program: the device of this thread, if it has one, does not follow it."""
    device = current_device()
    if device is None:
        yield
        return
    with device.paused():
        yield


def start_beside(reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> Callable[[], None]:
    """Follow an operation that runs beside the current stream, after what that has by now; return what waits for it.

    The current stream waits, if a tensor is on the device, and else the host; without a device nobody does.
    """
    device = current_device()
    if device is None or device.is_paused:
        return _do_nothing
    reads, writes = list(reads), list(writes)
    on_device = any(map(is_on_device, (*reads, *writes)))
    beside = device.new_stream()
    beside.wait_stream(device.stream if on_device else device.host)
    device.run(beside, reads, writes, what)
    return lambda: merge((device.stream if on_device else device.host).clock, beside.clock)


def _do_nothing() -> None:
    """Stand for a wait without a device."""


def _caller() -> str:
    """Return the line, outside of torch and of this folder, that makes the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _name(stream: int) -> str:
    return "the host" if stream == _HOST else f"stream {stream}"
