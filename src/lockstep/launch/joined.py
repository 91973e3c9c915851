"""A launch where somebody else has started the workers: torchrun, srun, mpirun, a PyTorchJob, Ray Train.

`launch` is then called in each of them, by the same script that starts its own workers elsewhere. It starts nothing,
joins the world that is there, and calls the function in this process.
"""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm import join_world, launched_world, tell_peers
from lockstep.devices import DeviceRequest
from lockstep.errors import DeviceError
from lockstep.launch.messages import Run
from lockstep.processes import keep_freed_memory
from lockstep.settings import WorldVariables, read_is_launched
from lockstep.train.reproducibility import seed_generators


def find_launcher() -> WorldVariables | None:
    """Return what another launcher than Lockstep's says of this worker, if it started this process as one of several.

    Raises:
        GroupError: What launchers say contradicts itself.
    """
    return None if read_is_launched() else launched_world()


def run_here(
    call: Callable[[Run], Any],
    told: WorldVariables,
    *,
    workers: int | None,
    devices: DeviceRequest,
    threads: int,
    seed: int,
) -> list[Any]:
    """Join the world and call `call` in this process (collective); return what it returned in each, in rank order.

    Raises:
        DeviceError: Other workers or devices are asked for than the launcher has started.
        Exception: What the function raised, or the error that tells of another worker's.
    """
    wants_cpu = isinstance(devices, str) and devices.strip().startswith("cpu")
    has_gpu = torch.cuda.is_available() and not wants_cpu
    if not has_gpu:
        keep_freed_memory()
    world = join_world(None if has_gpu else torch.device("cpu"))
    _check_request(workers, devices, world.world_size, told.launcher)
    torch.set_num_threads(threads)
    seed_generators(seed)
    try:
        result = call(
            Run(
                rank=world.rank,
                world_size=world.world_size,
                local_rank=int(told.local_rank or 0),
                device=torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu"),
            )
        )
    except BaseException as error:
        tell_peers(error)
        raise
    return world.gather_objects(result)


def _check_request(workers: int | None, devices: DeviceRequest, world_size: int, launcher: str) -> None:
    """Check that the call asks for what is there: it cannot have anything else."""
    started = f"{launcher} started {world_size} workers already"
    if workers is not None and workers != world_size:
        raise DeviceError(
            f"workers is {workers}, but {started}. Leave workers out, and say how many there are to be to {launcher}."
        )
    if devices is None:
        return
    kind, _, count = devices.strip().partition(":") if isinstance(devices, str) else ("list", "", "")
    if kind not in {"auto", "cpu"} or (count and count != str(world_size)):
        raise DeviceError(
            f"devices is {devices!r}, but {started}, and each has the device of its number on its host. Say auto, or "
            "cpu; which GPUs there are is set by CUDA_VISIBLE_DEVICES."
        )
