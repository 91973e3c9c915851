"""Slowdowns in real trainings: are the slowest part, the worker and the reason named? `faulty.py` is what is started.

`python -m torture.slow [NAME...]` runs it alone: each job runs for some seconds, and is looked at with
`lockstep doctor --slow --json` meanwhile.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torture.row import Row

_SOURCE = Path(__file__).with_name("faulty.py")
_SECONDS = 14.0
_LAUNCH = """
import sys
sys.path.insert(0, "")
import faulty, lockstep
lockstep.launch(faulty.train_slowly, workers=2, threads_per_worker={})
"""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One thing that makes a training slow."""

    name: str
    what: str
    """What `faulty.py` does slowly."""
    bound: str
    """The part that must be named: a pattern."""
    reason: str = ""
    """What the text must say besides: a pattern."""
    rank: int | None = None
    """The slow worker; None for all."""
    disturbance: str = ""
    """What is done to the process of the slow worker from outside."""
    threads: int = 1
    variables: tuple[tuple[str, str], ...] = ()


SLOWDOWNS: tuple[Slowdown, ...] = (
    Slowdown("slow data set on one worker", "getitem", "loading", "faulty.py", rank=1),
    Slowdown("slow data set on all", "getitem", "loading", "faulty.py"),
    Slowdown("slow loss on one worker", "loss", "forward and backward", "faulty.py", rank=1),
    Slowdown("slow callback", "callback", "callbacks", r"SlowCallback\.on_step"),
    Slowdown("slow save", "save", "saving", variables=(("FAULTY_WIDTH", "1500"),)),
    Slowdown("slow metric", "metric", "evaluating", "faulty.py"),
    Slowdown("stopped again and again", "", ".*", "was stopped", rank=1, disturbance="duty"),
    Slowdown("another process on its core", "", ".*", "another process", rank=1, disturbance="busy"),
    Slowdown("more threads than cores", "matmul", "forward and backward", "busy threads share", threads=8),
    Slowdown("printing", "print", "own code", "faulty.py"),
    Slowdown("many bytes", "bytes", "communication", variables=(("LOCKSTEP_CPU_BACKEND", "gloo"),)),
    Slowdown("slow optimizer", "optimizer", "update", "faulty.py"),
    Slowdown("unequal shards", "unequal", "forward and backward", "more work"),
    Slowdown("throttled", "", ".*", "throttled", rank=1, disturbance="quota"),
)


def try_slowdown(slowdown: Slowdown) -> tuple[bool, str]:
    """Run a job that is slow, and return whether that was named, and what was said."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-slow-"))
    shutil.copy(_SOURCE, folder / "faulty.py")
    with _job(slowdown, folder) as process:
        deadline = time.monotonic() + 180
        while len(pids := sorted(folder.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        if len(pids) < 2:
            return False, "it did not begin"
        with _disturbed(slowdown.disturbance, int((folder / "pid-1").read_text(encoding="ascii"))):
            time.sleep(_SECONDS)
            said = subprocess.run(
                [sys.executable, "-m", "lockstep", "doctor", "--slow", "--json", "--pid", str(process.pid)],
                env={**os.environ, "TMPDIR": str(folder)},
                capture_output=True,
                text=True,
                check=False,
            )
        if said.returncode != 0:
            return False, said.stdout + said.stderr
        found = json.loads(said.stdout)
        is_right = (
            re.fullmatch(slowdown.bound, found["bound"]) is not None
            and (slowdown.rank is None or found["behind"] == slowdown.rank)
            and re.search(slowdown.reason, found["text"]) is not None
        )
        return is_right, found["text"]


@contextmanager
def _job(slowdown: Slowdown, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    variables = {
        **os.environ,
        "FAULTY_SLOW": slowdown.what,
        "FAULTY_RANK": str(-1 if slowdown.rank is None else slowdown.rank),
        "FAULTY_FOLDER": str(folder),
        "TMPDIR": str(folder),
        **dict(slowdown.variables),
    }
    with (folder / "out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH.format(slowdown.threads)],
            cwd=folder,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disturbed(how: str, pid: int) -> Iterator[None]:
    """Disturb a process within the block."""
    if how == "quota":
        with _quota(pid):
            yield
        return
    programs = {
        "duty": "import os,sys,time\nwhile 1:\n os.kill({0},19);time.sleep(.2);os.kill({0},18);time.sleep(.1)",
        "busy": "import os\nos.sched_setaffinity(0,[0])\nwhile 1: pass",
    }
    started = []
    if how == "busy":
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), [0])
    if how:
        number = 3 if how == "busy" else 1
        command = [sys.executable, "-c", programs[how].format(pid)]
        started = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _quota(pid: int) -> Iterator[None]:
    """Let a process have a fifth of a core within the block, with a control group of its own (version 1)."""
    group = Path(f"/sys/fs/cgroup/cpu/lockstep-torture-{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("20000", encoding="ascii")
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid), encoding="ascii")
        with contextlib.suppress(OSError):
            group.rmdir()


def run(row: Row, _seed: int) -> None:
    """Try all slowdowns once, or as many as there is time for."""
    for slowdown in SLOWDOWNS:
        if not row.has_time:
            break
        is_right, said = try_slowdown(slowdown)
        row.note("" if is_right else f"{slowdown.name}: {said}")


def main() -> None:
    """Try the slowdowns whose names contain one of the arguments, and print a table."""
    wanted = [each for each in SLOWDOWNS if not sys.argv[1:] or any(part in each.name for part in sys.argv[1:])]
    num_right = 0
    for slowdown in wanted:
        is_right, said = try_slowdown(slowdown)
        num_right += is_right
        print(f"{slowdown.name:<32} {'named' if is_right else 'NOT NAMED'}\n    {said}", flush=True)
    print(f"{num_right} of {len(wanted)} named; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
