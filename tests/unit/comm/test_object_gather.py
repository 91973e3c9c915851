"""Gathering objects where the launcher holds the secret of the ranks."""

import socket

import pytest
from torch.distributed import HashStore, PrefixStore, ProcessGroup

from lockstep.channel.client import Channel
from lockstep.comm import objects
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.errors import GroupError


def test_a_group_that_the_launcher_has_given_up_is_an_error_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not one of torch's: a trainer continues after an error of the group.
    own, launcher = socket.socketpair()
    with launcher:
        store = ChannelStore(Channel(own.detach(), lambda _message: None))
        store.abandon()
        monkeypatch.setattr(objects, "store_of", lambda _group: PrefixStore("generation/1", store))
        with pytest.raises(GroupError, match="given up"):
            objects.find_secret(ProcessGroup(HashStore(), 0, 1))
