"""Where everything lies in the memory that a group shares. Pure: numbers in, offsets out.

One anonymous file per group, far longer than any memory: a page exists from when it is first written.

    control   | semaphores (a to b) | state page of each rank | call pages, 2 per rank | send buffers, 2 per rank |
    channels  | one per ordered pair: a head page, a reply page, 2 slots |
    heaps     | one per rank: tensors that the group allocates |
"""

from dataclasses import dataclass

PAGE = 4096
SEMAPHORE_BYTES = 64
"""Room for one semaphore: a cache line, more than `sem_t` takes on any Linux."""
_HEAP_SPAN = 1 << 44


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Offsets in bytes into the shared file of a group of `size` ranks."""

    size: int
    send_buffer_bytes: int = 4 << 20
    """Bytes of one send buffer: the most that a rank publishes in one phase."""
    slot_bytes: int = 512 << 10
    """Bytes of one of the two slots of a channel."""

    def semaphore(self, kind: int, source: int, target: int) -> int:
        """Return the place of the semaphore that `source` posts for `target`; there are NUM_KINDS per pair."""
        return ((kind * self.size + source) * self.size + target) * SEMAPHORE_BYTES

    def semaphores(self) -> range:
        return range(0, self.semaphore(NUM_KINDS, 0, 0), SEMAPHORE_BYTES)

    def state(self, rank: int) -> int:
        return self._after_semaphores + rank * PAGE

    def call(self, rank: int, parity: int) -> int:
        return self.state(self.size) + (2 * rank + parity) * PAGE

    def send_buffer(self, rank: int, parity: int) -> int:
        return self.call(self.size, 0) + (2 * rank + parity) * self.send_buffer_bytes

    @property
    def control_bytes(self) -> int:
        """Length of what every rank maps from the start."""
        return self.send_buffer(self.size, 0)

    def channel(self, source: int, target: int) -> int:
        return self.control_bytes + (source * self.size + target) * self.channel_bytes

    @property
    def channel_bytes(self) -> int:
        return 2 * PAGE + 2 * self.slot_bytes

    def heap(self, rank: int) -> int:
        return self.channel(self.size, 0) + rank * _HEAP_SPAN

    @property
    def total_bytes(self) -> int:
        return self.heap(self.size)

    @property
    def _after_semaphores(self) -> int:
        return -(-self.semaphore(NUM_KINDS, 0, 0) // PAGE) * PAGE


PHASE, FULL, FREE, MESSAGE = range(4)
"""Kinds of semaphore: a phase is published; a slot is full; a slot is free; some channel has something new."""
NUM_KINDS = 4
