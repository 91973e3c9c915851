"""The first lines of the command `lockstep`.

Importing Lockstep imports torch, which takes a second or two. A Ctrl-C during the import would show a traceback, or be
lost. So the command begins here, outside the package, and Ctrl-C ends this process at once until all is imported.

`lockstep run` does not import torch before a worker connects to the rendezvous. So the scripts, which import torch
themselves, start at once.
"""

import importlib.util
import os
import signal
import sys

INTERRUPTED_EXIT = 130


def main() -> None:
    """Import the command line and run it; Ctrl-C during the import ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    _open_closed_streams()
    # Not at the top of the file: the signal handler must be set before these imports.
    if sys.argv[1:2] == ["run"]:
        _skip_package_init()
        from lockstep.cli.run import main as run
    else:
        from lockstep.cli.main import main as run
    run()


def _open_closed_streams() -> None:
    """Open the null device where a standard stream is closed, as by `>&-`, here and for what this process starts.

    Otherwise the next pipe or socket would get its number, and would receive what is written to the stream.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # The kernel gives the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _skip_package_init() -> None:
    """Make the package's modules importable without running its `__init__.py`, which imports all of them.

    No module of the package imports from it: tests/test_architecture.py checks that.
    """
    spec = importlib.util.find_spec("lockstep")
    assert spec is not None
    sys.modules["lockstep"] = importlib.util.module_from_spec(spec)


def _end(_signal: int, _frame: object) -> None:
    sys.stderr.write("\nInterrupted before anything began.\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED_EXIT)
