"""The messages of `ls.init_process_group` when workers disagree, and groups of workers that agree. Real processes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from tests.process import warm
from tests.process.ranks import SERVER

import lockstep as ls

NUM_WORKERS = 3
NUM_WAITING = 10
SHORT = timedelta(seconds=5)
LONG = timedelta(seconds=150)
START_SECONDS = 100
HANG_SECONDS = 100
AT_ONCE_SECONDS = 60
NOWHERE = "no-such-host.invalid"


class SetUp(NamedTuple):
    """The outcome of a worker's set-up."""

    message: str
    """The error that was raised; empty if the group was made."""
    seconds: float
    """How long it took."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def set_up(environment: dict[str, Any], options: dict[str, Any]) -> str:
    os.environ.update({name: str(value) for name, value in environment.items()})
    if isinstance(options.get("store"), int):
        place = ("127.0.0.1", options["store"])
        options["store"] = dist.TCPStore(*place, is_master=options["rank"] == 0, wait_for_workers=False)
    try:
        ls.init_process_group(options.pop("backend", "gloo"), **options)
    except Exception as error:  # noqa: BLE001 - its class is looked at by the test
        return f"{type(error).__name__}: {error}"
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return ""


def serve(pipe: Connection) -> None:
    # A connection of torch looks up the name of its address: 5 s where the name server is silent.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    while True:
        match pipe.recv():
            case "leave":
                ls.destroy_process_group()
            case (environment, options):
                start = time.monotonic()
                message = set_up(environment, options)
                pipe.send(SetUp(message, time.monotonic() - start))
            case call:
                pipe.send(call())


class SetUpWorkers:
    """Processes in which tests make and destroy groups: starting them for each test would take minutes."""

    def __init__(self, number: int = NUM_WORKERS) -> None:
        pipes = [SERVER.Pipe() for _ in range(number)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [SERVER.Process(target=serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            pipe.send(os.getpid)
        for place in range(number):
            self._receive(place, START_SECONDS)

    def start(self, place: int, environment: dict[str, Any] | None = None, **options: Any) -> None:
        self._pipes[place].send((environment or {}, {"timeout": LONG, **options}))

    def outcome(self, place: int) -> SetUp:
        outcome = self._receive(place)
        assert isinstance(outcome, SetUp)
        return outcome

    def leave(self) -> None:
        for pipe in self._pipes:
            pipe.send("leave")

    def call(self, function: Callable[[], Any]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(function)
        return [self._receive(place) for place in range(len(self._pipes))]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, place: int, seconds: float = HANG_SECONDS) -> Any:
        assert self._pipes[place].poll(seconds), f"worker {place} hangs"
        return self._pipes[place].recv()

    def set_up(self, port: int, *ranks: tuple[int, int], **options: Any) -> list[SetUp]:
        """Set up as many workers as there are pairs of rank and world size, by env://."""
        for place, (rank, world_size) in enumerate(ranks):
            self.start(place, environ(port, rank, world_size), **options)
        return [self.outcome(place) for place in range(len(ranks))]


def environ(port: int, rank: int, world_size: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": host, "MASTER_PORT": port}


@pytest.fixture(scope="module")
def pools() -> Iterator[list[SetUpWorkers]]:
    pools = [SetUpWorkers()]
    yield pools
    for workers in pools:
        workers.stop()


@pytest.fixture
def workers(pools: list[SetUpWorkers]) -> Iterator[SetUpWorkers]:
    workers = pools.pop()
    done = False
    try:
        yield workers
        workers.leave()
        done = all(isinstance(answer, int) for answer in workers.call(os.getpid))
    finally:  # after a failure its workers may be anywhere
        if not done:
            workers.stop()
        pools.append(workers if done else SetUpWorkers())


@pytest.fixture
def waiting() -> Iterator[SetUpWorkers]:
    workers = SetUpWorkers(NUM_WAITING)
    yield workers
    workers.stop()


RESTARTED = """
import os
import lockstep as ls
import torch
import torch.distributed as dist

ls.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(3)
dist.barrier()
with open(os.path.join(os.path.dirname(__file__), f"rank{dist.get_rank()}"), "w") as done:
    done.write(str(total.item()))
ls.destroy_process_group()
"""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Start torchrun, and let it run while the other tests do."""
    directory = tmp_path_factory.mktemp("restarted")
    (directory / "script.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = warm.Popen(
        [*command, str(directory / "script.py")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process, directory
    process.kill()
    process.communicate()


def assert_all_raise(outcomes: Sequence[SetUp], *parts: str) -> None:
    for message, _ in outcomes:
        assert message.startswith("GroupError: ")
        for part in parts:
            assert part in message


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([(0, 3, {}), (1, 3, {}), (1, 3, {})], ["Two workers have rank 1 of 3: process "]),
        # One of them cannot serve the store, since the other does.
        ([(0, 3, {}), (0, 3, {}), (1, 3, {})], ["Two workers have rank 0 of 3: process "]),
        ([(0, 2, {}), (1, 3, {}), (2, 3, {})], ["different world sizes: rank ", "rank 0 (process ", "WORLD_SIZE"]),
        (
            [(0, 3, {}), (1, 3, {"backend": "nccl"}), (2, 3, {})],
            ["rank 1 (process ", "'nccl'", "'gloo'", "same backend"],
        ),
        (
            [(0, 2, {"check": False}), (1, 2, {"check": True})],
            ["different backends", "'gloo with check=False'", "'gloo with check=True'"],
        ),
    ],
    ids=["rank 1 twice", "rank 0 twice", "world sizes", "backends", "checks"],
)
def test_workers_that_disagree_are_reported_at_once(
    workers: SetUpWorkers, asked: list[tuple[int, int, dict[str, Any]]], said: list[str]
) -> None:
    port = free_port()
    for place, (rank, world_size, options) in enumerate(asked):
        workers.start(place, environ(port, rank, world_size), **options)
    outcomes = [workers.outcome(place) for place in range(len(asked))]
    assert_all_raise(outcomes, *said)
    assert max(seconds for _, seconds in outcomes) < AT_ONCE_SECONDS


@pytest.mark.skipif(dist.is_nccl_available(), reason="needs a torch without NCCL")
def test_a_backend_that_no_rank_has_is_named_by_all(workers: SetUpWorkers) -> None:
    assert_all_raise(workers.set_up(free_port(), (0, 3), (1, 3), (2, 3), backend="nccl"), "has no backend 'nccl'")


def test_an_unknown_backend_is_named_with_those_that_exist(workers: SetUpWorkers) -> None:
    outcomes = workers.set_up(free_port(), (0, 3), (1, 3), (2, 3), backend="shn")
    assert_all_raise(outcomes, "has no backend 'shn'; it has: ", "gloo", "shm")
    assert not any(
        name in message for message, _ in outcomes for name in ("checked", "fake", "undefined", "cannot take part")
    )


def test_shm_for_tensors_of_a_gpu_is_refused(workers: SetUpWorkers) -> None:
    # It was accepted, and the group carried CPU tensors alone.
    outcomes = workers.set_up(free_port(), (0, 3), (1, 3), (2, 3), backend="cuda:shm")
    assert_all_raise(outcomes, "shm is for CPU tensors, but 'cuda:shm' uses it for others", "Give 'cpu:shm,cuda:nccl'")


def test_a_negative_rank_is_refused_with_the_range_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ls.GroupError, match="RANK is '-1' in the environment, expected a number from 0 to WORLD_SIZE"):
        ls.init_process_group("gloo")


def test_who_is_missing_is_named_when_time_is_up(waiting: SetUpWorkers, tmp_path: Path) -> None:
    # Six worlds at once, all of which wait. Of the first three each has one worker that waits for another, and
    # connects first.
    ports = [free_port() for _ in range(4)]
    waiting.start(0, environ(ports[0], 0, 2), timeout=SHORT)
    waiting.start(1, init_method=f"tcp://127.0.0.1:{ports[1]}", rank=0, world_size=2, timeout=SHORT)
    waiting.start(2, store=ports[2], rank=0, world_size=2, timeout=SHORT)
    for place, rank in ((3, 0), (4, 2)):
        waiting.start(place, init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=4, timeout=SHORT)
    waiting.start(5, environ(ports[3], 1, 2), timeout=SHORT)
    for place, rank in ((6, 0), (7, 1)):
        waiting.start(place, environ(ports[3], rank, 2, NOWHERE), timeout=SHORT)
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        taken = foreign.getsockname()[1]
        for place, rank in ((8, 0), (9, 1)):
            waiting.start(place, environ(taken, rank, 2), timeout=SHORT)
        outcomes = [waiting.outcome(place) for place in range(NUM_WAITING)]
    assert_all_raise(outcomes[:3], "Rank 1 did not connect: rank 0 waited ", "WORLD_SIZE is too large")
    assert_all_raise(outcomes[3:5], "Ranks 1, 3 did not connect: ranks 0, 2 waited ", "for a world of 4 workers")
    no_rendezvous = f"Rank 1 found no rendezvous at 127.0.0.1:{ports[3]} in"
    assert_all_raise(outcomes[5:6], no_rendezvous, "rank 0, which serves it")
    unknown = f"the name '{NOWHERE}' cannot be resolved"
    assert_all_raise(outcomes[6:8], f"at {NOWHERE}:{ports[3]}", unknown, "Set MASTER_ADDR")
    assert_all_raise(outcomes[8:9], f"Port {taken} is in use by another program on this host", "MASTER_PORT")
    assert_all_raise(outcomes[9:], f"127.0.0.1:{taken} in", "a program listens there, but it does not answer")
    assert max(seconds for _, seconds in outcomes) < AT_ONCE_SECONDS


def test_a_worker_too_many_is_reported_at_once_and_leaves_the_others_alone(workers: SetUpWorkers) -> None:
    port = free_port()
    assert [message for message, _ in workers.set_up(port, (0, 2), (1, 2))] == ["", ""]
    workers.start(2, environ(port, 1, 2))
    message, seconds = workers.outcome(2)
    assert f"The world at 127.0.0.1:{port} is complete without this worker, process " in message
    assert seconds < AT_ONCE_SECONDS
    workers.start(2, environ(port, 0, 2))
    message = workers.outcome(2).message
    assert f"Port {port} is in use by process " in message
    assert ", a worker of another training" in message


def test_groups_are_made_anew_without_waiting_for_each_other(workers: SetUpWorkers) -> None:
    # Nothing makes rank 0, which serves the store, leave its group before the others come for the next.
    port = free_port()
    for _ in range(4):
        assert [message for message, _ in workers.set_up(port, (0, 3), (1, 3), (2, 3))] == [""] * 3
        workers.leave()


def test_groups_are_made_anew_over_one_file(workers: SetUpWorkers, tmp_path: Path) -> None:
    # torch removes the file with its last user, though another may just have opened it. This one keeps it.
    user = dist.FileStore(f"{tmp_path}/rendezvous", NUM_WORKERS)
    for _ in range(3):
        for rank in range(3):
            workers.start(rank, init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=3)
        assert [workers.outcome(rank).message for rank in range(3)] == [""] * 3
        workers.leave()
    assert user.num_keys() > 0


def use_what_torch_has() -> tuple[float, int, float, list[int]]:
    half = dist.new_group([0, 1, 2], timeout=timedelta(seconds=7))
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=half)
    limits = [cast("Any", group).timeout.seconds for group in (half, dist.new_group([0, 1, 2]))]
    default: Any = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._get_default_store().set("mine", "yes")
    dist.monitored_barrier()
    own_limit = default._get_backend(torch.device("cpu")).options._timeout.seconds
    return total.item(), dist.get_world_size(), own_limit, limits


def test_what_torch_does_with_a_group_works(workers: SetUpWorkers) -> None:
    assert [message for message, _ in workers.set_up(free_port(), (0, 3), (1, 3), (2, 3))] == [""] * 3
    assert workers.call(use_what_torch_has) == [(3.0, 3, LONG.seconds, [7, LONG.seconds])] * 3


def test_no_directory_for_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ls.GroupError, match=f"no directory {tmp_path}/nowhere"):
        ls.init_process_group("gloo", f"file://{tmp_path}/nowhere/file", rank=0, world_size=1)


def test_workers_that_torchrun_starts_again_meet(restarted: tuple["subprocess.Popen[str]", Path]) -> None:
    # torchrun's agent keeps the store: over torch's own set-up, Gloo finds the addresses of the dead in it.
    process, directory = restarted
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert [(directory / f"rank{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
