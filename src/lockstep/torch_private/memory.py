"""Storages, versions and reference counts of tensors, and operations on lists of tensors."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, UntypedStorage

storage_address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""The address of torch's StorageImpl, the argument of `storage_use_count`; equal for all tensors that share memory.

Unlike `data_ptr()` it differs for two storages that are both empty, and stays the same when the storage is resized.
"""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and storage objects hold the StorageImpl at an address.

Each tensor counts once, and so do a view, a detached tensor, an array made by `numpy()`, and the storage object, of
which there is one at a time. For: finding out whether anything else refers to memory that is about to be written (the
buckets' held gradients, replicas' kept memory) and whether two gradients share memory.
"""


def count_storage_users(tensors: Iterable[Tensor]) -> list[int]:
    """Return of each tensor how many tensors and storage objects hold its memory, the one made for this included."""
    return list(map(storage_use_count, map(storage_address, map(Tensor.untyped_storage, tensors))))


USUAL_STORAGE_USERS: Final = 2
"""What `count_storage_users` says of memory that one tensor alone has: that tensor, and the storage object."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor, or a view of it, was written in place.

Reading does not count, nor does writing through `.data` or to a detached NumPy array's memory. A view has its base's
counter; `.data` makes a tensor with a counter of its own. For: parameters that anything but the optimizer writes to,
and partials that a backward has not added to.
"""

REFERENCES_OF_ONE_HOLDER: Final = 2
"""What `sys.getrefcount(slot.gradient)` says of a tensor that only the attribute of one Python object holds.

One is the attribute, one the argument. We rely on three things. The same Python object comes back each time from
`parameter.grad`. While a tensor is also held in C++, as `.grad` is, the count is one higher. When `.grad` is cleared it
falls back. For: leaving a gradient to whoever held it when `.grad` was cleared.
"""

foreach_add_ = torch._foreach_add_
"""Add to each tensor of a list, in place, a number or its counterpart of a second list: with the bits of `add_`."""

foreach_div_ = torch._foreach_div_
"""Divide each tensor of a list in place, with the bits of `div_`."""

foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
"""Return the norm of each tensor of a list; that of order infinity is not finite if a number is not."""

foreach_copy_ = torch._foreach_copy_
"""Copy to each tensor of a list its counterpart of a second list, as `copy_` does: strides and dtype may differ."""

flatten_dense: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors
"""Copy the elements of tensors of one dtype and device to one tensor with one dimension: `torch.cat` of their
`reshape(-1)`, in half the time where there are many.
"""

foreach_lerp_ = torch._foreach_lerp_
"""Move each tensor of a list in place towards its counterpart of a second list by a part of the way: with the bits of
`lerp_` with that number."""


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor of a list in place, with the bits of `mul_`.

    Given a number, torch's operation rounds it to the tensors' dtype first, on the CPU: 1/3 in bfloat16 is 0.2% too
    large. Given a tensor it does not.
    """
    torch._foreach_mul_(tensors, torch.tensor(factor, dtype=torch.float64))
