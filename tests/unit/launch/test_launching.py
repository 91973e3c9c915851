"""What a launch needs before any worker runs, and what it changes in the process that launches."""

import ctypes
import errno
import resource
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.launch import rendezvous
from lockstep.launch.launcher import launch
from lockstep.launch.rendezvous import LOOPBACK, GuardedStore, open_rendezvous
from lockstep.launch.sessions import check_descriptors
from lockstep.launch.template import adopting_orphans


def test_too_many_workers_for_the_limit_are_refused_before_they_start() -> None:
    # Half of them had started when the launcher failed with "Too many open files".
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 40, hard))
    try:
        check_descriptors(2, 4)
        with pytest.raises(
            UsageError, match=r"16 workers need \d+ file descriptors .* Raise the limit with `ulimit -n \d+`"
        ):
            launch(print, devices="cpu:16")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_current_directory_that_was_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each worker ended in "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so".
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="The current directory was deleted"):
        launch(print, devices="cpu:2")


# -- The store of a launch that cannot be opened -----------------------------------------------------------------------


def test_a_store_that_cannot_be_opened_is_told_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # torch's error is a RuntimeError. It ended the thread, and workers waited for an answer without a message.
    def fail(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("The server socket has failed.")

    monkeypatch.setattr(dist, "TCPStore", fail)
    with open_rendezvous(2) as opened:
        for _ in range(2):
            with socket.create_connection((LOOPBACK, opened.port), timeout=20) as connection:
                assert connection.recv(1) == b""
    told = "torch could not open the store: The server socket has failed. (LS111)"
    told = f"error: The rendezvous of this launch cannot be served: {told}"
    assert capfd.readouterr().err.splitlines() == [told] * 2


def test_a_store_that_cannot_be_guarded_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a sandbox whose kernel has no such filter each connection failed, though the store had been opened without it.
    def fail(_store: GuardedStore) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(GuardedStore, "_attach_filter", fail)
    with open_rendezvous(2) as opened:
        store = dist.TCPStore(LOOPBACK, opened.port, is_master=False, timeout=timedelta(seconds=20))
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store


def test_a_host_with_ipv6_alone_reserves_a_port_and_serves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # `lockstep train` ended in a traceback in a namespace without 127.0.0.1, though its workers need no network.
    monkeypatch.setattr(rendezvous, "has_loopback_address", lambda: False)
    with open_rendezvous(2) as opened:
        assert opened.port > 0
        assert not opened.is_served


SET, GET = 36, 37


def is_adopting() -> bool:
    found = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(GET, ctypes.byref(found), 0, 0, 0) == 0
    return bool(found.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked on Linux alone")
@pytest.mark.parametrize("before", [False, True])
def test_a_process_adopts_orphans_afterwards_as_it_did_before(before: bool) -> None:
    # A program that supervises others, and adopts what they leave, did so no more after a launch.
    was_adopting = is_adopting()
    try:
        ctypes.CDLL(None).prctl(SET, int(before), 0, 0, 0)
        with adopting_orphans():
            assert is_adopting()
        assert is_adopting() is before
    finally:
        ctypes.CDLL(None).prctl(SET, int(was_adopting), 0, 0, 0)
