"""When a process ends: with its parent, and by whose signal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.launch import rendezvous
from lockstep.processes.ending import terminate_only_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux reports who has sent a signal")


def send_as_another(pid: int, number: int) -> None:
    subprocess.run(["kill", f"-{number}", str(pid)], check=True)


def wait_until_taken(pid: int, number: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if not int(status["ShdPnd"], 16) >> (number - 1) & 1:
            return
        assert time.monotonic() < deadline, "nobody has taken the signal"
        time.sleep(0.005)


def end_of_child(*sent: tuple[Callable[[int, int], None], int]) -> int:
    """Return how a child ends that is sent these signals, and whose input is closed then."""
    source, written = os.pipe()
    back, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(written)
        terminate_only_for(os.getppid())
        os.write(ready, b".")
        os.read(source, 1)
        os._exit(7)
    os.close(source)
    os.read(back, 1)
    for send, number in sent:
        wait_until_taken(child, signal.SIGTERM)  # two that wait to be taken are one
        send(child, number)
    if sent[-1][0] is os.kill:  # which ends it
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(written)
        return code
    os.close(written)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_to_a_whole_job_does_not_end_a_loading_process() -> None:
    assert end_of_child((send_as_another, signal.SIGTERM), (send_as_another, signal.SIGUSR1)) == 7


def test_its_parent_may_end_it_and_torch_sees_no_error_in_that() -> None:
    assert end_of_child((send_as_another, signal.SIGTERM), (os.kill, signal.SIGTERM)) == 0


def test_a_host_with_ipv6_alone_reserves_a_port_and_serves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # `lockstep train` ended in a traceback in a namespace without 127.0.0.1, though its workers need no network.
    monkeypatch.setattr(rendezvous, "has_loopback_address", lambda: False)
    with rendezvous.open_rendezvous(2) as opened:
        assert opened.port > 0
        assert not opened.is_served
