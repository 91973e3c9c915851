"""What a trainer refuses or warns of before its first step, and changes that it checks for in each step."""

import warnings
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.engine.fingerprint import Fingerprint
from lockstep.errors import counted
from lockstep.reduce import TrainedModel

_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


def check_model(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the named trainable parameters of a model."""
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


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that an optimizer's parameters are the model's."""
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


def check_batchnorm(model: nn.Module, world: World, num_shards: int) -> None:
    """Refuse layers whose result depends on the number of workers."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
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
            stacklevel=6,
        )


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
                stacklevel=3,
            )


def warn_of_other_conditions(saved: Mapping[str, Any] | None, now: Fingerprint) -> None:
    """Warn if a resumed run has other settings that change its bits than when it was saved."""
    differences = [] if saved is None else Fingerprint.from_dict(saved).differences(now)
    if differences:
        warnings.warn(
            f"The run is resumed with other settings than it was saved with: {'; '.join(differences)}. Its digest will "
            "not be that of a run without an interruption. (LS711)",
            stacklevel=3,
        )


@final
class ModelChangeCheck:
    """Checks that a model and its optimizer still have the parameters that a trainer was made for."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, trained: TrainedModel) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trained = trained
        self._held = self._look()

    def check(self) -> None:
        held = self._look()
        if held != self._held:
            check_optimizer(self._optimizer, self._model)
            self._held = held
        if not self._trained.has_changed():
            return
        current = TrainedModel(self._model)
        before = {each.spec.name: str(each.spec) for each in self._trained.trained}
        now = {each.spec.name: str(each.spec) for each in current.trained}
        changes = [f"{name} is no longer trained" for name in before if name not in now]
        changes += [f"{name} is new or newly trained" for name in now if name not in before]
        changes += [f"{before[name]} is {now[name]} now" for name in now if before.get(name, now[name]) != now[name]]
        listed = "; ".join(changes[:3]) or "a parameter was replaced by another of the same name"
        more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""  # noqa: PLR2004 - as many as are listed
        raise ValueError(
            f"The model was changed between steps: {listed}{more}. Make a new trainer of the changed model, with an "
            "optimizer of its parameters, on every worker alike. (LS513)"
        )

    def _look(self) -> list[int]:
        return [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]


@final
class SettingsChangeCheck:
    """Warns if process-wide settings that change the last bits have changed: threads, deterministic operators."""

    def __init__(self) -> None:
        self._at_first = self._look()

    def check(self) -> None:
        """Warn, once, where they are not what they were when the trainer was made (local)."""
        now = self._look()
        if now != self._at_first:
            changes = [
                f"{name} from {before} to {now[name]}" for name, before in self._at_first.items() if before != now[name]
            ]
            self._at_first = now
            warnings.warn(
                f"Since the trainer was made, a setting has changed: {' and '.join(changes)}. From this step on the "
                "weights have other last bits. Set it before the trainer is made. (LS513)",
                stacklevel=5,
            )

    def _look(self) -> dict[str, object]:
        return {
            "threads": torch.get_num_threads(),
            "deterministic operators": torch.are_deterministic_algorithms_enabled(),
        }
