"""The buffers of a wrapped module: overwritten with one rank's before a forward, and beside the gradients.

And checkpoints of which nothing was loaded into a module.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, final

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lockstep.comm import TensorBroadcast, World, broadcast_tensors, calls_for
from lockstep.processes.user_line import NO_LINE, CodeLine, stacklevel_of_user, user_line
from lockstep.recording import EventKind, own_recorder
from lockstep.reduce import TrainedModel
from lockstep.reduce.model import Registries
from lockstep.torch_private.modules import buffer_registry, module_registry, version_of

BUFFERS_BEFORE_FORWARD = (
    "the buffers of a wrapped model before a forward in training (call train() on every rank; for a forward on one "
    "rank alone, eval() or no_grad())"
)
"""What a call is for: ranks compare it, and errors show it."""
BUFFERS_AFTER_BACKWARD = "the buffers of a wrapped model after its backward"
_PREFIXES: Final = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before the keys."""


@final
class ModuleBuffers:
    """Sends buffers from rank `source`. Layers are found anew where one has come or gone: a walk takes long."""

    def __init__(self, model: TrainedModel, world: World) -> None:
        assert world.group is not None
        self.source = 0
        self._model = model
        self._broadcast = TensorBroadcast(world.group)
        self._find_layers()

    def send(self) -> None:
        waiting = own_recorder().during(EventKind.WAITING, -1, text="buffers before a forward")
        with waiting, calls_for(BUFFERS_BEFORE_FORWARD):
            self._broadcast.start(self.named().items(), self.source, waits=True)

    def start(self) -> Callable[[], None]:
        """Begin to overwrite the buffers, beside the gradients; return what waits for it (collective)."""
        with calls_for(BUFFERS_AFTER_BACKWARD):
            return self._broadcast.start(self.named().items(), self.source)

    def named(self) -> dict[str, Tensor]:
        """Return them by name, each once: a forward may have put another tensor in a buffer's place."""
        if self._children.have_changed():
            self._find_layers()
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        if not any(self._registries):
            return found
        for prefix, registry in zip(self._prefixes, self._registries, strict=True):
            for key, buffer in registry.items() if registry else ():
                if buffer is None or id(buffer) in seen or prefix + key in self._model.ignored:
                    continue
                seen.add(id(buffer))
                found[prefix + key] = buffer
        return found

    def _find_layers(self) -> None:
        root = self._model.module
        named = [] if root is None else list(root.named_modules())
        self._children = Registries([module_registry(layer) for _, layer in named])
        self._prefixes = [f"{name}." if name else "" for name, _ in named]
        self._registries = [buffer_registry(layer) for _, layer in named]


def broadcast_model(model: TrainedModel, group: ProcessGroup, source: int, *, with_buffers: bool) -> None:
    broadcast_tensors([*model.parameters(), *(model.buffers() if with_buffers else ())], group, source)


def buffers_go_before_forward(wrapper: object) -> bool:
    """Return whether a wrapper's buffers are sent before its forward: after it, if a user's hook wants it so."""
    hook = getattr(wrapper, "buffer_hook", None)  # torch sets it when one is registered
    return hook is None or hook.buffer_comm_hook_location.name == "PRE_FORWARD"


def send_no_buffers() -> None:
    """Do nothing: no buffers were sent."""


class ModuleHook:
    """A hook on a wrapped module. A copy of it does nothing.

    People copy the inner module: `copy.deepcopy(model.module)` for an average of weights, `torch.save(model.module)` as
    a checkpoint. An ordinary hook would be copied with the wrapper, its buckets and its process group.
    """

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _the_hook_without_effect, ()


def _nothing(*_arguments: Any) -> None:
    """Do nothing: the hook of a copy."""


def _the_hook_without_effect() -> Callable[..., None]:
    return _nothing


def note_loaded_state(module: nn.Module, state: Mapping[str, Any], keys: Any) -> None:
    """Note a state of which nothing was loaded into a module; `keys` are torch's missing and unexpected ones.

        model.load_state_dict(torch.load("model.pt"), strict=False)    # "module.0.weight", and here it is "0.weight"
        model = DistributedDataParallel(model)

    `strict=False` is meant for a new head; with another prefix all of the checkpoint is left out, on all ranks alike.
    It is said in the next forward and not at once: many scripts try it, and then change the keys.
    """
    _MISSED.pop(module, None)
    names, missing, unexpected = (
        [name for name, _ in module.named_parameters()],
        keys.missing_keys,
        keys.unexpected_keys,
    )
    # Not buffers: BatchNorm's of a state without versions are never missing.
    if not names or not unexpected or not {*names} <= {*missing}:
        return
    bare = {_without_prefix(key): key for key in unexpected}
    pairs = [(bare[_without_prefix(name)], name) for name in names if _without_prefix(name) in bare]
    pairs += [(key, name) for key in unexpected for name in names[:1] if _have_prefix(key, name, names, unexpected)]
    pairs += [(key, names[0]) for key in unexpected if isinstance(state[key], Mapping)]  # of a whole checkpoint
    if pairs:
        _MISSED[module] = *pairs[0], user_line(), _count_writes(module)


def warn_of_missed_states(model: nn.Module) -> None:
    """Warn if nothing of the last state that was loaded into a model or a part of it has fitted (local)."""
    for module in model.modules() if _MISSED else ():
        loaded, expected, line, num_writes = _MISSED.pop(module, ("", "", NO_LINE, -1))
        if num_writes == _count_writes(module):  # and nothing else was written since
            warnings.warn(
                f"Nothing of the checkpoint that was loaded at {line} has fitted: its keys are such as {loaded!r}, and "
                f"here they are such as {expected!r}. strict=False hides that, and the model kept the values that it "
                "had. ls.load_weights(path, model) finds the weights in a file, and takes prefixes off. A wrapper's "
                "state has the prefix 'module.': save model.module.state_dict() and load it with "
                "model.module.load_state_dict(...). (LS727)",
                stacklevel=stacklevel_of_user(),
            )


def _count_writes(module: nn.Module) -> int:
    return sum(map(version_of, module.parameters()))


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


_MISSED: Final["weakref.WeakKeyDictionary[nn.Module, tuple[str, str, CodeLine, int]]"] = weakref.WeakKeyDictionary()
"""Of all modules of this process, which may be loaded before they are wrapped."""
