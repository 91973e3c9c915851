r"""The order in which the gradients of shards are added.

[Note: reduction order] Floating-point addition is not associative: the sum of the same numbers depends on how they are
grouped. So the grouping is fixed, as a binary tree over the shards that depends on their number alone:

    sum(lo, hi) = sum(lo, mid) + sum(mid, hi)        mid = (lo + hi) // 2;  sum(s, s + 1) is shard s

                  (0, 5)
                 /      \
            (0, 2)      (2, 5)            a worker that runs shards 0 1 2 adds 0 + 1 and keeps 2: it cannot add 2 to
            /   \       /   \             them, for 2 belongs to 3 + 4. What it keeps are *partials*: the sums of the
           0     1     2   (3, 5)         maximal subtrees within its range, about 2 log2 of them at the most.
                           /   \
                          3     4

Whoever holds the partials of all workers adds them in tree order; the result has the same bits whichever worker ran
which shard.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

Node = tuple[int, int]
"""A subtree: its first shard, and the one after its last."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What a worker does with one of its shards."""

    shard: int
    """Number of the shard."""
    num_sums: int
    """To how many partials its gradient is added: to that on top of the stack, their sum to the next, and so on."""


def partial_nodes(start: int, stop: int, num_shards: int) -> list[Node]:
    """Return the maximal subtrees within the shards `range(start, stop)`, in shard order.

    Raises:
        ValueError: The range is not within `range(num_shards)`.
    """
    if not 0 <= start <= stop <= num_shards:
        raise ValueError(f"Shards {start} to {stop} are not within the {num_shards} shards of the run.")
    return list(_nodes_within((0, num_shards), start, stop))


def completed_nodes(shard: int, start: int, num_shards: int) -> list[Node]:
    """Return the subtrees that shard `shard` completes when `range(start, shard + 1)` has been run in order.

    A worker that runs its shards in order keeps a stack of partials. After each shard it pushes the shard's gradient
    and then, for each node but the first of this list, replaces the two on top by their sum: so it never holds more
    than the partials of what it has run.

    Returns:
        The leaf `(shard, shard + 1)` first, then its ancestors that end with it and begin at `start` or later.
    """
    path: list[Node] = []
    node: Node | None = (0, num_shards)
    while node is not None:
        path.append(node)
        node = next((child for child in _children(node) if child[0] <= shard < child[1]), None)
    return [node for node in reversed(path) if node[0] >= start and node[1] == shard + 1]


def partial_nodes_by_size(shards: range, num_shards: int) -> list[Node]:
    """Return the maximal subtrees within `shards`, the largest first.

    That is the order in which a worker runs them, so that what it must keep at a time is little: with even ranges at
    most ceil(log2 k) + 1 gradients for k shards, the one that is being computed included, but for few odd cases
    (72 of the 366,145 ranges of up to 129 shards) in which it is one more.

    Raises:
        ValueError: The shards are not within `range(num_shards)`.
    """
    return sorted(partial_nodes(shards.start, shards.stop, num_shards), key=_size_then_place)


def plan_shard_tasks(shards: range, num_shards: int) -> list[ShardTask]:
    """Return the order in which a worker runs its shards, and how it adds them up on a stack of partials.

    After the last turn the stack holds `partial_nodes_by_size`, in that order.

    Raises:
        ValueError: The shards are not within `range(num_shards)`.
    """
    return [
        ShardTask(shard, len(completed_nodes(shard, start, num_shards)) - 1)
        for start, stop in partial_nodes_by_size(shards, num_shards)
        for shard in range(start, stop)
    ]


def _size_then_place(node: Node) -> tuple[int, int]:
    lo, hi = node
    return lo - hi, lo


def add_in_tree_order(partials: Mapping[Node, T], num_shards: int, add: Callable[[T, T], T]) -> T:
    """Add partials that together cover every shard once, in the order of the tree.

    Args:
        partials: Sums of subtrees.
        num_shards: Number of shards of the run.
        add: Adds a left and a right sum; may reuse the left one's memory.

    Raises:
        ValueError: A shard is missing, or what covers it is not a subtree.
    """
    return _total(partials, (0, num_shards), num_shards, add)


def _total(partials: Mapping[Node, T], node: Node, num_shards: int, add: Callable[[T, T], T]) -> T:
    # Not inside of its caller: a function that calls itself by a name around it is a cycle, which would keep the
    # partials' memory until the garbage collector comes.
    if node in partials:
        return partials[node]
    children = _children(node)
    if not children:
        raise ValueError(f"No partial covers shard {node[0]}; there are {sorted(partials)} of {num_shards} shards.")
    left, right = (_total(partials, child, num_shards, add) for child in children)
    return add(left, right)


def _nodes_within(node: Node, start: int, stop: int) -> Iterator[Node]:
    lo, hi = node
    if start <= lo and hi <= stop:
        yield node
    elif lo < stop and start < hi:
        for child in _children(node):
            yield from _nodes_within(child, start, stop)


def _children(node: Node) -> tuple[Node, ...]:
    lo, hi = node
    mid = (lo + hi) // 2
    return ((lo, mid), (mid, hi)) if hi - lo > 1 else ()
