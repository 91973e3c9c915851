"""Batches that are moved to a device, and the device that a worker has."""

import copy
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import StreamError
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import lockstep as ls
from lockstep.comm import World
from lockstep.comm.bootstrap.identity import read_torch_variables
from lockstep.comm.bootstrap.process_group import own_device
from lockstep.devices.transfer import InputCopies, current_accelerator, own_accelerator, take_gpu, to_device

META = torch.device("meta")


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class OwnBatch:
    """A batch class of a user's, which moves itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "OwnBatch":
        return OwnBatch(self.tensor.to(device))


def test_containers_are_rebuilt_with_moved_tensors() -> None:
    tensor = torch.zeros(2)
    value: dict[str, Any] = {"pair": Pair(tensor, [tensor]), "tuple": (tensor, 3), "text": "kept"}
    moved = to_device(value, META)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.device == moved["pair"].right[0].device == moved["tuple"][0].device == META
    assert (moved["tuple"][1], moved["text"]) == (3, "kept")
    assert tensor.device.type == "cpu"


def test_the_kind_of_a_mapping_is_kept() -> None:
    moved = to_device(OrderedDict(a=torch.zeros(1)), META)
    assert isinstance(moved, OrderedDict)
    assert moved["a"].device == META


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = to_device(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_a_batch_with_a_to_method_moves_itself() -> None:
    assert to_device(OwnBatch(torch.ones(1)), META).tensor.device == META


# -- Copies of inputs beside the computation: complete when they are used, and their memory is kept as long ------------


CPU = torch.device("cpu")


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


# -- Which accelerator a worker uses, for CUDA and for others ----------------------------------------------------------


CHOSEN: list[int] = []


@pytest.fixture(params=["cuda", "xpu"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this host have two accelerators of a type, of which none was used."""
    kind: str = request.param
    CHOSEN.clear()
    for name, value in (("is_available", True), ("current_accelerator", torch.device(kind)), ("device_count", 2)):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", CHOSEN.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    return kind


def test_a_worker_takes_the_accelerator_of_its_local_rank(accelerator: str) -> None:
    assert take_gpu(1) == ""
    assert CHOSEN == [1]
    assert current_accelerator() == torch.device(accelerator, 1)


def test_a_worker_without_an_accelerator_of_its_own_is_an_error(accelerator: str) -> None:
    assert "has no GPU of its own: 2 can be seen" in take_gpu(2)
    assert CHOSEN == []


def test_an_accelerator_that_was_used_already_is_kept(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(torch, accelerator), "is_initialized", lambda: True)
    assert take_gpu(0) == ""
    assert CHOSEN == []


def test_a_host_without_an_accelerator_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert (current_accelerator(), take_gpu(0)) == (None, "")


@pytest.mark.parametrize(("local_rank", "num_devices", "is_own"), [("1", 2, True), ("0", 2, False), ("0", 1, True)])
def test_a_worker_has_the_accelerator_of_its_local_rank_or_the_only_one_to_itself(
    accelerator: str, monkeypatch: pytest.MonkeyPatch, local_rank: str, num_devices: int, is_own: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    assert own_accelerator(local_rank) == (torch.device(accelerator, 1) if is_own else None)
    assert own_accelerator(None) is None


@pytest.mark.parametrize(
    ("backend", "is_bound"), [("cpu:shm,{}", True), ("{}", True), ("shm", False), ("cpu:gloo,cuda:other", False)]
)
def test_a_group_is_bound_to_the_accelerator_whose_backend_it_has(
    accelerator: str, backend: str, is_bound: bool
) -> None:
    # Only NCCL's groups were.
    own = {"cuda": "nccl", "xpu": "xccl"}[accelerator]
    found = own_device(backend.format(own), read_torch_variables({"LOCAL_RANK": "1"}))
    assert found == (torch.device(accelerator, 1) if is_bound else None)
