"""Constructing the loss that a config names."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.engine import Loss
from lockstep.engine.arguments import can_be_called
from lockstep.errors import ConfigError
from lockstep.runs.build_metrics import Criterion, input_and_target
from lockstep.runs.config import Config
from lockstep.runs.importing import call_object, import_object

_PAIRWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_PAIRWISE_FUNCTIONS = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)


def build_criterion(config: Config, device: torch.device) -> Criterion:
    loss = import_object("loss", config.loss)
    if inspect.isclass(loss):
        made: Criterion = call_object("loss", loss, **config.loss_args)
        criterion = made.to(device) if isinstance(made, nn.Module) else made
        return _with_shapes_compared(criterion) if isinstance(made, _PAIRWISE) else criterion
    if not callable(loss):
        raise ConfigError(f"loss is {config.loss!r}, a {type(loss).__name__}, expected a function or a class. (LS806)")
    if not can_be_called(loss, None, None, **config.loss_args):
        raise ConfigError(
            f"loss is {config.loss!r}, which cannot be called with (output, target) and loss_args {config.loss_args}: "
            f"its parameters are {inspect.signature(loss)}. (LS806)"
        )

    def call(output: Any, target: Any) -> Tensor:
        found: Tensor = loss(output, target, **config.loss_args)
        return found

    return _with_shapes_compared(call) if loss in _PAIRWISE_FUNCTIONS else call


def as_loss(criterion: Criterion) -> Loss:
    """Return a criterion as a loss function of the trainer: called with the model and a batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = input_and_target(batch)
        return criterion(model(inputs), target)

    return loss


def _with_shapes_compared(criterion: Callable[[Any, Any], Tensor]) -> Criterion:
    """Refuse an output and a target of other shapes: torch compares each of one with all of the other, and warns."""

    def compare(output: Any, target: Any) -> Tensor:
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape:
            raise ConfigError(
                f"The model returns outputs of shape {list(output.shape)} and data yields targets of shape "
                f"{list(target.shape)}. Of such shapes this loss compares each output with several targets. Let data "
                "yield targets of the shape of one output, such as target.unsqueeze(-1), or let the model return "
                "output.squeeze(-1). (LS806)"
            )
        return criterion(output, target)

    return compare
