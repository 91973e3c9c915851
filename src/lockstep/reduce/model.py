"""The model as a reducer sees it: which parameters it trains, and whether that has changed since.

Users add parameters, freeze and unfreeze, cast and move a model after wrapping it. torch's DistributedDataParallel
silently continues with the parameters that it found at construction. So in each backward the model is compared with
what was found before; a walk over its modules would be too slow for that, comparing the dictionaries in which they keep
parameters and submodules is not.
"""

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, final

import torch
from torch import nn

from lockstep.reduce.plan import ParameterSpec
from lockstep.torch_private.modules import module_registry, parameter_registry

_CHANGEABLE = attrgetter("requires_grad", "dtype", "device", "shape")
"""What of a parameter may change in place."""
_TRAINING = attrgetter("training")


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter whose gradient is reduced."""

    spec: ParameterSpec
    parameter: nn.Parameter


@final
class TrainedModel:
    """The trainable parameters of a module, each once, in registration order.

    The module is held weakly, for its hooks hold whoever looks at it: reference counts alone must free both.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = weakref.ref(module)
        self.ignored = frozenset(ignored)
        self._parameters: list[nn.Parameter] = []
        self._parts: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._layers: list[nn.Module] = []
        self.trained: list[TrainedParameter] = []
        self.look()

    @property
    def module(self) -> nn.Module | None:
        """The model; None when it is gone."""
        return self._module()

    def look(self) -> None:
        """See the model as it is now."""
        root = self.module
        assert root is not None
        sparse = {
            id(module.weight)
            for module in root.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        named = list(self._named())
        self._parameters = [parameter for _, parameter in named]
        modules = list(root.modules())
        self._parts = [part for module in modules for part in (parameter_registry(module), module_registry(module))]
        self._lengths = list(map(len, self._parts))
        self._filled = [part for part in self._parts if part]
        self._held = list(self._list_held())
        self._seen = list(map(_CHANGEABLE, self._parameters))
        children = (module_registry(module).values() for module in modules)
        self._layers = [layer for layer in chain.from_iterable(children) if layer is not None]
        self.trained = [
            TrainedParameter(
                spec=describe_parameter(name, parameter, is_sparse=id(parameter) in sparse), parameter=parameter
            )
            for name, parameter in named
            if parameter.requires_grad
        ]

    def has_changed(self) -> bool:
        """Whether the model differs from what was seen."""
        return not (
            self._lengths == list(map(len, self._parts))
            and all(map(is_, self._held, self._list_held()))
            # One after the other: a list of hundreds of tuples would make the garbage collector run in each step.
            and all(map(eq, self._seen, map(_CHANGEABLE, self._parameters)))
        )

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient, trained or not, as `zero_grad` does; the model has not changed (local)."""
        for parameter in self._parameters:
            parameter.grad = None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters that are not ignored, trainable or not."""
        return list(self._named())

    def tensors(self) -> list[torch.Tensor]:
        """Return all parameters and buffers that are not ignored, trainable or not."""
        return [tensor for _, tensor in [*self._named(), *self.buffers()]]

    def frozen(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self._named() if not parameter.requires_grad]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the named buffers, listed anew: a forward may put another tensor in a buffer's place."""
        root = self.module
        named = () if root is None else root.named_buffers()
        return [(name, buffer) for name, buffer in named if name not in self.ignored]

    def modes(self) -> list[bool]:
        """Return of each layer within, as they were seen, whether it is in training mode, always in the same order."""
        return list(map(_TRAINING, self._layers))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        root = self.module
        for name, parameter in () if root is None else root.named_parameters():
            if name not in self.ignored:
                yield name, parameter

    def _list_held(self) -> Iterator[Any]:
        """Return the parameters and layers of all modules, of those that hold any."""
        return chain.from_iterable(map(dict.values, self._filled))


def describe_parameter(name: str, parameter: nn.Parameter, *, is_sparse: bool = False) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        device=parameter.device,
        num_elements=parameter.numel(),
        is_sparse=is_sparse,
    )
