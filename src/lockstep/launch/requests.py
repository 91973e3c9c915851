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

_NUMBER = re.compile(r"(?:gpu)?[ :]?(\d+(?::\d+)?)")
_UUID = re.compile(r"(?:gpu|mig)-[\w/-]*")
_LABEL = re.compile(r"\bGPU (\d+(?::\d+)?)(?= \()")


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
        named = {worker: parts for worker in members if (parts := named_parts(device, self._pool.devices[worker]))}
        found = list(named)
        if len(parts := set[str]().union(*named.values())) > 1:
            raise RefusedError(f"{device} means {' and '.join(sorted(parts))}. Name one of them. (LS603)")
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


def named_parts(name: str, device: Device) -> set[str]:
    """Return the cards of a device that a name means, as `device_ids` names them: "GPU2", "2", "0:1", UUIDs.

    The number of a card that is split by MIG means none of its instances; a UUID may be given by its beginning.
    """
    if not device.visible:
        return set()
    wanted = name.strip().lower()
    if (number := _NUMBER.fullmatch(wanted)) is not None:
        return {each for each in _LABEL.findall(device.label) if each == number[1]}
    return {each for each in device.visible.split(",") if _UUID.fullmatch(wanted) and each.lower().startswith(wanted)}
