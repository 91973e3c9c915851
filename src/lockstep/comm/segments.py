"""Where the parts of a tensor travel when it is summed over a group, and who holds what (pure).

A *segment* is the part of a tensor that one rank adds up, or that is passed around the ring. Long tensors
are cut further, so that memory beside the tensor stays small and adding overlaps with sending. A *chunk* is what is
sent at a time: the ring cuts each segment into chunks; ordered reduction cuts the tensor into chunks, and each chunk
into segments.

Sums are taken element by element, so no cut changes a bit. Every rank computes the same cuts from the same numbers. A
tensor with at least one element per rank has no empty message: under NCCL the first batch of messages
of a group sets up its communicator, and every rank must take part in it.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.shards.assignment import split_evenly
from lockstep.shards.tree import Node, add_in_tree_order, partial_nodes

Bounds = tuple[int, int]
"""First element, and the one after the last."""

_NOT_COVERED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one rank does in one turn of the ring."""

    sent: Bounds
    """Elements that go to the next rank."""
    received: Bounds
    """Elements that the previous rank sends."""
    is_added: bool
    """Whether what is received is added to what is there, or replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPartials:
    """What one rank brings to an ordered reduction."""

    nodes: tuple[Node, ...]
    num_shards: int
    shape: tuple[int, ...]
    dtype: str


def plan_ring(num_elements: int, world_size: int, chunk_elements: int) -> list[list[Bounds]]:
    """Cut `range(num_elements)` into one segment per rank, and every segment into the same number of chunks.

    There are at least `world_size` elements, so that no chunk is empty; `chunk_elements` is the most, and 2 or more.
    """
    num_chunks = -(-num_elements // (world_size * chunk_elements))
    return _cut_twice(num_elements, world_size, num_chunks)


def ring_transfers(rank: int, chunks: Sequence[Sequence[Bounds]]) -> Iterator[Transfer]:
    """Yield the turns of one rank, in order: first those that add, then those that distribute the sums.

    In step `s` of 2 (world_size - 1), rank r passes on segment r - s and takes segment r - s - 1 (modulo world_size);
    with three ranks:

        step         rank 0         rank 1         rank 2
        0  add       0 ->  <- 2     1 ->  <- 0     2 ->  <- 1
        1  add       2 ->  <- 1     0 ->  <- 2     1 ->  <- 0     now rank r has the whole sum of segment r + 1
        2  replace   1 ->  <- 0     2 ->  <- 1     0 ->  <- 2
        3  replace   0 ->  <- 2     1 ->  <- 0     2 ->  <- 1

    What a turn sends came in the turn one step, that is as many turns as a segment has chunks, before it.
    """
    world_size = len(chunks)
    for step in range(2 * (world_size - 1)):
        passed_on, taken = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        for sent, received in zip(passed_on, taken, strict=True):
            yield Transfer(sent=sent, received=received, is_added=step < world_size - 1)


def plan_chunks(num_elements: int, world_size: int, segment_elements: int) -> list[list[Bounds]]:
    """Cut `range(num_elements)` into chunks, and every chunk into one segment per rank.

    There are at least `world_size` elements, so that no segment is empty; `segment_elements` is 2 or more.
    """
    num_chunks = -(-num_elements // (world_size * segment_elements))
    return _cut_twice(num_elements, num_chunks, world_size)


def check_held_partials(holdings: Sequence[HeldPartials]) -> None:
    """Check that what the ranks bring, in rank order, is alike and adds up to the whole tree."""
    for rank, holding in enumerate(holdings):
        for name in ("num_shards", "shape", "dtype"):
            found, expected = getattr(holding, name), getattr(holdings[0], name)
            if found != expected:
                raise ValueError(
                    f"Rank {rank} has {name} {found}, rank 0 has {expected}. Give every rank's partials the same "
                    "shape and dtype, and the same num_shards. (LS210)"
                )
    check_layout([holding.nodes for holding in holdings], holdings[0].num_shards)


def check_layout(layout: Sequence[Sequence[Node]], num_shards: int) -> None:
    """Check that the ranks hold subtrees that cover every shard exactly once."""
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}, expected 1 or more. (LS210)")
    held = [node for nodes in layout for node in nodes]
    try:
        # The sum takes each node that it reaches once. Taking all that are held, it takes no shard twice.
        num_used = add_in_tree_order(dict.fromkeys(held, 1), num_shards, operator.add)
    except (TypeError, ValueError):
        num_used = _NOT_COVERED
    if num_used != len(held):
        raise ValueError(_explain_layout(layout, num_shards))


def _cut_twice(num_elements: int, num_parts: int, num_pieces: int) -> list[list[Bounds]]:
    parts = split_evenly(num_elements, num_parts)
    return [[(start + lo, start + hi) for lo, hi in split_evenly(stop - start, num_pieces)] for start, stop in parts]


def _explain_layout(layout: Sequence[Sequence[Node]], num_shards: int) -> str:
    holders: list[tuple[int, Node] | None] = [None] * num_shards
    for rank, nodes in enumerate(layout):
        for node in nodes:
            if not _is_subtree(node, num_shards):
                return (
                    f"Rank {rank} holds {node!r}, which is not a subtree of {num_shards} shards. A position is a pair "
                    "(first shard, one after last) as partial_nodes returns them. (LS210)"
                )
            for shard in range(*node):
                other = holders[shard]
                if other is not None:
                    return (
                        f"Shard {shard} is held twice: by rank {other[0]} in {other[1]} and by rank {rank} in {node}. "
                        "Each shard must be in one partial only. (LS210)"
                    )
                holders[shard] = rank, node
    missing = holders.index(None)
    return (
        f"No rank holds shard {missing} of {num_shards}; the ranks hold {[sorted(nodes) for nodes in layout]}, in rank "
        "order. Together the partials must cover every shard. (LS210)"
    )


def _is_subtree(node: object, num_shards: int) -> bool:
    match node:
        case (int(start), int(stop)) if isinstance(node, tuple) and 0 <= start < stop <= num_shards:
            return partial_nodes(start, stop, num_shards) == [node]
    return False
