"""A wrapper's hook on the module that it wraps.

People copy the inner module: `copy.deepcopy(model.module)` for an average of weights, `torch.save(model.module)` as a
checkpoint. An ordinary hook would be copied with the wrapper, its buckets and its process group. This one is not
copied.
"""

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from lockstep.parallel.module_sync import ModuleSync
from lockstep.torch_private import disable_compiler, forward_pre_hooks


@final
class ModuleHook:
    """Calls its wrapper's method with the hook's arguments, or the module sync's when the wrapper was deleted.

    A copy of it calls nothing.

    Args:
        method: Of the wrapper.
        otherwise: Of the module sync.
        module_sync: Synchronises the module when the wrapper was deleted.
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
        """Call the method."""
        (self._method() or self._otherwise)(*arguments)

    @property
    def is_orphaned(self) -> bool:
        """Whether the wrapper was deleted."""
        return self._method() is None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Callable[..., None]":
        """Return a hook without effect."""
        return _nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _the_hook_without_effect, ()


def close_orphans(module: nn.Module) -> None:
    """Remove the hooks of deleted wrappers of this module, which is about to be wrapped again (local)."""
    for hook in list(forward_pre_hooks(module).values()):
        if isinstance(hook, ModuleHook) and hook.is_orphaned:
            hook.module_sync.close()


def _nothing(*_arguments: Any) -> None:
    """Do nothing: the hook of a copy."""


def _the_hook_without_effect() -> Callable[..., None]:
    return _nothing
