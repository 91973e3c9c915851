"""The calls of a group in the recording.

All ranks of a group make the same calls in the same order. So the number of a call, counted by each rank, is the same
on all of them, and a reader sees which rank has not made a call in which others wait.
"""

import itertools
import zlib
from collections.abc import Sequence
from typing import final

from torch import Tensor

from lockstep.recording import EventKind, own_recorder
from lockstep.recording.file_format import GROUP_SHIFT


@final
class CallEvents:
    """Records the calls of one group, whose ranks have these `names` in the default group."""

    def __init__(self, names: Sequence[int]) -> None:
        self._recorder = own_recorder()
        is_default = [*names] == [*range(len(names))]
        self._group = 0 if is_default else zlib.crc32(repr([*names]).encode()) & 0xFFFF | 1
        self.take_number = itertools.count(self._group << GROUP_SHIFT).__next__
        """Returns the number of the next call; called in the order of the calls."""

    def begin(self, number: int, call: bytes, tensors: Sequence[Tensor]) -> int:
        """Record that a call begins, and return the number of the event."""
        recorder = self._recorder
        if not recorder.is_open:
            return 0
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # sparse ones have no nbytes
        return recorder.begin(EventKind.COLLECTIVE, number, size, recorder.text(call))

    def end(self, event: int) -> None:
        """Record that a call is complete, or has failed."""
        self._recorder.end(event)
