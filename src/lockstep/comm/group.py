"""Setting up and tearing down the process group, with torch's arguments and errors that say what to do."""

import datetime
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from lockstep.errors import GroupError
from lockstep.settings import WorldVariables, read_world

_REMEDY = "Start the script with torchrun, or call ls.launch, which sets up the group by itself."


def init_process_group(  # the parameters are torch's, in torch's order
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Set up the default process group (collective over the world that is made).

    Same arguments as `torch.distributed.init_process_group`, except that the backend is chosen by device when it
    is not given: NCCL for CUDA tensors where there are GPUs, Gloo for CPU tensors.

    Args:
        backend: `"nccl"`, `"gloo"`, `"cpu:gloo,cuda:nccl"`, ...; None to choose.
        init_method: `"env://"` (the default), `"tcp://host:port"` or `"file:///path"`.
        timeout: How long a collective may take; None for the backend's default.
        world_size: Number of workers; needed unless the method is `env://`.
        rank: Number of this worker; needed unless the method is `env://`.
        store: A store that all workers share, instead of `init_method`.
        group_name: Accepted because torch does; without effect there too.
        pg_options: Options of the backend, handed through.
        device_id: The device of this worker, if it has one.

    Raises:
        GroupError: There is a group already; a variable is missing or not a number; the rank is outside the
            world; the rendezvous cannot be reached; this torch lacks the backend.
        ValueError: Both `store` and `init_method` are given.
    """
    if dist.is_initialized():
        raise GroupError(
            f"This process is rank {dist.get_rank()} of a process group already. A worker that ls.launch started "
            "has its group; elsewhere call ls.destroy_process_group() before making another one."
        )
    if store is not None and init_method is not None:
        raise ValueError("Both store and init_method are given; they are two ways to say one thing: drop one.")
    backend = choose_backend(device_id) if backend is None else backend
    _check_backend(backend)
    if store is None and (init_method or "env://").startswith("env://"):
        _check_environment(read_world(), world_size, rank)
    elif world_size < 0 or rank < 0:
        raise GroupError(
            f"rank is {rank} and world_size is {world_size}, but {init_method or 'a store'} knows neither: give both."
        )
    if world_size >= 0 and rank >= 0:
        _check_rank(rank, world_size)
    try:
        dist.init_process_group(
            backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id
        )
    except dist.DistNetworkError as error:
        raise GroupError(_explain_network(str(error))) from error


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Tear down `group`, or the default group and with it all others; calling it again does nothing (local)."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group(group)


def choose_backend(device_id: torch.device | int | None = None) -> str:
    """Return the backend for this worker's device: NCCL beside Gloo where there is a GPU, else Gloo (local)."""
    wants_gpu = device_id.type == "cuda" if isinstance(device_id, torch.device) else torch.cuda.is_available()
    return "cpu:gloo,cuda:nccl" if wants_gpu and dist.is_nccl_available() else "gloo"


def _check_backend(backend: str) -> None:
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            known = ", ".join(sorted(known for known in dist.Backend.backend_list if dist.is_backend_available(known)))
            raise GroupError(f"This build of torch ({torch.__version__}) has no backend {name!r}; it has: {known}.")


def _check_environment(variables: WorldVariables, world_size: int, rank: int) -> None:
    given: Mapping[str, bool] = {"rank": rank >= 0, "world_size": world_size >= 0}
    values = {field.name: getattr(variables, field.name) for field in fields(variables)}
    needed = [name for name in ("rank", "world_size", "master_addr", "master_port") if not given.get(name)]
    missing = [name.upper() for name in needed if not values[name]]
    if missing:
        raise GroupError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the environment, so this "
            f"worker does not know its place. {_REMEDY}"
        )
    for name in needed:
        if name != "master_addr" and not values[name].isdecimal():
            raise GroupError(f"{name.upper()} is {values[name]!r} in the environment, expected a whole number.")
    _check_rank(
        rank if given["rank"] else int(values["rank"]),
        world_size if given["world_size"] else int(values["world_size"]),
    )


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise GroupError(
            f"Rank {rank} is outside a world of {world_size} workers: ranks are 0 to {world_size - 1}. "
            "Check that the number of workers counts processes, not hosts."
        )


def _explain_network(message: str) -> str:
    if "EADDRINUSE" in message or "address already in use" in message.lower():
        return (
            "The rendezvous port is in use by another program, perhaps another training. Set MASTER_PORT to a "
            f"free one, or use ls.launch, which picks one by itself. torch said: {message.splitlines()[0]}"
        )
    return (
        "The rendezvous cannot be reached: check MASTER_ADDR and MASTER_PORT, and that rank 0 is running. "
        f"torch said: {message.splitlines()[0]}"
    )
