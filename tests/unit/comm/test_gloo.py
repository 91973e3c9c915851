"""Connecting Gloo in time."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from lockstep.channel.client import Channel
from lockstep.channel.server import ChannelServer
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.gloo import GlooSockets, connect_gloo, gloo_connected_in_time
from lockstep.comm.hosts import GroupMembers
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError, PeerLostError
from lockstep.torch_private.groups import gloo_announcements


def test_the_error_names_missing_ranks_of_a_subgroup_by_their_ranks_in_the_default_group() -> None:
    deadline = Deadline.after(timedelta(0))
    with (
        pytest.raises(GroupError, match=r"^Rank 6 of 2 did not connect"),
        gloo_connected_in_time(HashStore(), 0, GroupMembers(global_ranks=(4, 6)), deadline),
    ):
        pytest.fail("rank 6 did not connect")


def test_connecting_ends_when_the_launcher_announces_a_loss() -> None:
    # Ranks that are late connect twice. The first time nothing ended the wait for a rank that was lost meanwhile.
    server = ChannelServer()
    with server.worker_end(0) as descriptor:
        store = ChannelStore(Channel(os.dup(descriptor), lambda _event: None))
    store.set("gloo/is_late/1", "True")
    deadline = Deadline(end=time.monotonic() + 40, limit=timedelta(seconds=80))
    OPEN_GROUPS.end_calls(PeerLostError("Rank 1 is lost.", rank=1))
    try:
        with (
            pytest.raises(PeerLostError),
            gloo_connected_in_time(store, 0, GroupMembers(global_ranks=range(2)), deadline),
        ):
            pytest.fail("rank 1 did not connect")
    finally:
        OPEN_GROUPS.renew()
        server.close()


def test_connecting_ends_when_a_rank_is_found_to_be_lost() -> None:
    # Gloo waits for the connection of a rank that was killed until its timeout, half an hour.
    lost = PeerLostError("Rank 1 is lost.", rank=1)
    over = threading.Event()
    try:
        with pytest.raises(PeerLostError):
            connect_gloo(HashStore(), 2, over.wait, lambda: lost)
    finally:
        over.set()


def test_an_error_of_connecting_names_the_rank_that_is_found_to_be_lost_after_it() -> None:
    # It was "Connection reset by peer", or said that a firewall was in between.
    lost = iter([None, PeerLostError("Rank 1 is lost.", rank=1)])

    def fail() -> None:
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(PeerLostError, match="Rank 1") as caught:
        connect_gloo(HashStore(), 2, fail, lambda: next(lost))
    assert "Connection reset" in str(caught.value.__cause__)


# -- The connections of a Gloo group are found and shut down, and no others; ranks are threads of this process ---------


TIMEOUT = timedelta(seconds=50)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection that is none of Gloo's."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = stack.enter_context(socket.create_connection(listener.getsockname()))
        yield first, stack.enter_context(listener.accept()[0])


def make_group(size: int, name: str = "") -> list[tuple[Any, GlooSockets]]:
    store = PrefixStore(name, HashStore())

    def make(rank: int) -> tuple[Any, GlooSockets]:
        return connect_gloo(store, size, lambda: dist.ProcessGroupGloo(store, rank, size, TIMEOUT))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def test_calls_that_wait_for_a_rank_end_and_other_connections_stay(
    stranger: tuple[socket.socket, socket.socket],
) -> None:
    ranks, others = make_group(3), make_group(2, "others")
    waiting = [ranks[rank][0].allreduce([torch.ones(4)]) for rank in (0, 1)]  # rank 2 never calls
    # Three connections of two ends, for the ranks are in one process; the second end may be closed at once.
    assert 3 <= ranks[0][1].shut_down() <= 6
    for work in waiting:
        with pytest.raises(RuntimeError, match=r"(?i)connection|socket|peer"):
            work.wait()
    ranks[0][1].wait_until_closed()
    assert ranks[1][1].shut_down() == 0
    stranger[0].sendall(b"still there")
    assert stranger[1].recv(20) == b"still there"
    sums = [others[rank][0].allreduce([torch.ones(4)]) for rank in (0, 1)]
    assert all(work.wait() for work in sums)


def test_a_connection_with_a_message_that_nobody_receives_is_closed_too() -> None:
    # A call that fails because one rank is lost gives up its receives from the others. What these have sent is read by
    # nobody then, nor the end of the connection: survivors waited 20 s, and then the run ended.
    (first, sockets), (second, _) = make_group(2)
    first.recv([torch.empty(4)], 1, 0)  # given up at once
    assert second.send([torch.ones(4)], 0, 0).wait()
    assert sockets.shut_down()
    began = time.monotonic()
    sockets.wait_until_closed()
    assert time.monotonic() - began < 15, "as long as Gloo had been left to close it"


def test_a_forked_child_leaves_the_connections_of_its_parent_alone() -> None:
    ranks = make_group(2)
    child = os.fork()
    if child == 0:
        os._exit(ranks[0][1].shut_down())
    assert os.waitpid(child, 0)[1] == 0
    assert all(work.wait() for work in [ranks[rank][0].barrier() for rank in (0, 1)])


def test_a_child_of_a_killed_rank_does_not_keep_its_connections(tmp_path: Path) -> None:
    # One of eleven runs hung: a rank was killed just when it had forked a loading process, which did nothing.
    def connect(rank: int) -> tuple[Any, GlooSockets]:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        return connect_gloo(store, 2, lambda: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT))

    (forked, tell), (held, hold) = os.pipe(), os.pipe()
    killed = os.fork()
    if killed == 0:
        os.close(hold)
        group = connect(1)
        os.fork()
        os.write(tell, b".")
        os.read(held, 1)  # both processes wait
        os._exit(len(group))
    backend, _ = connect(0)
    assert os.read(forked, 1) + os.read(forked, 1) == b".."
    waiting = backend.allreduce([torch.ones(4)])
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"(?i)connection|socket|peer"):
        waiting.wait()
    os.waitpid(killed, 0)
    os.close(hold)  # the child ends


def test_a_forked_child_may_end_as_any_process_does() -> None:
    # The destructor of the group waited for a thread that the child does not have.
    ranks = make_group(2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            del ranks[:]
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_gloo_announces_has_the_address_where_it_listens() -> None:
    """A contract with torch: the connections of a group are found by it, those that are made late too."""
    ((backend, sockets),) = make_group(1)
    assert backend.size() == 1
    assert sockets.shut_down() == 0
    assert gloo_announcements(HashStore(), 1) == [], "a group that was never made"
