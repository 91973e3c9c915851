"""Making the replicas of a module, each with its own parameters and buffers.

A replica is a shallow copy of the module's Python objects, made for every forward. So a replica has every change since
the last forward (a flag, a hook, a submodule, an attribute), and what a replica's forward assigns to its attributes is
discarded. Memory is expensive and is reused (`copies.py`). Replica 0 shares memory with the module, so buffers that it
updates in place are updated in the module.

A module's parts are read from its registries (`_parameters`, `_buffers`, `_modules`): torch has no public way to
list only what the module itself holds. Replicas are new in every forward and would be compiled in every forward, so a
compiled module is replaced by the module that was compiled (`compiled.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.comm.messages import joined_world
from lockstep.parallel.compiled import uncompiled
from lockstep.parallel.replicas.copies import Copies
from lockstep.torch_private.compiler import forget_compiled_call
from lockstep.torch_private.modules import (
    buffer_registry,
    former_parameters_of,
    make_replica_shell,
    module_registry,
    parameter_registry,
)


@final
class Replicas(list[nn.Module]):
    """The replicas of one forward, in order."""

    def __init__(self, replicas: Sequence[nn.Module], originals: Sequence["_OriginalBuffers"]) -> None:
        super().__init__(replicas)
        self._originals = originals

    def keep_buffers(self) -> None:
        """Assign buffers that replica 0 replaced (`self.mean = new`) to the module.

        torch's DataParallel loses them.
        """
        for originals in self._originals:
            for name, given in originals.buffers.items():
                now = buffer_registry(originals.shell).get(name, given)
                if now is not given:
                    buffer_registry(originals.module)[name] = now


@dataclass(frozen=True, slots=True)
class _OriginalBuffers:
    """The buffers of one submodule of replica 0, before the forward."""

    module: nn.Module
    shell: nn.Module
    buffers: Mapping[str, Tensor | None]


def check_on_device(module: nn.Module, home: torch.device) -> None:
    """Check that all parameters and buffers are on the first device."""
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
    """Check that no layer of a module calls collectives in its forward."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    for layer in _submodules(module):
        if not (isinstance(layer, nn.SyncBatchNorm) and layer.training):
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
    replicas, originals = [], []
    for number, values in enumerate(copies.broadcast(tensors, devices)):
        copy_of = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
        if number == 0:
            copy_of |= _shared_buffers(modules)
        shells = {id(original): _shell(original) for original in modules}
        for original in modules:
            _rebind(shells[id(original)], shells)
            _fill_shell(shells[id(original)], original, shells, copy_of)
        if number == 0:
            originals = [
                _record_buffers(original, shells[id(original)]) for original in modules if buffer_registry(original)
            ]
        replicas.append(shells[id(module)])
    return Replicas(replicas, originals)


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


def _shell(module: nn.Module) -> Any:
    """Return a shallow copy, made by the class's own `_replicate_for_data_parallel`."""
    shell = make_replica_shell(module)
    forget_compiled_call(vars(shell))
    return shell


_BINDING = (MethodType, partial)


def _rebind(shell: nn.Module, shells: Mapping[int, nn.Module]) -> None:
    """Rebind methods that were assigned to the module itself (`module.forward = ...`) to the replica."""
    for name, value in list(vars(shell).items()):
        if isinstance(value, _BINDING):
            vars(shell)[name] = _rebound(value, shells)


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


_SETATTR: Any = nn.Module.__setattr__


def _fill_shell(shell: Any, original: Any, shells: dict[int, nn.Module], copy_of: dict[int, Tensor]) -> None:
    """Set the submodules, parameters and buffers of a replica.

    Parameters become plain tensors, because they are not leaves of the graph. If the class overrides `__setattr__`, as
    recurrent networks do to keep their flat weights, it is used.
    """
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


def _record_buffers(module: nn.Module, shell: nn.Module) -> _OriginalBuffers:
    return _OriginalBuffers(module=module, shell=shell, buffers=dict(buffer_registry(shell)))
