"""The end of another rank's process is noticed where nothing but a store is shared."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from lockstep.comm import generations as module
from lockstep.comm import lost_ranks
from lockstep.comm.generations import Generations
from lockstep.comm.lost_ranks import (
    ProcessEnds,
    exchange_processes,
    may_come_from_loss,
    own_process,
    says_connection_ended,
)
from lockstep.comm.stored_values import to_stored


def test_a_process_that_has_ended_is_found_and_one_that_cannot_be_watched_is_not() -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    own = own_process()
    started = own.started  # of this process, not of the child: so the number means another process by now
    ends = ProcessEnds([own, replace(own, pid=child, started=started), replace(own, place="another host")], 0)
    assert ends.find_ended() == 1
    assert ends.find_ended([2]) is None
    store = HashStore()
    store.set("process/1", to_stored(_process_of(child)))
    watched = exchange_processes(store, 0, 2)
    assert watched.pids == [os.getpid(), child]
    assert watched.find_ended(seconds=0.001) is None
    os.kill(child, signal.SIGKILL)
    assert watched.find_ended(seconds=50) == 1
    assert watched.find_ended([1]) == 1
    assert watched.find_ended([]) is None  # none was asked about: all were looked at
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
    assert "a handler of atexit, or the end of the interpreter, holds it up" in capsys.readouterr().err


# -- What a new worker makes of the launcher's messages, without processes ---------------------------------------------


Joining = tuple[Generations, list[int]]


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    """A new worker, and the sizes of the groups that it makes."""
    made: list[int] = []
    monkeypatch.setattr(module, "destroy_process_group", lambda: None)
    monkeypatch.setattr(module, "make_next_group", lambda _backend, _store, _rank, size: made.append(size))
    monkeypatch.setattr(module, "current_world", lambda: None)
    launcher, worker = socket.socketpair()
    with launcher:
        new = Generations(worker.detach(), "gloo")
        new.is_joiner = True
        yield new, made


def generation(number: int, world_size: int) -> dict[str, Any]:
    return {"event": "generation", "number": number, "rank": world_size - 1, "world_size": world_size, "lost": []}


def test_a_new_worker_that_was_slow_to_see_that_it_was_set_aside_joins_the_next_generation(joining: Joining) -> None:
    """Else it waited for another generation, and the others waited for it in their step, for ever."""
    new, made = joining
    new.handle(generation(5, 4))
    assert new.wait_to_join()
    for message in ({"event": "set_aside"}, generation(6, 3)):  # before it has looked at generation 5
        new.handle(message)
    new.join_next()
    new.become_member()
    assert (new.number, made, new.is_joiner) == (6, [3], False)


def test_a_new_worker_that_is_set_aside_while_it_joins_waits_for_the_next_generation(joining: Joining) -> None:
    new, made = joining
    new.handle(generation(5, 4))
    assert new.wait_to_join()
    new.join_next()
    new.handle({"event": "set_aside"})
    new.become_member()
    assert new.is_joiner
    new.handle(generation(6, 3))
    assert new.wait_to_join()
    new.join_next()
    new.become_member()
    assert (new.number, made, new.is_joiner) == (6, [4, 3], False)
