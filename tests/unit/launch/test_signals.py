"""Signals that can be waited for."""

import os
import signal

import pytest

from lockstep.launch.signals import SignalPipe


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
