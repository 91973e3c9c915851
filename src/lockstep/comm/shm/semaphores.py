"""POSIX semaphores in shared memory: how one process signals another that something is ready.

[Note: memory order] Data that one process writes and another reads needs more than a flag: on ARM the flag may be seen
before the data. POSIX (chapter 4.12, Memory Synchronization) promises that `sem_post` and `sem_wait` synchronise
memory between processes; nothing here relies on anything else. A post without a waiter is one atomic instruction, a
wait that must block sleeps in the kernel, so processes that outnumber the cores do not burn each other's time.

A semaphore is known by its address. A killed process leaves nothing behind in it but its value.
"""

import ctypes
import errno
import math
import sys
import threading
import time
from collections import Counter
from typing import final


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if sys.platform == "linux":
    # Posting and trying never block: holding the interpreter lock is cheaper than giving it up.
    _quick = ctypes.PyDLL(None, use_errno=True)
    _blocking = ctypes.CDLL(None, use_errno=True)
    _sem_init = _quick.sem_init
    _sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    _sem_post = _quick.sem_post
    _sem_post.argtypes = (ctypes.c_void_p,)
    _sem_trywait = _quick.sem_trywait
    _sem_trywait.argtypes = (ctypes.c_void_p,)
    _sem_getvalue = _quick.sem_getvalue
    _sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    _sched_yield = _blocking.sched_yield
    # By the monotonic clock, where the C library can (glibc 2.30).
    _has_clockwait = hasattr(_blocking, "sem_clockwait")
    _sem_timedwait = _blocking.sem_clockwait if _has_clockwait else _blocking.sem_timedwait
    _sem_timedwait.argtypes = (
        ctypes.c_void_p,
        *((ctypes.c_int,) if _has_clockwait else ()),
        ctypes.POINTER(_Timespec),
    )


def create(address: int) -> None:
    """Make a semaphore of value 0 at `address`, for use between processes."""
    if _sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def post(address: int) -> None:
    _sem_post(address)


def post_if_zero(address: int) -> None:
    value = ctypes.c_int()
    _sem_getvalue(address, ctypes.byref(value))
    if value.value == 0:
        _sem_post(address)


def try_wait(address: int) -> bool:
    """Take one from the semaphore if there is one to take."""
    return bool(_sem_trywait(address) == 0)


def yield_core() -> None:
    """Let another thread of this process, or another process on this core, run for a moment."""
    _sched_yield()


def wait(address: int, timeout_seconds: float) -> bool:
    """Take one from the semaphore, waiting for it at most so long; return whether it was taken.

    Other threads of this process run meanwhile. A signal ends the wait early.
    """
    now = time.monotonic() if _has_clockwait else time.time()
    fraction, whole = math.modf(now + timeout_seconds)
    deadline = ctypes.byref(_Timespec(int(whole), int(fraction * 1e9)))
    clock = (time.CLOCK_MONOTONIC,) if _has_clockwait else ()
    if _sem_timedwait(address, *clock, deadline) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(number, "waiting for a semaphore failed")
    return False


@final
class Sleepers:
    """The threads that sleep at semaphores of one group, as long as the group can be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[int] = Counter()
        """How many threads sleep at each semaphore, by address."""
        self._is_over = False

    def sleep(self, address: int, seconds: float) -> bool:
        """Take one from the semaphore, waiting at most so long; return whether it was taken and the group is usable."""
        with self._lock:
            if self._is_over:
                return False
            self.counts[address] += 1
        try:
            taken = wait(address, seconds)
        finally:
            with self._lock:
                self.counts[address] -= 1
        return taken and not self._is_over

    def end(self) -> None:
        """Let all sleeps end now, those to come too (any thread): the group cannot be used any more."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            for address, count in self.counts.items():
                for _ in range(count):
                    post(address)
