"""The functions that IPython adds to Python's built-in ones, for functions of notebook cells.

A worker has no IPython shell. There `display` prints its objects, as IPython's own does without a shell, and
`get_ipython` returns None.
"""

import builtins
from typing import Any


def is_in_ipython() -> bool:
    """Return whether this process is a shell of IPython, as the kernel of a notebook is."""
    return hasattr(builtins, "__IPYTHON__")


def add_ipython_functions() -> None:
    """Add IPython's functions to the built-in ones of a worker."""
    vars(builtins).update(display=_display, get_ipython=_get_ipython)


def _display(*objects: Any, **_options: Any) -> None:
    print(*objects)  # noqa: T201 - what it is for


def _get_ipython() -> None:
    """Return None: there is no shell."""
