"""A wrapper's hook on the module that it wraps.

People copy the inner module: `copy.deepcopy(model.module)` for an average of weights, `torch.save(model.module)` as a
checkpoint. An ordinary hook would drag the wrapper, its buckets and its process group into the copy. This one stays
behind.
"""

from collections.abc import Callable
from typing import Any, final

import torch


@final
class ModuleHook:
    """Calls `target()` with what the hook gets, as long as its owner lives; a copy of it calls nothing.

    Args:
        target: A weak reference to the owner's method.
    """

    def __init__(self, target: Callable[[], Callable[..., None] | None]) -> None:
        self._target = target

    @torch._disable_dynamo  # noqa: SLF001 - torch.compiler.disable, but without importing the compiler at once
    def __call__(self, *arguments: Any) -> None:
        """Hand the hook's arguments on."""
        call = self._target()
        if call is not None:
            call(*arguments)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "ModuleHook":
        """Return a hook without effect."""
        return ModuleHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing() -> None:
    """Stand for an owner that is not there."""
