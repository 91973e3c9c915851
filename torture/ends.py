"""A worker is killed, raises, exits, or its launcher gets a signal: how long until all has ended, what is left."""

import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from torture.row import Row

_SCRIPT = """
import os, sys, time
import torch
from torch import nn
import lockstep as ls
STATE = os.environ["TORTURE"]

def train(run):
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    wrapped = ls.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, step = torch.randn(64, 8) + run.rank, 0
    while True:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 3:
            with open(f"{STATE}.{run.rank}.new", "w") as stream:
                stream.write(str(os.getpid()))
            os.rename(f"{STATE}.{run.rank}.new", f"{STATE}.{run.rank}")
        if run.rank == 1 and os.path.exists(f"{STATE}.raise"):
            raise KeyError("mine")
        if run.rank == 1 and os.path.exists(f"{STATE}.exit"):
            sys.exit(3)

class Own:
    rank = int(os.environ.get("RANK", "0"))

if sys.argv[1] == "run":
    ls.init_process_group()
    train(Own)
else:
    ls.launch(train, workers=int(sys.argv[2]), devices="cpu")
"""
_HOW = ("kill", "raise", "exit", "interrupt", "terminate", "stopped")
_PATIENCE_SECONDS = 40.0
_WORKERS = 3


def run(row: Row, seed: int) -> None:
    """Try every way to end, in turn, under both launchers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    draw = random.Random(f"{seed} ends")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT)
        while row.has_time:
            how = _HOW[row.num_tried // 2 % len(_HOW)]
            launcher = ("launch", "run")[row.num_tried % 2]
            state = Path(folder) / f"state{row.num_tried}"
            ended = _try(script, state, launcher, how, draw)
            row.note(f"{launcher}, {how}: {ended.problem}" if ended.problem else "")
            times.setdefault(f"{launcher} {how}", []).append(ended.seconds)
            if how in {"kill", "raise"}:
                times.setdefault(f"{launcher} {how}, first message", []).append(ended.said_after)
    for name, found in times.items():
        row.figures[name] = f"{statistics.median(found):.2f} s median, {max(found):.2f} at most, of {len(found)}"


@dataclass(frozen=True, slots=True)
class _Ended:
    """How one try has ended."""

    seconds: float
    """How long it took until all had ended."""
    said_after: float
    """How long it took until the expected message was printed."""
    problem: str
    """What was wrong; empty for nothing."""


def _try(script: Path, state: Path, launcher: str, how: str, draw: random.Random) -> _Ended:
    """Let it end once."""
    command = [sys.executable, str(script), "launch", str(_WORKERS)]
    if launcher == "run":
        lockstep = Path(sysconfig.get_path("scripts")) / "lockstep"
        command = [str(lockstep), "run", "--workers", str(_WORKERS), "--devices", "cpu", str(script), "run"]
    environment = {**os.environ, "TORTURE": str(state)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            pids = _wait_for_workers(process, state)
            time.sleep(draw.uniform(0.0, 0.5))
            began = time.monotonic()
            _end(how, process, pids, state)
            expected = {"kill": "Worker 1 failed first: killed by SIGKILL", "raise": "KeyError: 'mine'"}.get(how, "")
            said, said_after = _read(process, expected, began)
            seconds = time.monotonic() - began
        except (TimeoutError, RuntimeError) as error:
            process.kill()
            return _Ended(math.inf, math.inf, f"{type(error).__name__}: {error}")
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if left:
        return _Ended(seconds, said_after, f"processes {left} are left")
    problem = "" if expected in said else f"{expected!r} is not in the output: {said[-300:]}"
    return _Ended(seconds, said_after, problem)


def _read(process: "subprocess.Popen[bytes]", expected: str, began: float) -> tuple[str, float]:
    """Return all that is printed until everybody has ended, and how long after the fault the expected text came."""
    assert process.stdout is not None
    said, said_after = b"", math.inf
    while select.select([process.stdout], [], [], began + _PATIENCE_SECONDS - time.monotonic())[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        said += chunk
        if expected.encode() in said:
            said_after = min(said_after, time.monotonic() - began)
        if not chunk:
            process.wait(_PATIENCE_SECONDS)
            return said.decode(errors="replace"), said_after
    raise TimeoutError(f"not all had ended after {_PATIENCE_SECONDS:g} s")


def _wait_for_workers(process: "subprocess.Popen[bytes]", state: Path) -> list[int]:
    files = [Path(f"{state}.{rank}") for rank in range(_WORKERS)]
    deadline = time.monotonic() + 3 * _PATIENCE_SECONDS
    while not all(file.exists() for file in files):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the workers have not begun to train")
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def _end(how: str, process: "subprocess.Popen[bytes]", pids: list[int], state: Path) -> None:
    if how == "kill":
        os.kill(pids[1], signal.SIGKILL)
    elif how in {"raise", "exit"}:
        Path(f"{state}.{how}").touch()
    elif how == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        if how == "stopped":
            os.kill(pids[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
