"""Copies of inputs beside the computation: complete when they are used, and their memory is kept as long."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import StreamError
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import lockstep as ls
from lockstep.comm import World
from lockstep.devices.transfer import InputCopies

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


def test_a_copy_or_a_pickle_copies_to_the_same_device_and_leaves_the_stream_here() -> None:
    with asynchronous_device() as device:
        copies = InputCopies(torch.device(device.name))
        copies.move(torch.ones(2))
        for other in (copy.deepcopy(copies), pickle.loads(pickle.dumps(copies))):
            assert other.move(torch.ones(2)).device.type == torch.device(device.name).type


def test_a_wrapper_copies_its_inputs_beside_what_the_device_computes() -> None:
    # They were copied on the stream that computes, behind all that it had to do.
    def program(world: World) -> int:
        with asynchronous_device() as device:
            module = nn.Linear(4, 2).to(device.name)
            model = ls.DistributedDataParallel(module, device_ids=[0], process_group=world.group)
            seen: list[int] = []
            make = InputCopies.start

            def start(copies: InputCopies, value: Any) -> Any:
                pending = make(copies, value)
                seen.append(pending.ended is not None)
                return pending

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(InputCopies, "start", start)
                with device.no_blocking_reads():
                    output = model(torch.ones(3, 4))
            assert output.shape == (3, 2)
            model.reducer.close()
            return sum(seen)

    assert run_ranks(1, program, has_default_group=True) == [1]
