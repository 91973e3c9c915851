"""Time of an all-reduce (float32 sums, CPU memory) under Gloo, Lockstep's own transport, OpenMPI and MPICH.

    make bench-comm       or: python benchmarks/comm.py [--quick] [--markdown] [--sizes 4B,1MB] [--worlds 2,4]
                                                        [--columns gloo,shm,openmpi] [--repetitions 15] [--busy 8]

All columns of a size are measured in one run. Each repetition times a short batch of calls of every column, so that
noise affects all columns equally. Each MPI needs processes of its own; torch's columns share processes:

controller                                      ranks: torch's, by ls.launch; those of an MPI, by its mpiexec
----------                                      ------
1 start all sets, listen on a socket            connect, send set and rank
2 a batch: one set, one column, n calls  ->     barriers, clock, n calls, clock
3 take the slowest rank                  <-     seconds per call
4 a batch of the next column                    block in a read of the socket, not in a spinning MPI call

A figure is the median over the repetitions of the slowest rank's mean time per call. Every column's sums are checked
at every size before they are timed.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from comm_ranks import Call, needs_shm, serve_torch
from rich import box
from rich.console import Console
from rich.table import Table

import lockstep as ls

COLUMNS = {
    "copy": "every process copies as many bytes at once (copy_): what the memory can do",
    "gloo": "torch's Gloo, over loopback",
    "shm": "backend shm, on ordinary tensors",
    "shm-own": "backend shm, on tensors that the group allocated",
    "ring": "lockstep.comm.ring over shm",
    "ordered": "lockstep.comm.ordered over shm",
    "openmpi": "OpenMPI, mpi4py's Allreduce in place",
    "mpich": "MPICH, the same",
}
MPIS = ("openmpi", "mpich")
MPICH = Path(__file__).parents[1] / "build" / "mpich"
"""Where it is installed, beside the environment: both have a program mpirun."""
BASELINES = ("gloo", *MPIS, "copy")
UNITS = {"MB": 10**6, "KB": 10**3, "B": 1}  # MB before B, because the first matching suffix is used
SIZES = "4B,1KB,4KB,64KB,256KB,1MB,4MB,26MB,102MB,256MB"  # 26 MB: a bucket of DDP; 102 MB: a ResNet-50
QUICK_SIZES = "4B,64KB,1MB,4MB"
BATCH_SECONDS = 0.03
"""A batch has as many calls as fit in here, at least one."""
MAX_CALLS = 2000
SIZE_SECONDS = 25.0
"""A size gets fewer repetitions than asked for, though not fewer than five, where they would take longer."""
NOISY_SPREAD = 0.5
"""A time whose quartiles are further apart, in units of the median, is marked."""
PATIENCE_SECONDS = 120.0
"""How long a set of ranks may take to start, or to answer, before it counts as hung."""
LEAVE_SECONDS = 20.0
"""How long a set of ranks may take to end."""


@final
class WorkerPool:
    """The controller's connection to one set of ranks.

    Args:
        connections: One socket per rank.
        explain: Raises what is known about how the set ended.
    """

    def __init__(self, connections: Sequence[socket.socket], explain: Call) -> None:
        self._connections = connections
        self._explain = explain
        self._streams = [connection.makefile("rw") for connection in connections]
        self.version = max(hello["version"] for hello in self._answers("starting"))

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Give all ranks one order; return their answers."""
        with contextlib.suppress(BrokenPipeError):  # the next read raises the error
            for stream in self._streams:
                stream.write(json.dumps(order) + "\n")
                stream.flush()
        return self._answers(f"the order {order}")

    def seconds(self, column: str, calls: int) -> float:
        """Return the slowest rank's seconds per call."""
        answers = self.ask(do="time", column=column, calls=calls)
        return max(float(answer["seconds"]) for answer in answers)

    def close(self) -> None:
        """Let the ranks go."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def _answers(self, doing: str) -> list[dict[str, Any]]:
        lines = []
        for stream in self._streams:
            try:
                lines.append(stream.readline())
            except TimeoutError:
                sys.exit(f"A rank has not answered for {PATIENCE_SECONDS:.0f} seconds: it hangs in {doing}.")
            except ConnectionResetError:
                lines.append("")
        if not all(lines):
            self._explain()
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def torch_pool(world: int, columns: Sequence[str]) -> Iterator[WorkerPool]:
    """Start torch's ranks; `ls.launch` waits for them in a thread."""
    outcome: Future[list[None]] = Future()

    def launch(address: str) -> None:
        try:
            outcome.set_result(ls.launch(serve_torch, address, columns, devices=f"cpu:{world}"))
        except BaseException as error:  # noqa: BLE001 - raised again by the reader
            outcome.set_exception(error)

    def explain() -> None:
        sys.exit(str(outcome.exception(LEAVE_SECONDS) or "A torch rank hung up."))

    with listening() as (listener, address):
        threading.Thread(target=launch, args=(address,), daemon=True).start()
        pool = WorkerPool(accept(listener, world, outcome.done, explain), explain)
        try:
            yield pool
        finally:
            pool.close()
            with contextlib.suppress(Exception):  # reported already, or a consequence of the error that is being raised
                outcome.result(LEAVE_SECONDS)


@contextlib.contextmanager
def mpi_pool(column: str, world: int) -> Iterator[WorkerPool]:
    """Start the ranks of an MPI."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Bound to no core, as torch's.
    if column == "mpich":
        command = [str(MPICH / "bin" / "mpiexec"), "-bind-to", "none"]
        variables |= {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(MPICH / "lib")}
    else:  # more processes than cores are allowed: OpenMPI then yields while it waits
        command = [str(find_mpirun()), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += ["-n", str(world), sys.executable, str(Path(__file__).with_name("comm_ranks.py")), column]

    def explain() -> None:
        sys.exit(f"The ranks of {column} ended early; its exit code is {process.wait(LEAVE_SECONDS)}.")

    with listening() as (listener, address):
        process = subprocess.Popen([*command, address], env=variables, stdin=subprocess.DEVNULL)
        try:
            pool = WorkerPool(accept(listener, world, lambda: process.poll() is not None, explain), explain)
            yield pool
            pool.close()
            process.wait(LEAVE_SECONDS)
        finally:
            process.terminate()
            process.wait(LEAVE_SECONDS)


def find_mpirun() -> Path | None:
    """Return the mpirun that came with this interpreter's packages, else the system's."""
    beside = Path(sys.executable).parent
    found = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    return Path(found) if found else None


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """Listen where only this user can connect."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(directory) / "controller")
        listener.bind(address)
        listener.listen(128)
        yield listener, address


def accept(listener: socket.socket, world: int, has_ended: Callable[[], bool], explain: Call) -> list[socket.socket]:
    """Return one connection per rank, in the order in which they come."""
    listener.settimeout(1.0)
    connections: list[socket.socket] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(connections) < world:
        if has_ended():
            explain()
        if time.monotonic() > deadline:
            sys.exit(f"Only {len(connections)} of {world} ranks have come in {PATIENCE_SECONDS:.0f} seconds.")
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE_SECONDS)
            connections.append(connection)
    return connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured at one size and number of ranks."""

    world: int
    num_bytes: int
    samples: dict[str, list[float]]
    """Seconds per call of the slowest rank, by column; one for each repetition."""

    def median(self, column: str) -> float:
        return statistics.median(self.samples[column])

    def spread(self, column: str) -> float:
        """Return the distance between the quartiles, in units of the median."""
        low, _, high = statistics.quantiles(self.samples[column], n=4, method="inclusive")
        return (high - low) / self.median(column)


def measure(pools: dict[str, WorkerPool], world: int, num_bytes: int, repetitions: int) -> Row:
    """Check and time all columns at one size."""
    for pool in dict.fromkeys(pools.values()):
        pool.ask(do="bind", numel=num_bytes // 4)
    for column, pool in pools.items():
        if column == "copy":  # no sum
            continue
        for answer in pool.ask(do="check", column=column):
            if answer["wrong"]:
                sys.exit(
                    f"{column}: {answer['wrong']} of {num_bytes // 4} sums are wrong on {world} ranks, so its times "
                    "would mean nothing."
                )
    calls = {column: choose_calls(pool, column) for column, pool in pools.items()}
    samples: dict[str, list[float]] = {column: [] for column in pools}
    began = time.monotonic()
    for number in range(repetitions):
        if number >= 5 and time.monotonic() - began > SIZE_SECONDS:  # noqa: PLR2004 - see SIZE_SECONDS
            break
        # Each repetition starts with another column, so that no column always runs after the same other column.
        first = number % len(pools)
        for column in [*pools, *pools][first : first + len(pools)]:
            samples[column].append(pools[column].seconds(column, calls[column]))
    return Row(world=world, num_bytes=num_bytes, samples=samples)


def choose_calls(pool: WorkerPool, column: str) -> int:
    """Return how many calls make a batch; warms up on the way."""
    calls = 1
    while True:
        seconds = pool.seconds(column, calls)
        if calls * seconds < 10 * BATCH_SECONDS:
            # The shortest of three, because one disturbed call would make all batches too short.
            seconds = min(seconds, *(pool.seconds(column, calls) for _ in range(2)))
        if calls >= MAX_CALLS or calls * seconds >= BATCH_SECONDS / 4:
            break
        calls *= 4
    return max(1, min(MAX_CALLS, round(BATCH_SECONDS / seconds)))


def why_unavailable(column: str) -> str:
    """Return why a column cannot be measured here; empty if it can."""
    if needs_shm([column]) and not hasattr(dist.Backend, "SHM"):
        return "there is no backend shm"
    if column in ("ring", "ordered") and find_spec(f"lockstep.comm.{column}") is None:
        return f"there is no lockstep.comm.{column}"
    has_program = (MPICH / "bin" / "mpiexec").exists() if column == "mpich" else find_mpirun() is not None
    if column in MPIS and not (find_spec("mpi4py") and has_program):
        return "there is no mpi4py, or no such MPI; make bench-comm installs both"
    return ""


def parse_size(text: str) -> int:
    """Return the bytes in `4B`, `64KB` or `1.5MB`."""
    unit = next((unit for unit in UNITS if text.upper().endswith(unit)), None)
    try:
        num_bytes = round(float(text[: -len(unit)]) * UNITS[unit]) if unit else 0
    except ValueError:
        num_bytes = 0
    if num_bytes < 4 or num_bytes % 4:  # noqa: PLR2004 - bytes of a float32
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected, for example, 4B, 64KB or 1MB.")
    return num_bytes


def format_size(num_bytes: int) -> str:
    unit = next(unit for unit, factor in UNITS.items() if num_bytes >= factor)
    return f"{num_bytes / UNITS[unit]:g} {unit}"


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"  # noqa: PLR2004 - a millisecond


def format_ratio(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.4f}"  # noqa: PLR2004


def describe_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show(console: Console, rows: Sequence[Row], columns: Sequence[str], markdown: bool) -> None:
    """Print the times, then their ratios to each baseline."""

    def print_table(title: str, names: Sequence[str], cell: Callable[[Row, str], str]) -> None:
        table = Table("ranks", "size", box=box.MARKDOWN if markdown else box.SIMPLE)
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(str(row.world), format_size(row.num_bytes), *(cell(row, name) for name in names))
        console.print(f"\n{title}\n")
        console.print(table)

    def format_time(row: Row, name: str) -> str:
        noisy = len(row.samples[name]) > 1 and row.spread(name) > NOISY_SPREAD
        return ("~" if noisy else "") + format_seconds(row.median(name))

    print_table("Time of one call", columns, format_time)
    for baseline in filter(columns.__contains__, BASELINES):
        others = [name for name in columns if name not in (baseline, "copy")]
        if others:
            print_table(
                f"Time / time of {baseline} (below 1: faster)",
                others,
                lambda row, name, baseline=baseline: format_ratio(row.median(name) / row.median(baseline)),  # type: ignore[misc]
            )
    fewest = min(len(row.samples[columns[0]]) for row in rows)
    console.print(
        f"\nAt least {fewest} repetitions. ~: the quartiles are further apart than {NOISY_SPREAD:.0%} of the median; "
        "the machine was busy, do not cite."
    )


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Let other processes compute meanwhile, each in a session of its own, as those of other users."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def load_average() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"sizes of the tensor (KB = 1000 bytes); default {SIZES}")
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks")
    parser.add_argument("--columns", default=",".join(COLUMNS), help=f"which of {', '.join(COLUMNS)}")
    parser.add_argument("--repetitions", type=int, help="batches of each column at each size; default 15")
    parser.add_argument("--busy", type=int, default=0, help="how many other processes compute meanwhile")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SIZES} and 5 repetitions, unless they are given")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    options = parser.parse_args()
    options.columns = options.columns.split(",")
    options.repetitions = options.repetitions or (5 if options.quick else 15)
    options.worlds = [int(world) for world in options.worlds.split(",")]
    try:
        options.sizes = [
            parse_size(text) for text in (options.sizes or (QUICK_SIZES if options.quick else SIZES)).split(",")
        ]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if unknown := sorted(set(options.columns) - COLUMNS.keys()):
        parser.error(f"no column is called {', '.join(unknown)}; there are {', '.join(COLUMNS)}.")
    return options


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parse_options()
    os.environ.setdefault("LOCKSTEP_CHECK", "0")  # else torch would be timed on groups of ours, which compare calls
    width = None if sys.stdout.isatty() and not options.markdown else 200
    console = Console(width=width, soft_wrap=True, markup=False, highlight=False, emoji=False)
    reasons = {column: why_unavailable(column) for column in options.columns}
    columns = [column for column in COLUMNS if column in options.columns and not reasons[column]]
    if not columns:
        sys.exit("; ".join(f"{column}: {reason}" for column, reason in reasons.items()))
    load_before = load_average()
    rows, versions = [], [f"torch {torch.__version__}"]
    for world in options.worlds:
        with contextlib.ExitStack() as stack:
            stack.enter_context(busy_processes(options.busy))
            pools: dict[str, WorkerPool] = {}
            if torchs := [column for column in columns if column not in MPIS]:
                pools |= dict.fromkeys(torchs, stack.enter_context(torch_pool(world, torchs)))
            for column in filter(columns.__contains__, MPIS):
                pools[column] = stack.enter_context(mpi_pool(column, world))
            versions[1:] = [pools[column].version for column in MPIS if column in pools]
            for num_bytes in options.sizes:
                print(f"{world} ranks, {format_size(num_bytes)} ...", file=sys.stderr, flush=True)
                rows.append(measure(pools, world, num_bytes, options.repetitions))
    console.print(
        f"{', '.join(versions)}, Python {platform.python_version()}; {os.cpu_count()} cores, {describe_cpu()}; "
        f"{options.busy} other processes compute; load average before {load_before}, after {load_average()}"
    )
    console.print(
        f"All-reduce of float32 sums; KB = 1000 bytes; one thread per rank; medians over up to {options.repetitions} "
        "repetitions of the slowest rank's mean time per call."
    )
    for column in options.columns:
        note = f" (left out: {reasons[column]})" if reasons[column] else ""
        console.print(f"- {column}: {COLUMNS[column]}{note}")
    show(console, rows, columns, options.markdown)


if __name__ == "__main__":
    main()
