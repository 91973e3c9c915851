"""What the launcher and a worker of `launch` send each other: a task and a report, each as bytes on a pipe.

And what the caller of `launch` gets of a report: a result, or an exception.

launcher                                   worker
--------                                   ------
search path (JSON line)            ->      sets sys.path, which unpickling the task needs
WorkerTask (pickle)                ->
                                   <-      Report (pickle)
"""

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from lockstep.errors import WorkerFailedError, WorkerFailure
from lockstep.launch.pickling import find_in_call, find_in_result, name_of, pack

if TYPE_CHECKING:  # a launcher does not need torch
    import torch


@dataclass(slots=True, kw_only=True)
class Run:
    """Rank and device of a worker: the first argument of the function that `launch` calls.

        def main(run: ls.Run) -> None:
            model = Net().to(run.device)
            if run.rank == 0:
                print(f"{run.world_size} workers")

    Where a trainer continues without a lost worker, `rank` and `world_size` change in the call that does so.
    """

    rank: int
    """Number of this worker."""
    world_size: int
    """How many workers there are."""
    local_rank: int
    """Number of this worker on its host; it does not change."""
    device: "torch.device"
    """The worker's device; if it is a GPU, it is the current device already."""
    is_new: bool = False
    """Whether this worker was started to join others that train already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    worker: int
    rank: int
    """Its rank at first; 0 for a worker that joins later."""
    world_size: int
    """How many there are at first; 1 for a worker that joins later."""
    is_joiner: bool = False
    device: str
    master_port: int
    """A loopback port that the launcher has reserved, for a store of the function's own."""
    threads: int
    is_portable: bool
    seed: int
    parent_pid: int
    argv: tuple[str, ...]
    is_from_ipython: bool
    """Whether the launcher is a shell of IPython, whose built-in functions the function may call."""
    recording: str
    """The folder where it records what it does; empty for none."""
    capacity: int
    folder: str
    """For temporary files; the launcher has it deleted when all have ended. Empty for none."""
    call: bytes
    """The function, its positional and its keyword arguments, pickled by `pack_call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    rank: int
    time: float
    """When it ended, on the host's monotonic clock, in seconds."""
    result: bytes | None = None
    reason: str = ""
    traceback: str = ""
    error: bytes | None = None
    """The exception, pickled; None if it cannot be pickled."""
    has_left: bool = False
    """Whether it has left the others between two steps; there is no result then."""


def pack_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call; a function of a script or a notebook cell is sent by value."""
    try:
        return pack((function, args, dict(kwargs)))
    except Exception as error:
        found = find_in_call(function, args, kwargs)
        raise TypeError(
            f"`{name_of(function)}` cannot be sent to the workers. {_describe_location(found, error)} "
            "Create it inside the function, or in another module that the function imports. (LS120)"
        ) from error


def pack_result(result: object) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        raise TypeError(
            f"The function returned a {type(result).__name__} that cannot be sent to the launcher. "
            f"{_describe_location(find_in_result(result), error)} Return numbers, text, containers or CPU "
            "tensors. (LS120)"
        ) from error


def _describe_location(found: str | None, error: Exception) -> str:
    text = found or f"It cannot be pickled: {error}"
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def send_task(stream: BinaryIO, search_path: list[str], task: WorkerTask) -> None:
    stream.write(json.dumps(search_path).encode() + b"\n")
    pickle.dump(task, stream)  # which copies no large argument


def send_report(stream: BinaryIO, report: Report) -> None:
    payload = pickle.dumps(report)
    stream.write(struct.pack("<Q", len(payload)) + payload)
    stream.flush()


def read_report(received: bytes | bytearray) -> Report | None:
    """Return the report in what a worker wrote; None if it is not complete."""
    header = struct.calcsize("<Q")
    if len(received) < header or len(received) < header + struct.unpack_from("<Q", received)[0]:
        return None
    report: Report = pickle.loads(memoryview(received)[header:])  # noqa: S301 - from our own child, over a pipe only it holds
    return report


def load_result(report: Report) -> Any:
    try:
        return pickle.loads(report.result or b"")  # noqa: S301 - from our own child
    except Exception as error:
        reason = f"returned a value that the launcher cannot unpickle: {type(error).__name__}: {error}"
        failure = WorkerFailure(rank=report.rank, reason=reason, traceback="", error=error)
        raise WorkerFailedError(
            f"Worker {report.rank} {reason}. Return numbers, text, containers or CPU tensors. (LS120)", (failure,)
        ) from error


def load_error(report: Report) -> BaseException | None:
    """Return the worker's exception; None if it cannot be unpickled here. The report has its text in any case."""
    try:
        error: BaseException | None = pickle.loads(report.error) if report.error is not None else None  # noqa: S301
    except Exception:  # noqa: BLE001 - unpickling a user's class may raise anything
        return None
    return error
