"""Several workers on one card: a script that starts itself, once for each rank, and waits for all with a limit.

    script.py ...                                script.py ... (rank r)
    -------------                                ----------------------
    start(__file__, arguments, world_size=2)  -> is_worker(): join("gloo"), train, hand_in(result)
    wait(limit)                               <- Outcome: exit code, seconds, output, result

There is no launcher that ends a worker because another one failed: each worker's exit code is its own.
"""

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_device import IS_CUDA

import lockstep as ls
from lockstep.devices import Device, Placement  # the only names here that are not public

RESULT = "GPU_WORKER_RESULT"
"""Variable that names the file in which a worker hands in its result."""
PATIENCE = datetime.timedelta(seconds=60)
"""How long a worker waits for the others in a collective."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one worker ended."""

    rank: int
    code: int | None
    """Exit code, negative for a signal; None for a worker that had not ended within the limit and was killed."""
    seconds: float
    """When it ended, after the start of all workers."""
    ended_at: float
    """The same on the machine's monotonic clock."""
    output: str
    """What it wrote."""
    result: Any
    """What it handed in; None for nothing."""

    def last_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "(no output)"

    def errors(self) -> str:
        """Return the lines that name exceptions, without their tracebacks."""
        lines = (re.sub(r"^\[rank\d+\]: ", "", line) for line in self.output.splitlines())
        return "\n".join(line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line))


class Workers:
    """Processes of one script, all on the one card."""

    def __init__(self, script: str, arguments: Sequence[str], *, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-workers-")
        self.began = time.monotonic()
        self._processes = []
        self._ended: dict[int, float] = {}
        port = free_port()
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",  # NCCL's set-up takes the card of the local rank, and there is one card
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                RESULT: str(self._path(rank, "json")),
            }
            with self._path(rank, "log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, script, *arguments],
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def _path(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def wait(self, limit: float) -> list[Outcome]:
        """Wait for all, at most until `limit` seconds after their start; kill what is left."""
        codes: dict[int, int | None] = dict.fromkeys(range(len(self._processes)))
        while len(self._ended) < len(codes) and time.monotonic() < self.began + limit:
            for rank, process in enumerate(self._processes):
                if rank not in self._ended and (code := process.poll()) is not None:
                    codes[rank] = code
                    self._ended[rank] = time.monotonic()
            time.sleep(POLL_SECONDS)
        for process in self._processes:
            process.kill()
            process.wait()
        outcomes = [self._outcome(rank, code) for rank, code in codes.items()]
        self._folder.cleanup()
        return outcomes

    def _outcome(self, rank: int, code: int | None) -> Outcome:
        result = self._path(rank, "json")
        ended_at = self._ended.get(rank, time.monotonic())
        return Outcome(
            rank=rank,
            code=code,
            seconds=ended_at - self.began,
            ended_at=ended_at,
            output=self._path(rank, "log").read_text(errors="replace"),
            result=json.loads(result.read_text()) if result.exists() else None,
        )


def run_workers(script: str, arguments: Sequence[str], *, world_size: int, limit: float) -> list[Outcome]:
    return Workers(script, arguments, world_size=world_size).wait(limit)


def describe(outcome: Outcome) -> str:
    """Say in a line how a worker ended."""
    if outcome.code is None:
        return f"rank {outcome.rank} did not end and was killed after {outcome.seconds:.1f} s"
    how = signal.Signals(-outcome.code).name if outcome.code < 0 else f"exit code {outcome.code}"
    return f"rank {outcome.rank} ended after {outcome.seconds:.1f} s, {how}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- In the workers ----------------------------------------------------------------------------------------------------


def is_worker() -> bool:
    return RESULT in os.environ


def join(backend: str) -> None:
    """Join the group of all workers: "nccl" for the default of a GPU, "gloo" for several workers on the card."""
    ls.init_process_group("gloo" if backend == "gloo" or not IS_CUDA else "cpu:gloo,cuda:nccl", timeout=PATIENCE)


def hand_in(result: Any) -> None:
    """Give the starting process a result that JSON can hold; whole or not at all."""
    path = Path(os.environ[RESULT])
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result))
    beside.rename(path)


def join_alone() -> None:
    """Make a group of one, in the backend that is chosen for the device: NCCL for a GPU."""
    ls.init_process_group(init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, timeout=PATIENCE)


def one_card(world_size: int) -> Placement:
    """Return a placement for `ls.launch`, which gives no two workers one card: CPU workers that can see it."""
    device = Device(name="cpu", visible="0" if IS_CUDA else "", label="GPU 0, shared")
    return Placement(devices=(device,) * world_size, reason="shared by all workers")
