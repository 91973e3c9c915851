"""Replicas of a module, and copies of its parameters and buffers on their devices.

A replica is a shallow copy of the module's Python objects, made for every forward. So a replica has every change since
the last forward (a flag, a hook, a submodule, an attribute), and what a replica's forward assigns to its attributes is
discarded. Replica 0 shares memory with the module, so buffers that it updates in place are updated in the module.

A module's parts are read from its registries (`_parameters`, `_buffers`, `_modules`): torch has no public way to list
only what the module itself holds.

torch's DataParallel allocates new memory for all replicas in every forward. Here memory is allocated once and
overwritten in the next forward, unless a tensor in it is still referenced.

[Note: kept memory] A copy may outlive its forward: autograd saves weights for backward, a script runs two forwards
before two backwards, a hook keeps a replica's tensor. Each such tensor, in Python or in autograd, holds a reference to
its storage, and the storage has a reference count. Memory is overwritten only if this count is what it was right after
the allocation. Otherwise the forward allocates new memory, which is kept instead. The stream orders kernels that still
read the old values before the copy that overwrites them. So memory is only reused on the streams that were current when
it was allocated.

[Note: order of gradients] One autograd node copies each bucket of parameters to the replicas. Its backward adds the
gradients in the order of the replicas, whichever arrived first. A parameter that no replica used gets no
gradient, as without DataParallel; with torch's it gets zeros. There are several buckets, so that gradients of the last
layers are added before those of the first layers have arrived.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy

from lockstep.comm.messages import joined_world
from lockstep.reduce.plan import ALIGNMENT_BYTES
from lockstep.torch_private.compiler import (
    forget_compiled_call,
    is_compiled_module,
    original_of_compiled,
)
from lockstep.torch_private.modules import (
    TorchsSyncBatchNorm,
    buffer_registry,
    foreach_copy_,
    former_parameters_of,
    has_forward_or_backward_hooks,
    make_replica_shell,
    module_registry,
    parameter_registry,
    storage_address,
    storage_use_count,
)

BUCKET_BYTES = 25 << 20
"""Approximate size of a bucket, which is sent and added as a whole."""

_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_BINDING = (MethodType, partial)
_SETATTR: Any = nn.Module.__setattr__
_Fill = Callable[[Sequence[Tensor]], list[Tensor]]
"""Copies the values of tensors to another device; returns tensors that each have a version counter of their own."""


@final
class Copies:
    """Keeps the memory for the next call. Thread-safe; a deep copy or an unpickled object starts without memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], _KeptMemory] = {}  # by bucket and replica

    def broadcast(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
        """Return the tensors of each replica: for replica 0 tensors that share memory with `tensors`, else copies.

        If grad mode is on, backward adds the gradients of the results to those `tensors` that require a gradient.
        `tensors` are without duplicates, and all on the first device.
        """
        spread: list[list[Tensor]] = [[*tensors] for _ in devices]
        buckets = _buckets(tensors)
        with self._lock:
            for number, bucket in enumerate(buckets):
                members = [tensors[i] for i in bucket]
                targets = [
                    self._find_memory(number, replica, devices[replica], members) for replica in range(1, len(devices))
                ]
                if members[0].requires_grad and torch.is_grad_enabled():
                    results = _broadcast(targets, *members)
                else:
                    with torch.no_grad():
                        results = _copies(targets, members)
                for place, tensor in enumerate(results):
                    spread[place // len(bucket)][bucket[place % len(bucket)]] = tensor
            for key in [key for key in self._kept if key[0] >= len(buckets)]:
                del self._kept[key]
        return spread

    def _find_memory(self, bucket: int, replica: int, device: torch.device, members: Sequence[Tensor]) -> _Fill:
        if not _is_plain(members[0]):  # it cannot be packed: sparse, with overlapping strides, or of a tensor subclass
            return lambda tensors: [each.detach().to(device, copy=True) for each in tensors]
        layout = _FlatLayout.of(members, device)
        kept = self._kept.get((bucket, replica))
        if kept is None or kept.layout != layout or not kept.is_unused():
            kept = self._kept[bucket, replica] = _KeptMemory(layout)
        return kept.fill

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Copies":
        return Copies()

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()


@dataclass(frozen=True, slots=True)
class _FlatLayout:
    """The positions of a bucket's tensors in one flat tensor; kept memory is reused only for an equal layout."""

    device: torch.device
    dtype: torch.dtype
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    """Shape, strides and offset of each tensor."""
    num_elements: int
    streams: tuple[int, ...]
    """Ids of the current streams of the source and the target device; [Note: kept memory]."""

    @staticmethod
    def of(members: Sequence[Tensor], device: torch.device) -> "_FlatLayout":
        dtype, offset, places = members[0].dtype, 0, []
        alignment = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
        for tensor in members:
            places.append((tensor.shape, tensor.stride(), offset))
            offset += -(-tensor.numel() // alignment) * alignment
        streams = [
            torch.accelerator.current_stream(place).stream_id
            for place in (members[0].device, device)
            if place.type != "cpu"
        ]
        return _FlatLayout(
            device=device, dtype=dtype, places=tuple(places), num_elements=offset, streams=tuple(streams)
        )

    def views(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(shape, stride, offset) for shape, stride, offset in self.places]


@final
class _KeptMemory:
    def __init__(self, layout: _FlatLayout) -> None:
        self.layout = layout
        # Outside inference mode, because autograd cannot save inference tensors for backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._flat = torch.empty(layout.num_elements, dtype=layout.dtype, device=layout.device)
            self._views = layout.views(self._flat)
        self._storage = self._flat.untyped_storage()
        self._own_references = self._count_references()

    def is_unused(self) -> bool:
        """Return whether only this object references the memory; [Note: kept memory]."""
        return self._count_references() == self._own_references

    def fill(self, members: Sequence[Tensor]) -> list[Tensor]:
        source = members[0].device
        may_overlap = self.layout.device.type != "cpu"  # code on the CPU could read the values before they arrive
        if source == self.layout.device or len(members) == 1:
            foreach_copy_(self._views, list(members), non_blocking=may_overlap)
        else:  # one transfer instead of one per tensor
            staging = torch.empty(self.layout.num_elements, dtype=self.layout.dtype, device=source)
            foreach_copy_(self.layout.views(staging), list(members))
            self._flat.copy_(staging, non_blocking=may_overlap)
        return [view.data for view in self._views]

    def _count_references(self) -> int:
        return storage_use_count(storage_address(self._storage))


class _Broadcast(Function):
    """[Note: order of gradients]."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[_Fill], *members: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # so that unused parameters get no gradient
        ctx.num_members, ctx.device = len(members), members[0].device
        return _copies(targets, members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        replicas = range(0, len(grads), ctx.num_members)
        arrived = [_move_gradients(grads[begin : begin + ctx.num_members], ctx.device) for begin in replicas]
        return None, *(_add_gradients(of_one) for of_one in zip(*arrived, strict=True))


_broadcast: Any = _Broadcast.apply


def _copies(targets: Sequence[_Fill], members: Sequence[Tensor]) -> tuple[Tensor, ...]:
    copies = [copy for fill in targets for copy in fill(members)]
    return *(member.detach() for member in members), *copies


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group consecutive tensors of one dtype and `requires_grad` into buckets; return the indices of each bucket."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, bool], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not _is_plain(tensor):
            buckets.append([index])
            continue
        kind = (tensor.dtype, tensor.requires_grad)
        bucket, num_bytes = open_buckets.get(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        num_bytes += tensor.numel() * tensor.element_size()
        open_buckets[kind] = (bucket, num_bytes) if num_bytes < BUCKET_BYTES else ([], 0)
    return buckets


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _move_gradients(grads: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Return the gradients on `device`; those on another device are sent in one transfer."""
    away = [grad for grad in grads if grad is not None and grad.device != device]
    if len(away) < 2 or any(grad.layout != torch.strided for grad in away):  # noqa: PLR2004
        return [None if grad is None else grad.to(device) for grad in grads]
    flat = torch.cat([grad.reshape(-1) for grad in away]).to(device)
    arrived = iter(flat.split([grad.numel() for grad in away]))
    return [next(arrived).view(grad.shape) if grad is not None and grad.device != device else grad for grad in grads]


def _add_gradients(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Add gradients in the order of the replicas; None if all are None."""
    total: Tensor | None = None
    num_added = 0
    for grad in grads:
        if grad is None:
            continue
        num_added += 1
        if total is None:
            total = grad
        elif num_added > 2 and not torch.is_grad_enabled() and total.layout == grad.layout:  # noqa: PLR2004
            total.add_(grad)  # in place, because `total` is a new tensor since the first addition
        else:
            total = grad + total if total.is_sparse else total + grad  # dense + sparse is defined, sparse + dense not
    return total


@final
class Replicas(list[nn.Module]):
    """The replicas, and the buffers of each submodule and of its copy in replica 0, before the forward."""

    def __init__(
        self,
        replicas: Sequence[nn.Module],
        buffers: Sequence[tuple[nn.Module, nn.Module, Mapping[str, Tensor | None]]],
    ) -> None:
        super().__init__(replicas)
        self._buffers = buffers

    def keep_buffers(self) -> None:
        """Assign buffers that replica 0 replaced (`self.mean = new`) to the module; torch's DataParallel loses them."""
        for module, shell, buffers in self._buffers:
            for name, given in buffers.items():
                now = buffer_registry(shell).get(name, given)
                if now is not given:
                    buffer_registry(module)[name] = now


def check_on_device(module: nn.Module, home: torch.device) -> None:
    for tensor in _tensors(_submodules(module)):
        if is_lazy(tensor):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DataParallel`. "
                "Run a dummy forward pass to correctly initialize the modules (LS301)"
            )
        if tensor.device != home:
            raise RuntimeError(
                "module must have its parameters and buffers "
                f"on device {home} (device_ids[0]) but found one of them on device: {tensor.device} (LS351)"
            )


def check_no_sync_batchnorm(module: nn.Module) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    for layer in _submodules(module):
        if not (isinstance(layer, TorchsSyncBatchNorm) and layer.training):
            continue
        world = joined_world(layer.process_group)
        if world.world_size > 1:
            raise ValueError(
                f"Rank {world.rank} of {world.world_size} replicates a module with a SyncBatchNorm in training mode. "
                "Each replica would call collectives in an undefined order, so statistics of different replicas would "
                "be mixed. Use one device per process (DistributedDataParallel), or BatchNorm. (LS355)"
            )


def replicate(module: nn.Module, devices: Sequence[torch.device], copies: Copies) -> Replicas:
    """Return one replica of `module` per device; if grad mode is on, backward adds their gradients to the module's."""
    module = uncompiled(module)
    modules = list(_submodules(module))
    _check_script_modules(modules)
    tensors = list(_tensors(modules))
    replicas, buffers = [], []
    for number, values in enumerate(copies.broadcast(tensors, devices)):
        copy_of = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
        if number == 0:
            copy_of |= _shared_buffers(modules)
        shells: dict[int, nn.Module] = {id(original): make_replica_shell(original) for original in modules}
        for original in modules:
            shell = shells[id(original)]
            attributes = vars(shell)
            forget_compiled_call(attributes)
            for name, value in list(attributes.items()):
                if isinstance(value, _BINDING):  # methods that were assigned to the module itself
                    attributes[name] = _rebound(value, shells)
            _fill_shell(shell, original, shells, copy_of)
            if number == 0 and buffer_registry(original):
                buffers.append((original, shell, dict(buffer_registry(shell))))
        replicas.append(shells[id(module)])
    return Replicas(replicas, buffers)


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module of the tree once, uncompiled, parents first; several times faster than `modules()`."""
    top = uncompiled(module)
    seen = {id(top)}
    waiting = [top]
    while waiting:
        current = waiting.pop()
        yield current
        for named in reversed(module_registry(current).values()):
            child = None if named is None else uncompiled(named)
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _tensors(modules: Any) -> Iterator[Tensor]:
    """Yield each parameter and buffer once, however many names it has."""
    seen: set[int] = set()
    for module in modules:
        for named in (parameter_registry(module), buffer_registry(module)):
            for tensor in named.values():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _shared_buffers(modules: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return the buffers that replica 0 shares with the module: those that need no gradient."""
    buffers = [buffer for module in modules for buffer in buffer_registry(module).values()]
    return {
        id(buffer): buffer
        for buffer in buffers
        if buffer is not None and not (buffer.requires_grad and torch.is_grad_enabled())
    }


def _check_script_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            for descendant in _submodules(module):
                if not isinstance(descendant, torch.jit.ScriptModule):
                    message = "Cannot replicate network where python modules are children of ScriptModule (LS355)"
                    raise RuntimeError(message)  # noqa: TRY004  torch's error


def _rebound(value: Any, shells: Mapping[int, nn.Module]) -> Any:
    """Return the replica's method for a method of the module, also inside a `functools.partial`."""
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebound(value.__self__, shells))
    if type(value) is partial:
        arguments = [_rebound(argument, shells) for argument in value.args]
        keywords = {name: _rebound(argument, shells) for name, argument in value.keywords.items()}
        rebound = partial(_rebound(value.func, shells), *arguments, **keywords)
        vars(rebound).update(vars(value))
        return rebound
    return value


def _fill_shell(shell: Any, original: Any, shells: dict[int, nn.Module], copy_of: dict[int, Tensor]) -> None:
    """Parameters become plain tensors; a class's own `__setattr__`, as recurrent networks have, is called."""
    ordinary = type(shell).__setattr__ is _SETATTR and not isinstance(shell, torch.jit.ScriptModule)
    for name, child in module_registry(original).items():
        if child is None or ordinary:
            module_registry(shell)[name] = None if child is None else shells[id(uncompiled(child))]
        else:
            setattr(shell, name, shells[id(uncompiled(child))])
    set_tensor = object.__setattr__ if ordinary else setattr
    for name, parameter in parameter_registry(original).items():
        if parameter is None:
            parameter_registry(shell)[name] = None
        else:
            set_tensor(shell, name, copy_of[id(parameter)])
            former_parameters_of(shell)[name] = copy_of[id(parameter)]
    for name, buffer in buffer_registry(original).items():
        if buffer is None or ordinary:
            buffer_registry(shell)[name] = None if buffer is None else copy_of[id(buffer)]
        else:
            setattr(shell, name, copy_of[id(buffer)])


def uncompiled(module: nn.Module) -> nn.Module:
    """Return what was given to `torch.compile`, or `module`: replicas would be compiled in every forward."""
    while is_compiled_module(module):
        original = original_of_compiled(module)
        if has_forward_or_backward_hooks(module):
            raise RuntimeError(
                f"There are hooks on a compiled {type(original).__name__}, and replicas run uncompiled: these hooks "
                "would be lost. Register them on the module itself, before torch.compile. (LS355)"
            )
        module = original
    return module
