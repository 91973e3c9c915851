"""Lightning Fabric: a strategy whose wrapper and process group are Lockstep's.

from lockstep.plugins.fabric import LockstepFabricStrategy

fabric = Fabric(strategy=LockstepFabricStrategy(), devices=2)
"""

from typing import Any

from torch import nn

from lockstep.parallel import DistributedDataParallel
from lockstep.plugins import make_group

try:
    from lightning.fabric.strategies import DDPStrategy
except ModuleNotFoundError:  # the same code, as a package of its own
    from lightning_fabric.strategies import DDPStrategy


class LockstepFabricStrategy(DDPStrategy):  # type: ignore[misc]  # the library may not be installed
    """Fabric's `DDPStrategy`, with its arguments, on Lockstep's wrapper and process group."""

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap the module (collective)."""
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        return DistributedDataParallel(module, device_ids, **self._ddp_kwargs)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        make_group(self, self._timeout)
        super()._setup_distributed()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: pass an object of this class."""
