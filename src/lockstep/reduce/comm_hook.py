"""Communication hooks: the user's function in place of an all-reduce, as torch's `register_comm_hook` takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.errors import ReductionError
from lockstep.reduce.bucket_set import Bucket
from lockstep.torch_private.groups import AnyFuture


@final
class GradBucket:
    """What a hook sees of a bucket: the methods of `torch.distributed.GradBucket`, which Python cannot construct."""

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._slots = bucket.slots
        self._buffer = bucket.gradients
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket; 0 is sent first."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last bucket of this backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the gradients, flat, one after another; for a sparse gradient, the gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor of the same length in its place."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return a view of the buffer for each parameter, in the shape of the parameter."""
        if self._buffer.is_sparse:
            return [self._buffer]
        views, offset = [], 0
        for parameter in self.parameters():
            flat = self._buffer[offset : offset + parameter.numel()]
            dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
            views.append(flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape))
            offset += parameter.numel()
        return views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of the gradients."""
        return [slot.parameter for slot in self._slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommHook:
    function: Callable[[Any, Any], "torch.futures.Future[Tensor]"]
    """`function(state, bucket)` returns a future of the reduced gradients."""
    state: Any
    """Its first argument."""

    def start(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        future = self.function(self.state, bucket)
        if not isinstance(future, AnyFuture):
            raise ReductionError(
                "Communication hook: callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}. (LS309)"
            )
        return future


def result_of(future: "torch.futures.Future[Tensor]") -> Tensor:
    """Wait for a hook's future and return what it holds."""
    result = future.wait()
    if not isinstance(result, Tensor):
        raise ReductionError(
            f"The future of a communication hook holds {type(result).__name__}, expected one tensor with the reduced "
            "gradients. After `all_reduce(...).get_future()`, which holds a list, add `.then(lambda f: "
            "f.value()[0])`. (LS309)"
        )
    return result
