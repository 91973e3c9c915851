"""The first lines of the command `lockstep`.

Importing Lockstep imports torch, which takes a second or two and is not made to be interrupted: a Ctrl-C in it shows a
traceback, or is lost. So the command begins here, outside the package: until everything is imported there is
nothing to stop but this process.

`lockstep run` imports no torch at all, unless its workers ask for a rendezvous: the scripts that it starts do that, and
are not kept waiting by a launcher that does it first.
"""

import importlib.util
import os
import signal
import sys

INTERRUPTED_EXIT = 130


def main() -> None:
    """Import the command line and run it; a Ctrl-C meanwhile ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    _open_closed_streams()
    # Not at the top: that is the point of this module.
    if sys.argv[1:2] == ["run"]:
        _leave_front_door_closed()
        from lockstep.cli.run import main as run
    else:
        from lockstep.cli.main import main as run
    run()


def _open_closed_streams() -> None:
    """Open the null device where a standard stream is closed, as by `>&-`, here and for what this process starts.

    Else the next pipe or socket would have its number, and get what is written to the stream.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is the one that is given.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _leave_front_door_closed() -> None:
    """Let the package's rooms be imported without the package's own `__init__.py`, which imports all of them.

    No room goes through it: tests/test_architecture.py holds that.
    """
    spec = importlib.util.find_spec("lockstep")
    assert spec is not None
    sys.modules["lockstep"] = importlib.util.module_from_spec(spec)


def _end(_signal: int, _frame: object) -> None:
    sys.stderr.write("\nInterrupted before anything began.\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED_EXIT)
