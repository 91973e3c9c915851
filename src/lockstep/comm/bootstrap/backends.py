"""Which backends a group has: chosen for the worker's device and the hosts of all, and what speaks against them."""

import warnings

import torch
import torch.distributed as dist

from lockstep.comm.bootstrap.interface import explain_wrong_interface
from lockstep.comm.hosts import GroupHosts
from lockstep.comm.nccl_defects import explain_defects
from lockstep.devices.transfer import own_accelerator, take_gpu
from lockstep.settings import WorldVariables, read_settings

_FOR_CPU = frozenset({"gloo", "shm", "mpi", "fake"})
"""Backends with which a worker needs no accelerator."""
_INTERNAL = frozenset({"checked", "fake", "undefined"})
"""Backends that users should not pass by name."""


def choose_backend(device_id: torch.device | int | None = None) -> str:
    """Return the backends for this worker: shared memory, and where there is an accelerator its own beside it (local).

    LOCKSTEP_CPU_BACKEND=gloo replaces shared memory by Gloo. Without `device_id`, the accelerator of this host counts.
    """
    if isinstance(device_id, torch.device):
        kind = device_id.type
    else:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = "cpu" if found is None else found.type
    name = dist.Backend.default_device_backend_map.get(kind, "gloo")
    has_own = name != "gloo" and dist.is_backend_available(name)
    for_cpu = read_settings().cpu_backend()
    return f"cpu:{for_cpu},{kind}:{name}" if kind != "cpu" and has_own else for_cpu


def backend_on_hosts(backend: str, hosts: GroupHosts, rank: int, *, is_chosen: bool) -> str:
    """Return the backends for ranks on these hosts: Gloo replaces shared memory beside an accelerator's backend."""
    if hosts.is_one_host or "," not in backend or "shm" not in backend_names(backend):
        return backend
    if rank == 0 and not is_chosen:
        warnings.warn(
            "The group uses Gloo instead of shm, because "
            f"{hosts.why_not_shared(range(len(hosts.identities)))}. (LS116)",
            stacklevel=3,
        )
    return backend.lower().replace(":shm", ":gloo")


def warn_of_nccl(backend: str, hosts: GroupHosts, rank: int) -> None:
    """Warn, on rank 0, if this version of NCCL is known to return wrong results in such a group."""
    if rank == 0 and "nccl" in backend_names(backend) and dist.is_nccl_available():
        text = explain_defects(
            torch.cuda.nccl.version()[:3], world_size=len(hosts.identities), is_one_host=hosts.is_one_host
        )
        if text:
            warnings.warn(text, stacklevel=3)


def own_device(backend: str, variables: WorldVariables) -> torch.device | None:
    """Return the accelerator that its backend is to use in this process, if it follows from the local rank (local)."""
    device = own_accelerator(variables.local_rank)
    name = None if device is None else dist.Backend.default_device_backend_map.get(device.type)
    return device if name != "gloo" and name in backend_names(backend) else None


def explain_missing_backend(backend: str) -> str:
    """Return which backend this torch lacks, or which device it cannot serve; empty if all are usable."""
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            public = set(dist.Backend.backend_list) - _INTERNAL
            known = ", ".join(sorted(known for known in public if dist.is_backend_available(known)))
            return f"This build of torch ({torch.__version__}) has no backend {name!r}; it has: {known}. (LS108)"
        if part.endswith(":shm") and part != "cpu:shm":
            return (
                f"The backend shm is for CPU tensors, but {part!r} uses it for others. "
                "Give 'cpu:shm,cuda:nccl'. (LS108)"
            )
    return ""


def explain_unusable(backend: str, variables: WorldVariables, device_id: torch.device | int | None) -> str:
    """Return which interface or GPU is set for this worker but cannot be used; empty if there is no problem.

    Makes the GPU of its local rank the current device, unless the worker has chosen one.
    """
    if uses_gloo_anywhere(backend) and (problem := explain_wrong_interface()):
        return problem
    is_for_cpu = set(backend_names(backend)) <= _FOR_CPU
    if device_id is not None or is_for_cpu or not (variables.local_rank or "").isdecimal():
        return ""
    return take_gpu(int(variables.local_rank or 0))


def uses_gloo_anywhere(backend: str) -> bool:
    """Return whether Gloo is among the backends; shm uses it if the workers are on several hosts."""
    return "gloo" in backend.lower() or "shm" in backend.lower()


def backend_names(backend: str) -> list[str]:
    """Return the names of a group's backends: `["shm", "nccl"]` for `"cpu:shm,cuda:nccl"`."""
    return [part.rpartition(":")[2] for part in backend.lower().split(",")]
