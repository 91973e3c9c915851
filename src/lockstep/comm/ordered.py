"""All-reduce in the order of the tree: the same bits on any number of ranks, whoever holds which partial.

Every slice of the tensor has an owner. All ranks send it their partials of that slice; it adds them in tree order
([Note: reduction order] in `shards/tree.py`) and sends the sum to all:

    rank 0 holds (0, 2)       rank 1 holds (2, 3), (3, 5)              owner of
                                                                       slice 0   slice 1
    1 exchange   (0, 2)[slice 1] -> 1                                            (0, 2)
                 (2, 3)[slice 0], (3, 5)[slice 0] -> 0                 (2, 3) (3, 5)
    2 add        (0, 2) + ((2, 3) + (3, 5)), each in its slice
    3 gather     the sums, to all

With one partial per rank these are the bytes of a ring, 2 (W - 1) / W times the tensor, and two steps instead of
2 (W - 1). Long tensors go in rounds: while one round is added, the next is being exchanged. On the shm backend ranks
read each other's partials where they lie; the order of addition is the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.messages import check_summable, flatten, joined_world, post_messages, wait_all, write_back
from lockstep.comm.ring import resolved
from lockstep.comm.same_call import describe_use, require_same_call
from lockstep.comm.shm import ShmProcessGroup
from lockstep.comm.slices import Bounds, Holding, check_holdings, check_layout, plan_rounds
from lockstep.comm.world import World
from lockstep.shards.tree import Node, add_in_tree_order

_ROUND_BYTES = 16 << 20
"""Most that a rank receives in the exchange of one round."""
_MAX_IN_FLIGHT = 2

Layout = Sequence[Sequence[Node]]
"""The nodes that each rank holds, in rank order."""


@torch.no_grad()
def ordered_all_reduce(
    tensor: Tensor | Mapping[Node, Tensor],
    group: ProcessGroup | None = None,
    *,
    num_shards: int | None = None,
    out: Tensor | None = None,
    layout: Layout | None = None,
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
            partials tell each other first, which takes two collectives more: for the first call, not for every step.

    Returns:
        `out`, the tensor, or the new tensor.

    Raises:
        CollectiveMismatchError: The ranks pass tensors of different shape, dtype or kind of device, or different
            layouts, or make different calls; on every rank alike. On groups that compare no calls, only calls of this
            function and of `ring_all_reduce` are told from each other.
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
    if isinstance(world.group, ShmProcessGroup) and inputs.out.device.type == "cpu" and inputs.out.numel() > 0:
        reduction = _flatten(inputs, layout, world)
        _reduce_in_shared_memory(reduction, world.group, call)  # compares the calls in its first round
        write_back(reduction.out, inputs.out)
        return inputs.out
    require_same_call(call, inputs.out.device, world)
    if inputs.out.numel() > 0:
        reduction = _flatten(inputs, layout, world)
        _exchange_and_gather(reduction)
        write_back(reduction.out, inputs.out)
    return inputs.out


def ordered_hook(state: ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of torch's DistributedDataParallel in tree order; its register_comm_hook takes this.

    Rank r holds shard r. The hook returns when the bucket is reduced: nothing of the backward overlaps with it. The
    sum is divided, not what is added: where half precision may overflow, scale the loss.

    Args:
        state: The group to average over, that of the wrapper: a bucket does not say it. None for the default group;
            under a wrapper over a subgroup that would wait for ranks which do not come.
        bucket: The bucket, reduced in place.

    Raises:
        GroupError: As `ordered_all_reduce`.
    """
    summed = ordered_all_reduce(bucket.buffer(), state)
    return resolved(summed.div_(joined_world(state).world_size))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the caller gave, checked as far as one rank can."""

    partials: Mapping[Node, Tensor]
    """Sums of subtrees."""
    num_shards: int
    """Number of shards."""
    out: Tensor
    """Where the result goes."""
    is_one_tensor: bool
    """Whether every rank holds its own shard, so that all know who holds what."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """One reduction of flat tensors."""

    partials: dict[Node, Tensor]
    """What this rank holds: 1-D, contiguous, real, one length."""
    out: Tensor
    """Where the result goes: likewise; may be one of the partials."""
    layout: list[list[Node]]
    """Sorted nodes of every rank: the order in which a rank sends them and its peers receive them."""
    num_shards: int
    """Number of shards."""
    world: World
    """The ranks."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A round whose exchange is on its way."""

    slices: list[Bounds]
    """The slice of every rank."""
    received: dict[Node, Tensor]
    """Other ranks' partials of this rank's slice, once the messages are through."""
    works: list[dist.Work]
    """The messages."""


def _check_inputs(
    tensor: Tensor | Mapping[Node, Tensor], world: World, num_shards: int | None, out: Tensor | None
) -> _Inputs:
    is_one_tensor = not isinstance(tensor, Mapping)
    if isinstance(tensor, Mapping):
        partials = tensor
        if num_shards is None:
            raise TypeError("num_shards is missing: with partials, give the number of shards of the run.")
        for node, partial in partials.items():
            check_summable(partial, f"the partial {node}", is_written=False)
    else:
        partials = {(world.rank, world.rank + 1): check_summable(tensor, "tensor", is_written=out is None)}
        out = tensor if out is None else out
        num_shards = world.world_size if num_shards is None else num_shards
        if num_shards != world.world_size:
            raise ValueError(
                f"One tensor per rank makes {world.world_size} shards, and num_shards is {num_shards}. Give the "
                "partials that this rank holds, by subtree, or leave num_shards out."
            )
    if out is None:
        if not partials:
            raise ValueError(
                f"Rank {world.rank} holds no partial, so shape and dtype of the result are not known. Give out."
            )
        out = torch.empty_like(next(iter(partials.values())), memory_format=torch.contiguous_format)
    check_summable(out, "out", is_written=True)
    for node, partial in partials.items():
        if _describe(partial) != _describe(out):
            raise ValueError(
                f"Rank {world.rank}: the partial {node} is {_describe(partial)}, and the result {_describe(out)}. "
                "Partials and out must have one shape, dtype and device."
            )
    return _Inputs(partials=partials, num_shards=num_shards, out=out, is_one_tensor=is_one_tensor)


def _agree_on_layout(inputs: _Inputs, world: World, layout: Layout | None) -> Layout:
    """Return who holds what (collective if there are partials and `layout` is None)."""
    if layout is not None:
        if len(layout) != world.world_size:
            raise ValueError(f"The layout lists {len(layout)} ranks, and the group has {world.world_size}.")
        check_layout(layout, inputs.num_shards)
        _check_own(layout[world.rank], inputs.partials, world.rank)
        return layout
    if inputs.is_one_tensor:
        return [[(rank, rank + 1)] for rank in range(world.world_size)]
    require_same_call(b"ordered_all_reduce(partials, without a layout)", inputs.out.device, world)
    holding = Holding(
        nodes=tuple(inputs.partials),
        num_shards=inputs.num_shards,
        shape=tuple(inputs.out.shape),
        dtype=str(inputs.out.dtype),
    )
    holdings: list[Holding] = world.gather_objects(holding)
    check_holdings(holdings)
    return [holding.nodes for holding in holdings]


def _describe_call(inputs: _Inputs, layout: Layout) -> bytes:
    nodes = [sorted(nodes) for nodes in layout]
    is_one_each = nodes == [[(rank, rank + 1)] for rank in range(len(nodes))]
    return describe_use("ordered_all_reduce", inputs.out, "" if is_one_each else f"layout {nodes}")


def _check_own(expected: Sequence[Node], partials: Mapping[Node, Tensor], rank: int) -> None:
    if set(expected) != set(partials):
        raise ValueError(
            f"Rank {rank} holds {list(partials)}, and the layout says {list(expected)}. Make both from the same shards "
            "and the same number of ranks."
        )


def _flatten(inputs: _Inputs, layout: Layout, world: World) -> _Reduction:
    return _Reduction(
        partials={node: flatten(partial, world.world_size) for node, partial in inputs.partials.items()},
        out=flatten(inputs.out, world.world_size),
        layout=[sorted(nodes) for nodes in layout],
        num_shards=inputs.num_shards,
        world=world,
    )


def _reduce_in_shared_memory(reduction: _Reduction, group: ShmProcessGroup, call: bytes) -> None:
    own = reduction.layout[reduction.world.rank]
    parts = [reduction.partials[node] for node in own]
    options = dist.AllreduceOptions()
    options.asyncOp = False
    group.ordered_all_reduce(parts, reduction.out, reduction.layout, reduction.num_shards, call, options).wait()


def _exchange_and_gather(reduction: _Reduction) -> None:
    num_partials = sum(len(nodes) for nodes in reduction.layout)
    slice_elements = max(2, _ROUND_BYTES // (num_partials * reduction.out.element_size()))
    rounds = plan_rounds(reduction.out.numel(), reduction.world.world_size, slice_elements)
    landings = [_make_landings(reduction, rounds) for _ in range(min(_MAX_IN_FLIGHT, len(rounds)))]
    in_flight: deque[_Round] = deque()
    gathers: list[dist.Work] = []
    for number, slices in enumerate(rounds):
        if len(in_flight) == _MAX_IN_FLIGHT:
            gathers += _add_and_gather(reduction, in_flight.popleft())
        in_flight.append(_exchange(reduction, slices, landings[number % len(landings)]))
    while in_flight:
        gathers += _add_and_gather(reduction, in_flight.popleft())
    wait_all(gathers)


def _make_landings(reduction: _Reduction, rounds: list[list[Bounds]]) -> dict[Node, Tensor]:
    """Make room for what other ranks hold, as long as the longest slice, which is the first."""
    start, stop = rounds[0][0]
    foreign = [node for nodes in reduction.layout for node in nodes if node not in reduction.partials]
    return {node: reduction.out.new_empty(stop - start) for node in foreign}


def _exchange(reduction: _Reduction, slices: list[Bounds], landings: dict[Node, Tensor]) -> _Round:
    """Start sending the owners of slices this rank's partials, and receiving those of its own slice."""
    world = reduction.world
    start, stop = slices[world.rank]
    received = {node: landing[: stop - start] for node, landing in landings.items()}
    works = post_messages(
        sends=[
            (peer, reduction.partials[node][slice(*slices[peer])])
            for peer in _peers(world)
            for node in reduction.layout[world.rank]
        ],
        receives=[(peer, received[node]) for peer in _peers(world) for node in reduction.layout[peer]],
        world=world,
    )
    return _Round(slices=slices, received=received, works=works)


def _add_and_gather(reduction: _Reduction, finished: _Round) -> list[dist.Work]:
    """Wait for the exchange of a round, add this rank's slice, and start gathering the sums into the result.

    Only now may the result be written: it may be a partial that was being sent.
    """
    wait_all(finished.works)
    world, out = reduction.world, reduction.out
    own = slice(*finished.slices[world.rank])
    partials = {node: (landing, True) for node, landing in finished.received.items()}
    in_out = [node for node, partial in reduction.partials.items() if partial.data_ptr() == out.data_ptr()]
    for node, partial in reduction.partials.items():
        # If several partials are one tensor, each sum needs it as it was.
        partials[node] = partial[own], in_out == [node]
    total, _ = add_in_tree_order(partials, reduction.num_shards, _add)
    if total.data_ptr() != out[own].data_ptr():
        out[own].copy_(total)
    return post_messages(
        sends=[(peer, out[own]) for peer in _peers(world)],
        receives=[(peer, out[slice(*finished.slices[peer])]) for peer in _peers(world)],
        world=world,
    )


def _add(left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Add two sums, each with whether its memory may be written; that of the caller's partials may not."""
    for target, is_writable in (left, right):
        if is_writable:
            return torch.add(left[0], right[0], out=target), True
    return left[0] + right[0], True


def _peers(world: World) -> list[int]:
    """Return the other ranks, the next one first: so no two ranks begin with the same."""
    return [(world.rank + distance) % world.world_size for distance in range(1, world.world_size)]


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
