"""The end of another rank's process is noticed where nothing but a store is shared."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lockstep.comm import lost_ranks
from lockstep.comm.lost_ranks import (
    ProcessEnds,
    exchange_processes,
    may_come_from_loss,
    own_process,
    says_connection_ended,
)
from lockstep.comm.stored_values import to_stored


def test_a_killed_process_is_found_and_one_that_cannot_be_watched_is_not() -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    own = own_process()
    started = own.started  # of this process, not of the child: so the number means another process by now
    ends = ProcessEnds([own, replace(own, pid=child, started=started), replace(own, place="another host")], 0)
    assert ends.find_ended() is None
    store = HashStore()
    store.set("process/1", to_stored(_process_of(child)))
    watched = exchange_processes(store, 0, 2)
    assert watched.pids == [os.getpid(), child]
    assert watched.find_ended(seconds=0.001) is None
    os.kill(child, signal.SIGKILL)
    assert watched.find_ended(seconds=50) == 1
    assert watched.find_ended([1]) == 1
    assert watched.find_ended([]) is None  # none was asked about: all were looked at
    assert ends.find_ended() is None
    os.waitpid(child, 0)


def _process_of(pid: int) -> object:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(own_process(), pid=pid, started=int(fields[19]))


@pytest.mark.parametrize(
    ("text", "has_ended"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete", False),  # a rank may be late
        ("Application timeout caused pair closure", False),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
        ("writev: Broken pipe", True),
    ],
)
def test_a_call_that_takes_too_long_is_no_ended_connection(text: str, has_ended: bool) -> None:
    assert says_connection_ended(RuntimeError(text)) == has_ended
    assert may_come_from_loss(RuntimeError(text))


# -- What an exception that nobody catches leads to --------------------------------------------------------------------


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
