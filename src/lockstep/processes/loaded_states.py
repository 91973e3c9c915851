"""States that were loaded, and of which next to nothing has fitted: seen at `load_state_dict`, said at a forward.

    model.load_state_dict(torch.load("model.pt"), strict=False)    # "module.0.weight", and here it is "0.weight"
    model = DistributedDataParallel(model)

`strict=False` is meant for a new head; with another prefix all of the checkpoint is left out, on all ranks alike. It is
said when the model is wrapped or used, and not at once: many scripts try it, and then change the keys. Torch has a hook
for the loading of one module alone, and a model may be loaded before anything of ours has seen it.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.processes.user_line import CodeLine, stacklevel_of_user, user_line
from lockstep.torch_private.modules import version_of

_PREFIXES: Final = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before the keys."""
_NUM_SEEN: Final = 64
"""So many values of each parameter are looked at."""
_LARGEST_MISS: Final = 0.9
"""Of all parameters: fewer that are missing may be those of a new head."""
_Missed = tuple[str, str, str, CodeLine, Sequence[object]]


def watch_loaded_states() -> None:
    """Look at what each `load_state_dict` of this process leaves out."""
    load: Any = nn.Module.load_state_dict
    if load in _WATCHING:
        return

    @wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        keys = load(self, state_dict, *args, **kwargs)
        with suppress(TypeError, RuntimeError):  # a module without a hash, parameters without versions
            _MISSED.pop(self, None)
            if getattr(keys, "unexpected_keys", None):
                _note(self, state_dict, keys.missing_keys, keys.unexpected_keys)
        return keys

    _WATCHING.append(load_state_dict)
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _note(module: nn.Module, state: Mapping[str, Any], missing: Collection[str], unexpected: Collection[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    lacking = [name for name in names if name in {*missing}]
    # Not buffers: BatchNorm's of a state without versions are never missing.
    if not lacking or len(lacking) < _LARGEST_MISS * len(names):
        return
    bare = {_without_prefix(key): key for key in unexpected}
    pairs = [(bare[_without_prefix(name)], name) for name in lacking if _without_prefix(name) in bare]
    if len(pairs) < len(lacking) < len(names):
        pairs = []
    pairs += [(key, name) for key in unexpected for name in lacking[:1] if _have_prefix(key, name, lacking, unexpected)]
    if len(lacking) == len(names):
        pairs += [(key, names[0]) for key in unexpected if isinstance(state.get(key), Mapping)]  # of a whole checkpoint
    if pairs:
        found = f"{len(names) - len(lacking)} of {len(names)} parameters" if len(lacking) < len(names) else "Nothing"
        _MISSED[module] = found, *pairs[0], user_line(), _values_of(module)
        _LOOKED_INTO.clear()


def warn_of_missed_states(model: nn.Module) -> None:
    """Warn if nothing of the last state that was loaded into a model or a part of it has fitted (local)."""
    if not _MISSED or model in _LOOKED_INTO:
        return
    _LOOKED_INTO.add(model)
    for module in model.modules():
        missed = _MISSED.pop(module, None)
        if missed is None:
            continue
        found, loaded, expected, line, values = missed
        if values == _values_of(module):  # and nothing else was written since
            warnings.warn(
                f"{found} of the checkpoint that was loaded at {line} fitted: its keys are such as {loaded!r}, and "
                f"here they are such as {expected!r}. strict=False hides that, and the model kept the values that it "
                "had. ls.load_weights(path, model) finds the weights in a file, and takes prefixes off. A wrapper's "
                "state has the prefix 'module.': save model.module.state_dict() and load it with "
                "model.module.load_state_dict(...). (LS727)",
                stacklevel=stacklevel_of_user(),
            )


def _values_of(module: nn.Module) -> Sequence[object]:
    """Return what shows that parameters were written: not their versions alone, for `.data` writes leave these."""
    return [
        (version_of(each), each.detach().reshape(-1)[:_NUM_SEEN].cpu().view(torch.uint8).tolist() if is_plain else 0)
        for each in module.parameters()
        for is_plain in [type(each) is nn.Parameter and type(each.data) is Tensor and not each.is_meta]
    ]


def _have_prefix(key: str, name: str, names: Collection[str], unexpected: Collection[str]) -> bool:
    """Return whether all keys are the names of parameters with one prefix, or the other way round."""
    longer, shorter = (key, name) if len(key) > len(name) else (name, key)
    prefix = longer.removesuffix(shorter)
    if not prefix.endswith(".") or prefix == longer:
        return False
    expected = {prefix + each for each in names} if longer is key else {each.removeprefix(prefix) for each in names}
    return expected <= {*unexpected}


def _without_prefix(key: str) -> str:
    while key.startswith(_PREFIXES):
        key = key.partition(".")[2]
    return key


_MISSED: Final["weakref.WeakKeyDictionary[nn.Module, _Missed]"] = weakref.WeakKeyDictionary()
"""Of all modules of this process, which may be loaded before they are wrapped."""

_LOOKED_INTO: Final["weakref.WeakSet[nn.Module]"] = weakref.WeakSet()
"""Models that have none of these as a part: to go through 1000 parts in each forward would take milliseconds."""

_WATCHING: Final[list[Callable[..., Any]]] = []
"""What was put in the place of torch's method."""
