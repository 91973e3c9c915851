"""Signals that can be waited for, and SIGTERM as a request to leave."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.launch.signals import SignalPipe
from lockstep.launch.worker import LeaveRequest, leave_on_sigterm
from lockstep.processes.stop_signals import StopRequest, stop_signals_handled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_asks_to_end_is_received_and_interrupts_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with SignalPipe() as signals:
        os.kill(os.getpid(), signal.SIGCHLD)
        assert signals.wait(0) is None
        os.kill(os.getpid(), number)
        assert signals.wait(10) is number
        assert signals.wait(0) is None
    assert signal.getsignal(number) is before


def test_what_was_ignored_stays_so() -> None:
    # nohup ignores SIGHUP: a launch under it must not end with its terminal.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.wait(0) is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_c_code_handles_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python says None of such a handler, and takes no None: a launch under a profiler ended with a TypeError.
    def set_handler(number: int, handler: Any) -> Any:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        changed.append(number)

    changed: list[int] = []
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    monkeypatch.setattr(signal, "signal", set_handler)
    with SignalPipe():
        pass
    assert not changed


class Launcher:
    """What a worker's `Generations` would tell its launcher."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.on_stay: Callable[[], None] = lambda: None

    def report(self, what: str) -> None:
        self.reports.append(what)

    def wait_for_report(self) -> list[str]:
        deadline = time.monotonic() + 20
        while not self.reports and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.reports


@pytest.fixture
def sigterm_kept() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = signal.set_wakeup_fd(-1)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(descriptor)


def use_an_event_loop() -> None:
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.close()


def take_the_descriptor() -> None:
    signal.set_wakeup_fd(-1)


def save_and_restore() -> None:
    signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_IGN))


def call_the_former_handler() -> None:
    before: Any = signal.getsignal(signal.SIGTERM)

    def call(number: int, frame: object) -> None:
        before(number, frame)

    signal.signal(signal.SIGTERM, call)


@pytest.mark.usefixtures("sigterm_kept")
@pytest.mark.parametrize(
    "users_code", [use_an_event_loop, take_the_descriptor, save_and_restore, call_the_former_handler]
)
def test_sigterm_is_a_request_to_leave_whatever_has_used_signals_meanwhile(users_code: Callable[[], None]) -> None:
    # asyncio takes the descriptor of the thread that waits for SIGTERM; the handler did nothing, so nothing happened.
    launcher: Any = Launcher()
    leave_on_sigterm(LeaveRequest(launcher))
    users_code()
    signal.raise_signal(signal.SIGTERM)
    assert launcher.wait_for_report() == ["leave"]


@pytest.mark.usefixtures("sigterm_kept")
@pytest.mark.parametrize("is_train", [False, True])
def test_sigterm_to_a_forked_child_ends_the_child_alone(is_train: bool) -> None:
    # It wrote into the descriptor of its parent, which left the others; the child went on.
    launcher: Any = Launcher()
    stop = StopRequest()
    if is_train:
        with stop_signals_handled(stop):
            child = fork_a_sleeper()
    else:
        leave_on_sigterm(LeaveRequest(launcher))
        child = fork_a_sleeper()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert launcher.reports == []
    assert not stop.is_made


def fork_a_sleeper() -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b".")  # past all that is called in a child
        time.sleep(20)
        os._exit(7)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


REFUSED = """
import ctypes, os, signal, threading
from types import SimpleNamespace
from lockstep.launch.worker import LeaveRequest, leave_on_sigterm
launcher = SimpleNamespace(report=print)
leave_on_sigterm(LeaveRequest(launcher))
signal.set_wakeup_fd(-1)
launcher.on_stay()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
ctypes.CDLL(None).sleep(20)
os._exit(7)
"""


def test_after_a_refusal_sigterm_ends_also_a_worker_that_calls_no_handler() -> None:
    # It is in native code, and its descriptor was taken away.
    ended = subprocess.run([sys.executable, "-c", REFUSED], check=False, timeout=60)
    assert ended.returncode == -signal.SIGTERM
