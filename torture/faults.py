"""Faults in real trainings: is the worker named, the line, the cause, and how soon? `faulty.py` is what is started.

A fault counts as explained when what the job prints, or its log, names the guilty worker, the line of the user's code
where there is one, and the cause, within `_LATEST` seconds after the stall time (for a worker that is gone: after the
fault). The table says who printed it. `python -m torture.faults [NAME...]` runs it alone.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torture.row import Row

_STALL = 3.0
_LATEST = 5.0
_MOST_SECONDS = 180.0
"""Until a job comes to its fault: on a busy machine imports take long."""
_SOURCE = Path(__file__).with_name("faulty.py")
_CONFIG = """
model: faulty:Net
data: faulty:datasets
loss: faulty:Timed
callbacks: [faulty:Watching]
optimizer_args: {lr: 0.1}
batch_size: 32
num_shards: 4
epochs: 50
on_worker_loss: stop
device_ids: cpu:2
report: false
"""

_LAUNCH = """
import sys
sys.path.insert(0, "")
import faulty, lockstep
lockstep.launch(faulty.train_with_trainer, workers={})
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    what: str
    """Place and function in `faulty.py`."""
    cause: str
    """What must be said of the cause: a pattern."""
    way: str = "run"
    """`lockstep run` with the wrapper, `launch` with a trainer, or `lockstep train`."""
    backend: str = "shm"
    has_line: bool = True
    """Whether there is a line to name: not of a process that is stopped or gone."""
    stalls: bool = True
    """Whether it is a stall, which is told after the stall time, and not an end, which is told at once."""
    rank: int = 1
    workers: int = 2
    loaders: int = 0
    names_rank: bool = True
    """Whether one worker is guilty."""
    variables: tuple[tuple[str, str], ...] = ()


_STOPPED = r"is stopped"
_BUSY = r"% of a core"
_SLEEP = r"system call sleep"
_LOCK = r"waits for a lock"
_DIFFERS = r"do not make the same call|different"
FAULTS: tuple[Fault, ...] = (
    Fault("worker stopped", "between:stop", _STOPPED, has_line=False),
    Fault("worker stopped, gloo", "between:stop", _STOPPED, backend="gloo", has_line=False),
    Fault("worker stopped, trainer", "loss:stop", _STOPPED, way="launch", has_line=False),
    Fault(
        "all of three stopped", "between:stop", _STOPPED, has_line=False, workers=3, variables=(("FAULTY_RANK", "-1"),)
    ),
    Fault("stopped in the first step", "forward:stop", _STOPPED, has_line=False, variables=(("FAULTY_STEP", "0"),)),
    Fault("stopped at start-up", "start:stop", _STOPPED, has_line=False, variables=(("FAULTY_STEP", "0"),)),
    Fault("hangs before the group is made", "start:sleep", "sleep", variables=(("FAULTY_STEP", "0"),)),
    Fault("import that hangs", "data:sleep", "sleep", way="train", variables=(("FAULTY_STEP", "0"),)),
    Fault("loop in forward", "forward:loop", _BUSY, way="launch"),
    Fault("loop in forward, gloo", "forward:loop", _BUSY, backend="gloo"),
    Fault("loop in the loss", "loss:loop", _BUSY, way="launch", backend="gloo"),
    Fault("loop in a metric", "metric:loop", _BUSY, way="launch"),
    Fault("loop in a callback", "callback:loop", _BUSY, way="train"),
    Fault("loop in a hook of a backward", "hook:loop", _BUSY),
    Fault("loop in __getitem__", "getitem:loop", _BUSY, way="launch"),
    Fault(
        "loop in __getitem__, loading process",
        "getitem:loop",
        "whose process",
        way="launch",
        loaders=1,
        variables=(("FAULTY_STEP", "0"),),
    ),
    Fault(
        "loop in collate, loading process",
        "collate:loop",
        "loading process|whose process",
        loaders=1,
        variables=(("FAULTY_STEP", "0"),),
    ),
    Fault(
        "lock in a loading process",
        "getitem:lock",
        "lock|futex",
        way="launch",
        loaders=1,
        variables=(("FAULTY_STEP", "0"),),
    ),
    Fault(
        "loading process killed",
        "getitem:kill",
        "killed",
        way="launch",
        loaders=1,
        stalls=False,
        has_line=False,
        variables=(("FAULTY_STEP", "0"),),
    ),
    Fault(
        "loading process stopped",
        "getitem:stop",
        _STOPPED,
        way="launch",
        loaders=1,
        has_line=False,
        variables=(("FAULTY_STEP", "0"),),
    ),
    Fault("collective on one rank", "between:all_reduce", _DIFFERS, stalls=False),
    Fault("collective on one rank, gloo", "between:all_reduce", _DIFFERS, backend="gloo", stalls=False),
    Fault("barrier in one branch", "between:barrier", _DIFFERS, way="launch", stalls=False),
    Fault(
        "different branch",
        "between:broadcast_or_reduce",
        _DIFFERS,
        stalls=False,
        names_rank=False,
        variables=(("FAULTY_RANK", "-1"),),
    ),
    Fault(
        "mismatched shapes",
        "between:shapes",
        _DIFFERS,
        stalls=False,
        backend="gloo",
        names_rank=False,
        variables=(("FAULTY_RANK", "-1"),),
    ),
    Fault("one batch fewer", "fewer:", r"fewer|skipped|after \d+ backwards", stalls=False),
    Fault("script of one rank ends early", "ends:", r"fewer|has ended|has left", stalls=False),
    Fault("evaluation on one rank", "evaluate:", r"different|evaluat", way="launch", stalls=False),
    Fault("exception swallowed", "try:", "skipped a batch|fewer", stalls=False),
    Fault("exception", "forward:fail", "had enough", way="launch", stalls=False),
    Fault("shape does not fit", "forward:allocate", "memory|allocate|bytes", way="train", stalls=False),
    Fault("memory limit", "loss:memory_limit", "MemoryError|memory", way="launch", stalls=False),
    Fault(
        "disk full, in a save",
        "save:",
        "No space left|disk is full|space",
        way="launch",
        stalls=False,
        names_rank=False,
    ),
    Fault("disk full", "callback:full_disk", "No space left", way="train", stalls=False),
    Fault("disk that does not answer", "loss:slow_disk", "disk sleep", way="launch"),
    Fault("reads a fifo", "forward:fifo", "fifo|open", backend="gloo"),
    Fault("input()", "between:ask", "input"),
    Fault("sleep in the loss", "loss:sleep", _SLEEP, way="launch"),
    Fault("waits for a subprocess", "between:child", "child"),
    Fault("waits for a forked child", "loss:fork", "child", way="launch"),
    Fault("waits for the network", "forward:network", "receive|socket", backend="gloo"),
    Fault("killed", "between:kill", "SIGKILL", stalls=False, has_line=False),
    Fault("killed, trainer, gloo", "loss:kill", "SIGKILL", way="launch", backend="gloo", stalls=False, has_line=False),
    Fault("segmentation fault", "forward:crash", "SIGSEGV", stalls=False),
    Fault("os._exit", "callback:vanish", "exit code 3|code 3", way="train", stalls=False, has_line=False),
    Fault("sys.exit(0)", "between:leave", "exit|left|ended", stalls=False, has_line=False),
    Fault("deadlock of two threads", "forward:two_threads", _LOCK),
    Fault("a regular expression holds the GIL", "loss:regex", _BUSY, way="launch"),
    Fault("writes to a full pipe", "between:pipe", "write of pipe|write"),
    Fault("file locked twice", "callback:file_lock", "lock", way="train"),
    Fault("hangs in on_save", "saved:sleep", _SLEEP, way="train", rank=0),
    Fault("all workers sleep in the loss", "loss:sleep", _SLEEP, way="launch", variables=(("FAULTY_RANK", "-1"),)),
    Fault("all workers hold the GIL", "loss:regex", _BUSY, way="launch", variables=(("FAULTY_RANK", "-1"),)),
)


@dataclass(slots=True)
class Output:
    """What a job has printed, with the times of its lines."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self, stream: "object") -> None:
        """Read until the end; a thread does this."""
        for line in stream:  # type: ignore[attr-defined]
            self.lines.append((time.monotonic(), line))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of a fault."""

    seconds: float | None
    """After how many seconds all had been said; None if it was not."""
    names_rank: bool
    names_line: bool
    names_cause: bool
    who: str
    """Who said it."""
    text: str
    """All that was printed from the fault on."""


def try_fault(fault: Fault) -> Outcome:
    """Start a job with a fault, read what it prints, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-fault-"))
    small = folder / "small"
    small.mkdir()
    is_mounted = False
    if "disk full" in fault.name:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(small)], check=False)
        is_mounted = mounted.returncode == 0
    shutil.copy(_SOURCE, folder / "faulty.py")
    (folder / "job.yaml").write_text(_CONFIG, encoding="ascii")
    at = folder / "at"
    variables = {
        **os.environ,
        "FAULTY": fault.what,
        "FAULTY_RANK": str(fault.rank),
        "FAULTY_AT": str(at),
        "FAULTY_FOLDER": str(folder),
        "FAULTY_LOADERS": str(fault.loaders),
        "LOCKSTEP_CPU_BACKEND": fault.backend,
        "LOCKSTEP_STALL_SECONDS": str(_STALL),
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        **dict(fault.variables),
    }
    command = {
        "run": [sys.executable, "-m", "lockstep", "run", "--workers", str(fault.workers), "faulty.py"],
        "launch": [sys.executable, "-c", _LAUNCH.format(fault.workers)],
        "train": [sys.executable, "-m", "lockstep", "train", "job.yaml", "run_dir=runs/job"],
    }[fault.way]
    output = Output()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=output.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        return _watch(fault, process, output, at)
    finally:
        _end(process)
        if is_mounted:
            subprocess.run(["umount", str(small)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _watch(fault: Fault, process: "subprocess.Popen[str]", output: Output, at: Path) -> Outcome:
    began = time.monotonic()
    happened: float | None = None
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        if happened is None and at.exists() and at.read_text(encoding="ascii"):
            happened = float(at.read_text(encoding="ascii"))
        outcome = _judge(fault, output.lines, happened if happened is not None else began)
        has_ended = process.poll() is not None
        limit = began + _MOST_SECONDS if happened is None else happened + _STALL + _LATEST + 10
        if outcome.seconds is not None or has_ended or now > limit:
            time.sleep(0.5)  # the rest of the message
            return _judge(fault, list(output.lines), happened if happened is not None else began)


def _judge(fault: Fault, lines: Sequence[tuple[float, str]], happened: float) -> Outcome:
    source = _SOURCE.read_text(encoding="utf-8").splitlines()
    place, _, function = fault.what.partition(":")
    wanted = _lines_of(source, function or place)
    rank = r"\d" if ("FAULTY_RANK", "-1") in fault.variables else str(fault.rank)  # of all, any one is right
    text, named, lined, caused, seconds, who = "", not fault.names_rank, not fault.has_line, False, None, ""
    for moment, line in lines:
        text += line
        named = named or re.search(rf"\b[Rr]ank(s)? (\d, )*{rank}\b|[Ww]orker {rank}\b", line) is not None
        found = [int(number) for number in re.findall(r"faulty\.py(?:\", line |:)(\d+)", line)]
        lined = lined or (any(number in wanted for number in found) if function else bool(found))
        caused = caused or re.search(fault.cause, line) is not None
        if named and lined and caused:
            seconds = moment - happened
            who = "worker" if re.match(r"\s*\[?\d\]?\s*[|:\]]", line) else "launcher"
            break
    return Outcome(seconds, named, lined, caused, who, "".join(line for _, line in lines))


def _lines_of(source: Sequence[str], function: str) -> range:
    """Return the lines of a function of `faulty.py`, and with it those that call it."""
    starts = [number for number, line in enumerate(source, 1) if line.startswith(f"def {function}(")]
    if not starts:
        return range(1, len(source) + 1)
    ends = [number for number in range(starts[0] + 1, len(source) + 1) if source[number - 1][:1] not in {"", " "}]
    return range(starts[0], ends[0])


def _end(process: "subprocess.Popen[str]") -> None:
    """End a job and all that it has started: the guardian does that when the launcher is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(3)
            break
        except subprocess.TimeoutExpired:
            continue


def limit_of(fault: Fault) -> float:
    """Return within how many seconds after the fault it must be explained."""
    return _LATEST + (_STALL if fault.stalls else 0.0)


def run(row: Row, _seed: int) -> None:
    """Try all faults once, or as many as there is time for."""
    num_explained = 0
    for fault in FAULTS:
        if not row.has_time:
            break
        outcome = try_fault(fault)
        is_explained = outcome.seconds is not None and outcome.seconds <= limit_of(fault)
        num_explained += is_explained
        row.note("" if is_explained else f"{fault.name}: {_missing(outcome)}")
    row.figures["explained"] = f"{num_explained} of {row.num_tried}"


def _missing(outcome: Outcome) -> str:
    if outcome.seconds is not None:
        return f"said after {outcome.seconds:.1f} s"
    named = {"worker": outcome.names_rank, "line": outcome.names_line, "cause": outcome.names_cause}
    return "not named: " + ", ".join(name for name, is_named in named.items() if not is_named)


def main() -> None:
    """Try the faults whose names contain one of the arguments, and print a table."""
    wanted = [fault for fault in FAULTS if not sys.argv[1:] or any(part in fault.name for part in sys.argv[1:])]
    num_explained = 0
    for fault in wanted:
        outcome = try_fault(fault)
        is_explained = outcome.seconds is not None and outcome.seconds <= limit_of(fault)
        num_explained += is_explained
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:5.1f} s of {limit_of(fault):g} s"
        said = f"{outcome.who:<9}" if is_explained else _missing(outcome)
        print(f"{fault.name:<40} {fault.way:<7} {fault.backend:<5} {seconds:<16} {said}", flush=True)
        if not is_explained or os.environ.get("FAULTS_VERBOSE"):
            print("    " + "\n    ".join(outcome.text.splitlines()[-25:]), flush=True)
    print(f"{num_explained} of {len(wanted)} explained; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
