"""The buffers of a wrapped module: overwritten with one rank's before a forward, and beside the gradients.

And `LoadedKeys`, for checkpoints of which nothing was loaded.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final, final

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lockstep.comm import TensorBroadcast, World, broadcast_tensors, calls_for
from lockstep.processes.user_line import CodeLine, stacklevel_of_user, user_line
from lockstep.recording import EventKind, own_recorder
from lockstep.reduce import TrainedModel
from lockstep.reduce.model import Registries
from lockstep.torch_private.modules import buffer_registry, module_registry

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


@final
class LoadedKeys(ModuleHook):
    """Sees which keys fit when a state is loaded into a module; a hook of torch's for that.

        model = DistributedDataParallel(model)
        model.load_state_dict(torch.load("model.pt"), strict=False)    # "0.weight", and here it is "module.0.weight"

    `strict=False` is meant for a new head; with another prefix all of the checkpoint is left out, on all ranks alike.
    It is said in the next forward and not at once: many scripts try it, and then change the keys.
    """

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


def _without_prefix(key: str) -> str:
    while key.startswith(_PREFIXES):
        key = key.partition(".")[2]
    return key
