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
from functools import partial
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.capabilities import AddsInOrder, capabilities_of
from lockstep.comm.messages import (
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
MakeRoom = Callable[[int], Tensor]
"""Returns so many bytes, on the device of the reduction, that no other exchange uses."""


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
        from_real_row(reduction.out, inputs.out)
        return inputs.out
    require_same_call(call, inputs.out.device, world)
    if inputs.out.numel() > 0:
        stream = OrderedMessages(world, inputs.num_shards)
        stream.start(inputs.partials, inputs.out, layout)
        stream.finish()
    return inputs.out


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
        if is_in_place and ((is_cpu and has_own_order) or is_one_addition(layout, out.dtype)):
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
            from_real_row(reduction.out, out)

        return finish


def _do_nothing() -> None:
    """Stand for a wait that is over."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the caller gave, checked as far as one rank can."""

    partials: Mapping[Node, Tensor]
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


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlatReduction:
    partials: dict[Node, Tensor]
    """What this rank holds: 1-D, contiguous, real, one length."""
    out: Tensor
    """Where the result goes: likewise; may be one of the partials."""
    layout: list[list[Node]]
    """Sorted nodes of every rank: the order in which a rank sends them and its peers receive them."""
    num_shards: int
    world: World


def is_one_addition(layout: PartialLayout, dtype: torch.dtype) -> bool:
    """Whether any all-reduce is in the order of the tree, and rounds as torch does. [Note: one addition]."""
    return [len(nodes) for nodes in layout] == [1, 1] and dtype in {torch.float32, torch.float64}


def flatten_reduction(
    partials: Mapping[Node, Tensor], out: Tensor, num_shards: int, layout: PartialLayout, world: World
) -> FlatReduction:
    """Return a reduction of flat tensors: copies, where one is not contiguous or shorter than there are ranks."""
    return FlatReduction(
        partials={node: to_real_row(partial, world.world_size) for node, partial in partials.items()},
        out=to_real_row(out, world.world_size),
        layout=[sorted(nodes) for nodes in layout],
        num_shards=num_shards,
        world=world,
    )


def _start_in_group(reduction: FlatReduction, call: bytes, *, waits: bool) -> dist.Work:
    group = cast("AddsInOrder", reduction.world.group)
    own = reduction.layout[reduction.world.rank]
    parts = [reduction.partials[node] for node in own]
    return group.ordered_all_reduce(
        parts, reduction.out, reduction.layout, reduction.num_shards, call, is_async=not waits
    )


@final
class MessageTransport:
    def exchange(
        self, reduction: FlatReduction, segments: Sequence[Bounds], make_room: MakeRoom
    ) -> tuple[Received, list[dist.Work]]:
        world = reduction.world
        start, stop = segments[world.rank]
        num_bytes = (stop - start) * reduction.out.element_size()
        stride = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        foreign = [node for nodes in reduction.layout for node in nodes if node not in reduction.partials]
        room = make_room(max(len(foreign) * stride, 1))
        received = {
            node: room[index * stride : index * stride + num_bytes].view(reduction.out.dtype)
            for index, node in enumerate(foreign)
        }
        works = post_messages(
            sends=[
                (peer, reduction.partials[node][slice(*segments[peer])])
                for peer in _peers(world)
                for node in reduction.layout[world.rank]
            ],
            receives=[(peer, received[node]) for peer in _peers(world) for node in reduction.layout[peer]],
            world=world,
        )
        return received, works

    def gather(self, reduction: FlatReduction, segments: Sequence[Bounds]) -> list[dist.Work]:
        world, out = reduction.world, reduction.out
        own = out[slice(*segments[world.rank])]
        return post_messages(
            sends=[(peer, own) for peer in _peers(world)],
            receives=[(peer, out[slice(*segments[peer])]) for peer in _peers(world)],
            world=world,
        )


@final
class CollectiveTransport:
    """An all-to-all for the first partial of every rank, one for the second, ..., and an all-gather of the sums."""

    def exchange(
        self, reduction: FlatReduction, segments: Sequence[Bounds], make_room: MakeRoom
    ) -> tuple[Received, list[dist.Work]]:
        world, out = reduction.world, reduction.out
        chunk = slice(segments[0][0], segments[-1][1])
        lengths = _byte_lengths(segments, out)
        own = reduction.layout[world.rank]
        num_partials = sum(len(nodes) for nodes in reduction.layout)
        room = make_room(max(num_partials * lengths[world.rank], 1))
        received: Received = {}
        works: list[dist.Work] = []
        for slot in range(max(len(nodes) for nodes in reduction.layout)):
            # This rank receives its own partial too: a contiguous input has no gap for it.
            senders = [peer for peer, nodes in enumerate(reduction.layout) if slot < len(nodes)]
            first = len(received) * lengths[world.rank]
            for number, peer in enumerate(senders):
                start = first + number * lengths[world.rank]
                place = room[start : start + lengths[world.rank]]
                received[reduction.layout[peer][slot]] = place.view(out.dtype)
            target = room[first : first + len(senders) * lengths[world.rank]]
            source = _as_bytes(reduction.partials[own[slot]][chunk]) if slot < len(own) else target[:0]
            works += _all_to_all(
                target,
                source,
                [lengths[world.rank] if peer in senders else 0 for peer in range(world.world_size)],
                lengths if slot < len(own) else [0] * world.world_size,
                world,
            )
        return received, works

    def gather(self, reduction: FlatReduction, segments: Sequence[Bounds]) -> list[dist.Work]:
        world, out = reduction.world, reduction.out
        lengths = _byte_lengths(segments, out)
        whole = _as_bytes(out[segments[0][0] : segments[-1][1]])
        own = _as_bytes(out[slice(*segments[world.rank])])
        if len(set(lengths)) == 1:
            return gather_single(whole, own, world)
        return _all_to_all(whole, own.repeat(world.world_size), lengths, [own.numel()] * world.world_size, world)


OrderedTransport = MessageTransport | CollectiveTransport
"""Moves what an ordered reduction exchanges: by messages on CPUs, by collectives elsewhere.

On CPUs every pair of ranks exchanges messages, which over Gloo take less time than all-to-all and all-gather. For other
devices both steps are collectives: Gloo has no messages for them; NCCL runs messages one after another unless they are
in one batch, which torch makes only for groups of its own class; and one collective replaces many messages.

`exchange` starts sending the owners of segments this rank's partials of them, and returns where those of others land
(collective). `gather` starts sending this rank's segment of the result to all, and receiving those of others
(collective).
"""


def transport_for(device: torch.device) -> OrderedTransport:
    return MessageTransport() if device.type == "cpu" else CollectiveTransport()


def _all_to_all(
    target: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int], world: World
) -> list[dist.Work]:
    work = dist.all_to_all_single(target, source, list(received), list(sent), group=world.group, async_op=True)
    return [] if work is None else [work]


def _byte_lengths(segments: Sequence[Bounds], out: Tensor) -> list[int]:
    return [(stop - start) * out.element_size() for start, stop in segments]


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a flat contiguous tensor as bytes, so that every dtype travels."""
    return tensor.view(torch.uint8)


def _peers(world: World) -> list[int]:
    """Return the other ranks, the next one first: so no two ranks begin with the same."""
    return [(world.rank + distance) % world.world_size for distance in range(1, world.world_size)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkInFlight:
    reduction: FlatReduction
    segments: list[Bounds]
    """The segment of every rank."""
    received: Received
    """Other ranks' partials of this rank's segment, when the works are done."""
    works: list[dist.Work]
    transport: OrderedTransport


@final
class OrderedMessages:
    """Ordered all-reduces, one after the other: the next is exchanged while one is added and gathered.

    Every rank starts the same reductions in the same order; nothing is compared. On a GPU they run on a stream of their
    own, beside what the caller computes.
    """

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._in_flight: deque[_ChunkInFlight] = deque()
        self._gathers: list[dist.Work] = []
        self._started: list[tuple[FlatReduction, Tensor]] = []
        self._landing_places: list[Tensor] = []
        self._num_chunks = 0
        self._side: torch.Stream | None = None

    @torch.no_grad()
    def start(self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout) -> None:
        """Start a reduction (collective); the partials, of which one may be `out`, are left alone until `finish`."""
        with self._beside(out.device):
            reduction = flatten_reduction(partials, out, self._num_shards, layout, self._world)
            self._started.append((reduction, out))
            if is_one_addition(reduction.layout, reduction.out.dtype):
                self._gathers.append(_all_reduce(reduction))
                return
            transport = transport_for(out.device)
            num_partials = sum(len(nodes) for nodes in reduction.layout)
            segment_elements = max(2, _CHUNK_BYTES // (num_partials * reduction.out.element_size()))
            for segments in plan_chunks(reduction.out.numel(), self._world.world_size, segment_elements):
                if len(self._in_flight) == _MAX_IN_FLIGHT:
                    self._gathers += _add_and_gather(self._in_flight.popleft())
                received, works = transport.exchange(reduction, segments, partial(self._make_room, out.device))
                self._in_flight.append(
                    _ChunkInFlight(
                        reduction=reduction, segments=segments, received=received, works=works, transport=transport
                    )
                )

    @torch.no_grad()
    def finish(self) -> None:
        """Return when all that was started is in its place; on a GPU the current stream waits for that."""
        if not self._started:
            return
        device = self._started[0][1].device
        with self._beside(device):
            while self._in_flight:
                self._gathers += _add_and_gather(self._in_flight.popleft())
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


def _add_and_gather(finished: _ChunkInFlight) -> list[dist.Work]:
    """Wait for the exchange of a chunk, add this rank's segment, and start gathering the sums into the result.

    Only now may the result be written: it may be a partial that was being sent.
    """
    wait_all(finished.works)
    reduction = finished.reduction
    world, out = reduction.world, reduction.out
    own = slice(*finished.segments[world.rank])
    partials = {node: (landing, True) for node, landing in finished.received.items()}
    in_out = [node for node, held in reduction.partials.items() if held.data_ptr() == out.data_ptr()]
    for node, held in reduction.partials.items():
        # If several partials are one tensor, each sum needs it as it was.
        partials[node] = held[own], in_out == [node]
    total, _ = add_in_tree_order(partials, reduction.num_shards, _add)
    if total.data_ptr() != out[own].data_ptr():
        out[own].copy_(total)
    return finished.transport.gather(reduction, finished.segments)


def _all_reduce(reduction: FlatReduction) -> dist.Work:
    """Start the group's own all-reduce of one partial on each of two ranks. [Note: one addition]."""
    (own,) = reduction.partials.values()
    if own.data_ptr() != reduction.out.data_ptr():
        reduction.out.copy_(own)
    work: dist.Work | None = dist.all_reduce(reduction.out, group=reduction.world.group, async_op=True)
    assert work is not None
    return work


def _add(left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Add two sums, each with whether its memory may be written; that of the caller's partials may not."""
    for target, is_writable in (left, right):
        if is_writable:
            return torch.add(left[0], right[0], out=target), True
    return left[0] + right[0], True
