"""Which device each worker gets, and why. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep.settings import VISIBLE_VARIABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one worker."""

    name: str
    """Its name for torch in that worker: "cuda:0", because the worker sees no other card, or "cpu"."""
    visible: str
    """CUDA_VISIBLE_DEVICES of that worker, or the variable of another kind: the card's name in it; empty on the CPU."""
    label: str
    """Its name in messages: "GPU 2 (NVIDIA GeForce RTX 3090)" or "CPU"."""

    def variables(self) -> Mapping[str, str]:
        """Return the environment in which a worker sees this device and no other."""
        return _variables(self.name, self.visible)


CPU = Device(name="cpu", visible="", label="CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One device per worker, in rank order."""

    devices: tuple[Device, ...]
    reason: str
    """One line: which devices these are, and why the others were not chosen."""
    hint: str = ""
    """Advice for the user, in one line; empty for none."""

    def variables_of_all(self) -> Mapping[str, str]:
        """Return the environment in which a worker sees the cards of all, in rank order: that of rank 1 as "cuda:1"."""
        return _variables(self.devices[0].name, ",".join(device.visible for device in self.devices if device.visible))

    def first(self, num_workers: int) -> "Placement":
        return replace(self, devices=self.devices[:num_workers])


def _variables(name: str, visible: str) -> Mapping[str, str]:
    variable = VISIBLE_VARIABLES.get(name.partition(":")[0])
    if variable is not None:
        return {variable: visible}
    # The order matters only where a card has no UUID and is named by its number, which is the one of nvidia-smi.
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
