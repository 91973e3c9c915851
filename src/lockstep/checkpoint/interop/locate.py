"""Finding the weights in the content of a file. Pure.

People save `model.state_dict()` alone, or in a dictionary with the optimizer, the epoch and other values. Weights are
recognised as a dictionary from names to tensors. The name of such a dictionary matters only if there are several.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.checkpoint.interop.names import first_components
from lockstep.errors import CheckpointError

USUAL_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights")
"""Usual keys of the weights, in a file that also has other dictionaries of tensors."""
EXTRA_STATE = "_extra_state"
"""Last component of the name of a module's extra state (`get_extra_state`), which need not be a tensor."""
_NOT_WEIGHTS_PREFIXES = ("optim", "sched", "scaler")
_SHOWN = 8
_MAX_DEPTH = 5
"""How deep weights are searched for; a dictionary may contain itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedWeights:
    path: tuple[str, ...]
    """The keys that lead to them; empty if the content itself is the weights."""
    prefix: str
    state: Mapping[str, Any]
    """Tensors and extra state of modules, by name without `prefix`."""
    others: tuple[str, ...]
    """Keys of other weights in the file, e.g. an average; not of single numbers such as a best loss."""


def find_weights(content: Any, source: str, key: str | None = None) -> LocatedWeights:
    """Find the weights in the content of a file; `key` is a key in it (`nets.generator`), or how names begin."""
    if key is None:
        return _search(content, (), source)
    inner, path, rest = _follow_key(content, key)
    found = _search(inner, path, source)
    if not rest:
        return found
    taken = {name.removeprefix(f"{rest}."): value for name, value in found.state.items() if name.startswith(f"{rest}.")}
    if not taken:
        keys = [str(name) for name in inner] if isinstance(inner, Mapping) else []
        places = [name for name in keys if name not in found.state] + list(first_components(found.state))
        raise CheckpointError(
            f"{source} has nothing under the key {key!r}. Expected one of: "
            f"{_listed(places) or 'no key at all'}. (LS720)"
        )
    return LocatedWeights(path=found.path, prefix=f"{rest}.", state=taken, others=())


def is_weights(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether `value` is a state_dict: it maps names to tensors and contains no state_dict (down to `depth`)."""
    if not depth or not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    inner = [item for name, item in value.items() if not _is_extra(name) and isinstance(item, Mapping)]
    return any(isinstance(item, Tensor) for item in value.values()) and not any(
        is_weights(item, depth - 1) for item in inner
    )


def split_extra(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], tuple[str, ...]]:
    """Return the tensors, the extra state of modules, and the names of all other values."""
    tensors = {name: item for name, item in state.items() if isinstance(item, Tensor)}
    extra = {name: item for name, item in state.items() if name not in tensors and _is_extra(name)}
    return tensors, extra, tuple(name for name in state if name not in tensors and name not in extra)


def _follow_key(content: Any, key: str) -> tuple[Any, tuple[str, ...], str]:
    """Follow a dotted key into `content`; return the innermost dictionary, its path and the rest of the key."""
    path: tuple[str, ...] = ()
    while key and isinstance(content, Mapping):
        parts = key.split(".")
        heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        head = next((head for head in heads if isinstance(content.get(head), Mapping)), None)
        if head is None:
            break
        content, path, key = content[head], (*path, head), key[len(head) + 1 :]
    return content, path, key


def _search(content: Any, path: tuple[str, ...], source: str) -> LocatedWeights:
    if is_weights(content):
        return LocatedWeights(path=path, prefix="", state=content, others=())
    entries = dict(content) if isinstance(content, Mapping) and len(path) < _MAX_DEPTH else {}
    holders = [name for name in entries if isinstance(name, str) and _holds_weights(entries[name])]
    usual = [name for name in holders if name in USUAL_KEYS]
    choice = usual or [name for name in holders if not name.lower().startswith(_NOT_WEIGHTS_PREFIXES)]
    if len(choice) > 1:
        raise CheckpointError(
            f"{source} holds several sets of weights: {_listed(choice)}. Choose one with the key, for example "
            f"{choice[0]!r}. (LS720)"
        )
    if not choice:
        raise CheckpointError(
            f"{source} holds no weights. Expected a dictionary of tensors by name, alone or under a key such as "
            f"'state_dict' or 'model', but found {_describe(content)}. (LS720)"
        )
    found = _search(entries[choice[0]], (*path, choice[0]), source)
    single = [name for name, value in entries.items() if isinstance(value, Tensor) and value.numel() > 1]
    beside = [name for name in holders if name != choice[0] and is_weights(entries[name])]
    return LocatedWeights(
        path=found.path, prefix="", state=found.state, others=(*beside, *map(str, single), *found.others)
    )


def _holds_weights(value: Any, depth: int = _MAX_DEPTH) -> bool:
    if not depth or is_weights(value, depth):
        return bool(depth)
    return isinstance(value, Mapping) and any(
        _holds_weights(item, depth - 1) for name, item in value.items() if isinstance(name, str)
    )


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with {_listed([str(name) for name in value])}" if value else "an empty dictionary"
    return "a single tensor without a name" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
