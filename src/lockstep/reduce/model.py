"""The model as a reducer sees it: which parameters it trains, whether that has changed, and whether ranks agree on it.

Users add parameters, freeze and unfreeze, cast and move a model after wrapping it. torch's DistributedDataParallel
silently continues with the parameters that it found at construction. So in each backward the model is compared with
what was found before; a walk over its modules would be too slow for that, comparing the dictionaries in which they keep
parameters and submodules is not. Ranks compare their models at construction: later a difference shows only as wrong
numbers.
"""

import hashlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.plan import ParameterSpec
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import module_registry, parameter_registry, remember_tensors

_KIND = attrgetter("requires_grad", "dtype", "device", "shape")
_TRAINING = attrgetter("training")
_BEFORE_WRAPPING = "Build the model identically on every rank before wrapping it. (LS304)"
_ARGUMENT = "argument of the wrapper"
_ALIKE = "Give DistributedDataParallel the same arguments on every rank. (LS304)"
_AFTER_WRAPPING = "It was changed after wrapping: make the same change on every rank, before the same step. (LS305)"
Description = Mapping[str, str]
"""What must be the same on every worker, in words, by name."""
_NOT_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    spec: ParameterSpec
    parameter: nn.Parameter


@final
class Registries:
    """The dictionaries in which modules keep something, and whether one of them holds something else by now."""

    def __init__(self, registries: Sequence[Mapping[str, Any]]) -> None:
        # What a dictionary returns goes on to show what it holds; those of scripted modules return a list.
        self._filled = [each.values() if isinstance(each, dict) else _Values(each) for each in registries if each]
        self._empty = [each for each in registries if not each]
        self._held = self._list_held()

    def have_changed(self) -> bool:
        held = self._list_held()
        return any(self._empty) or len(held) != len(self._held) or not all(map(is_, held, self._held))

    def _list_held(self) -> list[Any]:
        return list(chain.from_iterable(self._filled))


@final
class _Values:
    """What a registry of a scripted module holds when it is iterated over."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry

    def __iter__(self) -> Iterator[Any]:
        return iter(self._registry.values())


@final
class TrainedModel:
    """The trainable parameters of a module, each once, in registration order.

    The module is held weakly, for its hooks hold whoever looks at it: reference counts alone must free both.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = weakref.ref(module)
        self.ignored = frozenset(ignored)
        self._parameters: list[nn.Parameter] = []
        self.trained: list[TrainedParameter] = []
        self.look()

    @property
    def module(self) -> nn.Module | None:
        """The model; None when it is gone."""
        return self._module()

    def look(self) -> None:
        root = self.module
        assert root is not None
        sparse = {
            id(module.weight)
            for module in root.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        named = self.parameters()
        self._parameters = [parameter for _, parameter in named]
        modules = list(root.modules())
        self._registries = Registries(
            [part for module in modules for part in (parameter_registry(module), module_registry(module))]
        )
        self._kinds = list(map(_KIND, self._parameters))
        self._are_as_before = remember_tensors(self._parameters)
        children = (module_registry(module).values() for module in modules)
        self._layers = [layer for layer in chain.from_iterable(children) if layer is not None]
        self.trained = [
            TrainedParameter(_describe_parameter(name, parameter, is_sparse=id(parameter) in sparse), parameter)
            for name, parameter in named
            if parameter.requires_grad
        ]

    def has_changed(self) -> bool:
        return self._registries.have_changed() or not (
            self._are_as_before(*self._parameters) or list(map(_KIND, self._parameters)) == self._kinds
        )

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient, trained or not, as `zero_grad` does; the model has not changed (local)."""
        for parameter in self._parameters:
            parameter.grad = None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        root = self.module
        named = () if root is None else root.named_parameters()
        return [(name, parameter) for name, parameter in named if name not in self.ignored]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.parameters(), *self.buffers()]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the named buffers, listed anew: a forward may put another tensor in a buffer's place."""
        root = self.module
        named = () if root is None else root.named_buffers()
        return [(name, buffer) for name, buffer in named if name not in self.ignored]

    def modes(self) -> list[bool]:
        """Return of each layer within, as they were seen, whether it is in training mode, always in the same order."""
        return list(map(_TRAINING, self._layers))


def _describe_parameter(name: str, parameter: nn.Parameter, *, is_sparse: bool) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        device=parameter.device,
        num_elements=parameter.numel(),
        is_sparse=is_sparse,
    )


def check_same_model(
    model: TrainedModel,
    world: World,
    *,
    is_wrapped: bool = False,
    with_buffers: bool = True,
    arguments: Sequence[str] = (),
    besides: str = "",
) -> bool:
    """Compare the parameters and buffers of `model` across ranks; raise on every rank if they differ (collective).

    Return whether `besides`, in words what may differ, is the same on all ranks: in the same exchange.

    Trainable parameters must agree in names, order, shapes, dtypes and strides; frozen ones and buffers, which are
    broadcast, in names, order, shapes and dtypes.
    """
    described = {_ARGUMENT: [*arguments], **_describe(model, with_buffers=with_buffers)}
    own = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (described, besides)]
    fingerprints, fingerprints_besides = map(set, zip(*world.gather_objects(own), strict=True))
    if len(fingerprints) == 1:
        return len(fingerprints_besides) == 1
    # The descriptions are long, so they are sent only when the hashes differ.
    expected, *others = world.gather_objects(described)
    for rank, found in enumerate(others, start=1):
        for kind in expected:
            if found[kind] != expected[kind]:
                difference = _explain(rank, kind, found[kind], expected[kind])
                remedy = _ALIKE if kind == _ARGUMENT else _AFTER_WRAPPING if is_wrapped else _BEFORE_WRAPPING
                raise ParameterMismatchError(f"{difference} {remedy}")
    return len(fingerprints_besides) == 1


def check_same_values(parameters: Sequence[TrainedParameter], world: World) -> None:
    """Compare the values of parameters that were added after rank 0's were broadcast at construction (collective)."""
    numbers = {each.spec.name: int(sum_of_bits([each.parameter])) for each in parameters}
    expected, *others = world.gather_objects(numbers)
    for rank, found in enumerate(others, start=1):
        for name in {**expected, **found}:
            if name not in expected or name not in found:
                changed, same = (rank, 0) if name in found else (0, rank)
                raise ParameterMismatchError(
                    f"Parameter {name} was replaced, unfrozen or changed after wrapping on rank {changed}, and not on "
                    f"rank {same}. Make the same change on every rank, before the same step. (LS305)"
                )
            if found[name] != expected[name]:
                raise ParameterMismatchError(
                    f"Parameter {name} was added, unfrozen or changed after wrapping, and its values on rank {rank} "
                    "are not those on rank 0. Call torch.manual_seed with the same seed on every rank before "
                    "making it, or make it before wrapping. (LS305)"
                )


def _describe(model: TrainedModel, *, with_buffers: bool) -> dict[str, list[str]]:
    return {
        "trainable parameter": [str(each.spec) for each in model.trained],
        "frozen parameter": [
            _describe_tensor(name, value) for name, value in model.parameters() if not value.requires_grad
        ],
        "buffer": [_describe_tensor(name, value) for name, value in model.buffers() if with_buffers],
    }


def _describe_tensor(name: str, value: Tensor) -> str:
    shape = "x".join(map(str, value.shape)) or "scalar"
    return f"{name} ({shape}, {value.dtype})"


def _explain(rank: int, kind: str, found: list[str], expected: list[str]) -> str:
    pairs = enumerate(zip_longest(found, expected, fillvalue="nothing"))
    number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    start = "The first difference"
    if len(found) != len(expected):
        start = f"Rank {rank} has {len(found)} {kind}s but rank 0 has {len(expected)}; the first difference"
    return f"{start} is {kind} {number}: rank {rank} has {here}, rank 0 has {there}."


def describe_options(optimizer: Optimizer) -> Description:
    """Return the options of each parameter group, without tensors on a device: to read them is to wait for it."""
    several = len(optimizer.param_groups) > 1
    return {
        f"{name} of parameter group {number}" if several else name: _plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NOT_OPTIONS
    }


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.device.type == "cpu" else "on a device"
    is_plain = isinstance(value, int | float | str | tuple | list | None)
    return repr(value) if is_plain else type(value).__name__


def describe_differences(found: Description, expected: Description) -> str:
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return "; ".join(
        f"{name} is {found.get(name, 'not there')} and {expected.get(name, 'not there')}" for name in names
    )
