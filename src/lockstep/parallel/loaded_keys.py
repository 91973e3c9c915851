"""Checkpoints of which nothing was loaded, because their keys have the prefix of a wrapper or lack it.

    model = DistributedDataParallel(model)
    model.load_state_dict(torch.load("model.pt"), strict=False)    # "0.weight", and here it is "module.0.weight"

`strict=False` is meant for a new head; with another prefix all of the checkpoint is left out, on all ranks alike. It is
said in the next forward and not at once: many scripts try it, and then change the keys.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final, final

from torch import nn

from lockstep.parallel.user_code import CodeLine, stacklevel_of_user, user_line

_PREFIXES: Final = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before the keys."""


@final
class LoadedKeys:
    """Sees which keys fit when a state is loaded into a module; a hook of torch's for that. A copy sees nothing."""

    def __init__(self) -> None:
        self._found: tuple[str, str, CodeLine] | None = None

    def __call__(self, module: nn.Module, keys: Any) -> None:
        """Note what was loaded; `keys` are torch's missing and unexpected ones."""
        missing = {_without_prefix(key): key for key in keys.missing_keys}
        unexpected = {_without_prefix(key): key for key in keys.unexpected_keys}
        # Not buffers: BatchNorm's of a state without versions are never missing.
        bare = {_without_prefix(name) for name, _ in module.named_parameters()}
        common = sorted(bare & unexpected.keys())
        self._found = None
        if common and bare <= missing.keys():
            self._found = unexpected[common[0]], missing[common[0]], user_line()

    def warn(self) -> None:
        """Warn if nothing of the last state that was loaded has fitted; called before a forward (local)."""
        if self._found is None:
            return
        (loaded, expected, line), self._found = self._found, None
        warnings.warn(
            f"Nothing of the checkpoint that was loaded at {line} has fitted: its keys are such as {loaded!r}, and "
            f"here they are such as {expected!r}. strict=False hides that, and the model kept the values that it had. "
            "A wrapper's state has the prefix 'module.': save model.module.state_dict() and load it with "
            "model.module.load_state_dict(...). (LS727)",
            stacklevel=stacklevel_of_user(),
        )

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook without effect."""
        return _see_nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _the_hook_without_effect, ()


def _without_prefix(key: str) -> str:
    while key.startswith(_PREFIXES):
        key = key.partition(".")[2]
    return key


def _see_nothing(_module: nn.Module, _keys: Any) -> None:
    """Do nothing: the hook of a copy."""


def _the_hook_without_effect() -> Callable[..., None]:
    return _see_nothing
