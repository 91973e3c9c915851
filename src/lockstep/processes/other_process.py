"""Let code run as if it were in another process, of a job with one process more, at another time.

What asks for its rank, its process, its loading process, its host or the time gets another answer. So where another
worker would get another result, the same worker gets it here, and one that is alone does too.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lockstep.settings import rank_variables_raised
from lockstep.torch_private.loaders import worker_info_of

_SECONDS_LATER = 100_003.7
DIFFERENCES = ("rank or number of ranks", "process id", "loading process", "host", "time")

_ONE_AT_A_TIME: Final = threading.Lock()
"""Two threads would put back each other's answers."""


@contextmanager
def as_another_process(differences: Collection[str] = DIFFERENCES) -> Iterator[None]:
    """Answer the calls of this thread so, whatever module has imported the functions (local)."""
    thread = threading.get_ident()
    replaced: list[tuple[dict[str, Any], Callable[..., Any]]] = []
    with _ONE_AT_A_TIME, rank_variables_raised() if DIFFERENCES[0] in differences else nullcontext():
        modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        try:
            for difference, found, answer in _answers():
                if difference in differences:
                    other = _for_thread(thread, found, answer)
                    holders = [names for names in modules if names.get(found.__name__) is found]
                    replaced += [(names, found) for names in holders]
                    for names in holders:
                        names[found.__name__] = other
            yield
        finally:
            for names, found in replaced:
                names[found.__name__] = found


def _answers() -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Return for each function what it shows, and what answers in its place."""
    of_rank, of_process, of_loading, of_host, of_time = DIFFERENCES
    pid, now, now_ns, host = os.getpid, time.time, time.time_ns, socket.gethostname
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    info = worker_info_of(number=1, of=2)
    return [
        (of_rank, dist.get_rank, lambda *_, **__: rank + 1),
        (of_rank, dist.get_world_size, lambda *_, **__: size + 1),
        (of_rank, dist.is_initialized, lambda: True),
        (of_process, pid, lambda: pid() + 1),
        (of_loading, get_worker_info, lambda: info),
        (of_host, host, lambda: f"{host()}-2"),
        (of_time, now, lambda: now() + _SECONDS_LATER),
        (of_time, now_ns, lambda: now_ns() + int(_SECONDS_LATER * 1e9)),
    ]


def _for_thread(thread: int, found: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def answer_or_find(*args: Any, **kwargs: Any) -> Any:
        return (answer if threading.get_ident() == thread else found)(*args, **kwargs)

    return answer_or_find
