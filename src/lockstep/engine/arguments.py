"""The arguments of a trainer: checked by every worker for itself, then compared between them."""

import inspect
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.engine.callbacks import Callback, check_callbacks
from lockstep.engine.checks import check_batchnorm, check_model, check_optimizer
from lockstep.engine.optimizer_checks import (
    check_can_be_saved,
    check_group_options,
    check_separate,
    check_takes_dense_gradients,
    list_losses,
    list_optimizers,
    list_schedulers,
)
from lockstep.engine.optimizers import combine_optimizers, combine_schedulers
from lockstep.engine.raise_on_all import gather_results
from lockstep.engine.reached_networks import describe_networks, find_networks
from lockstep.engine.restoring import class_name
from lockstep.reduce import BucketLimits
from lockstep.reduce.model import Description, describe_differences, describe_options
from lockstep.shards import shard_range


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    model: nn.Module
    """On the device where it is to train."""
    optimizer: Optimizer | Mapping[str, Optimizer]
    """Over the model's parameters; several by name."""
    loss: Any
    """The loss function; or one for each optimizer, by name."""
    every: Mapping[str, int] | None
    """In every how many steps an optimizer steps, by name."""
    num_shards: int
    seed: int
    """Of every random state in a step."""
    scheduler: Any
    """Learning-rate scheduler, several by the names of their optimizers, or None."""
    scaler: GradScaler | None
    max_grad_norm: float | None
    nonfinite: str
    """What to do with a step whose loss or gradient is not finite."""
    balance: str
    """How shards are assigned to workers."""
    deterministic: bool
    bucket_limits: BucketLimits
    on_worker_loss: str
    """What calls do when a worker is lost."""
    min_workers: int
    """With fewer workers left the run ends."""
    precision: str = "float32"
    """The dtype of autocast for the loss function and metrics."""
    track_grad_norm: bool = False
    """Whether the gradient's norm is computed where it is not clipped."""
    compile: bool | str = False
    """Whether calls of the model run compiled, or by which of torch.compile's backends."""
    callbacks: Sequence[Callback] = ()

    @property
    def norm_limit(self) -> float | None:
        """Where the gradient's norm is clipped: infinite if it is only computed; None if it is not computed."""
        return math.inf if self.max_grad_norm is None and self.track_grad_norm else self.max_grad_norm


def check_arguments(
    arguments: TrainerArguments, world: World, progress: Description = MappingProxyType({})
) -> list[Description]:
    """Check what a trainer was given, on every worker; return what all were given (collective)."""
    return gather_results(world, lambda: {**_check_own(arguments, world), **progress}, "constructing a Trainer")


def find_device_type(model: Any) -> str:
    """Return the type of a model's device: "cpu", "cuda"; "cpu" for what is no model, which is refused later."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((each.device.type for each in parameters if each.requires_grad), "cpu")


def check_same_arguments(found: Sequence[Description]) -> None:
    """Compare what the workers' trainers were given, by rank."""
    for rank, description in enumerate(found):
        if description != found[0]:
            raise ValueError(
                f"Ranks {rank} and 0 make their trainers with different arguments: "
                f"{describe_differences(description, found[0])}. Give the same ones on every rank. (LS502)"
            )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Check that a scheduler can be stepped, and that it is this optimizer's."""
    kind = type(scheduler).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, method, None)):
            raise TypeError(
                f"The scheduler is a {kind} without a {method} method, so not a learning-rate scheduler. (LS503)"
            )
    if not can_be_called(scheduler.step):
        raise ValueError(
            f"The scheduler is a {kind}, whose step wants arguments (a metric, say), and a trainer has none to give. "
            "For a rate that falls when a metric does not improve use the callback ls.ReduceLROnPlateau, in a config "
            "scheduler: plateau; step another scheduler in a loop of your own. (LS503)"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"The scheduler {kind} was made for another optimizer than this trainer's, whose learning rate it would "
            "not change. Make it from the optimizer that the trainer gets. (LS503)"
        )


def can_be_called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function takes these arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature
        return True
    return True


def check_whole_number(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} is {value!r}, expected a whole number. (LS501)")


def _check_own(arguments: TrainerArguments, world: World) -> Description:
    num_shards = check_whole_number("num_shards", arguments.num_shards)
    if num_shards < 1:
        raise ValueError(
            f"num_shards is {num_shards}, expected at least 1: the slices that a step's batch is cut into. (LS501)"
        )
    check_whole_number("seed", arguments.seed)
    check_model(arguments.model)
    optimizers = list_optimizers(arguments.optimizer, arguments.every)
    for optimizer in optimizers.values():
        _check_optimizer(optimizer, arguments.model)
    check_separate(optimizers, arguments.model)
    for loss in list_losses(arguments.loss, arguments.optimizer):
        _check_loss(loss)
    for name, scheduler in list_schedulers(arguments.scheduler, arguments.optimizer).items():
        check_scheduler(scheduler, optimizers[name])
    check_callbacks(arguments.callbacks)
    _check_norm(arguments.max_grad_norm)
    _check_choice("nonfinite", arguments.nonfinite, ("stop", "skip"))
    _check_choice("balance", arguments.balance, ("even", "speed"))
    _check_choice("precision", arguments.precision, ("float32", "bfloat16", "float16"))
    if not isinstance(arguments.compile, bool | str):
        raise TypeError(
            f"compile is {arguments.compile!r}, expected True, False or a backend of torch.compile. (LS501)"
        )
    _check_choice("on_worker_loss", arguments.on_worker_loss, ("stop", "continue"))
    if check_whole_number("min_workers", arguments.min_workers) < 1:
        raise ValueError(f"min_workers is {arguments.min_workers}, expected 1 or more. (LS501)")
    if arguments.on_worker_loss == "continue" and isinstance(arguments.loss, Mapping):
        raise ValueError(
            'on_worker_loss="continue" is for one loss function: workers could be apart by one of the updates of a '
            'step. Use on_worker_loss="stop", and resume from a checkpoint. (LS501)'
        )
    shard_range(world.rank, world.world_size, num_shards)
    check_batchnorm(arguments.model, world, num_shards)
    return _describe(arguments)


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    check_optimizer(optimizer, model)
    check_group_options(optimizer)
    check_takes_dense_gradients(optimizer)
    check_can_be_saved(optimizer)
    # The class's own, for a scheduler puts a function in its place that looks as if it wanted the optimizer.
    if not can_be_called(type(optimizer).step, optimizer):
        raise ValueError(
            f"The optimizer is a {type(optimizer).__name__}, whose step wants a closure that computes the "
            "loss again; the trainer computes each gradient once. "
            "Use another optimizer, or write a loop of your own. (LS504)"
        )


def _check_loss(loss: Any) -> None:
    if not callable(loss):
        raise TypeError(
            f"The loss is a {type(loss).__name__}, expected a function loss(model, batch) that returns the "
            "mean loss of a slice, or that and its weight. (LS506)"
        )
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", "")
    if module in {"torch.nn.functional", "torch.nn.modules.loss"}:
        raise TypeError(
            f"The loss is torch's {getattr(loss, '__name__', type(loss).__name__)}, which takes (output, target), and "
            "the trainer calls loss(model, batch). Write: def loss(model, batch): return criterion(model(batch[0]), "
            "batch[1]). (LS506)"
        )
    if not (can_be_called(loss, None, None) or can_be_called(loss, None, None, place=None)):
        raise TypeError(
            f"The loss function takes {inspect.signature(loss)}, expected (model, batch), or (model, batch, place) "
            "where it is to be told the epoch, the step and the shard. (LS506)"
        )


def _describe(arguments: TrainerArguments) -> Description:
    optimizer = combine_optimizers(arguments.optimizer, arguments.every)
    names = {id(parameter): name for name, parameter in arguments.model.named_parameters()}
    held = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    values = {
        "num_shards": arguments.num_shards,
        "seed": arguments.seed,
        "optimizer": class_name(optimizer),
        "every": arguments.every,
        **describe_options(optimizer),
        # Their number alone: all names would be too much to read.
        "the optimizer's list of parameters": f"{sum(map(len, held))} (order {zlib.crc32(repr(held).encode()):08x})",
        "scheduler": class_name(combine_schedulers(arguments.scheduler, optimizer)),
        "scaler": None if arguments.scaler is None else arguments.scaler.state_dict(),
        "max_grad_norm": arguments.max_grad_norm,
        "precision": arguments.precision,
        "track_grad_norm": arguments.track_grad_norm,
        "compile": arguments.compile,
        "nonfinite": arguments.nonfinite,
        "balance": arguments.balance,
        "deterministic": arguments.deterministic,
        "callbacks": ", ".join(type(each).__name__ for each in arguments.callbacks),
        **describe_networks(find_networks(list_losses(arguments.loss, arguments.optimizer), arguments.model)),
    }
    return {name: str(value) for name, value in values.items()}


def _check_norm(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"max_grad_norm is {value!r}, expected a number above zero, or None to leave gradients alone. (LS501)"
        )
    if math.isnan(value) or value <= 0:
        raise ValueError(
            f"max_grad_norm is {value}, expected a number above zero: gradients would be turned round or made zero. "
            "Use None to leave them alone. (LS501)"
        )


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}. (LS501)")
