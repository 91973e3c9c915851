"""The buffers of a wrapped module: overwritten with one rank's before a forward, and beside the gradients."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import final

from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import World, broadcast_tensors, calls_for, start_broadcast
from lockstep.reduce import Reducer, TrainedModel

BUFFERS_BEFORE_FORWARD = (
    "the buffers of a wrapped model before a forward in training (call train() on every rank; for a forward on one "
    "rank alone, eval() or no_grad())"
)
"""What a call is for: ranks compare it, and errors show it."""
BUFFERS_AFTER_BACKWARD = "the buffers of a wrapped model after its backward"
"""Likewise."""


@final
class BufferBroadcast:
    """Broadcasts buffers over the ranks of a wrapper, from rank `source`."""

    def __init__(self, world: World, reducer: Reducer | None) -> None:
        self.source = 0
        self._world = world
        self._reducer = reducer

    def broadcast(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite the buffers, before a forward (collective)."""
        assert self._world.group is not None
        waiting = nullcontext() if self._reducer is None else self._reducer.waiting_for("buffers before a forward")
        with waiting, calls_for(BUFFERS_BEFORE_FORWARD):
            broadcast_tensors(buffers, self._world.group, self.source)

    def start(self, buffers: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to overwrite the buffers, beside the gradients; return what waits for it (collective)."""
        assert self._world.group is not None
        with calls_for(BUFFERS_AFTER_BACKWARD):
            return start_broadcast(buffers, self._world.group, self.source)


def broadcast_model(model: TrainedModel, group: ProcessGroup, source: int, *, with_buffers: bool) -> None:
    """Overwrite the parameters of a model, and its buffers if asked, with those of rank `source` (collective)."""
    left_out = set() if with_buffers else {id(buffer) for _, buffer in model.buffers()}
    broadcast_tensors([tensor for tensor in model.tensors() if id(tensor) not in left_out], group, source)


def buffers_go_before_forward(wrapper: object) -> bool:
    """Return whether a wrapper's buffers are sent before its forward: after it, if a user's hook wants it so."""
    hook = getattr(wrapper, "buffer_hook", None)  # torch sets it when one is registered
    return hook is None or hook.buffer_comm_hook_location.name == "PRE_FORWARD"


def start_buffers(
    method: "weakref.WeakMethod[Callable[[], Callable[[], None]]]",
    otherwise: "weakref.WeakMethod[Callable[[], Callable[[], None]]]",
) -> Callable[[], None]:
    """Call the wrapper's method, or that of its `ModuleSync` when the wrapper was deleted (collective)."""
    start = method() or otherwise()
    return send_no_buffers if start is None else start()


def send_no_buffers() -> None:
    """Do nothing: no buffers were sent."""
