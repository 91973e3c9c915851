"""How ranks of a group over shared memory may end, and what the others are told; also while the group is being made."""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process import warm
from tests.process.ranks import PATIENCE, Rank, Ranks, names_in

from lockstep.comm.shm import rendezvous
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError, PeerLostError

# -- At the end of a script --------------------------------------------------------------------------------------------

SCRIPT = """
import json, multiprocessing, os, signal, sys
import torch, torch.distributed as dist
import lockstep
from lockstep.errors import PeerLostError

folder, *ways = sys.argv[1:]

def join(rank, way):
    signal.alarm(40)  # no rank outlives the test
    store = dist.FileStore(f"{folder}/{way}", 2)
    dist.init_process_group("shm", store=store, rank=rank, world_size=2)
    dist.barrier()

def survive(way):
    join(0, way)
    try:
        dist.all_reduce(torch.ones(3))
    except PeerLostError as error:
        print(json.dumps([way, error.rank, str(error)]), flush=True)
    os._exit(0)

for way in ways:  # ranks are forked before any group is made
    if os.fork() == 0:
        survive(way)
    if os.fork() == 0:
        break
else:
    for _ in range(2 * len(ways)):
        os.wait()
    sys.exit()

# What follows is the script of rank 1.
if way.startswith("multiprocessing"):
    def child():
        join(1, way)
        if "raises" in way:
            raise ValueError("in a child")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    os._exit(0)
join(1, way)
if way == "exception":
    raise ValueError("no such luck")
if way == "interrupt":
    raise KeyboardInterrupt
if way == "sys.exit":
    sys.exit(3)
if way == "os._exit":
    os._exit(3)
if way == "destroy":
    dist.destroy_process_group()
if way.startswith("finally"):
    try:
        if "exit" in way:
            sys.exit(3)
        raise ValueError("no such luck")
    finally:
        dist.destroy_process_group()
if way == "async":
    dist.all_reduce(torch.ones(9), async_op=True)
    sys.exit(3)
"""
LEFT = "Rank 1 has left the group (it destroyed it, or its script ended), but rank 0 still needs it."
WAYS = {
    "end": LEFT,
    "destroy": LEFT,
    "sys.exit": LEFT,
    "exception": "Rank 1 failed: ValueError: no such luck",
    "finally": "Rank 1 has left the group, which rank 0 still needs, while it handled ValueError: no such luck",
    "finally, exit": "Rank 1 has left the group, which rank 0 still needs, while it handled SystemExit: 3",
    "interrupt": "Rank 1 failed: KeyboardInterrupt",
    "os._exit": "lost: its process exited without reporting an error. It was killed or crashed, or ended by os._exit",
    "multiprocessing": "and did not destroy the group, as forked children of multiprocessing do.",
    "multiprocessing raises": "and did not destroy the group, as forked children of multiprocessing do.",
}


def test_a_rank_that_ends_is_lost_with_the_reason(tmp_path: Path) -> None:
    ended = warm.run([sys.executable, "-c", SCRIPT, str(tmp_path), *WAYS])
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sorted(way for way, _, _ in told) == sorted(WAYS), ended.stderr
    for way, rank, message in told:
        assert rank == 1, way
        assert WAYS[way] in message


# -- In a subgroup -----------------------------------------------------------------------------------------------------


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except GroupError as error:
        return str(error)
    return "no error"


def lose_a_rank_of_a_subgroup(rank: Rank) -> list[str]:
    """Ranks 1 and 2 have a group of their own, in which they differ; then 2 is killed, and the others make groups."""
    rank.join()
    group: Any = dist.new_group([1, 2])
    found = []
    if rank.number > 0:
        tensor = torch.ones(rank.number)
        found.append(message_of(lambda: dist.all_reduce(tensor, group=group)))
        found.append(message_of(lambda: dist.broadcast(tensor, 2, group=group)))
        move = (lambda: dist.send(tensor, 2, group)) if rank.number == 1 else (lambda: dist.recv(tensor, 1, group))
        found.append(message_of(move))
    dist.barrier()
    rank.say()
    if rank.number == 2:
        threading.Event().wait()
    started = time.monotonic()
    if rank.number == 1:
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        assert caught.value.rank == 2
        found.append(str(caught.value))
    others = [rank.number, 2]
    with pytest.raises(PeerLostError) as caught:
        dist.new_group(others, use_local_synchronization=True)
    assert caught.value.rank == 2
    found.append(str(caught.value))
    assert time.monotonic() - started < PATIENCE  # and not the group's timeout, which is longer
    return found


def test_the_ranks_of_a_subgroup_are_called_by_what_the_user_knows(tmp_path: Path) -> None:
    # They were called by their numbers in the subgroup; and new_group waited half an hour for a rank that was dead.
    with Ranks(tmp_path, 3, lose_a_rank_of_a_subgroup) as ranks:
        for number in range(3):
            ranks.hear(number)
        ranks.send_signal(2, signal.SIGKILL)
        (late,), (different, roots, message, lost, late_too) = ranks.result(0), ranks.result(1)
    assert different.startswith(f"The ranks of the group made at {__file__}:")
    assert "rank 1 calls all_reduce(sum, float32 [1]) at " in different
    assert "; rank 2 calls all_reduce(sum, float32 [2]) at " in different
    assert "rank 1 calls broadcast(from rank 2, float32 [1]) at " in roots
    assert "; rank 2 calls broadcast(from rank 2, " in roots
    assert "Rank 1 sends 1 elements of float32 but rank 2 receives 2 elements of float32" in message
    for text in (late, lost, late_too):
        assert text.startswith("Rank 2 (process ")


# -- While the group is being made -------------------------------------------------------------------------------------


def meet(rank: Rank, stops: Mapping[int, str], limit: float) -> tuple[GroupError, int]:
    """Make a group, of which some ranks stop when they come to a function; say how it failed, and what stays open."""
    if rank.number in stops:
        stop_at(rank, stops[rank.number])
    store = rank.store()
    num_open = len(names_in("/proc/self/fd"))
    with pytest.raises(GroupError) as caught:
        rendezvous.connect_ranks(store, rank.number, FileLayout(rank.size), Deadline.after(timedelta(seconds=limit)))
    return caught.value, len(names_in("/proc/self/fd")) - num_open


def stop_at(rank: Rank, function: str) -> None:
    """Let a rank call a function of the rendezvous only when it is told to."""
    function_itself = getattr(rendezvous, function)

    def stop(*arguments: Any) -> Any:
        rank.say()
        rank.hear()
        return function_itself(*arguments)

    setattr(rendezvous, function, stop)


def test_if_rank_0_is_killed_before_all_have_its_file_all_raise(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, meet, {0: "_wait_for_all", 2: "_open_file"}, 3 * PATIENCE) as ranks:
        ranks.hear(0)
        ranks.hear(2)
        ranks.send_signal(0, signal.SIGKILL)
        for number in (1, 2):  # long before the limit
            if number == 2:
                ranks.say(2)
            error, num_left_open = ranks.result(number)
            assert isinstance(error, PeerLostError)
            assert error.rank == 0
            assert "while the group was being made" in str(error)
            assert num_left_open == 0


def call_after_meeting_a_victim(rank: Rank, stops: Mapping[int, str]) -> PeerLostError:
    if rank.number in stops:
        stop_at(rank, stops[rank.number])
    rank.join()
    with pytest.raises(PeerLostError) as caught:
        dist.barrier()
    return caught.value


@pytest.mark.parametrize("stops", [{1: "_wait_for_all", 2: "_open_file"}, {1: "closing"}, {0: "read_record"}])
def test_who_is_killed_after_it_has_the_file_is_lost_in_the_first_call(stops: dict[int, str], tmp_path: Path) -> None:
    victim = min(stops)
    with Ranks(tmp_path, 3, call_after_meeting_a_victim, stops) as ranks:
        for number in stops:
            ranks.hear(number)
        ranks.send_signal(victim, signal.SIGKILL)
        for number in set(stops) - {victim}:
            ranks.say(number)
        assert [ranks.result(number).rank for number in {0, 1, 2} - {victim}] == [victim, victim]


def test_a_rank_that_never_comes_to_make_the_group_is_named_to_all(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, meet, {1: "_open_file"}, 3.0) as ranks:
        ranks.hear(1)
        for number in (0, 2):
            error, num_left_open = ranks.result(number)
            assert "Rank 1 of 3 did not connect to make the group within 3 s." in str(error)
            assert num_left_open == 0


def hold_the_store(rank: Rank) -> GroupError:
    """Make a group by a store that rank 0 holds; rank 0 does no more than that."""
    port = rank.hear() if rank.number else 0
    store = dist.TCPStore("127.0.0.1", port, is_master=rank.number == 0, wait_for_workers=False)
    rank.say(store.port)
    if rank.number == 0:
        rank.hear()
    with pytest.raises(GroupError) as caught:
        rendezvous.connect_ranks(store, rank.number, FileLayout(rank.size), Deadline.after(timedelta(seconds=PATIENCE)))
    return caught.value


def test_a_store_that_is_lost_while_the_group_is_made_is_an_error(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, hold_the_store) as ranks:
        ranks.say(1, ranks.hear(0))
        ranks.hear(1)
        ranks.send_signal(0, signal.SIGKILL)
        assert "The store is gone" in str(ranks.result(1))
