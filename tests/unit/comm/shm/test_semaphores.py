"""Semaphores in memory that is shared, here between threads."""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

import pytest

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.file_layout import SEMAPHORE_BYTES
from lockstep.comm.shm.semaphores import Sleepers


@pytest.fixture
def semaphore() -> Iterator[int]:
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    semaphores.create(address)
    yield address
    del mapping


def test_what_was_posted_can_be_taken_once(semaphore: int) -> None:
    assert not semaphores.try_wait(semaphore)
    semaphores.post(semaphore)
    semaphores.post(semaphore)
    assert [semaphores.try_wait(semaphore) for _ in range(3)] == [True, True, False]


def test_a_post_wakes_a_waiter(semaphore: int) -> None:
    taken = threading.Event()

    def wait() -> None:
        while not semaphores.wait(semaphore, 1.0):
            pass
        taken.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    semaphores.post(semaphore)
    assert taken.wait(10)


def test_a_wait_ends_in_time(semaphore: int) -> None:
    started = time.monotonic()
    assert not semaphores.wait(semaphore, 0.02)
    assert time.monotonic() - started >= 0.015
    semaphores.post(semaphore)
    assert semaphores.wait(semaphore, 0.0)


def test_a_post_is_not_repeated_while_nobody_takes_it(semaphore: int) -> None:
    for _ in range(3):
        semaphores.post_if_zero(semaphore)
    assert [semaphores.try_wait(semaphore) for _ in range(2)] == [True, False]


def test_a_semaphore_fits_its_place() -> None:
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    mapping[:] = b"x" * mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    semaphores.create(address)
    semaphores.post(address)
    assert semaphores.wait(address, 0.01)
    assert mapping[SEMAPHORE_BYTES:] == b"x" * (mmap.PAGESIZE - SEMAPHORE_BYTES)


# -- Threads that sleep at semaphores are woken when the group cannot be used any more ---------------------------------


def test_all_sleeps_end_and_nobody_takes_what_woke_another_for_a_post() -> None:
    memory = ctypes.create_string_buffer(64)
    address = ctypes.addressof(memory)
    semaphores.create(address)
    sleepers = Sleepers()
    semaphores.post(address)
    assert sleepers.sleep(address, 50)
    assert not sleepers.sleep(address, 0.001)
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda: taken.append(sleepers.sleep(address, 50))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while sleepers.counts[address] < len(threads):
        threading.Event().wait(0.001)
    sleepers.end()
    for thread in threads:
        thread.join(20)
    assert taken == [False] * 3
    assert not sleepers.sleep(address, 50)
