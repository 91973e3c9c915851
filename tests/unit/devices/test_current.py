"""Which accelerator a worker uses, for CUDA and for others."""

import pytest
import torch

from lockstep.comm.bootstrap.identity import read_torch_variables
from lockstep.comm.bootstrap.process_group import own_device
from lockstep.devices.transfer import current_accelerator, own_accelerator, take_gpu

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
