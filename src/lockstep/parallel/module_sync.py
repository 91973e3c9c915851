"""What synchronises a module after its wrapper was deleted.

    model = DistributedDataParallel(model)
    return model.module                        # a recipe that many copy

When torch's wrapper is deleted, each rank trains alone, without an error. So what the module's hooks need lives as long
as the module, until the group is destroyed or the module is wrapped again.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm import World
from lockstep.parallel.averaging import Averaging
from lockstep.parallel.buffers import BufferBroadcast
from lockstep.parallel.loaded_keys import LoadedKeys
from lockstep.parallel.module_inputs import count_samples, puts_time_first
from lockstep.reduce import TrainedModel
from lockstep.torch_private.modules import find_tensors


@final
class ModuleSync:
    """Does around a forward what a wrapper without `join` and hooks of its own does."""

    def __init__(self, model: TrainedModel, world: World, averaging: Averaging, *, syncs_buffers: bool) -> None:
        self.handles: list[RemovableHandle] = []
        self.buffers = BufferBroadcast(world, averaging.reducer)
        self._model = model
        self._world = world
        self._reducer = averaging.reducer
        self._comparison = averaging.comparison
        self._syncs_buffers = syncs_buffers
        self._puts_time_first = model.module is not None and puts_time_first(model.module)
        self._loaded = LoadedKeys()
        if model.module is not None:
            self.handles.append(model.module.register_load_state_dict_post_hook(self._loaded))

    @property
    def has_group(self) -> bool:
        """Whether the group is there still."""
        return self._world.has_group

    def before_forward(self, module: nn.Module, _inputs: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Prepare for a forward (collective in training)."""
        if self._reducer is None or self._world.group is None or not self.has_group:
            return
        self._reducer.finish_interrupted()
        self.begin_forward(module)
        if module.training and torch.is_grad_enabled():
            buffers = [buffer for _, buffer in self._model.buffers()] if self._syncs_buffers else []
            if buffers and self._reducer.watch.synchronizes:
                self.buffers.source = 0  # the wrapper may have left that of a `join`
                self.buffers.broadcast(buffers)
            self._reducer.times.begin_forward()

    def begin_forward(self, module: nn.Module) -> None:
        self._loaded.warn()
        if self._comparison is not None and torch.is_grad_enabled():
            self._comparison.begin_forward(is_training=module.training)

    def start_buffers(self) -> Callable[[], None]:
        """Begin to send the buffers beside the gradients; return what ends it (collective)."""
        buffers = [buffer for _, buffer in self._model.buffers()] if self._syncs_buffers else []
        self.buffers.source = 0
        return self.buffers.start(buffers)

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Mark the outputs."""
        if self._reducer is not None and torch.is_grad_enabled():
            given = [*inputs, *kwargs.values()]
            num_samples = count_samples(given, output, time_first=self._puts_time_first)
            outputs = list(find_tensors(output))
            on_reached = None
            if self._comparison is not None:
                on_reached = self._comparison.end_forward(module, given, outputs)
            self._reducer.mark(*outputs, num_samples=num_samples, on_reached=on_reached)

    def close(self) -> None:
        """Do nothing more, and let the module go (local)."""
        while self.handles:
            self.handles.pop().remove()
        if self._reducer is not None:
            self._reducer.close()
        if self._comparison is not None:
            self._comparison.close()
