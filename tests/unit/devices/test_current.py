"""Which accelerator a worker uses, for CUDA and for others."""

import pytest
import torch

from lockstep.devices.current import current_accelerator, take_gpu

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
