"""Python imports this when it starts, if its folder is in PYTHONPATH: it imports `lockstep.drop_in` after torch.

It does not import torch itself, so Python processes without torch start as fast as before. It imports only the
standard library, takes its folder out of `sys.path`, and then runs the `sitecustomize` that it hides, if there is one.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import final

_FOLDER = str(Path(__file__).parent)


@final
class _ImportWatch(MetaPathFinder):
    """Imports `lockstep.drop_in` when torch has been imported, and Lockstep too if that import is under way."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._is_searching = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in {"torch", "lockstep"} or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self)
        return spec

    def run(self, loader: Loader, module: ModuleType) -> None:
        """Run the module's code, and then, if no other watched import is under way, the drop-in."""
        self._num_under_way += 1
        try:
            loader.exec_module(module)
        finally:
            self._num_under_way -= 1
        if self._num_under_way == 0 and "torch" in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _import_drop_in()


@final
class _WatchedLoader(Loader):
    def __init__(self, loader: Loader, watch: _ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # which others expect to find there
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._watch.run(self._loader, module)


def _import_drop_in() -> None:
    if importlib.util.find_spec("lockstep") is None:
        sys.stderr.write(
            f"lockstep: drop-in: {sys.executable} has torch but not lockstep, so torch's classes are used in this "
            "process. Install lockstep there, or start this program without --drop-in.\n"
        )
        return
    importlib.import_module("lockstep.drop_in")


def _run_hidden() -> None:
    """Run the next `sitecustomize` on `sys.path`, as Python would without this one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if path != _FOLDER]
sys.meta_path.insert(0, _ImportWatch())
_run_hidden()
