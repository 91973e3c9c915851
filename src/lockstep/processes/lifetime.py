"""Asking the kernel to end a process with its parent."""

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


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
    """Ignore SIGTERM unless the process `owner_pid` has sent it, and SIGUSR1 from every process (main thread; Linux).

    Slurm and systemd send a signal to every process of a job. A worker that handles it as a request to save and stop
    still needs its data-loading processes then. (The kernel delivers several pending SIGTERM as one. If the owner's
    signal is lost in this way, this process ends with the owner, see `die_with_parent`.)
    """
    if not sys.platform.startswith("linux"):
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != owner_pid:
            pass
        os._exit(0)  # asked for by the owner: another code is an error to torch, which says so while the owner exits

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the thread inherits this mask
    threading.Thread(target=wait, daemon=True).start()
