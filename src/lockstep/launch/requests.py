"""Carrying out the requests of `lockstep scale`, or saying why that cannot be done."""

import re
from collections.abc import Callable
from typing import final

from lockstep.channel.table import Message
from lockstep.devices import Device
from lockstep.errors import DeviceError, counted
from lockstep.launch.continuation import Continuation
from lockstep.launch.control import RefusedError
from lockstep.launch.membership import WorkerLimits
from lockstep.launch.scaling import Scaling
from lockstep.launch.worker_pool import WorkerPool


@final
class ScaleRequests:
    """The requests to one launch; `find_devices` raises `DeviceError` where there are none."""

    def __init__(
        self,
        pool: WorkerPool,
        continuation: Continuation,
        scaling: Scaling,
        find_devices: Callable[[int], list[Device]],
    ) -> None:
        self._pool = pool
        self._continuation = continuation
        self._scaling = scaling
        self._find_devices = find_devices

    def begin(self, request: Message) -> str:
        what = request.get("op")
        if what == "describe":
            return self.describe()
        limits = self._check_possible()
        if what == "resize" and type(request.get("workers")) is int:
            return self._resize(request["workers"], limits)
        if what == "release" and isinstance(request.get("device"), str):
            return self._release(request["device"], limits)
        raise RefusedError(f"The request {str(request)[:80]} is none that this version of Lockstep knows. (LS603)")

    def result(self) -> str | None:
        if self._scaling.problem:
            raise RefusedError(f"{self._scaling.problem} The run goes on: {self.describe()}. (LS603)")
        return self.describe() if self._scaling.is_reached else None

    def describe(self) -> str:
        members = self._continuation.generation.workers
        names = [
            f"rank {rank} (pid {self._continuation.pids[worker]}) on {self._pool.devices[worker].label}"
            for rank, worker in enumerate(members)
        ]
        return f"{counted(len(members), 'worker')}: {', '.join(names)}"

    def _check_possible(self) -> WorkerLimits:
        if self._pool.is_stopping or self._continuation.is_over:
            raise RefusedError("The run is ending, so its workers do not change any more. (LS603)")
        limits = self._continuation.limits
        if limits is None:
            raise RefusedError(
                "The workers of this run cannot change: it is still starting, or its trainer was not made with "
                'on_worker_loss="continue", which on GPUs is not the default. If it is starting, try again when it '
                "trains. (LS603)"
            )
        if not self._scaling.is_reached:
            raise RefusedError("The workers of this run are changing already. Try again when that has ended. (LS603)")
        return limits

    def _resize(self, num_workers: int, limits: WorkerLimits) -> str:
        members = self._continuation.generation.workers
        if num_workers > limits.max_workers:
            raise RefusedError(
                f"{num_workers} workers cannot share {counted(limits.max_workers, 'shard')}: some would have nothing "
                f"to do. Ask for at most {limits.max_workers}. (LS603)"
            )
        if num_workers < max(limits.min_workers, 1):
            raise RefusedError(
                f"{counted(num_workers, 'worker')} would be fewer than min_workers, which is {limits.min_workers}. To "
                "stop the run, send its launcher SIGTERM. (LS603)"
            )
        num_more = num_workers - len(members)
        devices: list[Device] = []
        if num_more > 0:
            try:
                devices = self._find_devices(num_more)
            except DeviceError as error:
                raise RefusedError(f"{error}") from error
        self._scaling.resize(num_workers, devices)
        if num_more == 0:
            return "The run has as many workers already."
        if num_more < 0:
            return f"{counted(-num_more, 'worker')} of {len(members)} will leave after the current step."
        labels = ", ".join(device.label for device in devices)
        return f"{counted(num_more, 'worker')} will join between two steps, when it is ready: {labels}."

    def _release(self, device: str, limits: WorkerLimits) -> str:
        members = self._continuation.generation.workers
        found = [worker for worker in members if is_named(device, self._pool.devices[worker])]
        if not found:
            raise RefusedError(f"No worker of this run uses {device}. It has {self.describe()}. (LS603)")
        num_left = len(members) - len(found)
        if num_left < max(limits.min_workers, 1):
            raise RefusedError(
                f"Without {device} the run would have {counted(num_left, 'worker')}, and min_workers is "
                f"{limits.min_workers}. To stop the run, send its launcher SIGTERM. (LS603)"
            )
        for worker in found:
            self._scaling.let_go(worker)
        return f"{counted(len(found), 'worker')} of {len(members)} will leave after the current step."


def is_named(name: str, device: Device) -> bool:
    """Return whether a device has a name: "GPU2", "2", a part of its UUID from the beginning, as in `device_ids`."""
    if not device.visible:
        return False
    number = re.fullmatch(r"(?:gpu)?[ :]?(\d+)", name.strip(), re.IGNORECASE)
    if number is not None:
        return re.match(rf"GPU {number[1]}\b", device.label) is not None
    return any(each.lower().startswith(name.strip().lower()) for each in device.visible.split(","))
