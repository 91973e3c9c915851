"""A thread that lets the other ranks know while this one waits long in a backward."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Final, final

import torch.distributed as dist

from lockstep.reduce import Reducer

_LONG_SECONDS: Final = 0.25
_JOIN_SECONDS: Final = 5.0


@final
class WaitPosts:
    """Calls a function again and again while a rank has waited longer than 0.25 s.

    Args:
        reducer: The reducer; the thread ends with it.
        post: Writes to the group's store.
    """

    def __init__(self, reducer: "weakref.ref[Reducer]", post: Callable[[], object]) -> None:
        self._reducer = reducer
        self._post = post
        self._ended = threading.Event()
        # At exit too: a thread that is in the store while the interpreter ends aborts the process.
        atexit.register(self.close)
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
                seconds = reducer.times.seconds_waiting
                del reducer
                if seconds > _LONG_SECONDS:
                    self._post()
        except dist.DistError:
            return  # the store has ended, and with it the group
        finally:
            atexit.unregister(self.close)
