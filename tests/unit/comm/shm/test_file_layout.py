"""Nothing in the shared file overlaps, and everything begins where it may."""

from itertools import pairwise

import pytest

from lockstep.comm.shm.file_layout import NUM_KINDS, PAGE, SEMAPHORE_BYTES, FileLayout

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
CACHE_LINE = 64


def regions(layout: FileLayout) -> list[tuple[int, int]]:
    """Return the first byte and the end of everything that lies in the file, rising."""
    ranks = range(layout.size)
    found = [(place, place + SEMAPHORE_BYTES) for place in layout.semaphores()]
    found += [(layout.state(rank), layout.state(rank) + PAGE) for rank in ranks]
    for rank in ranks:
        for parity in (0, 1):
            found.append((layout.call(rank, parity), layout.call(rank, parity) + PAGE))
            found.append(
                (layout.send_buffer(rank, parity), layout.send_buffer(rank, parity) + layout.send_buffer_bytes)
            )
    for source in ranks:
        for target in ranks:
            place = layout.channel(source, target)
            found.append((place, place + layout.channel_bytes))
    found += [(layout.heap(rank), layout.heap(rank + 1)) for rank in ranks]
    return sorted(found)


@SIZES
def test_regions_do_not_overlap(size: int) -> None:
    layout = FileLayout(size)
    found = regions(layout)
    for (_, end), (start, _) in pairwise(found):
        assert end <= start
    assert found[0][0] == 0
    assert found[-1][1] == layout.total_bytes


@SIZES
def test_what_is_mapped_begins_on_a_page(size: int) -> None:
    layout = FileLayout(size)
    for rank in range(size):
        for place in (layout.state(rank), layout.call(rank, 1), layout.channel(rank, 0), layout.heap(rank)):
            assert place % PAGE == 0
        assert layout.send_buffer(rank, 1) % CACHE_LINE == 0


@SIZES
def test_every_pair_has_one_semaphore_of_each_kind(size: int) -> None:
    layout = FileLayout(size)
    places = {
        layout.semaphore(kind, source, target)
        for kind in range(NUM_KINDS)
        for source in range(size)
        for target in range(size)
    }
    assert sorted(places) == list(layout.semaphores())
    assert len(places) == NUM_KINDS * size * size


def test_the_control_area_ends_where_channels_begin() -> None:
    layout = FileLayout(3, send_buffer_bytes=PAGE, slot_bytes=PAGE)
    assert layout.control_bytes == layout.channel(0, 0)
    assert layout.channel_bytes == 4 * PAGE
