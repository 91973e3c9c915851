"""The first lines of the command `lockstep`.

Importing Lockstep imports torch, which takes a second or two and is not made to be interrupted: a Ctrl-C in it shows a
traceback, or is lost. So the command begins here, outside the package: until everything is imported there is
nothing to stop but this process.
"""

import os
import signal
import sys

INTERRUPTED_EXIT = 130


def main() -> None:
    """Import the command line and run it; a Ctrl-C meanwhile ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    from lockstep.cli.main import main as run  # not at the top: that is the point of this module

    run()


def _end(_signal: int, _frame: object) -> None:
    sys.stderr.write("\nInterrupted before anything began.\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED_EXIT)
