"""What a new worker makes of the launcher's messages, without processes."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.comm import generations as module
from lockstep.comm.generations import Generations

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
