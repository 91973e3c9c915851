"""Which worker holds which part of the state of an optimizer, and what has to move when the workers are others.

A parameter is a sequence of elements, as they lie in memory; a *piece* is a range of them. An optimizer that treats
each element alike is cut: all parameters in a row, into one part for each worker. One that needs whole parameters has
each of them in one part. A worker holds its own part, and those of the workers before it whose neighbour it is:

    part        0    1    2    3        held by rank 0: parts 0, 3; by rank 1: parts 1, 0; ...   (one neighbour)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.shards import split_evenly


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, in elements."""

    name: str
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        if self.num_elements == tensor.numel() or tensor.is_sparse:
            return tensor
        return tensor.detach().reshape(-1)[self.start : self.stop]

    def is_within(self, other: "Piece") -> bool:
        return self.name == other.name and other.start <= self.start and self.stop <= other.stop


def cut_evenly(sizes: Mapping[str, int], num_parts: int, multiple: int) -> list[list[Piece]]:
    """Return parts of as many elements each, but for `multiple`: cuts are at multiples of it in a parameter.

    So the vectors of a processor, which has other instructions for the last elements of a row, begin where they begin
    in the whole parameter.
    """
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    ends = [stop for _, stop in split_evenly(sum(sizes.values()), num_parts)]
    part, first = 0, 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            while part < num_parts - 1 and ends[part] <= first + start:
                part += 1
            stop = size
            if ends[part] < first + size and part < num_parts - 1:
                stop = min((ends[part] - first + multiple // 2) // multiple * multiple, size)
            if stop <= start:  # less than half a multiple is left of this part
                part += 1
                continue
            parts[part].append(Piece(name, start, stop))
            start = stop
        first += size
    return parts


def place_whole(sizes: Mapping[str, int], num_parts: int) -> list[list[Piece]]:
    """Return parts of whole parameters: the largest first, each to the part that has the fewest elements so far."""
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        lightest = loads.index(min(loads))
        parts[lightest].append(Piece(name, 0, sizes[name]))
        loads[lightest] += sizes[name]
    return parts


def held_by_ranks(parts: Sequence[Sequence[Piece]], neighbours: int) -> list[list[Piece]]:
    """Return what each rank holds: its part, and those of as many ranks before it."""
    num_held = min(neighbours + 1, len(parts))
    return [[piece for back in range(num_held) for piece in parts[rank - back]] for rank in range(len(parts))]


@dataclass(frozen=True, slots=True)
class Move:
    piece: Piece
    source: int
    targets: tuple[int, ...]


def find_moves(have: Sequence[Sequence[Piece]], want: Sequence[Sequence[Piece]]) -> list[Move]:
    """Return what the ranks send so that each has all that it wants; each piece comes from one rank that has it.

    Of several that have a piece, the one that has the least to send so far sends it.

    Raises:
        CheckpointError: None has it.
    """
    borders: dict[str, set[int]] = {}
    for piece in (each for pieces in (*have, *want) for each in pieces):
        borders.setdefault(piece.name, set()).update((piece.start, piece.stop))
    holders, wanters = _by_name(have), _by_name(want)
    loads = [0] * len(have)
    moves: list[Move] = []
    for name, ends in borders.items():
        for start, stop in pairwise(sorted(ends)):
            piece = Piece(name, start, stop)
            held = _ranks_with(piece, holders)
            targets = tuple(rank for rank in _ranks_with(piece, wanters) if rank not in held)
            if not targets:
                continue
            if not held:
                raise CheckpointError(
                    "No worker is left that holds a part of the optimizer's state, which is lost. Resume the run from "
                    "its newest checkpoint. With neighbours=1 each part is held by two workers. (LS602)"
                )
            source = min(held, key=lambda rank: loads[rank])
            loads[source] += piece.num_elements
            moves.append(Move(piece, source, targets))
    return moves


def _by_name(pieces: Sequence[Sequence[Piece]]) -> dict[str, list[tuple[int, Piece]]]:
    found: dict[str, list[tuple[int, Piece]]] = {}
    for rank, mine in enumerate(pieces):
        for piece in mine:
            found.setdefault(piece.name, []).append((rank, piece))
    return found


def _ranks_with(piece: Piece, holders: Mapping[str, Sequence[tuple[int, Piece]]]) -> list[int]:
    return [rank for rank, each in holders.get(piece.name, ()) if piece.is_within(each)]
