"""Threads that sleep at semaphores are woken when the group cannot be used any more."""

import ctypes
import threading

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.semaphores import Sleepers


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
