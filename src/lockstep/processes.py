"""What a child process owes its parent: to end when the parent does, however the parent ends."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, `kill -9` included (Linux; elsewhere does nothing).

    See prctl(2), PR_SET_PDEATHSIG. The parent may have ended before the request was made, so that is looked at too.

    Args:
        parent_pid: The parent as it was when this process was started.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
