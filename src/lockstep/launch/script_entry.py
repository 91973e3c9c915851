"""A script's worker, before it becomes the script: it arranges that it ends with the launcher, then calls exec.

This file is run as a script, and imports only the standard library. After `execv` the process is like one that the user
has started from a shell.

Arguments: the launcher's process id; the program, as a path; its arguments.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, *command = sys.argv[1:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit(1)
    # Python ignores these, and exec keeps ignored signals ignored: `yes | head` in a shell script would not end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(command[0], command)  # noqa: S606 - that is the point
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} cannot be started: {error.strerror}.\n")
        sys.exit(126)


if __name__ == "__main__":
    main()
