"""The shared file, seen by two ranks of one process."""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from lockstep.comm.lost_ranks import ProcessEnds, own_process
from lockstep.comm.shm.file_layout import LINE, PAGE, FileLayout
from lockstep.comm.shm.memory import Memory, create_file, tensor_at
from lockstep.comm.shm.peers import Counter, Peers
from lockstep.errors import GroupError

LAYOUT = FileLayout(2, send_buffer_bytes=PAGE, slot_bytes=PAGE)


@pytest.fixture
def pair() -> Iterator[tuple[Memory, Memory]]:
    descriptor = create_file(LAYOUT)
    memories = (Memory(os.dup(descriptor), LAYOUT, 0), Memory(descriptor, LAYOUT, 1))
    yield memories
    for memory in memories:
        memory.close()


def test_the_file_has_its_full_length_and_no_pages() -> None:
    descriptor = create_file(LAYOUT)
    try:
        status = os.fstat(descriptor)
        assert status.st_size == LAYOUT.total_bytes
        assert status.st_blocks * 512 < 20 * PAGE
        assert status.st_mode & 0o777 == 0o600
        assert status.st_nlink == 0
        for length in (0, 2 * LAYOUT.total_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)


def seen_by(memory: Memory, rank: int, place: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return tensor_at(memory.peer_address(rank, place, count * dtype.itemsize), dtype, count)


def test_an_allocation_is_found_by_the_other_rank(pair: tuple[Memory, Memory]) -> None:
    first, second = (pair[0].allocate(length, torch.float32) for length in (5000, 3))
    assert not first.any()
    first.copy_(torch.arange(5000.0))
    second.copy_(torch.tensor([7.0, 8.0, 9.0]))
    for tensor in (first, second, first[1:4000], first[4999:]):
        place = pair[0].locate(tensor)
        found = seen_by(pair[1], 0, place, torch.float32, tensor.numel())
        assert torch.equal(found, tensor)
        found += 1
        assert torch.equal(found, tensor)


def test_other_tensors_are_not_in_the_heap(pair: tuple[Memory, Memory]) -> None:
    allocated = pair[0].allocate(10, torch.int64)
    assert pair[0].locate(torch.empty(10)) == -1
    assert pair[1].locate(allocated) == -1


def test_memory_of_tensors_that_are_gone_is_given_back(pair: tuple[Memory, Memory]) -> None:
    def used() -> int:
        return os.fstat(pair[1].descriptor).st_blocks * 512

    before = used()
    tensor = pair[0].allocate(1 << 20, torch.uint8).fill_(1)
    place = pair[0].locate(tensor)
    assert seen_by(pair[1], 0, place, torch.uint8, 10).sum() == 10
    view = tensor[100:200]
    assert used() >= before + (1 << 20)
    del tensor
    gc.collect()
    assert used() >= before + (1 << 20)
    assert view.sum() == 100
    del view
    gc.collect()
    assert used() < before + PAGE * 4
    again = pair[0].allocate(1 << 20, torch.uint8)
    assert not again.any()


def test_a_tensor_outlives_its_group(pair: tuple[Memory, Memory]) -> None:
    tensor = pair[0].allocate(10, torch.float32).fill_(3)
    pair[0].close()
    assert tensor.sum() == 30
    tensor += 1
    assert tensor.sum() == 40


def holds_in_child(claim: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        holds = False
        try:
            holds = claim()
        finally:
            os._exit(not holds)
    return os.waitpid(pid, 0)[1] == 0


def test_inference_mode_leaves_no_tensors_of_its_own_behind(pair: tuple[Memory, Memory]) -> None:
    # An evaluation before the first step of a training once made its buffers useless for all that followed.
    with torch.inference_mode():
        allocated = pair[0].allocate(10, torch.float32)
        seen = seen_by(pair[1], 0, pair[0].locate(allocated), torch.float32, 10)
    assert not any(tensor.is_inference() for tensor in (allocated, seen))
    allocated += 1.0
    assert seen.sum() == 10


def test_memory_is_given_back_though_the_group_is_gone(pair: tuple[Memory, Memory]) -> None:
    # One small tensor that outlived its group once pinned the memory of all of it.
    def used() -> int:
        return os.fstat(pair[1].descriptor).st_blocks * 512

    small, big = pair[0].allocate(4, torch.float32).fill_(1), pair[0].allocate(1 << 20, torch.uint8).fill_(1)
    before = used()
    pair[0].close()
    assert small.sum() == 4
    del big
    gc.collect()
    assert used() <= before - (1 << 20)
    with pytest.raises(GroupError, match="memory was freed"):
        pair[0].allocate(4, torch.float32)


def test_the_descriptor_goes_with_the_last_tensor() -> None:
    gc.collect()  # what earlier tests left has descriptors too
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    memory = Memory(create_file(LAYOUT), LAYOUT, 0)
    tensor = memory.allocate(4, torch.float32)
    memory.close()
    assert tensor.sum() == 0
    del tensor, memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_threads_are_given_memory_of_their_own(pair: tuple[Memory, Memory]) -> None:
    # Two threads once read the same offset before either had moved it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            given = list(pool.map(lambda _: pair[0].allocate(1, torch.float32), range(1200)))
    finally:
        sys.setswitchinterval(interval)
    assert len({pair[0].locate(tensor) for tensor in given}) == 1200


def test_a_forked_child_writes_into_memory_of_its_own(pair: tuple[Memory, Memory]) -> None:
    # A child that cleared its copy of a gradient once cleared that of its parent.
    tensor, orphan = pair[0].allocate(5000, torch.float32).fill_(3), pair[1].allocate(10, torch.float32).fill_(3)
    pair[1].close()
    both = (tensor, orphan)

    def all_are(value: float) -> bool:
        return all(bool((one == value).all()) for one in both)

    def clear() -> bool:
        was_there = all_are(3)
        for one in both:
            one.zero_()
        return was_there and holds_in_child(lambda: all_are(0))  # a grandchild has what its own parent wrote

    assert holds_in_child(clear)
    assert all_are(3)


# -- Nothing in the shared file overlaps, and everything begins where it may -------------------------------------------


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
CACHE_LINE = 64


def regions(layout: FileLayout) -> list[tuple[int, int]]:
    """Return the first byte and the end of everything that lies in the file, rising."""
    ranks = range(layout.size)
    found = [(layout.arrivals, layout.arrivals + LINE)]
    for rank in ranks:
        places = [layout.reached(rank), layout.messages(rank)]
        places += [place for peer in ranks for place in (layout.full(rank, peer), layout.free(rank, peer))]
        found += [(place, place + LINE) for place in places]
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


def test_the_control_area_ends_where_channels_begin() -> None:
    layout = FileLayout(3, send_buffer_bytes=PAGE, slot_bytes=PAGE)
    assert layout.control_bytes == layout.channel(0, 0)
    assert layout.channel_bytes == 4 * PAGE


# -- Counters in memory that is shared, here between threads -----------------------------------------------------------


@pytest.fixture
def peers(pair: tuple[Memory, Memory]) -> Peers:
    return Peers(pair[0], 0, ProcessEnds([own_process()] * 2, 0), 1.0, [0, 1])


def test_what_was_added_is_taken_once(peers: Peers) -> None:
    place = LAYOUT.full(1, 0)
    sender, counter = Counter(peers, place), Counter(peers, place)
    assert not counter.try_take()
    sender.add()
    sender.add()
    assert [counter.try_take() for _ in range(3)] == [True, True, False]
    sender.add()
    counter.take_all()
    assert not counter.try_take()


def test_counters_go_on_from_their_largest_value(pair: tuple[Memory, Memory], peers: Peers) -> None:
    place = LAYOUT.full(1, 0)
    ctypes.c_uint32.from_address(pair[0].address + place).value = 0xFFFFFFFF
    counter = Counter(peers, place)
    counter.take_all()
    counter.add()
    assert [counter.try_take() for _ in range(2)] == [True, False]


def test_an_addition_ends_a_sleep_and_so_does_time(peers: Peers) -> None:
    counter = Counter(peers, LAYOUT.full(1, 0))
    started = time.monotonic()
    counter.sleep()
    assert 0.04 <= time.monotonic() - started < 10
    taken = threading.Event()

    def wait() -> None:
        while not counter.try_take():
            counter.sleep()
        taken.set()

    threading.Thread(target=wait, daemon=True).start()
    Counter(peers, LAYOUT.full(1, 0)).add()
    assert taken.wait(10)


def test_all_sleeps_end_when_the_calls_of_a_group_are_ended(peers: Peers) -> None:
    peers.end_calls(GroupError("ended"))
    started = time.monotonic()
    for place in (LAYOUT.full(1, 0), LAYOUT.free(0, 1), LAYOUT.messages(0)):
        for _ in range(100):
            Counter(peers, place).sleep()
    assert time.monotonic() - started < 5  # 300 sleeps of 50 ms otherwise
