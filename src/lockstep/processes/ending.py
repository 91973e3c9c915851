"""Ending a process: without the half second that it takes after torch's import, with its parent, with threads left.

It imports the standard library alone: the loading processes of a script load this file by itself.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, Final

_FILES = {io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper}
_WITHOUT_WORK_AT_THE_END = {"cuda", "numpy", "psutil", "pydantic_core", "safetensors", "torch", "yaml", "_yaml"}
"""Packages whose native code has nothing to save when the process ends."""
_PR_SET_PDEATHSIG = 1
_RELEASE_SECONDS: Final = 0.01
"""A thread needs microseconds, unless the machine is busy."""
_LEFT: Final = weakref.WeakSet[threading.Thread]()


def exit_quickly() -> None:
    """Let this process end, whenever it ends, without collecting garbage a last time (local; a second call is free).

    The interpreter looks several times at every object that is left, and torch's import alone makes half a million.
    What is left in reference cycles is not finalized then. Python never promised that for objects that exist at the
    end; but it writes what files of such objects still hold, so this does too. Handlers of `atexit` run as ever.

    After the interpreter, torch's libraries take 0.13 s to remove each operator from a table of which nothing is left
    a moment later. That is left out too, unless other native code was loaded before this call, which may have
    something to save in its own handlers, or a profiler looks on. Handlers of what is loaded later run as ever.
    """
    from lockstep.settings import read_settings

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


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, `kill -9` included (Linux; elsewhere does nothing).

    See prctl(2), PR_SET_PDEATHSIG. The parent may have ended before that call, so this is checked afterwards.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def terminate_only_for(owner_pid: int) -> None:
    """Ignore SIGTERM unless the process `owner_pid` has sent it; SIGINT and SIGUSR1 from all (main thread; Linux).

    Slurm and systemd send a signal to every process of a job, and so does Ctrl-C. A worker that handles it as a request
    to save and stop still needs its data-loading processes then. (The kernel delivers several pending SIGTERM as one.
    If the owner's signal is lost in this way, this process ends with the owner, see `die_with_parent`.)
    """
    if not sys.platform.startswith("linux"):
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != owner_pid:
            pass
        os._exit(0)  # asked for by the owner: another code is an error to torch, which says so while the owner exits

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A process that was not forked may have threads of libraries, whose masks are their own: to get it does nothing.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the thread inherits this mask
    threading.Thread(target=wait, daemon=True).start()


def describe_held_up(threads: Sequence[str]) -> str:
    """Return what keeps a process from ending in which these threads are left that are no daemons."""
    if threads:
        return f"thread {', '.join(map(repr, threads))}, which is no daemon,"
    return "a handler of atexit, or the end of the interpreter,"


def start_thread_left_alone(
    target: Callable[..., Any], arguments: Iterable[Any] = (), *, name: str
) -> threading.Thread:
    """Call a function that may wait in native code for long, in a thread that nobody waits for for ever (local)."""
    thread = threading.Thread(target=target, args=tuple(arguments), name=name, daemon=True)
    _LEFT.add(thread)
    atexit.unregister(_let_threads_sleep)
    atexit.register(_let_threads_sleep)
    thread.start()
    return thread


def let_native_threads_release() -> None:
    """Before this process ends, give threads of native code the time to release Python's objects.

    Gloo's thread drops the tensors of a call after it has said that the call is done, and takes the interpreter's
    lock for that. If the process ends meanwhile, as after a last gather, that thread is ended, and with it the
    process: [Note: a thread in native code at the end]. It is not Python's, so nobody can wait for it.
    """
    atexit.unregister(_release)
    atexit.register(_release)


def _release() -> None:
    time.sleep(_RELEASE_SECONDS)  # without the interpreter's lock


def _let_threads_sleep() -> None:
    """Let the threads that are left sleep for ever, once the process ends.

    [Note: a thread in native code at the end] Before Python 3.14 the interpreter, once it ends, ends a thread by
    `pthread_exit` when it comes back from native code. Torch's native code is C++ and lets nothing like that through:
    the C++ library aborts the process, with "terminate called without an active exception" and exit code 134. Newer
    Pythons make the thread sleep in place of that. The handler is not set earlier: until then, what calls it is an
    error that must end the process.
    """
    if sys.version_info >= (3, 14) or not any(thread.is_alive() for thread in _LEFT):
        return
    with suppress(AttributeError, OSError):  # another C++ library
        set_handler = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
