"""The options of an optimizer, in words: what ranks compare, and what errors show."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Description = Mapping[str, str]
"""What must be the same on every worker, in words, by name."""
_NOT_OPTIONS = frozenset({"params", "param_names"})
"""What a parameter group holds besides its options."""


def describe_options(optimizer: Optimizer) -> Description:
    """Return the options of each parameter group by name, learning rate and all.

    Tensors that are not on the CPU are left out: to read them is to wait for the device.
    """
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
