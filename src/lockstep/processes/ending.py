"""Ending a Python process that has imported torch without the half second that its interpreter takes for that."""

import atexit
import contextlib
import ctypes
import gc
import io
import sys
from itertools import compress

from lockstep.settings import read_settings

_FILES = {io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper}
_WITHOUT_WORK_AT_THE_END = {"cuda", "numpy", "psutil", "pydantic_core", "safetensors", "torch", "yaml", "_yaml"}
"""Packages whose native code has nothing to save when the process ends."""


def exit_quickly() -> None:
    """Let this process end, whenever it ends, without collecting garbage a last time (local; a second call is free).

    The interpreter looks several times at every object that is left, and torch's import alone makes half a million.
    What is left in reference cycles is not finalized then. Python never promised that for objects that exist at the
    end; but it writes what files of such objects still hold, so this does too. Handlers of `atexit` run as ever.

    After the interpreter, torch's libraries take 0.13 s to remove each operator from a table of which nothing is left
    a moment later. That is left out too, unless other native code was loaded before this call, which may have
    something to save in its own handlers, or a profiler looks on. Handlers of what is loaded later run as ever.
    """
    atexit.unregister(_prepare)
    atexit.register(_prepare)  # the last to register is the first to run
    if not read_settings().is_profiled() and native_packages() <= _WITHOUT_WORK_AT_THE_END:
        _leave_out_native_handlers()


def native_packages() -> set[str]:
    """Return the packages outside the standard library that have loaded native code."""
    found = set()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).endswith(".so"):
            found.add(name.partition(".")[0])
    return found - sys.stdlib_module_names


def _prepare() -> None:
    objects = gc.get_objects()
    for each in compress(objects, map(_FILES.__contains__, map(type, objects))):
        with contextlib.suppress(OSError, ValueError):  # closed, detached, or its reader has ended
            each.flush()
    gc.freeze()


def _leave_out_native_handlers() -> None:
    """Let `exit` skip the handlers that are registered now (glibc).

    It calls handlers in the reverse order of their registration. `_exit` as a handler gets the exit code, and leaves
    those out that would come after it.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library has no `on_exit`
        library = ctypes.CDLL(None)
        register, end, flush = library.on_exit, library["_exit"], library.fcloseall
        register(ctypes.cast(end, ctypes.c_void_p), None)
        register(ctypes.cast(flush, ctypes.c_void_p), None)  # is called before it: what native code has printed
