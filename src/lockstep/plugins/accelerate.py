"""Hugging Face Accelerate, and the Trainer of Transformers: models are wrapped with Lockstep's class.

    from lockstep.plugins.accelerate import use_lockstep

    accelerator = use_lockstep(Accelerator())  # or, before train(): use_lockstep(trainer.accelerator)

Accelerate constructs torch's class, then calls its handler's `register_comm_hook`. Our handler converts the object
there, before any forward.
"""

from dataclasses import dataclass, fields
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from lockstep.parallel.ddp import convert_wrapper


@dataclass
class LockstepKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]  # the library may not be installed
    """Arguments of the wrapper, as in Accelerate's own class; the wrapper is Lockstep's."""

    def register_comm_hook(self, model: Any) -> None:
        """Convert the wrapped model, and then register the hook of `comm_hook`, if one is set (collective)."""
        super().register_comm_hook(convert_wrapper(model))


def use_lockstep(accelerator: Accelerator) -> Accelerator:
    """Let `accelerator` wrap models with `lockstep.DistributedDataParallel`; call it before `prepare` (local).

    Args:
        accelerator: The accelerator; arguments for the wrapper that it was given are kept.

    Returns:
        The same accelerator.
    """
    given = accelerator.ddp_handler or DistributedDataParallelKwargs()
    accelerator.ddp_handler = LockstepKwargs(**{field.name: getattr(given, field.name) for field in fields(given)})
    return accelerator
