"""When the parts of a step began and ended, by this process's monotonic clock."""

import time
from typing import final

from lockstep.recording import EventKind, own_recorder


@final
class StepTimes:
    """Times of the last step, in nanoseconds; 0 for a part that it did not reach.

    On a GPU these are the times at which its work was launched, not those at which it was done.
    """

    __slots__ = (
        "_event",
        "_num_forwards",
        "_recorder",
        "_reducing",
        "backward_end",
        "backward_start",
        "forward_start",
        "messages_end",
        "messages_start",
    )

    def __init__(self) -> None:
        self.forward_start = 0
        self.backward_start = 0
        self.messages_start = 0
        self.backward_end = 0
        self.messages_end = 0
        self._recorder = own_recorder()
        self._event = self._reducing = self._num_forwards = 0

    def begin_forward(self) -> None:
        """Note that a forward begins."""
        self._num_forwards += 1
        self._recorder.set_step(self._num_forwards)
        self._recorder.mark(EventKind.FORWARD, 0, 0, 0)
        self.forward_start = time.monotonic_ns()

    def begin_backward(self) -> None:
        """Note that its backward begins."""
        self._event = self._recorder.begin(EventKind.BACKWARD, 0, 0, 0)
        self.backward_start = time.monotonic_ns()
        self.messages_start = 0

    def begin_messages(self) -> None:
        """Note that a bucket is sent; the first one counts."""
        if not self.messages_start:
            self.messages_start = time.monotonic_ns()

    def end_backward(self) -> None:
        """Note that the last gradient has arrived."""
        self.backward_end = time.monotonic_ns()
        self._reducing = self._recorder.begin(EventKind.REDUCING, 0, 0, 0)

    def end(self) -> None:
        """Note that everything is reduced."""
        self.messages_end = time.monotonic_ns()
        self._recorder.end(self._reducing)
        self._recorder.end(self._event)
