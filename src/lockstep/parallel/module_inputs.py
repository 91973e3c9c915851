"""What goes into a forward: how many samples it has, and in which precision it runs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from lockstep.torch_private.modules import set_precision_attributes, tree_leaves, tree_map_only

_SCALAR = -1
"""Stands for the first dimension of a tensor that has none."""


def puts_time_first(module: nn.Module) -> bool:
    """Return whether a layer of `module` expects sequences whose first dimension is time, as torch's do by default."""
    layers = (each for each in module.modules() if isinstance(each, nn.RNNBase | nn.MultiheadAttention))
    return any(not layer.batch_first for layer in layers)


def count_samples(arguments: Any, output: Any, *, time_first: bool) -> int:
    """Return how many samples a forward was given, or 0 if that cannot be known.

    It is known if all tensors among the arguments begin with the same dimension, and one of the outputs with it too or
    is a single number; and of packed sequences, which alone tell if the first dimension may be time (`time_first`).
    """
    given, returned = _leaves(arguments), _leaves(output)
    if time_first and not all(isinstance(leaf, PackedSequence) for leaf in given):
        return 0
    sizes = set(map(_count, given)) - {_SCALAR}
    if len(sizes) != 1:
        return 0
    (size,) = sizes
    return size if any(_count(leaf) in (size, _SCALAR) for leaf in returned) else 0


def _leaves(values: Any) -> list[Any]:
    if type(values) is Tensor:
        return [values]
    if type(values) is list and all(type(value) is Tensor for value in values):
        return values
    leaves = tree_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | PackedSequence)]


def _count(value: Any) -> int:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return value.shape[0] if value.dim() > 0 else _SCALAR


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    """Return `values` with the floating-point tensors in them in `dtype`; as they are if that is None."""
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def call_in_precision(
    module: nn.Module,
    mixed_precision: Any,
    ignored: Iterable[str],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `module` with its parameters cast to `param_dtype`, if there is one; gradients come back in their own.

    The cast is a part of the graph, so the parameters themselves stay as they are throughout.
    """
    dtype = getattr(mixed_precision, "param_dtype", None)
    if dtype is None:
        return module(*inputs, **kwargs)
    left_alone = set(ignored)
    cast = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if name not in left_alone and parameter.is_floating_point()
    }
    return functional_call(module, cast, cast_floats(inputs, dtype), cast_floats(kwargs, dtype))


def prepare_precisions(module: nn.Module, mixed_precision: Any, ignored: Iterable[str]) -> None:
    """Name what parameters are in either precision, and cast buffers in place, if there is a mixed precision."""
    _name_precisions(module, getattr(mixed_precision, "param_dtype", None), ignored)
    _cast_buffers(module, getattr(mixed_precision, "buffer_dtype", None), ignored)


def _name_precisions(module: nn.Module, dtype: torch.dtype | None, ignored: Iterable[str]) -> None:
    """Give parameters the attributes by which torch names what they are in either precision."""
    if dtype is None:
        return
    left_alone = set(ignored)
    for name, parameter in module.named_parameters():
        if name not in left_alone:
            set_precision_attributes(parameter, dtype)


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Iterable[str]) -> None:
    """Cast the floating-point buffers of `module` to `dtype`, in place."""
    if dtype is None:
        return
    left_alone = set(ignored)
    for name, buffer in module.named_buffers():
        if name not in left_alone and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
