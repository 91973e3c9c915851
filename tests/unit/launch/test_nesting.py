"""When the launcher of scripts takes workers for nested: only when all signs are there, several times in a row."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.launch.nesting import LaunchActivity, NestingWatch, describe_nesting, look_at

WAITING = LaunchActivity(is_every_worker_waiting=True, processes=frozenset({1, 2}), cpu_seconds=1.0, num_refused=5)


def feed(*changes: dict[str, object]) -> list[bool]:
    """Return what the watch finds in a series of looks, in each of which one more connection was refused."""
    watch = NestingWatch()
    snapshots = [
        dataclasses.replace(WAITING, **{"num_refused": 5 + look, **change}) for look, change in enumerate(changes)
    ]
    return [watch.is_nested(activity, 2.0) for activity in snapshots]


def test_four_looks_at_waiting_workers_are_enough() -> None:
    assert feed({}, {}, {}, {}) == [False, False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"is_every_worker_waiting": False},
        {"processes": frozenset({1, 2, 3})},
        {"cpu_seconds": 2.0},
        {"num_refused": 5},
    ],
    ids=["one has connections or computes", "one has started another process", "they compute", "nothing is refused"],
)
def test_a_missing_sign_starts_the_count_anew(change: dict[str, object]) -> None:
    assert not any(feed({}, {}, {}, change, {}, {}))


SPAWN = """
import multiprocessing, socket, sys, time
def wait(how):
    sockets = [socket.create_server(("127.0.0.1", 0))] if how == "listens" else []
    print("ready", flush=True)
    while how == "computes":
        pass
    time.sleep(60)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=wait, args=(sys.argv[2],), daemon=True)
    if sys.argv[2] == "none":
        print("ready", flush=True)
        time.sleep(60)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("method", "how", "expected"),
    [
        ("spawn", "sleeps", True),
        ("fork", "sleeps", True),
        ("spawn", "listens", False),
        ("spawn", "computes", False),
        ("spawn", "none", False),
    ],
)
def test_a_look_at_real_processes(method: str, how: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWN)
    command = [sys.executable, "script.py", method, how]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        deadline = time.monotonic() + 20
        found = look_at([worker.pid])
        while expected and not found.is_every_worker_waiting and time.monotonic() < deadline:
            found = look_at([worker.pid])  # it writes that it is ready a moment before it sleeps
        num_children = len(psutil.Process(worker.pid).children(recursive=True))
        os.killpg(worker.pid, 9)
    assert found.is_every_worker_waiting is expected
    assert len(found.processes) == 1 + num_children
    assert found.cpu_seconds > 0


def test_a_worker_that_has_ended_does_not_wait() -> None:
    assert not look_at([2**22 + 1]).is_every_worker_waiting


def test_refused_connections_are_the_kernels_count(tmp_path: Path) -> None:
    assert look_at([], tmp_path).num_refused == 0
    (tmp_path / "proc/net").mkdir(parents=True)
    text = "Ip: Forwarding\nIp: 1\nTcp: ActiveOpens AttemptFails\nTcp: 7 31\nUdp: InDatagrams\nUdp: 4\n"
    (tmp_path / "proc/net/snmp").write_text(text)
    assert look_at([], tmp_path).num_refused == 31


def test_the_error_says_what_to_do() -> None:
    assert "`python train.py` or with --workers 1" in describe_nesting(2, "train.py")
