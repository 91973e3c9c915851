"""Ending a Python process that has imported torch without the half second that its interpreter takes for that."""

import atexit
import contextlib
import gc
import io

_FILES = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def exit_quickly() -> None:
    """Let this process end, whenever it ends, without collecting garbage a last time (local; a second call is free).

    The interpreter looks several times at every object that is left, and torch's import alone makes half a million.
    What is left in reference cycles is not finalized then. Python never promised that for objects that exist at the
    end; but it writes what files of such objects still hold, so this does too. Handlers of `atexit` run as ever.
    """
    atexit.unregister(_prepare)
    atexit.register(_prepare)  # the last to register is the first to run


def _prepare() -> None:
    for each in gc.get_objects():
        if type(each) in _FILES:
            with contextlib.suppress(OSError, ValueError):  # closed, detached, or its reader has ended
                each.flush()
    gc.freeze()
