"""A script's worker, before it becomes the script: it makes sure that it ends with the launcher, then calls exec.

Run as a script, with the standard library alone. After `execv` the process is as if the user had started it by hand.

Arguments: the launcher's process id; the pipe to the guardian; the program, as a path; its arguments.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Send the guardian this process id, ask the kernel to end this process with its parent, become the script."""
    launcher, guardian, *command = sys.argv[1:]
    with contextlib.suppress(OSError):  # it was killed; the kernel is asked as well
        os.write(int(guardian), b"+%d\n" % os.getpid())
    os.close(int(guardian))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit(1)
    # Python ignores these, and what is ignored stays so: `yes | head` in a shell script would not end as it should.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(command[0], command)  # noqa: S606 - that is the point
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} cannot be started: {error.strerror}.\n")
        sys.exit(126)


if __name__ == "__main__":
    main()
