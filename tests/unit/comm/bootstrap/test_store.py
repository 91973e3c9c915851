"""Opening the store of a rendezvous, and what is said when that does not work."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lockstep.comm.bootstrap import store
from lockstep.comm.bootstrap.identity import read_torch_variables
from lockstep.comm.bootstrap.store import StoreLocation, connect_to_other, find_store_location, open_store
from lockstep.errors import GroupError

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=30)


def location(url: str, **variables: str) -> StoreLocation:
    return find_store_location(url, None, read_torch_variables(variables))


def here(port: int, **variables: str) -> StoreLocation:
    return location(f"tcp://127.0.0.1:{port}", **variables)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Return a port that nobody listens on, and that no other program is given while the test runs."""
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a store can use it
        holding.bind(("127.0.0.1", 0))
        yield int(holding.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "variables", "address", "is_hosted"),
    [
        ("env://", {"MASTER_ADDR": "there", "MASTER_PORT": "29500"}, "there:29500", True),
        ("env://?use_libuv=0", {"MASTER_ADDR": "there", "MASTER_PORT": "29500"}, "there:29500", True),
        ("tcp://there:29500", {}, "there:29500", True),
        ("tcp://[::1]:29500", {}, "::1:29500", True),
        ("tcp://there:29500", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "there:29500", False),
        ("tcp://there:29500", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "there:29500", True),
        ("file:///shared/rendezvous", {}, "/shared/rendezvous", False),
    ],
)
def test_the_place_to_meet_is_found(url: str, variables: dict[str, str], address: str, is_hosted: bool) -> None:
    found = location(url, **variables)
    assert (found.address, found.is_hosted) == (address, is_hosted)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "tcp://:29500", "tcp://"])
def test_a_method_without_host_or_port_is_refused(url: str) -> None:
    # Rank 0 once served a port of the kernel's choice, and the others looked for it at port 0 until their time was up.
    with pytest.raises(ValueError, match=r"expected a host and a port, as in 'tcp://127.0.0.1:29500'"):
        location(url)


def test_a_store_that_the_caller_has_is_used() -> None:
    given = dist.HashStore()
    place = open_store(find_store_location("env://", given, read_torch_variables({})), 1, 2, SHORT)
    assert place is not None
    assert place.store is given
    assert (place.rank, place.world_size) == (1, 2)


def test_rank_0_does_not_wait_for_the_others_to_come(closed_port: int) -> None:
    first = open_store(here(closed_port), 0, 2, LONG)
    second = open_store(here(closed_port), 1, 2, LONG)
    assert first is not None
    assert second is not None
    first.store.set("said", "yes")
    assert second.store.get("said") == b"yes"


def test_a_worker_that_comes_first_waits_for_rank_0(closed_port: int) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(open_store, here(closed_port), 1, 2, LONG)
        first = open_store(here(closed_port), 0, 2, LONG)
        second = waiting.result()
    assert first is not None
    assert second is not None
    assert second.rank == 1


def test_a_program_that_listens_but_does_not_answer_is_no_store(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.1)
    port = listener.getsockname()[1]
    start, threads = time.monotonic(), threading.active_count()
    with pytest.raises(GroupError, match=f"127.0.0.1:{port} in .* s: a program listens there"):
        open_store(here(port), 1, 2, LONG)
    assert time.monotonic() - start < LONG.total_seconds() / 2
    assert connect_to_other(here(port), SHORT) is None
    # A thread that still waits in torch's client prints C++ frames later, and aborts the process at its end.
    assert threading.active_count() == threads


def test_a_port_that_is_taken_is_no_place_for_rank_0(listener: socket.socket) -> None:
    assert open_store(here(listener.getsockname()[1]), 0, 2, SHORT) is None


def test_a_port_that_is_held_but_not_listened_on_is_told_from_a_store() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert connect_to_other(here(held.getsockname()[1]), SHORT) is None


def test_the_store_of_another_can_be_looked_at() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served.set("said", "yes")
    other = connect_to_other(here(served.port), LONG)
    assert other is not None
    assert other.get("said") == b"yes"


def test_who_is_missing_depends_on_who_serves(closed_port: int) -> None:
    with pytest.raises(GroupError, match="rank 0, which serves it, did not start in time"):
        open_store(here(closed_port), 1, 2, SHORT)
    with pytest.raises(GroupError, match="Look at the log of torchrun"):
        open_store(here(closed_port, TORCHELASTIC_USE_AGENT_STORE="True"), 0, 2, SHORT)


def test_what_to_set_depends_on_the_method(closed_port: int) -> None:
    with pytest.raises(GroupError, match="the host in init_method or the port in init_method differs"):
        open_store(here(closed_port), 1, 2, SHORT)
    with pytest.raises(GroupError, match="MASTER_ADDR or MASTER_PORT differs"):
        open_store(location("env://", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port)), 1, 2, SHORT)


def test_a_file_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=f"there is no directory {tmp_path}/nowhere"):
        open_store(location(f"file://{tmp_path}/nowhere/file"), 0, 1, SHORT)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match="cannot be opened: Is a directory"):
        open_store(location(f"file://{tmp_path}"), 0, 1, SHORT)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_of_one_host_listens_on_loopback_alone(host: str, closed_port: int) -> None:
    # torch's store listens on every interface, and takes whoever connects.
    at = location("env://", MASTER_ADDR=host, MASTER_PORT=str(closed_port))
    opened = open_store(at, 0, 1, LONG)
    assert opened is not None
    again = open_store(at, 0, 1, LONG)  # the next group of the process, while a part of the first one is left
    assert again is not None
    again.store.set("key", "value")
    assert opened.store.get("key") == b"value"
    found = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in found if each.port == closed_port] == ["127.0.0.1"]
