"""Signals that ask to stop, as a process takes them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.processes import stop_signals
from lockstep.processes.ending import terminate_only_for
from lockstep.processes.stop_signals import STOP_SIGNALS, StopRequest, handle_stop_signals, stop_signals_handled


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.processes.stop_signals.SAME_SECONDS", 1e6)  # however slow the machine is
    request, heard = StopRequest(), []
    request.add_listener(lambda: heard.append("before"))
    before = signal.getsignal(number)
    with stop_signals_handled(request):
        os.kill(os.getpid(), number)
        assert request.is_made
        request.add_listener(lambda: heard.append("after"))
        os.kill(os.getpid(), number)  # at once: the same request
    assert heard == ["before", "after"]
    assert signal.getsignal(number) is before


def end_of_child(live: Callable[[], bool]) -> int:
    """Return how a child ends, 0 if `live` is true; it has one thread, so a signal goes nowhere else."""
    child = os.fork()
    if child == 0:
        os._exit(0 if live() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_that_came_while_it_was_blocked_is_not_lost() -> None:
    def live() -> bool:
        request = StopRequest()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)
        handle_stop_signals(request)
        return request.is_made

    assert end_of_child(live) == 0


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    request = StopRequest()
    with stop_signals_handled(request):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert not request.is_made


@pytest.mark.parametrize(
    ("sent", "is_ended"),
    [
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.9)], False),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 1.1)], True),
        ([(signal.SIGUSR1, 0.0), (signal.SIGTERM, 50.0)], False),  # Slurm's, two minutes ahead and then at the end
        ([(signal.SIGTERM, 0.0), (signal.SIGUSR1, 50.0)], False),
        ([(signal.SIGUSR1, 0.0), (signal.SIGTERM, 5.0), (signal.SIGTERM, 7.0)], True),
    ],
)
def test_the_second_sigterm_ends_the_process(
    sent: list[tuple[signal.Signals, float]], is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live() -> bool:
        now = [0.0]
        monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
        handle_stop_signals(StopRequest())
        for number, now[0] in sent:
            os.kill(os.getpid(), number)
        return True

    assert end_of_child(live) == (-signal.SIGTERM if is_ended else 0)


# -- When a process ends: with its parent, and by whose signal ---------------------------------------------------------


ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux reports who has sent a signal")


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


def end_of_loading_child(*sent: tuple[Callable[[int, int], None], int]) -> int:
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


@ON_LINUX
def test_a_signal_to_a_whole_job_does_not_end_a_loading_process() -> None:
    assert end_of_loading_child((send_as_another, signal.SIGTERM), (send_as_another, signal.SIGUSR1)) == 7


@ON_LINUX
def test_its_parent_may_end_it_and_torch_sees_no_error_in_that() -> None:
    assert end_of_loading_child((send_as_another, signal.SIGTERM), (os.kill, signal.SIGTERM)) == 0
