"""Process groups: which there are, their stores and backends, and options of backends."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroup, Store, distributed_c10d

AnyFuture: type = torch._C.Future
"""The class of every future, `torch.futures.Future` and what `then` of a future from C++ returns alike."""


def list_groups() -> list[ProcessGroup]:
    """Return the groups of this process that torch made and has not destroyed, the default group first (local).

    For: telling the other ranks of each that this one is done. torch's tests replace the object that is asked, so it is
    looked up in each call.
    """
    return list(distributed_c10d._world.pg_map)


def store_of(group: ProcessGroup) -> Store | None:
    """Return the store that the ranks of a group share, with keys of their own; None if torch did not make it (local).

    For: seeing whether a group was destroyed, and messages between ranks while a collective hangs.
    """
    known = distributed_c10d._world.pg_map.get(group)
    return None if known is None else known[1]


def default_group() -> ProcessGroup:
    """Return the default group itself, where `dist.group.WORLD` is typed as possibly absent (local).

    Raises:
        ValueError: There is none.
    """
    return distributed_c10d._get_default_group()


def default_timeout(backend: str) -> timedelta:
    """Return how long a backend's calls wait if `init_process_group` is given no timeout."""
    return distributed_c10d._get_default_timeout(Backend(backend))


def device_types(group: ProcessGroup) -> list[torch.device]:
    """Return the devices for which a group has a backend, without an index."""
    return group._device_types


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend that does a group's calls for tensors on a device.

    Raises:
        RuntimeError: It has none.
    """
    return group._get_backend(device)


def register_backend(group: ProcessGroup, device: torch.device, kind: ProcessGroup.BackendType, backend: Any) -> None:
    """Let a backend do a group's calls for tensors on a device."""
    group._register_backend(device, kind, backend)


def set_default_backend(group: ProcessGroup, kind: ProcessGroup.BackendType) -> None:
    """Let the backend of a kind, once registered, be what a group goes by where no tensor says: its name, for one."""
    group._set_default_backend(kind)


def gloo_options(*, devices: Sequence[Any], timeout: timedelta, num_threads: int) -> Any:
    """Return options of Gloo with an interface of one's own choice, for which torch has no public name.

    Args:
        devices: From `ProcessGroupGloo.create_device`.
        timeout: How long its calls wait.
        num_threads: How many threads do calls.
    """
    options: Any = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._devices = list(devices)
    options._timeout = timeout
    options._threads = num_threads
    return options


def gloo_num_threads() -> int:
    """Return how many threads a Gloo group has that torch makes."""
    num_threads: int = distributed_c10d.ProcessGroupGloo._Options()._threads  # type: ignore[attr-defined]
    return num_threads


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set how long the calls of a backend with these options wait."""
    options._timeout = timeout


def root_mesh(mesh: Any) -> Any:
    """Return the device mesh that a mesh was cut from; a mesh that was not, itself."""
    return mesh._get_root_mesh()
