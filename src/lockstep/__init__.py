"""Lockstep: data-parallel training for PyTorch.

It has two layers over one core. The drop-in layer has the names and signatures of torch's `DistributedDataParallel` and
related classes. The trainer layer (`Trainer`, `ShardedLoader`, `launch`) adds what these signatures do not allow: the
same model on any number of workers.

`lockstep.comm` is imported at once, which makes the backends known to torch. The rest is imported when a name of it is
used: a script that takes the wrapper alone needs neither the trainer nor the launcher.
"""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import get_data
from typing import Any

from lockstep.torch_private.compiler_import import use_optimizers_without_compiler
from lockstep.version import VERSION

__version__ = VERSION

_MODULES = {
    name.name: node.module
    for node in ast.parse(get_data(__name__, "__init__.pyi") or b"").body  # also in a zip file
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
"""The module of each public name: in the stub, which is the one list of them."""

_PLACES = {".".join(module.split(".")[:2]) for module in _MODULES.values()}
"""The packages that they are in, as in `ls.parallel.DataParallel`."""

__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect no garbage: imports make none, and a collection looks at all objects of torch, which takes 60 ms."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    with _collector_paused():
        if name in _MODULES:
            found = getattr(import_module(_MODULES[name]), name)
        elif f"lockstep.{name}" in _PLACES:
            found = import_module(f"lockstep.{name}")
        else:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


with _collector_paused():
    import_module("lockstep.comm")
    import_module("lockstep.launch")
    import_module("lockstep.torch_private.loaders")  # takes note of the iterators of loaders from now on
    import_module("lockstep.processes.loaded_states").watch_loaded_states()
globals().pop("launch", None)  # the package, which is bound by its import and never again: the name is the function
use_optimizers_without_compiler()
