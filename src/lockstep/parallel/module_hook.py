"""A wrapper's hook on the module that it wraps.

People copy the inner module: `copy.deepcopy(model.module)` for an average of weights, `torch.save(model.module)` as a
checkpoint. An ordinary hook would be copied with the wrapper, its buckets and its process group. This one is not
copied.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import nn

from lockstep.parallel.averaging import Averaging
from lockstep.parallel.buffers import start_buffers
from lockstep.parallel.module_sync import ModuleSync
from lockstep.torch_private.compiler import disable_compiler
from lockstep.torch_private.modules import forward_pre_hooks


@final
class ModuleHook:
    """Calls its wrapper's method with the hook's arguments, or the module sync's when the wrapper was deleted.

    A copy of it calls nothing.
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


def connect(
    wrapper: nn.Module,
    sync: ModuleSync,
    averaging: Averaging,
    start: Callable[[], Callable[[], None]],
    before: Callable[..., None],
    after: Callable[..., None],
) -> None:
    """Call a wrapper's methods around the forwards of its module, and where its buffers are sent (local).

    All are held weakly: when the wrapper was deleted, `sync` does what is needed. `start` begins to send the buffers
    and returns what waits for that (collective).
    """
    assert isinstance(wrapper.module, nn.Module)
    close_orphans(wrapper.module)
    if averaging.comparison is not None:
        averaging.comparison.order.wrapper = weakref.ref(wrapper)
    if averaging.reducer is not None:
        averaging.reducer.schedule.send_besides = partial(
            start_buffers, weakref.WeakMethod(start), weakref.WeakMethod(sync.start_buffers)
        )
    before_hook = ModuleHook(weakref.WeakMethod(before), sync.before_forward, sync)
    after_hook = ModuleHook(weakref.WeakMethod(after), sync.after_forward, sync)
    # On the inner module, so that a forward through `.module` is seen as well.
    sync.handles += [
        wrapper.module.register_forward_pre_hook(before_hook, with_kwargs=True),
        wrapper.module.register_forward_hook(after_hook, with_kwargs=True),
    ]


def _nothing(*_arguments: Any) -> None:
    """Do nothing: the hook of a copy."""


def _the_hook_without_effect() -> Callable[..., None]:
    return _nothing
