"""Where a loss function is called: which step, and which shard of it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PLACE = "place"
"""The name of the parameter that gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Which shard of which step a loss function computes: `def loss(model, batch, place)`.

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], place: ls.StepPlace) -> Tensor:
            strength = min(1.0, place.global_step / 1000)
            return strength * loss_fn(model, batch)

    It takes the place of a counter, which would count the shards that this worker runs and so depend on the number of
    workers. All numbers count from 0.
    """

    epoch: int
    """The epoch."""
    step: int
    """The step in the epoch."""
    global_step: int
    """How many steps of the run were taken before, those of earlier epochs included."""
    shard: int
    """The shard. What depends on it depends on `num_shards`, not on the number of workers."""
    num_shards: int
    """How many shards the run has."""


def takes_place(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(PLACE)
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
