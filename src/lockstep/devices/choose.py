"""Turn a request for devices into a placement. Pure: what the machine has comes in as numbers."""

import re
from collections.abc import Sequence

from lockstep.errors import DeviceError

DeviceRequest = str | Sequence[int] | None
"""`"auto"`, `"auto:3"`, `"cpu"`, `"cpu:2"`, `[0, 2, 5]`, or None for `"auto"`."""

NUM_CPU_WORKERS = 2
"""Workers that `auto` takes where there is no GPU."""

_COUNTED = re.compile(r"(auto|cpu)(?::([+-]?\d+))?")
_FORMS = 'say "auto", "auto:3", "cpu", "cpu:2" or a list of GPU numbers such as [0, 2]'


def choose_devices(
    request: DeviceRequest, *, workers: int | None = None, num_gpus: int, max_workers: int | None = None
) -> tuple[str, ...]:
    """Return one device name per worker, in rank order.

    Args:
        request: Which devices.
        workers: How many workers, where the request leaves that open; a list or a count must agree with it.
        num_gpus: How many GPUs this process may use.
        max_workers: What a bare `auto` takes at the most; an explicit count is not cut.

    Raises:
        DeviceError: The request cannot be read, contradicts `workers`, or asks for what is not there.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise DeviceError(f"workers is {workers!r}, but a run needs a whole number of workers, 1 or more.")
    if request is None:
        request = "auto"
    if isinstance(request, str):
        return _by_count(request, workers, num_gpus, max_workers)
    if isinstance(request, list | tuple):
        return _by_index(request, workers, num_gpus)
    raise DeviceError(f"device_ids is {request!r}, which could be a count or a number: {_FORMS}.")


def _by_count(request: str, workers: int | None, num_gpus: int, max_workers: int | None) -> tuple[str, ...]:
    match = _COUNTED.fullmatch(request.strip())
    if match is None:
        raise DeviceError(f"device_ids is {request!r}, which names no devices: {_FORMS}.")
    kind, count = match[1], workers if match[2] is None else int(match[2])
    if workers is not None and count != workers:
        raise DeviceError(f"device_ids is {request!r}, but workers is {workers}: let one of them go.")
    if count is not None and count < 1:
        raise DeviceError(f"device_ids is {request!r}, but a run needs at least one worker.")
    if kind == "cpu":
        return ("cpu",) * (count or 1)
    if num_gpus == 0:
        return ("cpu",) * (count or min(NUM_CPU_WORKERS, max_workers or NUM_CPU_WORKERS))
    if count is not None and count > num_gpus:
        raise DeviceError(
            f"{count} workers need {count} GPUs, but {num_gpus} can be seen here. "
            f'Ask for at most {num_gpus}, or say device_ids "cpu:{count}" to train on the CPU.'
        )
    taken = count or min(num_gpus, max_workers or num_gpus)
    return tuple(f"cuda:{index}" for index in range(taken))


def _by_index(request: Sequence[int], workers: int | None, num_gpus: int) -> tuple[str, ...]:
    indices = list(request)
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise DeviceError(f"device_ids holds {index!r}, but GPUs are named by whole numbers: {_FORMS}.")
        if not 0 <= index < num_gpus:
            seen = f"GPUs 0 to {num_gpus - 1} are here" if num_gpus else "no GPU can be seen here"
            raise DeviceError(f"device_ids asks for GPU {index}, but {seen}. `nvidia-smi -L` lists them.")
        if indices.count(index) > 1:
            raise DeviceError(f"device_ids names GPU {index} twice; each worker needs a GPU of its own.")
    if not indices:
        raise DeviceError("device_ids is an empty list, but a run needs at least one worker.")
    if workers is not None and workers != len(indices):
        raise DeviceError(f"device_ids names {len(indices)} GPUs, but workers is {workers}: let one of them go.")
    return tuple(f"cuda:{index}" for index in indices)
