"""Signals that ask to stop, as a process takes them."""

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from lockstep.processes import stop_signals
from lockstep.processes.stop_signals import STOP_SIGNALS, StopRequest, handle_stop_signals, stop_signals_handled


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.processes.stop_signals._SAME_SECONDS", 1e6)  # however slow the machine is
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
