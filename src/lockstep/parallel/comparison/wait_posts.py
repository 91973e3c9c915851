"""A thread that lets the other ranks know while this one waits long in a backward.

[Note: a wait and its number] The thread may run between any two lines of the backward. A wait ends before its reduction
is counted, and the thread reads the number first. So a wait that it finds is of that number, and never of the one
after: a rank whose script has ended by then would be taken for one that has skipped a batch.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Final, final

import torch.distributed as dist

from lockstep.processes.forking import call_at_exit_here
from lockstep.reduce import Reducer

_LONG_SECONDS: Final = 0.25
_JOIN_SECONDS: Final = 5.0


@final
class WaitPosts:
    """Calls `post` with the reduction's number, from 1 on, again and again while a rank waits longer than 0.25 s."""

    def __init__(self, reducer: "weakref.ref[Reducer]", post: Callable[[int], object]) -> None:
        self._reducer = reducer
        self._post = post
        self._ended = threading.Event()
        # At exit too: a thread that is in the store while the interpreter ends aborts the process.
        self._forget_end = call_at_exit_here(self.close)
        self._thread = threading.Thread(target=self._run, name="lockstep long waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; returns when it has ended, which takes as long as one call to the store."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._ended.wait(_LONG_SECONDS) and (reducer := self._reducer()) is not None:
                number = reducer.num_reductions + 1
                seconds = reducer.times.seconds_waiting  # after the number: [Note: a wait and its number]
                del reducer
                if seconds > _LONG_SECONDS:
                    self._post(number)
        except dist.DistError:
            return  # the store has ended, and with it the group
        finally:
            self._forget_end()
