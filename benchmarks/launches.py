"""Start-up time of `lockstep run` compared with torchrun and plain python, and many launches at the same time.

python benchmarks/launches.py [--rounds 5] [--launches 100]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPTS = {
    "an empty script": "",
    "init, all_reduce": """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
}
WAIT_FOR_ALL = """
import os, pathlib, socket, sys, time
port, folder = int(os.environ["MASTER_PORT"]), pathlib.Path("ports")
(folder / f"{port}-{os.environ['RANK']}").touch()
while len(list(folder.iterdir())) < int(sys.argv[1]):  # until all workers of all launches have started
    time.sleep(0.1)
try:
    socket.socket().bind(("127.0.0.1", port))
except OSError:
    sys.exit()
sys.exit("the port is free for others")
"""


def timed(command: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def compare(folder: Path, rounds: int) -> None:
    for name, text in SCRIPTS.items():
        (folder / "script.py").write_text(text)
        commands = {
            "lockstep run": [str(BIN / "lockstep"), "run", "--workers", "2", "script.py"],
            "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "script.py"],
        }
        if not text:
            commands["python"] = [sys.executable, "script.py"]
        times: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(rounds):
            for label, command in commands.items():
                times[label].append(timed(command, folder))
        told = ", ".join(f"{label} {statistics.median(found):.2f} s" for label, found in times.items())
        print(f"{name}, two workers: {told}", flush=True)


def collide(folder: Path, num_launches: int) -> None:
    (folder / "script.py").write_text(WAIT_FOR_ALL)
    (folder / "ports").mkdir()
    command = [str(BIN / "lockstep"), "run", "--workers", "2", "script.py", str(2 * num_launches)]
    began = time.perf_counter()
    processes = [subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) for _ in range(num_launches)]
    codes = [process.wait() for process in processes]
    seconds = time.perf_counter() - began
    num_ports = len({path.name.partition("-")[0] for path in (folder / "ports").iterdir()})
    told = f"{codes.count(0)} ended well, on {num_ports} ports, in {seconds:.1f} s"
    print(f"{num_launches} launches of two workers at once: {told}", flush=True)


def in_folder(measure: Callable[[Path, int], None], number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=100)
    arguments = parser.parse_args()
    in_folder(compare, arguments.rounds)
    in_folder(collide, arguments.launches)
