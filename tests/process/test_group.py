"""`ls.init_process_group`: every way in, and what is said when it does not work."""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import SERVER, call_on_ranks

import lockstep as ls
from lockstep.errors import GroupError, PeerFailedError, PeerLostError

pytestmark = pytest.mark.usefixtures("warm_workers")

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_and_sum(rank: int, how: str, queue: Any) -> None:
    port = how.rpartition(":")[2]
    if how.startswith("env"):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        ls.init_process_group()
    elif how.startswith("store"):
        store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=rank == 0, timeout=timedelta(seconds=100))
        ls.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:
        ls.init_process_group(init_method=how, rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    queue.put((dist.get_backend(), total.item()))
    ls.destroy_process_group()
    ls.destroy_process_group()


@pytest.mark.parametrize("method", ["env", "tcp", "file", "store"])
def test_every_way_in_makes_one_group(method: str, tmp_path: Path) -> None:
    places = {
        "env": f"env:{free_port()}",
        "tcp": f"tcp://127.0.0.1:{free_port()}",
        "file": f"file://{tmp_path}/rendezvous",
        "store": f"store:{free_port()}",
    }
    queue = SERVER.Queue()
    processes = [SERVER.Process(target=join_and_sum, args=(rank, places[method], queue)) for rank in (0, 1)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=100) for _ in processes]
    for process in processes:
        process.join()
    assert [total for _, total in found] == [3.0, 3.0]
    if not torch.cuda.is_available():
        assert [backend for backend, _ in found] == ["gloo" if method == "store" else "shm"] * 2


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        ({}, {}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, {}, "MASTER_ADDR is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}, "ranks are 0 to 1"),
        ({}, {"init_method": "tcp://127.0.0.1:1"}, "give both"),
        ({}, {"init_method": "tcp://127.0.0.1:1", "rank": 5, "world_size": 2}, "Rank 5 is outside"),
        ({}, {"backend": "nopenope", "rank": 0, "world_size": 1}, "has no backend 'nopenope'; it has: .*gloo"),
        ({}, {"backend": "mpi"}, "has no backend 'mpi'"),
    ],
)
def test_a_group_that_cannot_be_made_is_explained(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any], said: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=said):
        ls.init_process_group(**options)
    assert not dist.is_initialized()


def test_a_port_in_use_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(GroupError, match=f"Port {port} is in use by another program"):
            ls.init_process_group("gloo", timeout=timedelta(seconds=1))


def test_a_store_and_a_method_together_are_refused() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        ls.init_process_group(store=dist.HashStore(), init_method="env://")


def test_tearing_down_without_a_group_does_nothing() -> None:
    ls.destroy_process_group()


@pytest.fixture
def single_group() -> Callable[[], None]:
    def make() -> None:
        ls.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    return make


def test_a_group_can_be_made_again_after_tearing_down(single_group: Callable[[], None]) -> None:
    for _ in range(2):
        single_group()
        assert dist.get_world_size() == 1
        with pytest.raises(GroupError, match="already"):
            single_group()
        ls.destroy_process_group()


def join_again(run: ls.Run) -> tuple[str, float]:
    ls.destroy_process_group()
    ls.init_process_group("gloo")
    total = torch.tensor([run.rank + 1.0])
    dist.all_reduce(total)
    return dist.get_backend(), total.item()


def test_a_launched_worker_may_make_another_group() -> None:
    # "Port ... is in use by a worker of another training": it is the store of the launcher.
    assert ls.launch(join_again, devices="cpu:2") == [("gloo", 3.0)] * 2


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_nothing_is_refused(seconds: int) -> None:
    # Zero meant the default, half an hour.
    with pytest.raises(ValueError, match="expected more than zero"):
        ls.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=seconds))


def prepare_once(run: ls.Run, folder: str) -> list[Any]:
    """Ranks 0 and 1 are on one host, 2 on another; all are back when both calls have ended, or one has failed."""
    socket.gethostname = lambda: "far" if run.rank == 2 else "near"
    path = Path(folder)
    seen: list[Any] = [ls.is_main()]

    def prepare() -> None:
        time.sleep(1.5)  # longer than the others' way here
        (path / f"{run.rank}").touch()

    ls.once_per_host(prepare)
    seen.append(sorted(each.name for each in path.iterdir()))
    ls.barrier()
    try:
        ls.once_per_host((path / "missing" / "file").read_text)
    except (OSError, PeerFailedError) as error:
        seen.append(type(error).__name__)
    return seen


def test_one_rank_of_each_host_prepares_and_all_learn_how_it_ended(tmp_path: Path) -> None:
    answers = call_on_ranks(3, prepare_once, str(tmp_path))
    assert [each[0] for each in answers] == [True, False, False]
    assert [each[1] for each in answers] == [["0", "2"]] * 3
    assert answers[0][2] == answers[2][2] == "FileNotFoundError"
    assert "missing" not in {each.name for each in tmp_path.iterdir()}


def end_in_the_call(rank: int, port: str, queue: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert ls.is_main() == (rank == 0)  # before there is a group
    try:
        ls.once_per_host(lambda: os.kill(os.getpid(), signal.SIGKILL))
    except PeerLostError as error:
        queue.put((error.rank, ls.is_main()))


def test_a_rank_that_ends_in_its_call_is_told_to_those_who_wait() -> None:
    queue, port = SERVER.Queue(), str(free_port())

    processes = [SERVER.Process(target=end_in_the_call, args=(rank, port, queue)) for rank in (0, 1)]
    for process in processes:
        process.start()
    assert queue.get(timeout=50) == (0, False)
    for process in processes:
        process.join()
