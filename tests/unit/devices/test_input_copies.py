"""Copies of inputs beside the computation: complete when they are used, and their memory is kept as long."""

from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import StreamError
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lockstep.devices.input_copies import InputCopies

CPU = torch.device("cpu")


class OwnBatch:
    """A batch class of a user's, which moves itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "OwnBatch":
        return OwnBatch(self.tensor.to(device))


def test_a_copy_is_complete_when_it_is_used_and_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Tensor, Any]] = []
    with asynchronous_device() as device:
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: kept.append((tensor, stream)))
        copies = InputCopies(torch.device(device.name))
        computes = device.stream
        values = {"inputs": [torch.ones(3)], "text": "kept"}
        with device.no_blocking_reads():
            pending = copies.start(values)
            assert device.stream is computes
            copied = copies.finish(pending)
            assert copied["text"] == "kept"
            copied["inputs"][0] + 1
        assert [(tensor is copied["inputs"][0], stream is computes) for tensor, stream in kept] == [(True, True)]


def test_a_copy_runs_beside_the_computation() -> None:
    with asynchronous_device() as device:
        copies = InputCopies(torch.device(device.name))
        early = copies.start(torch.ones(3).pin_memory())
        with pytest.raises(StreamError):  # on a stream of its own, which the computation has not waited for
            early.value + 1
        busy = torch.ones(3, device=device.name) + 1
        late = copies.start(torch.ones(3).pin_memory())
        assert late.ended is not None
        late.ended.synchronize()
        with pytest.raises(StreamError):  # the copy has not waited for what was computed before it
            device.run(device.host, [busy], [], "a read on the host")


@pytest.mark.parametrize(
    "value", [OwnBatch(torch.ones(2)), [OwnBatch(torch.ones(2))], pack_sequence([torch.ones(2)]), "text", 3]
)
def test_what_moves_itself_is_moved_where_it_is_used(value: Any) -> None:
    with asynchronous_device() as device:
        copies = InputCopies(torch.device(device.name))
        pending = copies.start(value)
        assert (pending.value is value, pending.ended) == (True, None)
        if isinstance(value, OwnBatch):
            assert copies.finish(pending).tensor.device.type == "privateuseone"


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    copies = InputCopies(CPU)
    assert copies.finish(copies.start(tensor)) is tensor
