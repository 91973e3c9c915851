"""When the parts of a step began and ended: as they were recorded. [Note: one clock] is in `lockstep.recording`."""

from typing import final

from lockstep.recording import NO_EVENT, EventKind, own_recorder


@final
class StepTimes:
    """Records the parts of each step, and reads those of the last one, in nanoseconds; 0 for what it did not reach.

    On a GPU these are the times at which its work was launched, not those at which it was done.
    """

    __slots__ = ("_backward", "_forward", "_message", "_num_forwards", "_recorder", "_reducing", "_waiting")

    def __init__(self) -> None:
        self._recorder = own_recorder()
        self._forward = self._backward = self._message = self._reducing = self._waiting = NO_EVENT
        self._num_forwards = 0

    def begin_forward(self) -> None:
        self._num_forwards += 1
        self._recorder.set_step(self._num_forwards)
        self._forward = self._recorder.mark(EventKind.FORWARD, 0, 0, 0)

    def begin_backward(self) -> None:
        self._backward = self._recorder.begin(EventKind.BACKWARD, 0, 0, 0)
        self._message = self._reducing = NO_EVENT

    def begin_message(self, event: int) -> None:
        """Note that a bucket is sent, of which this is the event; the first one counts."""
        if self._message == NO_EVENT:
            self._message = event

    def end_backward(self) -> None:
        """Record that the last gradient has arrived."""
        self._reducing = self._waiting = self._recorder.begin(EventKind.REDUCING, 0, 0, 0)

    def end(self) -> None:
        """Record that everything is reduced."""
        self._recorder.end(self._reducing)
        self._recorder.end(self._backward)

    def wait_no_more(self) -> None:
        """Note that this rank does not wait for gradients any more, whether or not it has them."""
        self._waiting = NO_EVENT

    @property
    def seconds_waiting(self) -> float:
        """For how many seconds this rank has waited for the gradients of others; 0 if it does not. For any thread."""
        begin, end = self._recorder.moments(self._waiting)
        return self._recorder.seconds() - begin / 1e9 if begin and not end else 0.0

    @property
    def forward_start(self) -> int:
        return self._recorder.moments(self._forward)[0]

    @property
    def backward_start(self) -> int:
        return self._recorder.moments(self._backward)[0]

    @property
    def messages_start(self) -> int:
        """When the first bucket was sent."""
        return self._recorder.moments(self._message)[0]

    @property
    def backward_end(self) -> int:
        """When the last gradient had arrived."""
        return self._recorder.moments(self._reducing)[0]

    @property
    def messages_end(self) -> int:
        """When everything was reduced."""
        return self._recorder.moments(self._reducing)[1]
