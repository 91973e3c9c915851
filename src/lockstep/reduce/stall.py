"""A warning for hangs: when a rank waits long for a reduction, every rank logs where every rank is.

    thread of rank 0                      store                    thread of rank 1
    ----------------                      -----                    ----------------
    1 its rank waits for `seconds`   ->   alarm + 1
    2 sees the alarm: writes where   ->   at 0                     2 the same          -> at 1
    3 a moment later: reads all      <-   at 0, at 1               3 the same
    4 logs them                                                    4 logs them

A rank whose process is stopped or has exited writes nothing, and the warning shows that. A rank that has ended its
training wrote that when its watch ended. The wait itself is not ended: that is what the group's timeout does.
"""

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import Store

_LOGGER = logging.getLogger("lockstep")
_MOST_SECONDS_BETWEEN_LOOKS = 5.0
_MOST_SECONDS_BETWEEN_QUESTIONS = 1.0
"""So often is asked how long this rank has waited; in the store is looked less often."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@final
class StallWatch:
    """Watches one rank's reductions from a thread of its own.

    Args:
        store: Shared by the ranks of the group, and by nothing else under these keys.
        rank: Number of this rank.
        world_size: How many there are.
        seconds: How long a wait may take.
        waited: Returns how long this rank has waited by now; None when nothing is left to watch.
        describe: Returns in words what this rank does now.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        seconds: float,
        waited: Callable[[], float | None],
        describe: Callable[[], str],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._waited = waited
        self._describe = describe
        self._pause = min(seconds / 4, _MOST_SECONDS_BETWEEN_LOOKS)
        self._ended = threading.Event()
        self._num_seen = 0
        self._has_alarmed = False
        # At exit too: a thread that is in the store while the interpreter ends aborts the process. The owner's
        # finalizer is not enough: this thread may hold the last reference, and a thread cannot join itself.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="lockstep stall watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; returns when its thread has ended, which takes as long as one call to the store."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_MOST_SECONDS_BETWEEN_LOOKS)

    def _run(self) -> None:
        try:
            self._watch()
        except dist.DistError:
            return  # the store has ended, and with it the group
        finally:
            atexit.unregister(self.close)

    def _watch(self) -> None:
        end = f"ended/{self._rank}"
        self._store.set(end, "")  # an earlier watch may have been of a model like this
        pause = min(self._pause, _MOST_SECONDS_BETWEEN_QUESTIONS)
        num_asked, num_between = 0, round(self._pause / pause)
        while not self._ended.wait(pause):
            waited = self._waited()
            if waited is None:
                break
            num_asked += 1
            if num_asked % num_between == 0:
                self._look(waited)
        self._store.set(end, "has ended its training")

    def _look(self, waited: float) -> None:
        if waited < self._seconds:
            self._has_alarmed = False
        is_new = waited >= self._seconds and not self._has_alarmed
        num_alarms = self._store.add("alarm", int(is_new))
        self._has_alarmed |= is_new
        if num_alarms == self._num_seen:
            return
        self._num_seen = num_alarms
        key = f"{num_alarms}/at"
        self._store.set(f"{key}/{self._rank}", self._describe())
        # The others look as often as this one does; one that was about to look needs as long again to answer.
        if self._ended.wait(2 * self._pause):
            return
        _LOGGER.warning("%s", self._report(key))

    def _report(self, key: str) -> str:
        lines = [f"A rank has waited {self._seconds:g} s for the others. The state of each rank:"]
        for rank in range(self._world_size):
            answer = self._read(f"{key}/{rank}") or self._read(f"ended/{rank}") or "does not answer"
            lines.append(f"  rank {rank} {answer}")
        lines.append(
            "  If no rank is computing, look for a branch or a loop that differs between ranks: each must run the same "
            "forwards and backwards through wrapped models. The wait ends with the group's timeout. "
            "(LOCKSTEP_STALL_SECONDS sets after how many seconds this is logged.)"
        )
        return "\n".join(lines)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def where(thread_id: int) -> str:
    """Return the line of the user's code that a thread is running; empty if there is none."""
    frame: FrameType | None = sys._current_frames().get(thread_id)  # noqa: SLF001 - Python's name for it
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
