"""Naming how a loading process has ended: torch reports a lost connection, or the signal alone."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from lockstep.launch.exits import describe_exit
from lockstep.launch.out_of_memory import OomKills, name_killer, read_oom_kills

_END_SECONDS = 1.0
"""The kernel closes the connections of a process before it reports its end."""
_POLL_SECONDS = 0.01


@contextmanager
def loading_processes_explained(read_kills: Callable[[], OomKills] = read_oom_kills) -> Iterator[None]:
    """Name the loading process that was killed, if that is why something within fails; enter when they have started."""
    processes = multiprocessing.active_children()
    before = read_kills()
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        if not isinstance(error, EOFError | ConnectionError) and "DataLoader worker" not in str(error):
            raise
        killed = _find_killed(processes)
        if killed is None:
            raise
        how = describe_exit(killed.exitcode or 0, killer=name_killer(before, read_kills()))
        explained = RuntimeError(
            f"The loading process {killed.pid} was {how}, while it loaded samples. If memory is short, use fewer "
            "loading processes, or load less in each; num_workers=0 loads in this process, and shows errors of the "
            "data set itself. (LS406)"
        )
        for note in getattr(error, "__notes__", ()):  # which samples it loaded
            explained.add_note(note)
        raise explained from error


def _find_killed(processes: list[BaseProcess]) -> BaseProcess | None:
    deadline = time.monotonic() + _END_SECONDS
    while True:
        killed = [each for each in processes if each.exitcode is not None and each.exitcode < 0]
        if killed or time.monotonic() > deadline:
            return killed[0] if killed else None
        time.sleep(_POLL_SECONDS)
