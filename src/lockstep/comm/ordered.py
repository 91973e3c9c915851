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

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.capabilities import capabilities_of
from lockstep.comm.messages import (
    all_to_all,
    check_summable,
    describe_use,
    from_real_row,
    gather_single,
    joined_world,
    post_messages,
    require_same_call,
    to_real_row,
    wait_all,
)
from lockstep.comm.ring import resolved
from lockstep.comm.segments import Bounds, HeldPartials, check_held_partials, check_layout, plan_chunks
from lockstep.comm.world import World
from lockstep.shards.tree import Node, add_in_tree_order

_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 16 << 20
"""Most that a rank receives in the exchange of one chunk."""
_MAX_IN_FLIGHT = 2
PartialLayout = Sequence[Sequence[Node]]
"""The nodes that each rank holds, in rank order."""
Received = dict[Node, Tensor]
"""Partials of this rank's segment, in memory that the addition may overwrite."""


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
    Memory beside inputs and result: 32 MiB, on a GPU up to twice that; for non-contiguous tensors contiguous copies.

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
    partials, out, num_shards = _check_inputs(tensor, world, num_shards, out)
    if layout is not None:
        _check_layout(layout, partials, num_shards, world)
    elif isinstance(tensor, Mapping):
        layout = _gather_layout(partials, out, num_shards, world)
    else:
        layout = [[(rank, rank + 1)] for rank in range(world.world_size)]
    reductions = OrderedReductions(world, num_shards)
    if out.numel() == 0 or not reductions.adds_in_group(out):  # that compares the calls too
        require_same_call(_describe_call(out, layout), out.device, world)
    if out.numel() > 0:
        reductions.start_ordered(partials, out, layout, waits=True)()
    return out


def ordered_hook(state: ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of torch's DistributedDataParallel in tree order; its register_comm_hook takes this.

        torch.nn.parallel.DistributedDataParallel(model).register_comm_hook(None, ls.ordered_hook)

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


def _check_inputs(
    tensor: Tensor | Mapping[Node, Tensor], world: World, num_shards: int | None, out: Tensor | None
) -> tuple[Mapping[Node, Tensor], Tensor, int]:
    """Return partials, result and number of shards, checked as far as one rank can."""
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
    return partials, out, num_shards


def _check_layout(layout: PartialLayout, partials: Mapping[Node, Tensor], num_shards: int, world: World) -> None:
    if len(layout) != world.world_size:
        raise ValueError(f"The layout lists {len(layout)} ranks, and the group has {world.world_size}. (LS210)")
    check_layout(layout, num_shards)
    if set(layout[world.rank]) != set(partials):
        raise ValueError(
            f"Rank {world.rank} holds {list(partials)}, and the layout has {list(layout[world.rank])}. Make both from "
            "the same shards and the same number of ranks. (LS210)"
        )


def _gather_layout(partials: Mapping[Node, Tensor], out: Tensor, num_shards: int, world: World) -> PartialLayout:
    """Return who holds what (collective)."""
    require_same_call(b"ordered_all_reduce(partials, without a layout)", out.device, world)
    mine = HeldPartials(nodes=tuple(partials), num_shards=num_shards, shape=tuple(out.shape), dtype=str(out.dtype))
    holdings: list[HeldPartials] = world.gather_objects(mine)
    check_held_partials(holdings)
    return [holding.nodes for holding in holdings]


def _describe_call(out: Tensor, layout: PartialLayout) -> bytes:
    return describe_use(
        "ordered_all_reduce", out, "" if _is_one_each(layout) else f"layout {list(map(sorted, layout))}"
    )


def _is_one_each(layout: PartialLayout) -> bool:
    """Whether rank r holds shard r, and no rank more."""
    return all(list(nodes) == [(rank, rank + 1)] for rank, nodes in enumerate(layout))


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatReduction:
    partials: dict[Node, Tensor]
    """What this rank holds: 1-D, contiguous, real, one length."""
    out: Tensor
    """Where the result goes: likewise; may be one of the partials."""
    layout: list[list[Node]]
    """Sorted nodes of every rank: the order in which a rank sends them and its peers receive them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkInFlight:
    reduction: _FlatReduction
    segments: list[Bounds]
    """The segment of every rank."""
    received: dict[Node, Tensor]
    """Partials of this rank's segment, when the works are done, in memory that the addition may overwrite."""
    works: list[dist.Work]


@final
class OrderedReductions:
    """Ordered all-reduces, one after the other: the next is exchanged while one is added and gathered.

    Every rank starts the same ones in the same order. Shared memory compares them; elsewhere nothing does. They overlap
    with what the caller computes: on a GPU they run on a stream of their own.
    """

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._group_adds_in_order = world.group is not None and capabilities_of(world.group).adds_in_order
        # The other ranks, the next one first: so no two ranks begin with the same.
        self._peers = [(world.rank + distance) % world.world_size for distance in range(1, world.world_size)]
        self._in_flight: deque[_ChunkInFlight] = deque()
        self._gathers: list[dist.Work] = []
        self._started: list[tuple[_FlatReduction, Tensor]] = []
        self._landing_places: list[Tensor] = []
        self._num_chunks = 0
        self._side: torch.Stream | None = None

    def start(
        self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout, *, waits: bool
    ) -> Callable[[], object]:
        """Start one (collective: every rank of the group calls); return what waits until it is in its place.

        The partials are flat and contiguous, and left alone until then; one may be `out`. `waits`: the caller does so
        at once.
        """
        has_own_order = self.adds_in_group(out) and _is_one_each(layout)
        is_in_place = next(iter(partials.values()), None) is out  # so the group need not copy memory of its own
        if is_in_place and (has_own_order or _is_one_addition(layout, out.dtype)):
            work = dist.all_reduce(out, group=self._world.group, async_op=not waits)
            return (lambda: None) if work is None else work.wait
        return self.start_ordered(partials, out, layout, waits=waits)

    def adds_in_group(self, out: Tensor) -> bool:
        return self._group_adds_in_order and out.device.type == "cpu"

    @torch.no_grad()
    def start_ordered(
        self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout, *, waits: bool
    ) -> Callable[[], object]:
        """As `start`, of tensors of any strides, and always as a call of its own (collective)."""
        if not self.adds_in_group(out):
            with self._beside(out.device):
                self._start_messages(self._flatten(partials, out, layout), out)
            return self._finish
        reduction = self._flatten(partials, out, layout)
        work = cast("Any", self._world.group).ordered_all_reduce(
            [reduction.partials[node] for node in reduction.layout[self._world.rank]],
            reduction.out,
            reduction.layout,
            self._num_shards,
            _describe_call(out, layout),
            is_async=not waits,
        )

        def finish() -> None:
            if work is not None:
                work.wait()
            from_real_row(reduction.out, out)

        return finish

    def _flatten(self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout) -> _FlatReduction:
        """Return a reduction of flat tensors: copies, where one is not contiguous or shorter than there are ranks."""
        world_size = self._world.world_size
        return _FlatReduction(
            partials={node: to_real_row(partial, world_size) for node, partial in partials.items()},
            out=to_real_row(out, world_size),
            layout=[sorted(nodes) for nodes in layout],
        )

    def _start_messages(self, reduction: _FlatReduction, out: Tensor) -> None:
        self._started.append((reduction, out))
        if _is_one_addition(reduction.layout, reduction.out.dtype):
            (own,) = reduction.partials.values()
            if own.data_ptr() != reduction.out.data_ptr():
                reduction.out.copy_(own)
            work = dist.all_reduce(reduction.out, group=self._world.group, async_op=True)
            assert work is not None
            self._gathers.append(work)
            return
        num_partials = sum(len(nodes) for nodes in reduction.layout)
        segment_elements = max(2, _CHUNK_BYTES // (num_partials * reduction.out.element_size()))
        for segments in plan_chunks(reduction.out.numel(), self._world.world_size, segment_elements):
            if len(self._in_flight) == _MAX_IN_FLIGHT:
                self._add_and_gather(self._in_flight.popleft())
            self._in_flight.append(self._exchange(reduction, segments))

    def _exchange(self, reduction: _FlatReduction, segments: list[Bounds]) -> _ChunkInFlight:
        """Start sending the owners of segments this rank's partials of them, and receiving others' (collective).

        On CPUs every pair of ranks exchanges messages, which over Gloo take less time than all-to-all and all-gather.
        For other devices both steps are collectives: Gloo has no messages for them; NCCL runs messages one after
        another unless they are in one batch, which torch makes only for groups of its own class.
        """
        rank, layout, out = self._world.rank, reduction.layout, reduction.out
        is_cpu = out.device.type == "cpu"
        # A collective brings this rank its own partials too: a contiguous input has no gap for them.
        senders = [peer for peer in range(len(layout)) if not (is_cpu and peer == rank)]
        landing = [node for peer in senders for node in layout[peer]]
        lengths = [(stop - start) * out.element_size() for start, stop in segments]
        stride = -(-lengths[rank] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES if is_cpu else lengths[rank]
        room = self._make_room(out.device, max(len(landing) * stride, 1))
        received = {
            node: room[index * stride : index * stride + lengths[rank]].view(out.dtype)
            for index, node in enumerate(landing)
        }
        own = [reduction.partials[node] for node in layout[rank]]
        if is_cpu:
            sends = [(peer, partial[slice(*segments[peer])]) for peer in self._peers for partial in own]
            receives = [(peer, received[node]) for peer in self._peers for node in layout[peer]]
            works = post_messages(sends, receives, self._world)
        else:
            parts = [partial[slice(*segment)] for segment in segments for partial in own] or [out[:0]]
            # One partial lies as it is sent already.
            source = own[0][segments[0][0] : segments[-1][1]] if len(own) == 1 else torch.cat(parts)
            received_bytes = [lengths[rank] * len(nodes) for nodes in layout]
            sent_bytes = [length * len(own) for length in lengths]
            works = all_to_all(room[: len(landing) * stride], source, received_bytes, sent_bytes, self._world)
        return _ChunkInFlight(reduction=reduction, segments=segments, received=received, works=works)

    def _add_and_gather(self, finished: _ChunkInFlight) -> None:
        """Wait for the exchange of a chunk, add this rank's segment, and start gathering the sums into the result.

        Only now may the result be written: it may be a partial that was being sent.
        """
        wait_all(finished.works)
        reduction, out = finished.reduction, finished.reduction.out
        own = slice(*finished.segments[self._world.rank])
        partials = {node: (landing, True) for node, landing in finished.received.items()}
        in_out = [node for node, held in reduction.partials.items() if held.data_ptr() == out.data_ptr()]
        for node, held in reduction.partials.items():
            # If several partials are one tensor, each sum needs it as it was.
            partials[node] = held[own], in_out == [node]
        total, _ = add_in_tree_order(partials, self._num_shards, _add)
        if total.data_ptr() != out[own].data_ptr():
            out[own].copy_(total)
        self._gathers += self._gather(out, finished.segments)

    def _gather(self, out: Tensor, segments: Sequence[Bounds]) -> list[dist.Work]:
        """Start sending this rank's segment of the result to all, and receiving those of others (collective)."""
        own = out[slice(*segments[self._world.rank])]
        if out.device.type == "cpu":
            receives = [(peer, out[slice(*segments[peer])]) for peer in self._peers]
            return post_messages([(peer, own) for peer in self._peers], receives, self._world)
        whole = out[segments[0][0] : segments[-1][1]].view(torch.uint8)
        mine = own.view(torch.uint8)
        lengths = [(stop - start) * out.element_size() for start, stop in segments]
        if len(set(lengths)) == 1:
            return gather_single(whole, mine, self._world)
        num_ranks = self._world.world_size
        return all_to_all(whole, mine.repeat(num_ranks), lengths, [mine.numel()] * num_ranks, self._world)

    @torch.no_grad()
    def _finish(self) -> None:
        """Return when all that was started is in its place; on a GPU the current stream waits for that."""
        if not self._started:
            return
        device = self._started[0][1].device
        with self._beside(device):
            while self._in_flight:
                self._add_and_gather(self._in_flight.popleft())
            wait_all(self._gathers)
            for reduction, out in self._started:
                from_real_row(reduction.out, out)
        self._gathers = []
        if self._side is not None:
            torch.accelerator.current_stream(device).wait_stream(self._side)
        # Only now: memory that is freed while a stream reads it would be given to the next tensor.
        self._started = []

    def _make_room(self, device: torch.device, num_bytes: int) -> Tensor:
        """Return memory that no chunk in flight uses; it is kept, for fresh memory costs a page fault per 4 KiB."""
        number, self._num_chunks = self._num_chunks % _MAX_IN_FLIGHT, self._num_chunks + 1
        if len(self._landing_places) <= number:
            self._landing_places.append(torch.empty(0, dtype=torch.uint8, device=device))
        place = self._landing_places[number]
        if place.numel() < num_bytes or place.device != device:
            place = self._landing_places[number] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return place[:num_bytes]

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Run on a stream of our own, after what the current one has to do by now."""
        if device.type == "cpu":
            yield
            return
        current = torch.accelerator.current_stream(device)
        if self._side is None or self._side.device != current.device:
            self._side = torch.Stream(device)
        self._side.wait_stream(current)
        with self._side:
            yield


def _is_one_addition(layout: PartialLayout, dtype: torch.dtype) -> bool:
    """Whether any all-reduce is in the order of the tree, and rounds as torch does. [Note: one addition]."""
    return [len(nodes) for nodes in layout] == [1, 1] and dtype in {torch.float32, torch.float64}


def _add(left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Add two sums, each with whether its memory may be written; that of the caller's partials may not."""
    for target, is_writable in (left, right):
        if is_writable:
            return torch.add(left[0], right[0], out=target), True
    return left[0] + right[0], True
