"""Threads that are left alone: they wait in native code, and the process may end before they come back.

[Note: a thread in native code at the end] Before Python 3.14 the interpreter, once it ends, ends a thread by
`pthread_exit` when it comes back from native code. Torch's native code is C++ and lets nothing of that kind through:
the C++ library aborts the process, with "terminate called without an active exception" and exit code 134. So where such
a thread is left at the end, it is made to sleep in place of that, as newer Pythons do. The handler is not set earlier:
until then, what calls it is an error that must end the process.
"""

import atexit
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

_LEFT: Final = weakref.WeakSet[threading.Thread]()


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


def _let_threads_sleep() -> None:
    if sys.version_info >= (3, 14) or not any(thread.is_alive() for thread in _LEFT):
        return
    with suppress(AttributeError, OSError):  # another C++ library
        set_handler = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
