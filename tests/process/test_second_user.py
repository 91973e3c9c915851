"""What another user of the machine can do to a run: a real second user, with the tools that every user has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.process.ranks import wait_until
from tests.process.test_run_command import COMMAND

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes another user's id")
NOBODY = 65534

WAITING = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
import lockstep as ls
make = ls.init_process_group if sys.argv[1] == "lockstep" else dist.init_process_group
make("gloo" if sys.argv[1] == "torch" else None)
rank = dist.get_rank()
pathlib.Path(f"here-{rank}").touch()
deadline = time.monotonic() + 120
while not pathlib.Path("go").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
total = torch.ones(3)
dist.all_reduce(total)
if rank == 0:
    print("total", total.tolist(), flush=True)
dist.destroy_process_group()
"""

ATTACK = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
found = {}
for port in json.loads(sys.argv[1]):
    connection = socket.socket()
    connection.settimeout(2)
    try:
        connection.connect(("127.0.0.1", port))
    except OSError:
        found[port] = "dropped"
        continue
    connection.settimeout(20)
    try:
        # torch's store: its greeting, then SET of a key. A store that takes it says nothing and waits for more.
        connection.sendall(b"\\x00" + (0x3C85F7CE).to_bytes(4, "little"))
        connection.sendall(b"\\x01" + (3).to_bytes(8, "little") + b"key" + (3).to_bytes(8, "little") + b"bad")
        found[port] = "taken" if connection.recv(1) else "closed"
    except TimeoutError:
        found[port] = "taken"
    except OSError:
        found[port] = "closed"
print(json.dumps(found))
"""


def listening(process: psutil.Process) -> list[int]:
    return sorted(each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)


@needs_root
@pytest.mark.root
def test_a_network_namespace_without_loopback_is_told_at_once(tmp_path: Path) -> None:
    # Torch's workers tried to connect for 30 minutes, and nothing said why.
    (tmp_path / "script.py").write_text("print('done')")
    in_namespace = ["unshare", "-n", *COMMAND, "--workers", "2", "script.py"]
    found = subprocess.run(in_namespace, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    if "unshare failed" in found.stderr or "Operation not permitted" in found.stderr:
        pytest.skip(found.stderr)
    assert "The loopback interface of this network namespace is down" in found.stderr
    assert found.stdout.count("done") == 2


@needs_root
@pytest.mark.root
@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["torch", "lockstep"])
def test_another_user_cannot_join_a_launch(way: str, tmp_path: Path) -> None:
    # Any user finds the port of the rendezvous in /proc/net/tcp. He could set and read keys: choose the text of an
    # error, end the run in a raw ValueError, let it fall back from shared memory to Gloo.
    (tmp_path / "script.py").write_text(WAITING)
    command = [*COMMAND, "--workers", "2", "script.py", way]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe, stdin=pipe) as launcher:
        try:
            wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 2, "both workers")
            ports = listening(psutil.Process(launcher.pid))
            assert len(ports) == (2 if way == "torch" else 1)
            workers = psutil.Process(launcher.pid).children()
            addresses = {
                each.laddr.ip for process in workers for each in process.net_connections("tcp") if not each.raddr
            }
            assert addresses <= {"127.0.0.1"}
            if way == "lockstep":
                assert not addresses
            attack = [sys.executable, "-I", "-S", "-c", ATTACK, json.dumps(ports)]
            attacked = subprocess.run(attack, capture_output=True, text=True, timeout=100, check=True)
            assert set(json.loads(attacked.stdout).values()) <= {"closed", "dropped"}, attacked.stdout
            (tmp_path / "go").touch()
            shown, said = launcher.communicate(timeout=90)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert "total [2.0, 2.0, 2.0]" in shown
    assert said.count("the user nobody (id 65534) has connected to the rendezvous") == 1
