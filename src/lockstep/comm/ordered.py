"""All-reduce in the order of the tree: the same bits on any number of ranks, whichever rank holds which partial.

Every segment of the tensor has an owner. All ranks send it their partials of that segment; it adds them in tree order
([Note: reduction order] in `shards/tree.py`) and sends the sum to all:

    rank 0 holds (0, 2)       rank 1 holds (2, 3), (3, 5)              owner of
                                                                       segment 0       segment 1
    1 exchange   (0, 2)[segment 1] -> 1                                                (0, 2)
                 (2, 3)[segment 0], (3, 5)[segment 0] -> 0             (2, 3) (3, 5)
    2 add        (0, 2) + ((2, 3) + (3, 5)), each in its segment
    3 gather     the sums, to all

With one partial per rank these are the bytes of a ring, 2 (W - 1) / W times the tensor, and two steps instead of
2 (W - 1). Long tensors are cut into chunks: while one chunk is added, the next is being exchanged. On the shm backend
ranks read each other's partials where they lie; the order of addition is the same.

[Note: one addition] A sum of two numbers is the same in either order. So where two ranks hold one partial each, any
all-reduce of theirs is in the order of the tree, and the group's own is taken: one call that runs beside a backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.capabilities import AddsInOrder, capabilities_of
from lockstep.comm.messages import check_summable, joined_world, write_back
from lockstep.comm.ordered_messages import OrderedMessages
from lockstep.comm.ordered_reduction import FlatReduction, PartialLayout, flatten_reduction, is_one_addition_each
from lockstep.comm.ring import resolved
from lockstep.comm.same_call import describe_use, require_same_call
from lockstep.comm.segments import HeldPartials, check_held_partials, check_layout
from lockstep.comm.world import World
from lockstep.shards.tree import Node


@torch.no_grad()
def ordered_all_reduce(
    tensor: Tensor | Mapping[Node, Tensor],
    group: ProcessGroup | None = None,
    *,
    num_shards: int | None = None,
    out: Tensor | None = None,
    layout: PartialLayout | None = None,
) -> Tensor:
    """Sum over the ranks of `group` in the order of the tree over shards (collective: every rank of the group calls).

    The result has the same bits on every rank, and on any number of ranks that hold the same shards between them.
    Memory beside inputs and result: 32 MiB; for non-contiguous tensors contiguous copies.

    Four shards on two ranks, with the bits that four ranks get, of which each calls `ordered_all_reduce(shard)`:

        first = 2 * rank
        total = ordered_all_reduce({(first, first + 2): shards[first] + shards[first + 1]}, num_shards=4)

    Args:
        tensor: One dense tensor: rank r holds shard r of as many shards as there are ranks. Or the partials that
            this rank holds: dense tensors of one shape, dtype and device by subtree `(first shard, one after
            last)`; they are left alone. Shape and dtype are the same on every rank; any strides. Integers wrap
            around, booleans are or-ed, as torch adds them.
        group: The group; None for the default one.
        num_shards: Number of shards of the run; needed with partials.
        out: Where the sum goes, of the partials' shape, dtype and device; may be one of them. By default one tensor is
            overwritten, and for partials a new tensor is made. A rank that holds no partial needs it.
        layout: The nodes that every rank holds, in rank order, the same on every rank. Without it, ranks that hold
            partials exchange it first, which takes two collectives more: for the first call, not for every step.

    Returns:
        `out`, the tensor, or the new tensor.

    Raises:
        CollectiveMismatchError: The ranks pass tensors of different shape, dtype or kind of device, or different
            layouts, or make different calls; on every rank alike. On groups that compare no calls, only calls of this
            function and of `ring_all_reduce` are distinguished.
        GroupError: There is no group, or this worker is not in it.
        TypeError: Something that is not a tensor, a mapping of tensors or a group; `num_shards` is missing.
        ValueError: A tensor is sparse, or of a dtype that torch cannot add, or unlike the others; `out` is expanded;
            the layout is not this rank's or not this group's. On every rank alike: the partials do not cover every
            shard once, or, without a layout, they differ in shape, dtype or number of shards.
    """
    world = joined_world(group)
    inputs = _check_inputs(tensor, world, num_shards, out)
    layout = _agree_on_layout(inputs, world, layout)
    call = _describe_call(inputs, layout)
    is_added_by_group = world.group is not None and capabilities_of(world.group).adds_in_order
    if is_added_by_group and inputs.out.device.type == "cpu" and inputs.out.numel() > 0:
        reduction = flatten_reduction(inputs.partials, inputs.out, inputs.num_shards, layout, world)
        # The group compares the calls in its first phase.
        _start_in_group(reduction, call, waits=True).wait()
        write_back(reduction.out, inputs.out)
        return inputs.out
    require_same_call(call, inputs.out.device, world)
    if inputs.out.numel() > 0:
        stream = OrderedMessages(world, inputs.num_shards)
        stream.start(inputs.partials, inputs.out, layout)
        stream.finish()
    return inputs.out


def ordered_hook(state: ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of torch's DistributedDataParallel in tree order; its register_comm_hook takes this.

    Rank r holds shard r. The hook returns when the bucket is reduced: nothing of the backward overlaps with it. The
    sum is divided, not what is added: where half precision may overflow, scale the loss.

    Args:
        state: The group to average over, that of the wrapper: a bucket does not contain it. None for the default group;
            under a wrapper over a subgroup it would wait for ranks that make no such call.
        bucket: The bucket, reduced in place.

    Raises:
        GroupError: As `ordered_all_reduce`.
    """
    summed = ordered_all_reduce(bucket.buffer(), state)
    return resolved(summed.div_(joined_world(state).world_size))


@final
class OrderedReductions:
    """Ordered all-reduces that overlap with what the caller computes.

    Every rank starts the same ones in the same order. Shared memory compares them; elsewhere nothing does.
    """

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._one_each = [[(rank, rank + 1)] for rank in range(world.world_size)]
        self._messages = OrderedMessages(world, num_shards)
        self._group_adds_in_order = world.group is not None and capabilities_of(world.group).adds_in_order

    def start(
        self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout, *, waits: bool
    ) -> Callable[[], object]:
        """Start one (collective: every rank of the group calls); return what waits until it is in its place.

        The partials are flat and contiguous, and left alone until then; one may be `out`. `waits`: the caller does so
        at once.
        """
        group = self._world.group
        has_own_order = self._group_adds_in_order and list(layout) == self._one_each
        is_in_place = next(iter(partials.values()), None) is out  # so the group need not copy memory of its own
        is_cpu = out.device.type == "cpu"
        if is_in_place and ((is_cpu and has_own_order) or is_one_addition_each(layout, out.dtype)):
            work = dist.all_reduce(out, group=group, async_op=not waits)
            return _do_nothing if work is None else work.wait
        if not (self._group_adds_in_order and is_cpu):
            self._messages.start(partials, out, layout)
            return self._messages.finish
        reduction = flatten_reduction(partials, out, self._num_shards, layout, self._world)
        call = describe_use("ordered_all_reduce", out, f"layout {reduction.layout}")
        work = _start_in_group(reduction, call, waits=waits)

        def finish() -> None:
            work.wait()
            write_back(reduction.out, out)

        return finish


def _do_nothing() -> None:
    """Stand for a wait that is over."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the caller gave, checked as far as one rank can."""

    partials: Mapping[Node, Tensor]
    """Sums of subtrees."""
    num_shards: int
    out: Tensor
    is_one_tensor: bool
    """Whether every rank holds its own shard, so that the layout is known."""


def _check_inputs(
    tensor: Tensor | Mapping[Node, Tensor], world: World, num_shards: int | None, out: Tensor | None
) -> _Inputs:
    is_one_tensor = not isinstance(tensor, Mapping)
    if isinstance(tensor, Mapping):
        partials = tensor
        if num_shards is None:
            raise TypeError("num_shards is missing: with partials, give the number of shards of the run. (LS210)")
        for node, partial in partials.items():
            check_summable(partial, f"the partial {node}", is_written=False)
    else:
        partials = {(world.rank, world.rank + 1): check_summable(tensor, "tensor", is_written=out is None)}
        out = tensor if out is None else out
        num_shards = world.world_size if num_shards is None else num_shards
        if num_shards != world.world_size:
            raise ValueError(
                f"One tensor per rank makes {world.world_size} shards, and num_shards is {num_shards}. Give the "
                "partials that this rank holds, by subtree, or leave num_shards out. (LS210)"
            )
    if out is None:
        if not partials:
            raise ValueError(
                f"Rank {world.rank} holds no partial, so shape and dtype of the result are not known. Give out. (LS210)"
            )
        out = torch.empty_like(next(iter(partials.values())), memory_format=torch.contiguous_format)
    check_summable(out, "out", is_written=True)
    for node, partial in partials.items():
        if _describe(partial) != _describe(out):
            raise ValueError(
                f"Rank {world.rank}: the partial {node} is {_describe(partial)}, and the result {_describe(out)}. "
                "Partials and out must have one shape, dtype and device. (LS210)"
            )
    return _Inputs(partials=partials, num_shards=num_shards, out=out, is_one_tensor=is_one_tensor)


def _agree_on_layout(inputs: _Inputs, world: World, layout: PartialLayout | None) -> PartialLayout:
    """Return who holds what (collective if there are partials and `layout` is None)."""
    if layout is not None:
        if len(layout) != world.world_size:
            raise ValueError(f"The layout lists {len(layout)} ranks, and the group has {world.world_size}. (LS210)")
        check_layout(layout, inputs.num_shards)
        _check_own(layout[world.rank], inputs.partials, world.rank)
        return layout
    if inputs.is_one_tensor:
        return [[(rank, rank + 1)] for rank in range(world.world_size)]
    require_same_call(b"ordered_all_reduce(partials, without a layout)", inputs.out.device, world)
    holding = HeldPartials(
        nodes=tuple(inputs.partials),
        num_shards=inputs.num_shards,
        shape=tuple(inputs.out.shape),
        dtype=str(inputs.out.dtype),
    )
    holdings: list[HeldPartials] = world.gather_objects(holding)
    check_held_partials(holdings)
    return [holding.nodes for holding in holdings]


def _describe_call(inputs: _Inputs, layout: PartialLayout) -> bytes:
    nodes = [sorted(nodes) for nodes in layout]
    is_one_each = nodes == [[(rank, rank + 1)] for rank in range(len(nodes))]
    return describe_use("ordered_all_reduce", inputs.out, "" if is_one_each else f"layout {nodes}")


def _check_own(expected: Sequence[Node], partials: Mapping[Node, Tensor], rank: int) -> None:
    if set(expected) != set(partials):
        raise ValueError(
            f"Rank {rank} holds {list(partials)}, and the layout has {list(expected)}. Make both from the same shards "
            "and the same number of ranks. (LS210)"
        )


def _start_in_group(reduction: FlatReduction, call: bytes, *, waits: bool) -> dist.Work:
    group = cast("AddsInOrder", reduction.world.group)
    own = reduction.layout[reduction.world.rank]
    parts = [reduction.partials[node] for node in own]
    return group.ordered_all_reduce(
        parts, reduction.out, reduction.layout, reduction.num_shards, call, is_async=not waits
    )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
