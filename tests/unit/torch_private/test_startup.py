"""What `startup/sitecustomize.py` changes of torch in the processes of a script."""

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import rendezvous

import lockstep.torch_private

STARTUP = Path(lockstep.torch_private.__file__).parent / "startup"

SERVING = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import rendezvous
print(sys.is_users_own)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    url = f"tcp://localhost:{free.getsockname()[1]}"
def open_store(rank):
    return next(iter(rendezvous(url, rank, 2)))[0]
with ThreadPoolExecutor() as threads:
    first, other = threads.map(open_store, [0, 1])
    first.set("key", "value")
    print(other.get("key"))
    again = open_store(0)  # the port is taken, by this process: both are one store, as ever
    print(again.get("key"))
alone, *_ = next(iter(rendezvous("tcp://localhost:1", 0, 1)))  # a port that only root could serve
alone.set("key", "value")
print(alone.get("key"), alone.timeout)
"""


def test_torch_calls_the_function_that_is_replaced() -> None:
    names = list(inspect.signature(rendezvous.__globals__["_create_c10d_store"]).parameters)
    assert names == ["hostname", "port", "rank", "world_size", "timeout", "use_libuv"]


def test_a_store_works_as_torchs_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.is_users_own = True")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), str(tmp_path)])}
    command = [sys.executable, "-c", SERVING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.splitlines() == ["True", "b'value'", "b'value'", "b'value' 0:30:00"]


SAVING = """
import multiprocessing, signal, sys
import torch
from torch.utils.data import DataLoader
asked = []
def ask(number, frame):
    asked.append(number)
if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    loader = DataLoader(torch.arange(100), num_workers=2, multiprocessing_context=sys.argv[1])
    seen = 0
    for number, batch in enumerate(loader):
        seen += len(batch)
        if number == 5:
            print("loads", flush=True)
            while not asked:
                signal.sigtimedwait([], 0.01)
    print("saves after", seen, len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_leaves_the_script_its_loading_processes(
    tmp_path: Path, start: str, number: signal.Signals
) -> None:
    # They ended first, and the script in torch's error about them, before its handler could save.
    (tmp_path / "saving.py").write_text(SAVING)
    script = subprocess.Popen(
        [sys.executable, tmp_path / "saving.py", start],
        env={**os.environ, "PYTHONPATH": str(STARTUP)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "loads\n"
    os.killpg(script.pid, number)
    assert script.communicate(timeout=50)[0] == "saves after 100 0\n"
    assert script.returncode == 0
