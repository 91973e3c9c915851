"""What goes into a forward: how many samples it has, and in which precision it runs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only


def count_samples(arguments: Iterable[Any]) -> int:
    """Return the first dimension of the first tensor that has one, or 0: how many samples a forward gets, as a rule."""
    for leaf in tree_leaves(list(arguments)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return 0


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    """Return `values` with the floating-point tensors in them in `dtype`; as they are if that is None."""
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def call_in_precision(
    module: nn.Module,
    dtype: torch.dtype | None,
    ignored: Iterable[str],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `module` with its parameters cast to `dtype`; gradients come back in the parameters' own.

    The cast is a part of the graph, so the parameters themselves stay as they are throughout.
    """
    if dtype is None:
        return module(*inputs, **kwargs)
    left_alone = set(ignored)
    cast = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if name not in left_alone and parameter.is_floating_point()
    }
    return functional_call(module, cast, cast_floats(inputs, dtype), cast_floats(kwargs, dtype))


def name_precisions(module: nn.Module, dtype: torch.dtype | None, ignored: Iterable[str]) -> None:
    """Give parameters the attributes by which torch names what they are in either precision.

    `_fp_param` is the parameter's data; `_mp_param`, between steps, a tensor of the low dtype without memory.
    """
    if dtype is None:
        return
    left_alone = set(ignored)
    for name, parameter in module.named_parameters():
        if name not in left_alone:
            named: Any = parameter
            named._fp_param = parameter.data  # noqa: SLF001 - torch's name
            named._mp_param = torch.empty(0, dtype=dtype, device=parameter.device)  # noqa: SLF001


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Iterable[str]) -> None:
    """Cast the floating-point buffers of `module` to `dtype`, in place."""
    if dtype is None:
        return
    left_alone = set(ignored)
    for name, buffer in module.named_buffers():
        if name not in left_alone and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
