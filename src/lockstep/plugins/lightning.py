"""Lightning's Trainer: a strategy whose wrapper and process group are Lockstep's.

from lockstep.plugins.lightning import LockstepStrategy

trainer = lightning.Trainer(strategy=LockstepStrategy(), devices=2)  # or strategy="lockstep"
"""

from typing import Any

from torch import nn

from lockstep.parallel import DistributedDataParallel
from lockstep.plugins import make_group

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ModuleNotFoundError:  # the same code, as a package of its own
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry


class LockstepStrategy(DDPStrategy):  # type: ignore[misc]  # the library may not be installed
    """Lightning's `DDPStrategy`, with its arguments, on Lockstep's wrapper and process group."""

    strategy_name = "lockstep"

    def setup_distributed(self) -> None:
        """Make the process group, if there is none, and continue as Lightning does (collective)."""
        self.set_world_ranks()
        make_group(self, self._timeout)
        super().setup_distributed()

    def _setup_model(self, model: nn.Module) -> Any:
        return DistributedDataParallel(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: this module has done so."""


if "lockstep" not in StrategyRegistry:
    StrategyRegistry.register("lockstep", LockstepStrategy, description="DDP with Lockstep's wrapper and group")
