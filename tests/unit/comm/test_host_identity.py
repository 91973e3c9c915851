"""Who may share memory with whom."""

import os
import sys
from typing import Any

import pytest

from lockstep.comm.hosts import host_identity


def test_processes_of_one_host_have_one_identity() -> None:
    mine = host_identity()
    assert mine == host_identity()
    assert mine.startswith("boot ")
    assert f"uid {os.geteuid()}" in mine
    for space in ("pid:[", "net:[", "user:["):
        assert space in mine


def test_another_user_has_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_identity()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert host_identity() != mine


def test_without_linux_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_identity().startswith("alone, shared memory without names needs Linux, not darwin")


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_a_kernel_that_lacks_a_call_is_alone(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    assert host_identity().startswith("alone, this kernel")
    assert "Operation not permitted" in host_identity()
