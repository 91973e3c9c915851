"""What an exception that nobody catches leads to."""

import threading

import pytest

from lockstep.comm import lost_ranks


def test_it_is_said_what_holds_the_end_of_a_failed_process_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Under `lockstep run` the launcher waited for it, and nobody knew why.
    monkeypatch.setattr(lost_ranks, "_END_SECONDS", 0.0)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="watches")
    thread.start()
    try:
        lost_ranks._tell_if_running()
    finally:
        over.set()
        thread.join()
    assert "thread 'watches', which is no daemon, holds it up. (LS605)" in capsys.readouterr().err
    lost_ranks._tell_if_running()
    assert "a handler of atexit holds it up" in capsys.readouterr().err
