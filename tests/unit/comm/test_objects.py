"""What may come from a stranger is data, or it is refused."""

import os
import pickle
import socket
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroup

from lockstep.channel.client import Channel
from lockstep.comm import objects
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.objects import RefusedObjectError, pack_message, pack_plain, unpack_message, unpack_plain
from lockstep.comm.segments import HeldPartials
from lockstep.errors import GroupError, PeerLostError

SECRET = b"known to the ranks alone"


class Runs:
    """Reading it calls a function, as any pickle may."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 2**70, -0.5, "text", b"bytes", 1j, {"a": [(1, {2}), frozenset({3})]}),
        *(OrderedDict(a=1), torch.float16, torch.Size([2]), torch.device("cpu"), Path("a")),
        *(np.float64(1.5), np.int32(3), HeldPartials(nodes=((0, 1),), num_shards=2, shape=(3,), dtype="float32")),
    ],
)
def test_data_comes_back_as_it_was(value: object) -> None:
    found = unpack_plain(pack_plain(value))
    assert found == value
    assert type(found) is type(value)


def test_tensors_arrays_and_errors_come_back_as_they_were() -> None:
    values = [torch.arange(6.0).view(2, 3).t(), torch.ones((), dtype=torch.bfloat16), torch.empty(0, 3)]
    for value in values:
        found = unpack_plain(pack_plain(value))
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
    assert np.array_equal(unpack_plain(pack_plain(np.eye(2))), np.eye(2))
    error = unpack_plain(pack_plain(PeerLostError("lost", 3)))
    assert (type(error), str(error), error.rank) == (PeerLostError, "lost", 3)


@pytest.mark.parametrize(
    "value",
    [
        *(Runs(os.system, "touch was-run"), Runs(subprocess.Popen, ["touch", "was-run"]), Runs(eval, "1"), Runs),
        *(Runs(getattr, 1, "real"), Runs(torch.load, "file"), Runs(pickle.loads, b""), lambda: None),
    ],
)
def test_what_is_more_than_data_is_refused_and_not_called(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedObjectError):
        pack_plain(value)
    if not callable(value) or isinstance(value, type):
        with pytest.raises(RefusedObjectError):
            unpack_plain(pickle.dumps([value]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("garbage", [b"", b"\x80", b"garbage", b"\x80\x05R.", pickle.dumps("long")[:-3]])
def test_garbage_is_an_error_of_one_kind(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_plain(garbage)


def test_attributes_of_shared_classes_are_not_set() -> None:
    name = HeldPartials.__qualname__.encode()
    module = HeldPartials.__module__.encode()
    attack = b"\x80\x02c" + module + b"\n" + name + b"\nN}X\x05\x00\x00\x00shapeK\x01s\x86b."
    with pytest.raises(RefusedObjectError):
        unpack_plain(attack)


def test_a_message_without_the_secret_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert unpack_message(pack_message([1, Path], SECRET, 2), SECRET, 2) == [1, Path]  # a class: more than data
    attack = Runs(os.system, "touch was-run")
    forged = pack_message(attack, b"guessed", 2)
    moved = pack_message(attack, SECRET, 1)
    plain = b"P" + pickle.dumps(attack)
    for message, secret in ((forged, SECRET), (moved, SECRET), (plain, SECRET), (forged, None), (plain, None)):
        with pytest.raises(GroupError):
            unpack_message(message, secret, 2)
    for length in range(40):
        with pytest.raises(GroupError):
            unpack_message(forged[:length], SECRET, 2)
    assert not list(tmp_path.iterdir())


# -- Gathering objects where the launcher holds the secret of the ranks ------------------------------------------------


def test_a_group_that_the_launcher_has_given_up_is_an_error_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not one of torch's: a trainer continues after an error of the group.
    own, launcher = socket.socketpair()
    with launcher:
        store = ChannelStore(Channel(own.detach(), lambda _message: None))
        store.abandon()
        monkeypatch.setattr(objects, "store_of", lambda _group: PrefixStore("generation/1", store))
        with pytest.raises(GroupError, match="given up"):
            objects.find_secret(ProcessGroup(HashStore(), 0, 1))
