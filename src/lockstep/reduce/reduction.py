"""How one bucket is reduced: the mean over a group, what a user's hook makes of it, or sums over shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import AllreduceOptions, ProcessGroup

from lockstep.comm import OrderedReductions, World, calls_for
from lockstep.errors import GroupError, ReductionError
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.partials import Partials
from lockstep.shards import Node
from lockstep.torch_private.groups import AnyFuture, count_calls

Finish = Callable[[], object]
"""Waits until what was started has ended; on a GPU the current stream waits for that."""


@final
class MeanReduction:
    """Averages over the ranks of a group, in the group's order: each divides first, so that half precision holds."""

    is_one_at_a_time = False
    runs_users_code = False

    def __init__(self, world: World) -> None:
        self.scale = 1 / world.world_size
        self._world = world

    def divide_by(self, num_ranks: int) -> None:
        """Let averages from now on be those of so many ranks (each rank calls)."""
        self.scale = 1 / num_ranks

    def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:  # noqa: ARG002
        return start_all_reduce(bucket.message, self._world.group, waits=waits)

    def expect_nothing(self) -> None:
        """Do nothing: what `.grad` holds is sent, whatever it is."""


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
    """The user's function in place of an all-reduce, as torch's `register_comm_hook` takes it."""

    function: Callable[[Any, Any], "torch.futures.Future[Tensor]"]
    """`function(state, bucket)` returns a future of the reduced gradients."""
    state: Any
    name: str = ""
    """What logging data call it."""

    def start(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        future = self.function(self.state, bucket)
        if not isinstance(future, AnyFuture):
            raise ReductionError(
                "Communication hook: callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}. (LS309)"
            )
        return future


@final
class HookReduction:
    """Lets a user's communication hook reduce the buckets; it sees gradients as they are, and divides itself.

    [Note: one hook at a time] A communication hook such as PowerSGD's makes further calls when its first is done. With
    the hooks of two buckets at work, it would depend on the moment which rank makes which call first.

    [Note: a hook that fails] If a hook raises an error on one rank, the others wait in the calls of theirs. As a rule a
    hook makes one all-reduce of the bucket. So if it has made no call, that one is made in its place; not for a hook
    that has made none before, and calls another group. The result is not used, because all ranks raise an error at the
    end of this backward.
    """

    scale = 1.0
    is_one_at_a_time = True
    runs_users_code = True

    def __init__(self, hook: CommHook, world: World) -> None:
        self._hook = hook
        self._world = world
        self._calls_group = True

    def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:  # noqa: ARG002
        """Call the hook, and raise what it raises (collective). [Note: a hook that fails]."""
        num_calls = count_calls(self._world.group)
        with calls_for(""):  # whichever thread makes a hook's further calls, and that need not be the same on all ranks
            try:
                future = self._hook.start(GradBucket(bucket, index, is_last=is_last))
            except GroupError:
                raise
            except Exception:
                if count_calls(self._world.group) == num_calls and self._calls_group:
                    start_all_reduce(bucket.gradients, self._world.group, waits=True)
                raise
        self._calls_group = num_calls < 0 or count_calls(self._world.group) != num_calls
        return lambda: bucket.take(result_of(future))

    def expect_nothing(self) -> None:
        """Do nothing: the hook sees what `.grad` holds, whatever it is."""


def result_of(future: "torch.futures.Future[Tensor]") -> Tensor:
    result = future.wait()
    if not isinstance(result, Tensor):
        raise ReductionError(
            f"The future of a communication hook holds {type(result).__name__}, expected one tensor with the reduced "
            "gradients. After `all_reduce(...).get_future()`, which holds a list, add `.then(lambda f: "
            "f.value()[0])`. (LS309)"
        )
    return result


@final
class TreeReduction:
    """Adds up the partials of all ranks, which run several shards each, in the order of the tree.

    The message of a bucket holds the sum that the last shard's gradients were added to; partials that this rank keeps
    beside it, because they belong elsewhere in the tree, are messages of their own. [Note: reduction order] in
    `lockstep.shards.tree`.
    """

    scale = 1.0
    is_one_at_a_time = False
    runs_users_code = False

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._ordered = OrderedReductions(world, num_shards)
        self._partials = Partials()
        self._has_nothing = False
        self._nodes: Sequence[Sequence[Node]] = [[(rank, rank + 1)] for rank in range(world.world_size)]

    def expect(self, partials: Partials, nodes: Sequence[Sequence[Node]]) -> None:
        """Add all shards next; `nodes` are the subtrees each rank keeps, then that of its gradients to come (local)."""
        self._partials, self._nodes = partials, nodes
        self._has_nothing = False

    def expect_nothing(self) -> None:
        self._partials, self._has_nothing = Partials(), True

    def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:  # noqa: ARG002
        messages = self._messages(bucket)
        partials = dict(zip(self._nodes[self._world.rank], messages, strict=True))
        return self._ordered.start(partials, messages[-1], self._nodes, waits=waits)

    def _messages(self, bucket: Bucket) -> list[Tensor]:
        """Return what this rank holds of a bucket, in the order of its nodes."""
        if self._has_nothing:
            # The message, which is of zeros, in place of each, because there may be no memory for others. Not if it has
            # the status, which would be added several times; the last bucket is a small one.
            has_status = bucket.message.numel() > bucket.gradients.numel() + bucket.used_counts.numel()
            others = torch.zeros_like(bucket.message) if has_status else bucket.message
            return [*[others] * (len(self._nodes[self._world.rank]) - 1), bucket.message]
        return [*bucket.add(self._partials), bucket.message]


BucketReduction = MeanReduction | HookReduction | TreeReduction
"""Reduces one bucket after the other. Every rank starts the same ones in the same order.

- `scale`: by what gradients are multiplied before they are added.
- `is_one_at_a_time`: whether a reduction must have ended before the next message is sent.
- `runs_users_code`: whether it may raise an error of the user's on one rank; then it has made the call that others wait
  for.
- `all_reduce` starts to reduce a bucket whose message is ready; `waits` if the caller waits at once (collective).
- `expect_nothing` lets this rank's part of what is still to be reduced be empty.
"""


def start_all_reduce(message: Tensor, group: ProcessGroup | None, *, waits: bool) -> Finish:
    """Start to add up a message (collective)."""
    assert group is not None
    options = AllreduceOptions()
    options.asyncOp = not waits
    # Not dist.all_reduce, which takes as long as the call itself.
    work = group.allreduce([torch.view_as_real(message) if message.is_complex() else message], options)
    if not waits:
        return work.wait
    if work is not None:  # some backends have ended the call by now
        work.wait()
    return do_nothing


def do_nothing() -> None:
    """Do nothing: a call has ended, or nothing was sent."""
