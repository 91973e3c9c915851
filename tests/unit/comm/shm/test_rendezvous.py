"""Meeting in one process: who does not come, and who should not."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.comm import hosts
from lockstep.comm.hosts import GroupHosts, GroupMembers
from lockstep.comm.lost_ranks import ProcessEnds, own_process
from lockstep.comm.shm import rendezvous
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.shm.memory import Memory, create_file
from lockstep.comm.shm.peers import Counter, Peers
from lockstep.comm.stored_values import Deadline
from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError
from lockstep.recording import EventKind, open_recorder, own_recorder
from lockstep.recording.reading import read_recording

LONG = timedelta(seconds=30)


def one_host(size: int) -> GroupHosts:
    return GroupHosts(identities=("a",) * size, host_names=("a",) * size)


def close_all(found: list[Any]) -> None:
    for each in found:
        memory, ends = each
        memory.close()
        ends.close()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_told(rank: int) -> None:
    # It was an IndexError from within.
    with pytest.raises(GroupError, match=f"Rank {rank} is outside a group of 2: ranks are 0 to 1"):
        rendezvous.connect_ranks(dist.HashStore(), rank, FileLayout(2), Deadline.after(LONG))


def test_who_waits_says_for_whom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_WARNING_SECONDS", 0.0)
    store = dist.HashStore()
    store.set("host/1", "[]")
    with (
        caplog.at_level(logging.WARNING, "lockstep"),
        pytest.raises(GroupError, match="Ranks 4, 7 of 4 did not connect"),
    ):
        rendezvous.connect_ranks(
            store, 0, FileLayout(4), Deadline.after(timedelta(seconds=0.6)), GroupMembers(global_ranks=[1, 3, 4, 7])
        )
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "Waiting for ranks 4, 7 to make a group of ranks 1, 3, 4, 7"
    ]


def test_who_waits_for_a_lost_rank_is_told_at_once() -> None:
    members = GroupMembers(global_ranks=[2, 5], find_lost=lambda: PeerLostError("Rank 5 is lost.", rank=5))
    with pytest.raises(PeerLostError, match="Rank 5 is lost") as caught:
        rendezvous.connect_ranks(dist.HashStore(), 0, FileLayout(2), Deadline.after(LONG), members)
    assert caught.value.rank == 5


def test_waiting_over_tcp_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    # It waited in slices once, and torch printed a warning for each that was over: in every correct script.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(GroupError, match="Rank 1 of 2 did not connect"):
        rendezvous.connect_ranks(store, 0, FileLayout(2), Deadline.after(timedelta(seconds=0.6)))
    assert capfd.readouterr().err == ""


def test_ranks_that_were_in_time_may_connect_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 waited a millisecond more for the ranks to have its file, and then named ranks that had come as missing.
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 20.0)
    store = dist.HashStore()
    over = Deadline.after(timedelta(0))

    def connect(rank: int) -> Any:
        return rendezvous.connect_ranks(store, rank, FileLayout(2), over, hosts=one_host(2))[0]

    with ThreadPoolExecutor() as pool:
        first = pool.submit(connect, 0)
        store.wait(["file"], timedelta(seconds=20))
        threading.Event().wait(0.1)  # a slow machine
        close_all([connect(1), first.result()])


class LostStore(dist.HashStore):
    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError(f"no {keys}")


def test_who_has_the_file_notices_that_the_group_is_given_up() -> None:
    # Waiting for the others in the file alone, it waited for its deadline when the launcher replaced the workers.
    with pytest.raises(GroupError, match="The store is gone"):
        rendezvous.connect_ranks(LostStore(), 0, FileLayout(2), Deadline.after(LONG), hosts=one_host(2))


def test_a_wait_for_any_rank_that_fails_is_over_in_the_recording(tmp_path: Path) -> None:
    # Its event stayed open, and the doctor said that the rank waits until its end.
    recorder = own_recorder()
    try:
        assert open_recorder(recorder, tmp_path, worker=0, rank=0, world_size=1, capacity=256)
        layout = FileLayout(1)
        memory = Memory(create_file(layout), layout, 0)
        peers = Peers(memory, 0, ProcessEnds([own_process()], 0), 0.01, [0])
        with pytest.raises(CollectiveTimeoutError):
            peers.wait_for_any([], Counter(peers, layout.messages(0)), b"recv", lambda: None)
    finally:
        recorder.close()
    (found,) = read_recording(tmp_path)
    assert found.last(EventKind.WAITING) is not None
    assert all(each.kind != EventKind.WAITING for each in found.under_way())
