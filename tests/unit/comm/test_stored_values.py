"""Whatever a stranger writes into the store of a rendezvous, the workers say so in one message."""

import json
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lockstep.comm.bootstrap import handshake
from lockstep.comm.bootstrap.handshake import Announcement, run_handshake
from lockstep.comm.hosts import GroupMembers, find_hosts
from lockstep.comm.stored_values import Deadline, read_record, to_stored
from lockstep.errors import GroupError

ME = Announcement(rank=0, world_size=1, backend="shm", process="process 1 on host a", token="t")
GARBAGE = [
    *("", "bad", "null", "[]", "{}", '{"rank": 0}', "1e999", "[" * 100_000, b"\xff\x00"),
    *(to_stored(ME).replace('"shm"', "[1]"), to_stored(ME).replace(": 0", ": true"), to_stored(ME)[:-1] + ', "a": 1}'),
]
TIMEOUT = timedelta(seconds=20)


def test_what_a_worker_has_written_is_read() -> None:
    assert read_record("key", to_stored(ME).encode(), Announcement) == ME


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("key", ["lockstep/0/handshake/first", "lockstep/0/handshake/place/0", "lockstep/decided"])
def test_garbage_under_a_key_of_the_handshake_is_named(
    key: str, garbage: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A raw ValueError or TypeError ended the run, and named no key.
    store = HashStore()
    store.set(key, garbage)
    if garbage == "" and key != "lockstep/decided":
        pytest.skip("an empty value is that of a key that is not set")
    monkeypatch.setattr(handshake, "RESPONSE_SECONDS", 0.1)
    with pytest.raises(GroupError, match=f"under the key '{key.rpartition('handshake/')[2]}', which no worker"):
        run_handshake(store, ME, timeout=TIMEOUT)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_instead_of_a_host_or_a_decision_is_named(garbage: str | bytes) -> None:
    store = HashStore()
    store.set("host/1", garbage)
    with pytest.raises(GroupError, match="under the key 'host/1'"):
        find_hosts(store, 0, GroupMembers(global_ranks=range(2)), Deadline.after(TIMEOUT))
    store.set("lockstep/0/handshake/decision", garbage)
    with pytest.raises(GroupError, match="under the key 'decision'"):
        run_handshake(store, ME, timeout=TIMEOUT)


class ForgedStore(HashStore):
    """A store into which a stranger writes after each rank has."""

    forged = ("host/0", "")

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        super().set(*self.forged)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("forged", [["alone, of my choice", "there"], ["elsewhere", "there"], ["boot 1", "a\nb"]])
def test_a_forged_host_does_not_move_ranks_out_of_shared_memory(forged: list[str], rank: int) -> None:
    # A well-formed value was believed: the ranks took Gloo, and printed the stranger's text as the reason.
    store = ForgedStore()
    for peer in range(2):
        HashStore.set(store, f"host/{peer}", json.dumps(["boot 1", "here"]))
    store.forged = (f"host/{rank if forged[0].startswith('alone') else 1 - rank}", json.dumps(forged))
    with pytest.raises(GroupError, match=r"under the key 'host/[01]', which no worker"):
        find_hosts(store, rank, GroupMembers(global_ranks=range(2)), Deadline.after(TIMEOUT))
