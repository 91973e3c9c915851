"""The first lines of the command `lockstep`.

Importing Lockstep imports torch, which takes a second or two. A Ctrl-C during the import would show a traceback, or be
lost. So the command begins here, outside the package, and Ctrl-C ends this process at once until all is imported.

Commands import torch when they need it. `lockstep run` does not before a worker connects to the rendezvous, and
`lockstep train` does not for a new run: the workers, which import torch themselves, start at once.
"""

import gc
import importlib.util
import os
import signal
import sys

INTERRUPTED_EXIT = 130


def main() -> None:
    """Import the command line and run it; Ctrl-C during the import ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    _open_closed_streams()
    _check_current_directory()
    # Collecting garbage among what these imports make, which all stays, would take a third of the start and the end.
    gc.disable()
    _put_off_package_init()
    # Not at the top of the file: the signal handler must be set before these imports.
    try:
        if sys.argv[1:2] == ["run"]:
            from lockstep.cli.run import main as run
        else:
            from lockstep.cli.main import main as run
    except ModuleNotFoundError as error:
        from lockstep.errors import missing_extra

        if (explained := missing_extra(error)) is error:
            raise
        sys.exit(f"error: {explained}")
    gc.freeze()
    gc.enable()
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


def _check_current_directory() -> None:
    """Exit if the current directory was deleted: torch would end each worker in an error about another file."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is slow to import
    except FileNotFoundError:
        sys.stderr.write("error: The current directory was deleted. Change to one that exists, and start again.\n")
        sys.exit(2)


def _put_off_package_init() -> None:
    """Make the package's modules importable without running its `__init__.py`, which imports torch.

    It is run when somebody takes a name from it: user code that is imported in this process may. No module of the
    package imports from it: tests/test_architecture.py checks that.
    """
    spec = importlib.util.find_spec("lockstep")
    assert spec is not None
    assert spec.loader is not None
    loader = spec.loader
    package = importlib.util.module_from_spec(spec)

    def find(name: str) -> object:
        if name.startswith("__") and name not in {"__version__", "__all__"}:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        del vars(package)["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = find
    sys.modules["lockstep"] = package


def _end(_signal: int, _frame: object) -> None:
    sys.stderr.write("\nInterrupted before anything began.\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED_EXIT)
