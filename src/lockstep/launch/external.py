"""`launch` where another launcher has started the workers: torchrun, srun, mpirun, a PyTorchJob, Ray Train.

Each worker then runs the script and calls `launch`, which starts no process: it joins the group of these workers and
calls the function in this process.

torch is imported by the functions that need it: where no other launcher is, the caller of `launch` may do without it.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.devices import DeviceRequest, Placement, parse_request
from lockstep.devices.request import Auto, Cpu
from lockstep.errors import DeviceError, GroupError, counted
from lockstep.launch.messages import Run
from lockstep.processes.host import keep_freed_memory
from lockstep.settings import WorldVariables, read_settings

if TYPE_CHECKING:
    from lockstep.comm import World


def find_launcher() -> WorldVariables | None:
    """Return another launcher's variables about this worker, if it started this process as one of several workers."""
    settings = read_settings()
    if settings.is_launched() or not (settings.launchers() or "torch.distributed" in sys.modules):
        return None
    from lockstep.comm import launched_world

    return launched_world()


def run_here(
    call: Callable[[Run], Any],
    launcher: WorldVariables,
    *,
    workers: int | None,
    devices: DeviceRequest | Placement,
    threads: int,
    seed: int,
) -> list[Any]:
    """Join the world and call `call` in this process (collective); return the results of all ranks in rank order."""
    import torch

    from lockstep.comm import report_failure
    from lockstep.devices.transfer import current_accelerator
    from lockstep.processes.reproducibility import seed_generators

    world = join_started(devices)
    _check_request(workers, devices, world.world_size, launcher.launcher)
    accelerator = current_accelerator() if _uses_accelerator(devices) else None
    torch.set_num_threads(threads)
    seed_generators(seed)
    try:
        result = call(
            Run(
                rank=world.rank,
                world_size=world.world_size,
                local_rank=_read_local_rank(launcher),
                device=accelerator or torch.device("cpu"),
            )
        )
    except BaseException as error:
        report_failure(error)
        raise
    return world.gather_objects(result)


def join_started(devices: DeviceRequest | Placement) -> "World":
    """Join the workers that another launcher has started, on the requested kind of device (collective)."""
    import torch

    from lockstep.comm import join_world

    uses_accelerator = _uses_accelerator(devices)
    if not uses_accelerator:
        keep_freed_memory()
    return join_world(None if uses_accelerator else torch.device("cpu"))


def _read_local_rank(launcher: WorldVariables) -> int:
    if launcher.local_rank is not None and not launcher.local_rank.isdecimal():
        raise GroupError(
            f"LOCAL_RANK is {launcher.local_rank!r}, expected a number from 0 to LOCAL_WORLD_SIZE - 1. (LS102)"
        )
    return int(launcher.local_rank or 0)


def _uses_accelerator(devices: DeviceRequest | Placement) -> bool:
    """Return whether workers train on this host's accelerator; one without a backend, such as MPS, is not used."""
    import torch

    from lockstep.comm.bootstrap.process_group import choose_backend

    is_cpu = not isinstance(devices, Placement) and isinstance(parse_request(devices), Cpu)
    return not is_cpu and choose_backend() != choose_backend(torch.device("cpu"))


def _check_request(workers: int | None, devices: DeviceRequest | Placement, world_size: int, launcher: str) -> None:
    started = f"{launcher} started {counted(world_size, 'worker')} already"
    if workers is not None and workers != world_size:
        raise DeviceError(
            f"workers is {workers}, but {started}. Leave workers out, and give {launcher} the number of "
            "workers. (LS123)"
        )
    request = devices if isinstance(devices, Placement) else parse_request(devices)
    if not isinstance(request, Auto | Cpu) or request.count not in {None, world_size}:
        raise DeviceError(
            f"devices is {devices!r}, but {started}, and each uses the GPU whose number is its local rank. Use auto or "
            "cpu. To choose GPUs, set CUDA_VISIBLE_DEVICES. (LS123)"
        )
