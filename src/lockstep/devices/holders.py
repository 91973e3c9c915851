"""Finding the user and the command of a process that uses a GPU, as far as this process may see them."""

import os
from datetime import datetime

import psutil

from lockstep.devices.inventory import Holder


def look_up_holder(pid: int, *, memory_bytes: int | None, is_graphics: bool) -> Holder:
    """Return a process that has memory on a GPU, with its user, command and start if these can be seen.

    The driver's pid may belong to a process outside this container, or to one that has ended. Then the fields are None,
    which is not an error.

    Args:
        pid: Its process id, from the driver.
        memory_bytes: How much GPU memory it has, from the driver.
        is_graphics: Whether it only draws, from the driver.
    """
    user, command, since = None, None, None
    try:
        process = psutil.Process(pid)
        since = datetime.fromtimestamp(process.create_time()).astimezone()
        user = process.username()
        command = _clean(process.cmdline() or [process.name()])
    except (psutil.Error, OSError, ValueError):  # values that were read before this error are kept
        pass
    return Holder(
        pid=pid,
        user=user,
        command=command,
        since=since,
        memory_bytes=memory_bytes,
        is_graphics=is_graphics,
        is_self=pid == os.getpid(),
    )


def _clean(words: list[str]) -> str:
    """Return a command on one line, the program without its folder, without control characters for the terminal."""
    line = " ".join([os.path.basename(words[0]) or words[0], *words[1:]])  # noqa: PTH119 - a name, not a path of ours
    return " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())
