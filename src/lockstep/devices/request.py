"""The requests for devices that a user may write, and reading them into values. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import DeviceError, counted

GpuName = int | str
"""The number in nvidia-smi, "0:1" for a MIG instance, or a UUID or its beginning: "GPU-5b2c", "MIG-..."."""

DeviceRequest = str | Sequence[GpuName | Sequence[GpuName]] | None
"""`"auto"`, `"auto:3"`, `"auto:3@20GiB"`, `"cpu"`, `"cpu:2"`, `"0,2"`, `[0, 2, 5]`, `["GPU-5b2c", 1]`, for two GPUs
per worker `[[0, 1], [2, 3]]`; None for `"auto"`. `"auto:3>=20GiB"` is the same as `"auto:3@20GiB"`, but a shell takes
its `>` for a redirection, unless it stands in quotes."""

FORMS = (
    'use "auto", "auto:3", "auto:3@20GiB" (free memory), "cpu", "cpu:2", or a list of GPU numbers or UUIDs such as '
    '[0, 2] or ["GPU-5b2c"]'
)

_COUNTED = re.compile(r"(auto|cpu)\s*(?::\s*([+-]?\d+))?\s*(?:(?:>=|@)(.*))?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
_NAME = re.compile(r"\d+(:\d+)?|(GPU|MIG)-[\w/-]+", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Auto:
    """GPUs that are free, or the CPU where there are none."""

    count: int | None = None
    """How many; None for all that are free."""
    min_free_bytes: int | None = None
    """Take any GPU with this much free memory, also one that other processes use; None to take free GPUs only."""


@dataclass(frozen=True, slots=True)
class Cpu:
    count: int | None = None
    """How many; None for the value of `workers`, or one."""


@dataclass(frozen=True, slots=True)
class Named:
    groups: tuple[tuple[GpuName, ...], ...]
    """The GPUs of each worker, in rank order; usually one each."""


Request = Auto | Cpu | Named


def parse_request(request: DeviceRequest) -> Request:
    if request is None:
        return Auto()
    if isinstance(request, str):
        return _parse_text(request)
    if not isinstance(request, list | tuple):
        raise DeviceError(f"device_ids is {request!r}, which could be a count or the number of a GPU: {FORMS}. (LS901)")
    if not request:
        raise DeviceError("device_ids is an empty list, but a run needs at least one worker. (LS901)")
    return Named(tuple(_parse_group(entry, request) for entry in request))


def with_workers(request: Request, workers: int | None) -> Request:
    if workers is None:
        return request
    if isinstance(request, Named):
        if workers != len(request.groups):
            raise DeviceError(
                f"device_ids names {counted(len(request.groups), 'GPU')}, but workers is {workers}. Leave one of the "
                "two out. (LS905)"
            )
        return request
    if request.count not in {None, workers}:
        raise DeviceError(
            f"device_ids asks for {counted(request.count or 0, 'device')}, but workers is {workers}. Leave one of the "
            "two out. (LS905)"
        )
    return replace(request, count=workers)


def resized(request: Request, workers: int) -> Request:
    """Return a request for the same kind of devices and another number of workers; of named GPUs it has the first."""
    if not isinstance(request, Named):
        return replace(request, count=workers)
    if len(request.groups) < workers:
        named = counted(len(request.groups), "device")
        raise DeviceError(
            f"device_ids names {named}, too few for {counted(workers, 'worker')}. Name more, or cpu. (LS905)"
        )
    return Named(request.groups[:workers])


def _parse_text(text: str) -> Request:
    match = _COUNTED.fullmatch(text.strip())
    if match is None and text.strip().startswith("["):
        return parse_request(_read_list(text))
    if match is None:
        names = [part.strip() for part in text.split(",")]
        if not all(_NAME.fullmatch(name) for name in names):
            raise DeviceError(f"device_ids is {text!r}, which names no devices: {FORMS}. (LS901)")
        return Named(tuple((_as_name(name),) for name in names))
    kind, count, size = match[1], None if match[2] is None else int(match[2]), match[3]
    if count is not None and count < 1:
        raise DeviceError(f"device_ids is {text!r}, but a run needs at least one worker. (LS901)")
    if kind == "auto":
        return Auto(count, None if size is None else _parse_size(size.strip(), text))
    if size is not None:
        raise DeviceError(f'device_ids is {text!r}, but only "auto" asks for free memory: {FORMS}. (LS901)')
    return Cpu(count)


def _read_list(text: str) -> list[GpuName | Sequence[GpuName]]:
    """Read a list as it is written in Python or in YAML, where names need no quotes."""
    try:
        entries: list[GpuName | Sequence[GpuName]] = json.loads(text)
    except ValueError:
        inner = text.strip().removeprefix("[").removesuffix("]")
        entries = [part.strip(" \"'") for part in inner.split(",")]
    return entries


def _parse_size(size: str, text: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise DeviceError(
            f"device_ids is {text!r}, where {size!r} should be an amount of memory with its unit: GiB, GB, MiB or MB, "
            'as in "auto:3@20GiB". (LS901)'
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _parse_group(entry: object, request: DeviceRequest) -> tuple[GpuName, ...]:
    if isinstance(entry, list | tuple):
        if not entry:
            raise DeviceError(
                f"device_ids is {request!r}, where a worker gets no GPU: name one for each worker. (LS901)"
            )
        return tuple(_parse_name(name) for name in entry)
    return (_parse_name(entry),)


def _parse_name(name: object) -> GpuName:
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    if isinstance(name, str) and _NAME.fullmatch(name.strip()):
        return _as_name(name.strip())
    raise DeviceError(
        f"device_ids holds {name!r}, but GPUs are named by whole numbers from 0 on, or by UUIDs: {FORMS}. (LS901)"
    )


def _as_name(text: str) -> GpuName:
    return int(text) if text.isdigit() else text
