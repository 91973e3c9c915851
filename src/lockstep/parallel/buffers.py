"""The buffers of a wrapped module: overwritten with one rank's before a forward, and beside the gradients."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import TensorBroadcast, World, broadcast_tensors, calls_for
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
