"""A model that computes on two streams, on the device of `asynchronous_device`, whose backward does so too.

torch's engine runs each operation of a backward on the stream of its forward, lets it wait for what it reads, and lets
the caller's stream wait for all streams at the end. A device that is not there is not known to the engine, so the hooks
here do that for it, and no more than that.
"""

from typing import Any, final

import torch
from tests.support.fake_device import FakeDevice
from torch import Tensor, nn
from torch.autograd import Variable


@final
class TwoBranches(nn.Module):
    """Two layers beside each other, the second of them on a stream of its own, and a layer that adds them up.

    Args:
        device: The device.
        width: Of each layer.
        ends_on_side: Whether the branch on the other stream is the last one in a backward.
    """

    def __init__(self, device: FakeDevice, width: int, *, ends_on_side: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side, self.last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self._device = device
        self._ends_on_side = ends_on_side
        self._stream = device.new_stream()

    def forward(self, inputs: Tensor) -> Tensor:
        # What was made first comes last in a backward.
        if self._ends_on_side:
            side, main = self._run_side(inputs), self.main(inputs)
        else:
            main, side = self.main(inputs), self._run_side(inputs)
        self._device.stream.wait_stream(self._stream)
        total = main + side
        if total.requires_grad:
            _Backward(self._device, self._stream, total, main, side)
        result: Tensor = self.last(total)
        return result

    def _run_side(self, inputs: Tensor) -> Tensor:
        self._stream.wait_stream(self._device.stream)
        with self._stream:
            result: Tensor = self.side(inputs)
        return result


class _Backward:
    """What the engine would do in one backward, as hooks."""

    def __init__(self, device: FakeDevice, stream: Any, total: Tensor, main: Tensor, side: Tensor) -> None:
        self._device = device
        self._caller, self._side = device.stream, stream
        self._forked = self._caller.record_event()
        total.register_hook(self._fork)
        main.register_hook(self._on_main)
        side.register_hook(self._on_side)

    def _fork(self, _gradient: Tensor) -> None:
        self._forked = self._device.stream.record_event()
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._join)

    def _on_main(self, _gradient: Tensor) -> None:
        self._device.stream = self._caller

    def _on_side(self, _gradient: Tensor) -> None:
        self._side.wait_event(self._forked)
        self._device.stream = self._side

    def _join(self) -> None:
        self._device.stream = self._caller
        self._caller.wait_stream(self._side)
