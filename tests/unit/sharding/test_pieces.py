from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CheckpointError
from lockstep.sharding.pieces import Piece, cut_evenly, find_moves, held_by_ranks, place_whole

SIZES = st.dictionaries(st.text("abc", min_size=1), st.integers(1, 5000), max_size=8)


def elements(pieces: Sequence[Piece]) -> list[tuple[str, int]]:
    return [(piece.name, index) for piece in pieces for index in range(piece.start, piece.stop)]


@given(SIZES, st.integers(1, 7), st.sampled_from([1, 64, 256]))
def test_each_element_is_in_one_part_and_parts_are_even(sizes: dict[str, int], num_parts: int, multiple: int) -> None:
    parts = cut_evenly(sizes, num_parts, multiple)
    found = [each for part in parts for each in elements(part)]
    assert sorted(found) == sorted((name, index) for name, size in sizes.items() for index in range(size))
    mean = sum(sizes.values()) / num_parts
    assert all(abs(len(elements(part)) - mean) <= multiple + 1 for part in parts)
    assert all(piece.start % multiple == 0 for part in parts for piece in part)


@given(SIZES, st.integers(1, 7))
def test_whole_parameters_are_placed_by_size(sizes: dict[str, int], num_parts: int) -> None:
    parts = place_whole(sizes, num_parts)
    assert sorted(piece.name for part in parts for piece in part) == sorted(sizes)
    loads = [sum(piece.num_elements for piece in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
def test_after_the_moves_each_rank_has_what_it_wants(
    sizes: dict[str, int], before: int, after: int, neighbours: int
) -> None:
    have = held_by_ranks(cut_evenly(sizes, before, 64), neighbours) + [[] for _ in range(after)]
    want = held_by_ranks(cut_evenly(sizes, after, 64), neighbours)
    want += [[] for _ in range(len(have) - len(want))]
    held = [set(elements(pieces)) for pieces in have]
    for move in find_moves(have, want):
        moved = elements([move.piece])
        assert set(moved) <= set(elements(have[move.source]))
        for target in move.targets:
            assert not held[target] & set(moved)  # nothing is sent twice, or to who has it
            held[target] |= set(moved)
    assert all(set(elements(pieces)) <= held[rank] for rank, pieces in enumerate(want))


def test_a_neighbour_has_what_a_lost_worker_had() -> None:
    held = held_by_ranks(cut_evenly({"a": 1000}, 4, 10), neighbours=1)
    everything = [[Piece("a", 0, 1000)]] * 3
    assert find_moves(held[:1] + held[2:], everything)
    with pytest.raises(CheckpointError, match="newest checkpoint"):
        find_moves(held[2:], everything[:2])
