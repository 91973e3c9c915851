"""The device that is asynchronous without being there: what would be a race on a GPU fails, and what is right works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import BlockingReadError, FakeStream, StreamError
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import OrderedReductions, World
from lockstep.devices.transfer import is_asynchronous


def current_stream() -> Any:
    return torch.accelerator.current_stream()


def test_tensors_say_where_they_are() -> None:
    with asynchronous_device() as device:
        name = torch.device(device.name)
        model = nn.Linear(2, 2).to(device.name)
        here = torch.ones(1, 2)
        there = here.to(device.name)
        model(there).sum().backward()
        made = torch.zeros(3, device=device.name), torch.empty_like(there), torch.tensor([1.0], device=name)
        places = {tensor.device for tensor in (there, model.weight, model.weight.grad, there[0], *made)}
        assert places == {name}
        assert is_asynchronous(there.device)
        assert here.device == there.cpu().device == torch.zeros(1).device == torch.device("cpu")
        assert torch.zeros_like(there, device="cpu").device == torch.device("cpu")
        with pytest.raises(StreamError, match="some tensors are on the CPU"):
            there + here
    assert not is_asynchronous(here.device)


def test_hooks_of_a_backward_see_the_device() -> None:
    seen = []
    with asynchronous_device() as device:
        tensor = torch.ones(2, device=device.name, requires_grad=True)
        tensor.register_hook(lambda gradient: seen.append(gradient.device))
        (tensor * 2).sum().backward()
    assert seen == [torch.device(device.name)]


def test_a_stream_that_does_not_wait_is_an_error() -> None:
    with asynchronous_device() as device:
        tensor = torch.ones(2, device=device.name)
        side = torch.Stream(device.name)
        with side, pytest.raises(StreamError, match="mul on stream 2: what stream 1 writes may not be there yet"):
            tensor * 2
        side.wait_stream(current_stream())
        with side:
            doubled = tensor * 2
        with pytest.raises(StreamError, match="add_ on stream 1: it writes what stream 2 may still read"):
            tensor.add_(1)
        with pytest.raises(StreamError, match="_local_scalar_dense on stream 1"):
            doubled[0].item()
        current_stream().wait_event(side.record_event())
        tensor.add_(1)
        assert doubled[0].item() == 2.0


def test_streams_may_use_parts_of_one_tensor() -> None:
    with asynchronous_device() as device:
        tensor = torch.ones(4, device=device.name)
        side = torch.Stream(device.name)
        side.wait_stream(current_stream())
        with side:
            tensor[2:].zero_()
        tensor[:2].add_(1)
        with pytest.raises(StreamError):
            tensor[1:3].add_(1)


def test_a_copy_to_the_host_is_there_after_an_event() -> None:
    with asynchronous_device() as device:
        copy = torch.ones(2, device=device.name).to("cpu", non_blocking=True)
        event: Any = torch.Event(device.name)
        event.record(current_stream())
        assert not event.query()
        for read in (copy[0].item, copy.tolist, copy.numpy, lambda: copy + 1):
            with pytest.raises(StreamError, match="on the host: what stream 1 writes may not be there yet"):
                read()
        event.synchronize()
        assert event.query()
        assert copy.tolist() == [1.0, 1.0]


def test_pinned_memory_is_read_when_the_device_comes_to_it() -> None:
    with asynchronous_device() as device:
        pinned = torch.ones(2, pin_memory=True)
        there = pinned.to(device.name, non_blocking=True)
        with pytest.raises(StreamError, match="it writes what stream 1 may still read"):
            pinned.zero_()
        current_stream().synchronize()
        pinned.zero_()
        pageable = torch.ones(2)
        there.copy_(pageable, non_blocking=True)
        pageable.zero_()


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: tensor[0].item(),
    "bool": lambda tensor: bool(tensor[0] > 0),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "copy_": lambda tensor: torch.empty(2).copy_(tensor),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "pageable": lambda tensor: torch.ones(2).to(tensor.device, non_blocking=True),
    "blocking": lambda tensor: torch.ones(2).pin_memory().to(tensor.device),
    "new": lambda tensor: torch.tensor([1.0], device=tensor.device),
    "new_tensor": lambda tensor: tensor.new_tensor([1.0]),
    "synchronize": lambda tensor: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("read", READS)
def test_waiting_for_the_device_is_counted_and_can_be_an_error(read: str) -> None:
    with asynchronous_device() as device:
        tensor = torch.ones(2, device=device.name)
        READS[read](tensor)
        assert len(device.waits) == 1
        assert "test_asynchronous_device.py" in device.waits[0]
        with device.no_blocking_reads(), pytest.raises(BlockingReadError):
            READS[read](tensor)


def test_an_event_that_lies_far_behind_may_be_waited_for() -> None:
    with asynchronous_device() as device:
        tensor = torch.ones(2, device=device.name)
        event: Any = torch.Event(device.name)
        event.record(current_stream())
        with device.no_blocking_reads():
            with pytest.raises(BlockingReadError):
                event.synchronize()
            for _ in range(10):
                tensor.add_(1)
            event.synchronize()
            event.record(current_stream())
            with pytest.raises(BlockingReadError):
                event.synchronize()


def test_training_on_the_device_waits_for_nothing() -> None:
    with asynchronous_device() as device:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with device.no_blocking_reads():
            inputs = torch.randn(4, 4).pin_memory().to(device.name, non_blocking=True)
            model(inputs).pow(2).mean().backward()
            optimizer.step()


# -- With a group --------------------------------------------------------------------------------------------------


def test_what_a_call_receives_is_there_after_wait() -> None:
    def program(world: World) -> float:
        with asynchronous_device() as device:
            tensor = torch.ones(2, device=device.name)
            work: Any = dist.all_reduce(tensor, group=world.group, async_op=True)
            with pytest.raises(StreamError):
                tensor * 2
            side = torch.Stream(device.name)
            work.wait()
            with side, pytest.raises(StreamError):
                tensor * 2
            with device.no_blocking_reads():
                doubled = tensor * 2
            return doubled[0].item()

    assert run_ranks(2, program, poisons=True) == [4.0, 4.0]


def reduce_in_order(world: World) -> list[float]:
    with asynchronous_device() as device:
        tensor = torch.tensor([1.0, 2.0]).to(device.name) * (world.rank + 1)
        reductions = OrderedReductions(world, world.world_size)
        layout = [[(rank, rank + 1)] for rank in range(world.world_size)]
        with device.no_blocking_reads():
            reductions.start({(world.rank, world.rank + 1): tensor}, tensor, layout, waits=True)()
            doubled = tensor * 2
        return doubled.tolist()


def test_ordered_reductions_are_right_on_a_stream_of_their_own() -> None:
    assert run_ranks(3, reduce_in_order, poisons=True) == [[12.0, 24.0]] * 3


def test_a_stream_that_is_not_waited_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "wait_stream", lambda _self, _other: None)
    with pytest.raises(StreamError):
        run_ranks(3, reduce_in_order)


@pytest.mark.parametrize(("size", "on_device"), [(2, False), (2, True), (3, True)])
def test_a_trainer_has_the_same_bits_as_one_on_the_cpu(size: int, on_device: bool) -> None:
    assert (
        run_ranks(size, lambda _world: train(on_device=on_device), poisons=True, has_default_group=True)
        == [train(on_device=False)] * size
    )


def train(*, on_device: bool) -> str:
    with asynchronous_device() as device:
        place = device.name if on_device else "cpu"
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)).to(place)
        trainer = ls.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=lambda model, batch: model(batch[0]).pow(2).mean(),
            num_shards=4,
            seed=0,
        )
        data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64)
        for batch in ls.ShardedLoader(data, batch_size=8, num_shards=4, seed=0).epoch(0):
            trainer.step(batch)
        return trainer.digest()
