"""`DistributedDataParallel`: a module whose gradients are averaged over the ranks of a group.

First form: the arguments below, `no_sync`, buffers of rank 0. The reduction itself is `lockstep.reduce`.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves  # the walk that torch itself uses over nested outputs

from lockstep.comm import World, broadcast_tensors, current_world
from lockstep.devices import to_device
from lockstep.errors import GroupError
from lockstep.parallel.module_hook import ModuleHook
from lockstep.reduce import BucketLimits, Reducer, check_same_model


@final
class DistributedDataParallel(nn.Module):
    """Wrap `module` so that every backward averages its gradients over `process_group`.

    Same names and meaning as `torch.nn.parallel.DistributedDataParallel`. Differences that a user can see: a forward
    through `.module` synchronises as well; unused parameters need no flag; buffers are broadcast in training only, so
    that one rank may evaluate alone; parameters that differ between ranks in name, order or dtype are an error on
    every rank.

    Constructing is collective: every rank of the group must, with the same module.

    Args:
        module: Any module with a parameter that requires a gradient.
        device_ids: None, or a list with the one device to which forward moves its inputs.
        output_device: Accepted because torch does; kept, without effect.
        dim: Likewise.
        broadcast_buffers: Overwrite buffers (BatchNorm's statistics) with rank 0's before each training forward.
        init_sync: Compare the ranks' parameters and overwrite them with rank 0's at construction.
        process_group: The group; None for the default group.
        bucket_cap_mb: Size of a gradient bucket in MiB; None for 25, with a first bucket of 1.
        find_unused_parameters: Accepted; unused parameters are found without it.
        check_reduction: Accepted, without effect, as in torch.
        gradient_as_bucket_view: Accepted; gradients are always views into their buckets.
        static_graph: Accepted; nothing depends on the graph being static.

    Raises:
        GroupError: There is no process group.
        ParameterMismatchError: Ranks wrap different models.
        RuntimeError: Nothing to train, or parameters that are not initialised yet.
        ValueError: `device_ids` that do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids = _check_device_ids(device_ids, module)
        self.output_device = output_device
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.check_reduction = check_reduction
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self._world = _require_world(process_group)
        parameters = _trainable_parameters(module)
        if init_sync:
            check_same_model(module, self._world)
            broadcast_tensors([*module.parameters(), *module.buffers()], self.process_group)
        self._reducer = Reducer(parameters, self.process_group, limits=_limits(bucket_cap_mb), average=True)
        # On the inner module, so that a forward through `.module` is seen as well.
        handles = [
            module.register_forward_pre_hook(ModuleHook(weakref.WeakMethod(self._before_forward))),
            module.register_forward_hook(ModuleHook(weakref.WeakMethod(self._after_forward))),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    @property
    def process_group(self) -> ProcessGroup:
        """The group over which gradients are averaged."""
        assert self._world.group is not None
        return self._world.group

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients that arrive now are averaged; False within `no_sync`."""
        return self._reducer.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.synchronizes = value

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, on inputs moved to the device of `device_ids` if one was given.

        Collective in training mode if the module has buffers that are broadcast.
        """
        if self.device_ids:
            device = self.device_ids[0]
            return self.module(*to_device(inputs, device), **to_device(kwargs, device))
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards within accumulate gradients locally; the next one outside averages the sums (local)."""
        before = self._reducer.synchronizes
        self._reducer.synchronizes = False
        try:
            yield
        finally:
            self._reducer.synchronizes = before

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        self._reducer.abandon_interrupted()
        if self._will_send_buffers(module):
            broadcast_tensors(list(module.buffers()), self.process_group)

    def _will_send_buffers(self, module: nn.Module) -> bool:
        trains = module.training and torch.is_grad_enabled() and self._reducer.synchronizes
        return self.broadcast_buffers and trains

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._reducer.mark(leaf)


def _require_world(process_group: ProcessGroup | None) -> World:
    world = current_world(process_group)
    if world.group is None:
        raise GroupError(
            "DistributedDataParallel needs a process group, and this process has none. "
            "Call ls.init_process_group() first, or start the function with ls.launch."
        )
    return world


def _trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = list(module.named_parameters())
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for _, parameter in named):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules."
        )
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trainable:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    return trainable


def _check_device_ids(device_ids: Sequence[int | torch.device] | None, module: nn.Module) -> list[torch.device] | None:
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    places = {parameter.device for parameter in module.parameters()}
    if len(places) > 1 or any(place.type == "cpu" for place in places):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
            f"multiple-device GPU modules or CPU modules, but got device_ids {list(device_ids)} and module "
            f"parameters on {sorted(map(str, places))}. Leave device_ids out for a module on the CPU or on "
            "several devices."
        )
    only = device_ids[0]
    return [only if isinstance(only, torch.device) else torch.device("cuda", only)]


def _limits(bucket_cap_mb: float | None) -> BucketLimits:
    if bucket_cap_mb is None:
        return BucketLimits()
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, expected a size in MiB above zero.")
    cap = max(int(bucket_cap_mb * (1 << 20)), 1)
    return BucketLimits(first_bytes=cap, other_bytes=cap)
