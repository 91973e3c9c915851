"""Which streams a backward runs on, so that no gradient is sent before it is there.

The autograd engine runs each operation of a backward on the stream of its forward, and accumulates a gradient there. A
model with two streams so has gradients on both, while a bucket is packed and sent on the stream of its last gradient:

    stream A    gradient 1 accumulated                                   (1)
    stream B          gradient 2 accumulated, the last of its bucket     (2)   waits for A, packs the bucket
    messages                                                             (3)   start after (2)
    caller's                                                             (4)   waits for A, B and the messages

With one stream no waits are added: one event is recorded when a backward begins.
"""

from typing import final

import torch
from torch import Tensor


@final
class BackwardStreams:
    """The streams of one device on which the backward that is under way has left gradients or buckets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[torch.Stream] = []
        self._begun: torch.Event | None = None

    @property
    def are_several(self) -> bool:
        return len(self._seen) > 1

    def begin(self) -> None:
        """Begin with a backward, on the current stream."""
        current = torch.accelerator.current_stream(self._device)
        self._seen = [current]
        self._begun = current.record_event()

    def note_current(self) -> None:
        """Note that the current stream takes part. It waits for what the buckets had to do before this backward."""
        current = torch.accelerator.current_stream(self._device)
        if current not in self._seen:
            self._seen.append(current)
            if self._begun is not None:
                current.wait_event(self._begun)

    def join(self) -> None:
        """Let the current stream wait for all that have taken part so far."""
        self.note_current()
        if self.are_several:
            current = torch.accelerator.current_stream(self._device)
            for stream in self._seen:
                if stream != current:
                    current.wait_stream(stream)

    def keep_until_read(self, tensors: list[Tensor]) -> None:
        """Let the memory of tensors be used again only after what the current stream does with them by now.

        The allocator would give memory that was allocated on another stream to that stream's next tensor.
        """
        if self.are_several:
            current = torch.accelerator.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(current)


def make_streams(device: torch.device) -> BackwardStreams | None:
    """Return the streams of a device; None if it has none."""
    accelerator = torch.accelerator.current_accelerator()
    return BackwardStreams(device) if accelerator is not None and accelerator.type == device.type else None
