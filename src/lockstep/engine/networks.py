"""Networks that a loss function uses beside the model, such as a teacher: a part of the state of the run.

The trainer does not train them. But a forward may write their buffers, and the loss function may write their
parameters, as an average of weights; then the result would depend on who runs which shard. So their buffers are treated
as the model's are ([Note: buffers of shard 0]), writes to their parameters are refused, and their values are compared
between workers. They are searched for when an engine is made (`lockstep.held_objects`), among what the functions
mention, and again where these hold new objects when a step begins or its shards have run. An object may hold others
too: an average that rank 0 alone has.

[Note: networks of several trainers] Such a network may be the model of another trainer, as the other half of a GAN.
That trainer compares its parameters in its steps; and where it has taken steps or loaded a state, a load here leaves
them as they are.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.checkpoint.manifest import NETWORKS_PREFIX, encode_state
from lockstep.engine.state_parts import (
    State,
    StatePart,
    UnsavedBuffers,
    keep_module,
    load_with_buffers,
    unsaved_buffers,
    warn_of_unsaved_buffers,
)
from lockstep.errors import CheckpointError, LossError
from lockstep.held_objects import Walk
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import buffer_registry

_UNNAMED = frozenset({"", "self", "func", "keywords"})
"""Steps of a path that say nothing about what a network is called."""


@final
class NetworksPart(StatePart):
    def __init__(self, losses: Sequence[Any], model: nn.Module) -> None:
        self._losses = losses
        self._model = model
        self._unsaved: dict[str, UnsavedBuffers] = {}
        self.networks: dict[str, nn.Module] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._had_gradient: dict[str, Tensor | None] = {}
        self._is_checked = True
        self._walk = networks_walk(losses)
        self._has_changed = False
        self.find()

    def find(self) -> None:
        found = find_networks(self._walk, self._model)
        self._has_changed |= list(found.values()) != list(self.networks.values())
        self.networks = found
        own = set(map(id, self._model.parameters()))
        self.parameters = {
            f"{path}.{name}": parameter
            for path, network in self.networks.items()
            for name, parameter in network.named_parameters()
            if id(parameter) not in own
        }
        for name, network in self.networks.items():
            self._unsaved.setdefault(name, UnsavedBuffers(network))
        self._had_gradient = {name: each.grad for name, each in self.parameters.items()}
        self._is_checked = not self.networks

    def has_changed(self) -> bool:
        """Whether there are others than when this was asked before; asked when a step begins (local)."""
        if self._walk.has_new_objects():
            self.find()
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def check_made(self, place: str) -> None:
        """Refuse a network that the shards of a step have made, and written buffers of (local)."""
        if not self._walk.has_new_objects():
            return
        known = set(self.networks.values())
        self.find()
        for name, network in self.networks.items():
            parts = {} if network in known else dict(network.named_modules(prefix=name))
            written = [path for path, part in parts.items() if part.training and buffer_registry(part)]
            if written:
                raise LossError(
                    f"The loss function has made a network while the shards of {place} ran, of which {written[0]} has "
                    "buffers and is in training mode. Each worker runs other shards, so what they have written to the "
                    "buffers depends on the number of workers. Make the network before the trainer, or call eval() "
                    "on it when it is made. (LS518)"
                )

    def warn_of_unsaved(self) -> None:
        changed = [f"{name}.{buffer}" for name in self.networks for buffer in self._unsaved[name].changed()]
        warn_of_unsaved_buffers(changed, "the state of a network that the loss uses")

    def save(self) -> dict[str, Any]:
        return {"networks": {name: self._save(each) for name, each in self.networks.items()}} if self.networks else {}

    def _save(self, network: nn.Module) -> dict[str, Any]:
        own = {*map(id, self._model.parameters()), *map(id, self._model.buffers())}
        found = network.state_dict(keep_vars=True)
        return {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in found.items()
            if id(each) not in own
        }

    def check(self, saved: State) -> None:
        found = saved.get("networks") or {}
        for name in found:
            if name not in self.networks:
                there = ", ".join(self.networks) or "none"
                raise CheckpointError(
                    f"The state holds a network {name} that the loss function used, and this run's loss function uses "
                    f"{there}: the result would differ. Make it, and the networks that it uses, as they were, before "
                    "the trainer. (LS708)"
                )

    def load(self, saved: State) -> None:
        found = saved.get("networks") or {}
        missing = [name for name in self.networks if name not in found]
        if missing:
            warnings.warn(
                f"The loss function uses {missing[0]}, of which the state holds nothing: it has the values with which "
                "it was made, and not those of the run that was saved. (LS711)",
                stacklevel=stacklevel_of_user(),
            )
        for name, state in found.items():
            network = self.networks[name]
            if not TRAINED_MODELS.has_begun(network, but=self._model):
                network.load_state_dict({**network.state_dict(), **state})

    def save_for_worker(self) -> dict[str, Any]:
        unsaved = {name: unsaved_buffers(each) for name, each in self.networks.items()}
        return {**self.save(), "network_buffers": unsaved}

    def load_for_worker(self, saved: State) -> None:
        for name, state in (saved.get("networks") or {}).items():
            network = self.networks[name]
            load_with_buffers(network, {**network.state_dict(), **state}, saved["network_buffers"][name])

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        del is_stepped
        kept = [keep_module(each) for each in self.networks.values()]

        def put_back() -> None:
            for each in kept:
                each()

        return put_back

    def modules(self) -> Sequence[nn.Module]:
        return list(self.networks.values())

    def tensors(self) -> Mapping[str, Tensor]:
        values = {
            network: {name: each for name, each in state.items() if isinstance(each, Tensor)}
            for network, state in self.save().get("networks", {}).items()
        }
        found: dict[str, Tensor] = {}
        encode_state(values, NETWORKS_PREFIX, found)  # by the names that they have in a file
        return found

    def describe(self) -> Description:
        return {
            f"the network {name} that the loss uses": number_of_values(each) for name, each in self.networks.items()
        }

    def compared(self) -> Mapping[str, Tensor]:
        if not self.parameters:
            return {}
        elsewhere = TRAINED_MODELS.parameters(but=self._model)
        return {name: each for name, each in self.parameters.items() if id(each) not in elsewhere}

    def compared_at_begin(self) -> Mapping[str, Tensor]:
        if not self.networks:
            return {}
        own = set(map(id, self._model.buffers()))
        return {
            f"{path}.{name}": each
            for path, network in self.networks.items()
            for name, each in network.named_buffers()
            if id(each) not in own and each.numel() and each.layout is torch.strided
        }

    def check_gradients(self) -> None:
        """Warn, once, of a network that the losses have given gradients and that no trainer trains (local)."""
        if self._is_checked:
            return
        self._is_checked = True
        trained = TRAINED_MODELS.parameters(but=None)
        odd = [
            name
            for name, each in self.parameters.items()
            if each.requires_grad and each.grad is not self._had_gradient[name] and id(each) not in trained
        ]
        if odd:
            warnings.warn(
                f"The loss function uses a network that is no part of the model, and gives {odd[0]} "
                f"{f'and {len(odd) - 1} more of its parameters gradients' if len(odd) > 1 else 'a gradient'}, by which "
                "nothing is trained. If it is to be trained, make it a part of the model, and its parameters of an "
                "optimizer; if not, call requires_grad_(False) on it, or use it under torch.no_grad(). (LS521)",
                stacklevel=stacklevel_of_user(),
            )


@final
class TrainedModels:
    """The models of the trainers of this process. [Note: networks of several trainers]."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_added = 0

    def add(self, run: Any) -> None:
        self._runs.add(run)
        self._num_added += 1

    def discard(self, run: Any) -> None:
        self._runs.discard(run)

    @property
    def num_changes(self) -> tuple[int, int]:
        return self._num_added, len(self._runs)

    def has_begun(self, network: nn.Module, but: nn.Module) -> bool:
        """Whether a trainer of a network, or of one that it is in, has taken steps or loaded a state."""
        return any(run.has_begun and run.model is not but and network in set(run.model.modules()) for run in self._runs)

    def parameters(self, but: nn.Module | None) -> set[int]:
        """Return the ids of the parameters of all models but one."""
        return {id(each) for run in self._runs if run.model is not but for each in run.model.parameters()}


TRAINED_MODELS: Final = TrainedModels()


def networks_walk(functions: Sequence[Any]) -> Walk:
    return Walk([("", function) for function in functions], stops_at=(nn.Module,), only_used=True)


def find_networks(walk: Walk, model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules with parameters or buffers that functions use and that are not within the model."""
    own = set(model.modules())
    found: dict[str, nn.Module] = {}
    for held in walk:
        value = held.value
        if not isinstance(value, nn.Module) or value in own or any(value is each for each in found.values()):
            continue
        if own <= set(value.modules()) or next(itertools.chain(value.parameters(), value.buffers()), None) is None:
            continue
        path = ".".join(step for step in held.path.split(".") if step not in _UNNAMED) or type(value).__name__
        numbered = itertools.chain([path], (f"{path} ({number})" for number in itertools.count(2)))
        found[next(name for name in numbered if name not in found)] = value
    return found


def number_of_values(network: nn.Module) -> str:
    tensors = [
        each for each in (*network.parameters(), *network.buffers()) if each.numel() and each.layout is torch.strided
    ]
    return f"{int(sum_of_bits(tensors)):x}" if tensors else "empty"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Each its own: a model that is fine-tuned may have parts in evaluation mode.
        for module, training in modes.items():
            if changes_with_mode(module):
                module.train(training)
        for module, training in modes.items():
            module.training = training


def changes_with_mode(module: nn.Module) -> bool:
    """Whether a module does more than to note its mode, as one that merges weights for evaluations does."""
    return type(module).train is not nn.Module.train
