"""Two real processes that run a script, each as if it had been started alone: no launcher ends one after the other.

They are forked from the server of `tests/process/ranks.py`, so a pair costs 50 ms and not 5 s. A rank reports its
messages while it runs, over a pipe, so that what it said is known even if it never ends.
"""

import atexit
import logging
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace, TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from tests.mistakes.judge import LIMIT_SECONDS, Message, Report, tensors_of
from tests.mistakes.script import WORLD_SIZE
from tests.mistakes.scripts import SCRIPTS
from tests.process.ranks import SERVER

import lockstep as ls

_START_SECONDS = 90.0
"""How long the ranks may take until their scripts begin; the first ones wait for a server that imports torch."""
_MARGIN_SECONDS = 3.0
"""How much longer than the limit a rank may take, from the moment when the last script has begun."""


def run_on_pair(name: str, backend: str = "shm", wrapper: str = "lockstep") -> list[Report]:
    """Run a script on two ranks, and return what each reported, in rank order.

    Args:
        name: Name of the script.
        backend: `"shm"` or `"gloo"`.
        wrapper: `"lockstep"`, or `"torch"` for torch's wrapper and torch's way to make the group.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines: list[Connection] = []
        processes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = SERVER.Pipe(duplex=False)
            process = SERVER.Process(target=_be_rank, args=(rank, name, backend, wrapper, folder, theirs))
            process.start()
            theirs.close()
            lines.append(ours)
            processes.append(process)
        try:
            return _collect(lines, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for line in lines:
                line.close()


def report_of(run: ls.Run, name: str) -> Report:
    """Run a script that has no mistake, on a rank that stays for the next one."""
    kept: list[tuple[str, Any]] = []
    reader = _Reader(SimpleNamespace(send_bytes=lambda packed: kept.append(pickle.loads(packed))))
    torch.manual_seed(1000 + run.rank)
    with reader.listening():
        result = tensors_of(SCRIPTS[name].run(run.rank, ls.DistributedDataParallel))
    return Report(messages=tuple(message for _, message in kept), result=result, end="returned")


def _collect(lines: Sequence[Connection], processes: Sequence[Any]) -> list[Report]:
    messages: list[list[Message]] = [[] for _ in lines]
    results: list[list[torch.Tensor] | None] = [None for _ in lines]
    ends = ["not done" for _ in lines]
    waited_for = {line: rank for rank, line in enumerate(lines)}
    deadline = time.monotonic() + _START_SECONDS
    num_begun = 0
    while waited_for and (ready := wait(list(waited_for), max(deadline - time.monotonic(), 0.0))):
        for line in ready:
            assert isinstance(line, Connection)
            rank = waited_for[line]
            try:
                kind, value = pickle.loads(line.recv_bytes())
            except EOFError:
                del waited_for[line]
                processes[rank].join(LIMIT_SECONDS)
                if ends[rank] == "not done":
                    ends[rank] = f"exit code {processes[rank].exitcode}"
                continue
            if kind == "begun":
                num_begun += 1
                if num_begun == len(lines):
                    deadline = time.monotonic() + LIMIT_SECONDS + _MARGIN_SECONDS
            elif kind == "message":
                messages[rank].append(value)
            else:
                ends[rank] = kind
                results[rank] = value
    return [
        Report(messages=tuple(said), result=result, end=end)
        for said, result, end in zip(messages, results, ends, strict=True)
    ]


def _be_rank(rank: int, name: str, backend: str, wrapper: str, folder: str, line: Connection) -> None:
    """Run a script as the main module of a process would be run, to the end of the process."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), 1)
        if "MISTAKES_STDERR" not in os.environ:
            os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    make_group = ls.init_process_group if wrapper == "lockstep" else dist.init_process_group
    make_group(backend, store=store, rank=rank, world_size=WORLD_SIZE)
    wrap = ls.DistributedDataParallel if wrapper == "lockstep" else torch.nn.parallel.DistributedDataParallel
    torch.manual_seed(1000 + rank)
    reader = _Reader(line)
    exit_code = 0
    reader.send("begun")
    with reader.listening():
        try:
            reader.send("returned", tensors_of(SCRIPTS[name].run(rank, wrap)))
        except SystemExit:
            reader.send("exited")
        except BaseException as error:  # noqa: BLE001 - a message to the user like the others
            exit_code = 1
            reader.add(type(error).__name__, str(error))
            reader.send("raised")
            sys.excepthook(type(error), error, _without_harness(error.__traceback__))
        atexit._run_exitfuncs()
    os._exit(exit_code)


def _without_harness(trace: TracebackType | None) -> TracebackType | None:
    return None if trace is None else trace.tb_next


@final
class _Reader:
    """Reads warnings and the log as a user does, and passes them on."""

    def __init__(self, line: Any) -> None:
        self._line = line
        self._start = time.monotonic()

    def send(self, kind: str, value: Any = None) -> None:
        """Send the test something; by value, for a tensor that is shared ends with this process."""
        self._line.send_bytes(pickle.dumps((kind, value)))

    def add(self, kind: str, text: str) -> None:
        message = Message(kind=kind, text=text, seconds=time.monotonic() - self._start)
        self.send("message", message)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Read what is warned and logged within this context."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.add(record.levelname, record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_place: self.add(category.__name__, str(message))
            try:
                yield
            finally:
                logging.getLogger().removeHandler(handler)
