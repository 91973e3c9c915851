"""A wrapper's hook on the module that it wraps.

People copy the inner module: `copy.deepcopy(model.module)` for an average of weights, `torch.save(model.module)` as a
checkpoint. An ordinary hook would drag the wrapper, its buckets and its process group into the copy. This one stays
behind.
"""

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from lockstep.parallel.module_sync import ModuleSync
from lockstep.torch_private import disable_compiler, forward_pre_hooks


@final
class ModuleHook:
    """Calls its wrapper's method with what the hook gets, or the module sync's when the wrapper is gone.

    A copy of it calls nothing.

    Args:
        method: Of the wrapper.
        otherwise: Of the module sync.
        module_sync: What outlives the wrapper.
    """

    def __init__(
        self,
        method: "weakref.WeakMethod[Callable[..., None]]",
        otherwise: Callable[..., None],
        module_sync: ModuleSync,
    ) -> None:
        self._method = method
        self._otherwise = otherwise
        self.module_sync = module_sync

    @disable_compiler
    def __call__(self, *arguments: Any) -> None:
        """Hand the hook's arguments on."""
        (self._method() or self._otherwise)(*arguments)

    @property
    def is_orphaned(self) -> bool:
        """Whether the wrapper is gone."""
        return self._method() is None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Callable[..., None]":
        """Return a hook without effect."""
        return _nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _the_hook_without_effect, ()


def close_orphans(module: nn.Module) -> None:
    """End what goes on for wrappers of this module that are gone: it is about to be wrapped anew (local)."""
    for hook in list(forward_pre_hooks(module).values()):
        if isinstance(hook, ModuleHook) and hook.is_orphaned:
            hook.module_sync.close()


def _nothing(*_arguments: Any) -> None:
    """Stand for a hook of a wrapper that is not there."""


def _the_hook_without_effect() -> Callable[..., None]:
    return _nothing
