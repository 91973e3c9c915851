"""The channel between launcher and workers, with threads in the workers' place."""

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from lockstep.channel.client import Channel, ChannelClosedError
from lockstep.channel.server import ChannelServer
from lockstep.channel.table import LineReader, Table, to_bytes, to_text
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.hosts import GroupMembers, find_hosts, host_identity
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError

Message = dict[str, Any]


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer()
    yield server
    with contextlib.suppress(OSError):
        server.close()


def connect(server: ChannelServer, worker: int, events: list[Message] | None = None) -> Channel:
    with server.worker_end(worker) as descriptor:
        return Channel(os.dup(descriptor), (lambda _: None) if events is None else events.append)


def store_of(server: ChannelServer, worker: int, seconds: float = 20.0) -> ChannelStore:
    return ChannelStore(connect(server, worker), timedelta(seconds=seconds))


def operations(store: Any) -> list[Any]:
    """Return what a store answers, which must not depend on its class."""
    store.set("a", "1")
    found: list[Any] = [store.get("a"), store.add("n", 2), store.add("n", 3), store.get("n")]
    found += [store.compare_set("a", "0", "2"), store.compare_set("a", "1", "2"), store.compare_set("b", "", "3")]
    found += [store.compare_set("c", "x", "y"), store.check(["c"]), store.check(["a", "b"]), store.check(["a", "z"])]
    store.append("log", "x")
    store.append("log", "y")
    store.wait(["log", "a"], timedelta(seconds=5))
    store.multi_set(["p", "q"], ["1", "2"])
    found += [store.get("log"), store.multi_get(["p", "q"]), store.delete_key("p"), store.delete_key("p")]
    store.set("p", bytes(range(256)))
    return [*found, store.get("p"), store.has_extended_api()]


@pytest.mark.parametrize("prefix", ["", "group"])
def test_it_answers_as_a_tcp_store(server: ChannelServer, prefix: str) -> None:
    tcp: dist.Store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own: dist.Store = store_of(server, 0)
    if prefix:
        tcp, own = PrefixStore(prefix, tcp), PrefixStore(prefix, own)
    assert operations(own) == operations(tcp)


def test_a_key_that_another_worker_sets_ends_a_wait(server: ChannelServer) -> None:
    first, second = store_of(server, 0), store_of(server, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.get, "address")
        second.set("address", "here")
        assert waiting.result(20) == b"here"


def test_several_values_are_one_request_and_wait_for_the_last(server: ChannelServer) -> None:
    first, second = store_of(server, 0), store_of(server, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(PrefixStore("group", first).multi_get, ["a", "b"])
        second.set("group/b", "2")
        second.set("group/a", "1")
        assert waiting.result(20) == [b"1", b"2"]


def test_ranks_that_are_all_there_need_few_requests_to_find_their_hosts(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each is a message to the launcher and back, while nobody trains: a lost worker once cost about twenty.
    requests: list[int] = []
    answer = Table.answer

    def count(self: Table, worker: int, request: Message) -> Any:
        requests.append(1)
        return answer(self, worker, request)

    monkeypatch.setattr(Table, "answer", count)
    stores = [store_of(server, rank) for rank in range(3)]
    deadline = Deadline.after(timedelta(seconds=20))
    members = GroupMembers(global_ranks=range(3))
    for rank in (1, 2):
        stores[rank].set(f"host/{rank}", json.dumps([host_identity(), socket.gethostname()]))
    requests.clear()
    assert find_hosts(stores[0], 0, members, deadline).is_one_host
    assert len(requests) <= 3


def test_a_wait_for_several_keys_ends_with_the_last(server: ChannelServer) -> None:
    first, second = store_of(server, 0), store_of(server, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.wait, ["a", "b"])
        second.set("a", "")
        assert not waiting.done()
        second.set("b", "")
        waiting.result(20)


def test_a_wait_that_is_too_long_names_the_key(server: ChannelServer) -> None:
    store = store_of(server, 0, seconds=0.05)
    with pytest.raises(dist.DistStoreError, match="'missing'"):
        store.get("missing")
    store.set_timeout(timedelta(seconds=20))
    store.set("missing", "there")  # the late answer of the first request is not that of the next one
    assert store.get("missing") == b"there"


def test_several_threads_use_one_channel(server: ChannelServer) -> None:
    store = store_of(server, 0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.add("sum", 1), range(200), timeout=20))
    assert store.get("sum") == b"200"


def test_a_store_that_is_given_up_ends_its_waits_and_no_others(server: ChannelServer) -> None:
    channel = connect(server, 0)
    given_up, other = ChannelStore(channel), ChannelStore(channel)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(given_up.get, "never")
        given_up.abandon()
        with pytest.raises(dist.DistNetworkError):
            waiting.result(20)
    with pytest.raises(dist.DistNetworkError, match="given up"):
        given_up.set("a", "1")
    assert other.add("n", 1) == 1


def test_the_end_of_the_launcher_ends_a_wait(server: ChannelServer) -> None:
    channel = connect(server, 0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(channel.request, channel, "get", key="never")
        server.close()
        with pytest.raises(ChannelClosedError):
            waiting.result(20)
    with pytest.raises(ChannelClosedError):
        channel.request(channel, "count")


def test_a_worker_that_does_not_read_delays_no_other(server: ChannelServer) -> None:
    with server.worker_end(0) as descriptor:
        stopped = os.dup(descriptor)  # nothing reads it
    for _ in range(100):
        server.send(0, {"event": "x" * 10_000})
    assert store_of(server, 1).add("n", 1) == 1
    os.close(stopped)


def test_the_launcher_sends_one_worker_what_concerns_it(server: ChannelServer) -> None:
    events: list[Message] = []
    channel, other = connect(server, 0, events), connect(server, 1)
    server.send(0, {"event": "generation", "number": 3})
    channel.request(channel, "count")  # is answered after the event
    assert events == [{"event": "generation", "number": 3}]
    assert other.request(other, "count") == 0


def test_a_report_reaches_the_launcher_with_the_worker_s_number(server: ChannelServer) -> None:
    connect(server, 4).report("ready", shards=12)
    assert server.reports.get(timeout=20) == (4, {"report": "ready", "shards": 12})


def test_settling_ends_while_a_worker_sends_without_an_end(server: ChannelServer) -> None:
    # It read until nothing was left, which it never was.
    flood, over = connect(server, 0), threading.Event()

    def report_on() -> None:
        with contextlib.suppress(ChannelClosedError):
            while not over.is_set():
                flood.report("x" * 1000)

    flooding = [threading.Thread(target=report_on) for _ in range(2)]
    for thread in flooding:
        thread.start()
    connect(server, 1).report("ready")
    settling = threading.Thread(target=server.settle, daemon=True)
    settling.start()
    settling.join(20)
    over.set()
    assert not settling.is_alive()
    for thread in flooding:
        thread.join(20)
    assert (1, {"report": "ready"}) in server.take_reports()


@pytest.mark.parametrize("uses", ["settle", "take_reports", "check"])
def test_after_an_error_of_the_serving_thread_nobody_waits(uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The launcher waited for a thread that had ended, and the workers for its answers.
    def fail(_table: Table, _worker: int, _request: Message) -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(Table, "answer", fail)
    server = ChannelServer()
    channel = connect(server, 0)
    with pytest.raises(ChannelClosedError):
        channel.request(None, "count")
    assert select.select([server.report_descriptor], [], [], 20)[0]  # wakes who waits for reports
    found: list[BaseException] = []

    def use() -> None:
        try:
            getattr(server, uses)()
        except GroupError as error:
            found.append(error)

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(20)
    (error,) = found
    assert "an error of its own: AssertionError: a defect. (LS602)" in str(error)
    with server.worker_end(1), pytest.raises(GroupError):
        server.check()
    server.close()


def test_a_worker_that_sends_nonsense_loses_its_channel_alone(server: ChannelServer) -> None:
    other = store_of(server, 0)
    nonsense = (
        b"[1]\n",
        b"\xff\n",
        b'{"op": "set"}\n',
        b'{"op": "explode", "key": "a"}\n',
        b'{"op": "get"}\n',
        b"[" * 9**5 + b"\n",
    )
    for worker, line in enumerate(nonsense, start=1):
        with server.worker_end(worker) as descriptor:
            broken = os.dup(descriptor)
        os.write(broken, line)
        with os.fdopen(broken, "rb") as answers:
            assert json.loads(answers.read()).keys() == {"refused"}  # and the end
    assert other.add("n", 1) == 1


def test_a_forked_child_cannot_use_the_channel(server: ChannelServer) -> None:
    store = store_of(server, 0)
    child = os.fork()
    if child == 0:
        try:
            store.set("from", "child")
        except dist.DistNetworkError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not store.check(["from"])


@pytest.mark.parametrize("value", [b"", bytes(range(256)), "plain", "\u4e2d\u6587".encode()])
def test_any_bytes_travel_as_text(value: bytes | str) -> None:
    assert to_bytes(to_text(value)) == (value.encode() if isinstance(value, str) else value)


def test_lines_may_arrive_in_any_pieces() -> None:
    reader = LineReader()
    pieces = [b'{"a"', b": 1}\n{", b'"b": 2}\n{"c": 3}\n', b""]
    assert [message for piece in pieces for message in reader.feed(piece)] == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_group_is_made_over_it(server: ChannelServer) -> None:
    """Gloo's C++ code calls the store from its own threads."""

    def make(rank: int) -> object:
        store = PrefixStore("gloo", store_of(server, rank))
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    with ThreadPoolExecutor() as pool:
        assert len(list(pool.map(make, range(2), timeout=30))) == 2


def test_time_is_counted_by_the_worker_that_waits(server: ChannelServer) -> None:
    store = store_of(server, 0)
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(milliseconds=20))
    assert time.monotonic() - started < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_an_error_of_the_reading_thread_requests_fail_and_do_not_wait(server: ChannelServer) -> None:
    def fail(_message: Message) -> None:
        raise RuntimeError("a defect")

    with server.worker_end(0) as descriptor:
        channel = Channel(os.dup(descriptor), fail)
    server.send(0, {"event": "news"})
    with pytest.raises(ChannelClosedError):
        channel.request(object(), "get", 20.0, key="never set")
    # Its error is printed when it ends: in this test, and not in a later one.
    for thread in threading.enumerate():
        if thread.name == "channel":
            thread.join(20)


def test_a_worker_whose_request_cannot_be_read_learns_that(server: ChannelServer) -> None:
    channel = connect(server, 0)
    with pytest.raises(ChannelClosedError, match=r"cannot read .*'dance', which is not an operation"):
        channel.request(None, "dance", key="a")
    with pytest.raises(ChannelClosedError, match=r"is closed\. The launcher has closed this worker's channel"):
        channel.request(None, "get", key="a")
