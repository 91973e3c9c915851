"""Where everything lies in the memory that a group shares. Pure: numbers in, offsets out.

One anonymous file per group, far longer than any memory: a page exists from when it is first written.

    control   | counters | state page of each rank | call pages, 2 per rank | send buffers, 2 per rank |
    channels  | one per ordered pair: a head page, a reply page, 2 slots |
    heaps     | one per rank: tensors that the group allocates |
"""

from dataclasses import dataclass

PAGE = 4096
LINE = 64
"""Room for one counter: a cache line."""
HEAP_SPAN = 1 << 44


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Offsets in bytes into the shared file of a group of `size` ranks."""

    size: int
    send_buffer_bytes: int = 4 << 20
    """Bytes of one send buffer: the most that a rank publishes in one phase."""
    slot_bytes: int = 512 << 10
    """Bytes of one of the two slots of a channel."""

    arrivals = 0
    """The place of the counter at which ranks arrive at the end of a phase."""

    def reached(self, rank: int) -> int:
        """Return the place of the word that says at the end of which phase a rank has arrived."""
        return (1 + rank) * LINE

    def messages(self, rank: int) -> int:
        """Return the place of the counter of messages that were begun for a rank, by whichever other."""
        return (1 + self.size + rank) * LINE

    def full(self, source: int, target: int) -> int:
        """Return the place of the counter of slots that `source` has filled for `target`."""
        return (1 + 2 * self.size + source * self.size + target) * LINE

    def free(self, source: int, target: int) -> int:
        """Return the place of the counter of slots that `target` has emptied, of those that `source` has filled."""
        return self.full(self.size + source, target)

    @property
    def joined(self) -> int:
        """The place of the counter of ranks that have the file."""
        return self.free(self.size, 0)

    def state(self, rank: int) -> int:
        return -(-(self.joined + LINE) // PAGE) * PAGE + rank * PAGE

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
        return self.channel(self.size, 0) + rank * HEAP_SPAN

    @property
    def total_bytes(self) -> int:
        return self.heap(self.size)
