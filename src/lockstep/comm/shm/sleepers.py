"""Ending the sleep of this process' threads at semaphores, without a post of the rank for which they wait."""

import threading
from collections import Counter
from typing import final

from lockstep.comm.shm import semaphores


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
            taken = semaphores.wait(address, seconds)
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
                    semaphores.post(address)
