"""The arguments of a trainer: checked by every worker for itself, compared between them, some again in each step."""

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.engine.batches import gather_results
from lockstep.engine.callbacks import Callback, check_callbacks
from lockstep.engine.fingerprint import Fingerprint
from lockstep.engine.optimizer_state import (
    check_can_be_saved,
    check_group_options,
    check_separate,
    check_takes_dense_gradients,
    list_losses,
    list_optimizers,
    list_schedulers,
)
from lockstep.errors import counted
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import BucketLimits
from lockstep.reduce.model import Description, describe_differences
from lockstep.settings import read_settings
from lockstep.shards import shard_range
from lockstep.torch_private.compiler import has_compiled_part
from lockstep.torch_private.modules import TorchsSyncBatchNorm, complete_optimizer
from lockstep.torch_private.portable import make_portable

_COMPARED = (
    *("num_shards", "seed", "every", "max_grad_norm", "precision", "track_grad_norm", "compile", "nonfinite"),
    *("balance", "deterministic", "exact_mean", "verify_steps", "shard_optimizer", "neighbours"),
)
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    model: nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]
    loss: Any
    every: Mapping[str, int] | None
    num_shards: int
    seed: int
    scheduler: Any
    scaler: GradScaler | None
    max_grad_norm: float | None
    nonfinite: str
    exact_mean: bool
    verify_steps: int
    balance: str
    deterministic: bool
    bucket_limits: BucketLimits
    on_worker_loss: str
    min_workers: int
    precision: str
    track_grad_norm: bool
    compile: bool | str
    callbacks: Sequence[Callback]
    shard_optimizer: bool
    neighbours: int

    @property
    def norm_limit(self) -> float | None:
        """Where the gradient's norm is clipped: infinite if it is only computed; None if it is not computed."""
        return math.inf if self.max_grad_norm is None and self.track_grad_norm else self.max_grad_norm


def check_arguments(arguments: TrainerArguments, world: World) -> list[Description]:
    """Check what a trainer was given, on every worker; return what all were given (collective)."""
    return gather_results(world, lambda: _check_own(arguments, world), "constructing a Trainer")


def check_same_arguments(found: Sequence[Description]) -> None:
    for rank, description in enumerate(found):
        if description != found[0]:
            raise ValueError(
                f"Ranks {rank} and 0 make their trainers with different arguments: "
                f"{describe_differences(description, found[0])}. Give the same ones on every rank. (LS502)"
            )


def find_device_type(model: Any) -> str:
    """Return the type of a model's device: "cpu", "cuda"; "cpu" for what is no model, which is refused later."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((each.device.type for each in parameters if each.requires_grad), "cpu")


def _check_numbers(arguments: TrainerArguments) -> int:
    num_shards = check_whole_number("num_shards", arguments.num_shards)
    if num_shards < 1:
        raise ValueError(
            f"num_shards is {num_shards}, expected at least 1: the slices that a step's batch is cut into. (LS501)"
        )
    check_whole_number("seed", arguments.seed)
    for name in ("verify_steps", "neighbours"):
        if check_whole_number(name, getattr(arguments, name)) < 0:
            raise ValueError(f"{name} is {getattr(arguments, name)}, expected 0 (for none) or more. (LS501)")
    return num_shards


def _check_own(arguments: TrainerArguments, world: World) -> Description:
    num_shards = _check_numbers(arguments)
    check_model(arguments.model)
    optimizers = list_optimizers(arguments.optimizer, arguments.every)
    for optimizer in optimizers.values():
        _check_given_optimizer(optimizer, arguments.model)
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
    if read_settings().is_portable():
        is_compiled = bool(arguments.compile) or has_compiled_part(arguments.model)
        make_portable(torch.device(find_device_type(arguments.model)), is_compiled=is_compiled)
    shard_range(world.rank, world.world_size, num_shards)
    check_batchnorm(arguments.model, world, num_shards)
    return _describe(arguments)


def check_model(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model is a {type(model).__name__}, expected a torch.nn.Module. (LS509)")
    for name, module in model.named_modules():
        # By name: the modules of the wrappers may not be imported here.
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise TypeError(
                f"{f'The part {name} of the' if name else 'The'} model is wrapped already, in {wrapper}. Give the "
                "trainer the module itself: it reduces by itself, and a communication hook, which may compress, would "
                "give other weights on another number of workers. (LS509)"
            )
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, value in named if is_lazy(value)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy} of the model has no shape yet: a lazy module gets it in its first forward. Run one forward on a "
            "sample before you make the optimizer and the trainer: model(inputs). (LS509)"
        )
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("The model has no parameter that requires a gradient: there is nothing to train. (LS509)")
    devices = sorted({str(parameter.device) for _, parameter in parameters})
    if len(devices) > 1:
        raise ValueError(
            f"The model's parameters are on {' and '.join(devices)}, expected one device: move the model. (LS509)"
        )
    for name, parameter in parameters:
        dtype = getattr(parameter, "grad_dtype", parameter.dtype)
        if dtype != parameter.dtype:
            raise ValueError(
                f"Parameter {name} is of {parameter.dtype} and its grad_dtype is {dtype or 'left open'}, expected the "
                "same: a gradient is added up over the workers in the dtype of its parameter. Leave grad_dtype alone, "
                "or keep the parameter itself in the wider dtype and compute under torch.autocast. (LS509)"
            )
    return parameters


def _check_given_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    check_optimizer(optimizer, model)
    complete_optimizer(optimizer)
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


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"The optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer. (LS504)")
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(id(parameter) not in known for parameter in held)
    if num_foreign:
        raise ValueError(
            f"The optimizer holds {num_foreign} parameters that are not the model's: their gradients would not be "
            "reduced. Make the optimizer from model.parameters(), after the model is on its device; a loss with "
            "parameters of its own must be a part of the model. (LS504)"
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


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
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


def check_batchnorm(model: nn.Module, world: World, num_shards: int) -> None:
    found = [name for name, module in model.named_modules() if isinstance(module, TorchsSyncBatchNorm)]
    if not found:
        return
    named = f"{found[0]} and {len(found) - 1} more layers are" if len(found) > 1 else f"{found[0] or 'The model'} is"
    cause = f"{named} SyncBatchNorm, whose statistics are those of what all workers compute at the same moment"
    if world.world_size != num_shards:
        raise ValueError(
            f"{cause}: with {counted(num_shards, 'shard')} on {counted(world.world_size, 'worker')} the weights would "
            "depend on the number of workers. Use BatchNorm, whose statistics are those of a shard, or GroupNorm; or "
            "as many shards as workers. (LS510)"
        )
    if world.world_size > 1:
        warnings.warn(
            f"{cause}. This run has as many shards as workers, {num_shards}; on any other number of workers it will "
            "be refused. BatchNorm, whose statistics are those of a shard, has the same weights on any number. (LS510)",
            stacklevel=stacklevel_of_user(),
        )


def _describe(arguments: TrainerArguments) -> Description:
    """Describe what is no state of the run: that is compared when it is made."""
    return {
        **{name: str(getattr(arguments, name)) for name in _COMPARED},
        "scaler": str(None if arguments.scaler is None else arguments.scaler.state_dict()),
        "callbacks": ", ".join(type(each).__name__ for each in arguments.callbacks),
    }


def check_fingerprints(mine: Fingerprint, world: World) -> None:
    """Warn where workers differ in what bits depend on (collective)."""
    found: list[Fingerprint] = world.gather_objects(mine)
    for rank, other in enumerate(found):
        differences = found[0].differences(other)
        if differences and world.rank in {0, rank}:
            warnings.warn(
                f"Ranks 0 and {rank} differ in what the last bits of the weights depend on: {'; '.join(differences)}. "
                "The digest will depend on which worker runs which shard. Start all workers alike; for threads see "
                "threads_per_worker and torch.set_num_threads. (LS514)",
                stacklevel=stacklevel_of_user(),
            )


def warn_of_other_conditions(saved: Mapping[str, Any] | None, now: Fingerprint) -> None:
    differences = [] if saved is None else Fingerprint.from_dict(saved).differences(now)
    if differences:
        warnings.warn(
            f"The run is resumed with other settings than it was saved with: {'; '.join(differences)}. Its digest will "
            "not be that of a run without an interruption. (LS711)",
            stacklevel=stacklevel_of_user(),
        )
