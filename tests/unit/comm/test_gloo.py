"""Connecting Gloo in time."""

import os
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lockstep.channel.client import Channel
from lockstep.channel.server import ChannelServer
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.gloo import connect_gloo, gloo_connected_in_time
from lockstep.comm.hosts import GroupMembers
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError, PeerLostError


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
