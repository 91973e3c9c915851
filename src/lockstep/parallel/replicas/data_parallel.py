"""`DataParallel`: one process runs replicas of a module on several devices, each on its part of the batch."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, SupportsIndex

import torch
from torch import nn

from lockstep.errors import DeviceError
from lockstep.parallel.replicas.copies import (
    Copies,
    Replicas,
    check_no_sync_batchnorm,
    check_on_device,
    replicate,
)
from lockstep.parallel.replicas.scatter import join_outputs, scatter_arguments
from lockstep.parallel.replicas.threads import ReplicaThreads
from lockstep.torch_private.compiler import keep_compiler_out, mark_uncompiled
from lockstep.torch_private.modules import warn_of_unequal_devices

DeviceId = SupportsIndex | str | torch.device | torch.cuda.device | torch.xpu.device
"""An accelerator's number, or a device or its name; -1 is the CPU, as in torch's functional form.

`torch.cuda.device(1)`, a context manager, means device 1 here; torch's DataParallel takes it for the current device.
"""
_CPU = torch.device("cpu")


class DataParallel(torch.nn.DataParallel[nn.Module]):
    """Run `module` on several devices of this process, each on its part of the batch; gradients are summed into it.

    Same names and meaning as `torch.nn.DataParallel`. **When not to use it:** all replicas share one Python
    interpreter, so the GIL lets only one of them run Python code at a time. Parameters are copied to every device in
    every forward, and outputs and gradients are gathered on the first device. `DistributedDataParallel` has none of
    these costs. The change is one line, in a function that `ls.launch(main)` runs once per device:

        model = ls.DataParallel(Net().cuda())                                       # before
        model = ls.DistributedDataParallel(Net().to(run.device))                    # after, in `def main(run):`

    Differences from torch's class:

    - Memory for replicas is reused between forwards, and so are threads.
    - A device may also be the CPU: `["cpu", "cpu"]` is two replicas in two threads.
    - A parameter that no replica used keeps its `.grad` (None), as without DataParallel; with torch's it gets zeros.
    - If replica 0 assigns a new buffer (`self.mean = ...`), the module has it afterwards; torch loses it. In-place
      writes to buffers by replica 0 are kept in both. Other attributes that forward sets are lost in both.
    - Input tensors that split into different numbers of parts are an error; torch drops samples. So are those that are
      split at other places of the batch; torch pairs samples wrongly. Inputs without any tensor go to the first
      replica only; torch runs every replica on them.
    - Replicas use the caller's autocast dtype and inference mode. They run uncompiled: `torch.compile` and
      `module.compile()`, on the module, a submodule or a module that contains this one, have no effect on them.
    - A `forward` that is assigned to the module as a bound method, or as a `functools.partial` of one, runs on the
      replica. A function that refers to the module by a variable cannot be detected, and runs on the module.
    - In a process group, a SyncBatchNorm in training mode is an error: collectives of several replicas would mix.
    - An exception has the type that the replica raised, with a note that names the replica.

    Random numbers: replicas of one device (including the CPU) run one after the other, so that a run is reproducible
    with `torch.manual_seed`. They run at the same time only in eval mode without gradients. What replicas
    on GPUs draw from the CPU's generator is not reproducible. `forward` may be called from several threads.

    Replicas run with the caller's grad mode, autocast, inference mode, default device, number of threads and context
    variables. Saved-tensor hooks are only active in replicas on the first device.

    Args:
        module: Any module whose parameters and buffers are on the first device.
        device_ids: Indices of GPUs, devices, or names of devices, one per replica; None for all accelerators. If there
            is no accelerator, the module is called without replicas.
        output_device: The device on which outputs are concatenated; None for the first device.
        dim: The dimension along which tensors are split and concatenated.
        gather_output: False to return the list of the replicas' outputs on their devices, for `DataParallelCriterion`.

    Attributes:
        device_ids: As in torch's class: indices of accelerators; `torch.device("cpu")` for the CPU.

    Raises:
        DeviceError: A device does not exist on this machine.
        ValueError: `device_ids` is empty.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        gather_output: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # skips the __init__ of torch's class, which would search for devices
        if device_ids is not None and len(device_ids) == 0:
            raise ValueError(
                "device_ids is empty, but a module needs a device. Leave it out to use all devices. (LS351)"
            )
        self.module = module
        self.dim = dim
        self.gather_output = gather_output
        ids = _visible_ids() if device_ids is None else device_ids
        self.device_ids: list[Any] = [as_id(as_device(each)) for each in ids]
        self._threads = ReplicaThreads()
        self._copies = Copies()
        home = as_device(self.device_ids[0]) if self.device_ids else torch.device("cpu")
        self.src_device_obj = home
        self.output_device: Any = as_id(home if output_device is None else as_device(output_device))
        if home.type == "cuda":
            warn_of_unequal_devices([device_id for device_id in self.device_ids if isinstance(device_id, int)])
        if len(self.device_ids) == 1:
            module.to(home)

    def __class_getitem__(cls, _item: Any) -> type[Self]:
        """Return the class: torch's is generic, so annotations may say `DataParallel[Net]`."""
        return cls

    @keep_compiler_out
    @mark_uncompiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the inputs, run a replica on each part, and concatenate their outputs.

        Raises:
            RuntimeError: A parameter or buffer is not on the first device, or outputs do not fit together.
            ValueError: Inputs do not fit together, or a SyncBatchNorm is training in a process group.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if len(self.device_ids) <= 1:
                output = self._run_module(inputs, kwargs)
                return output if self.gather_output else [output]
            check_on_device(self.module, self.src_device_obj)
            check_no_sync_batchnorm(self.module)
            parts, named_parts = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(parts)])
            outputs = self.parallel_apply(replicas, parts, named_parts)
            if isinstance(replicas, Replicas):
                replicas.keep_buffers()
            return self.gather(outputs, self.output_device) if self.gather_output else outputs

    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        check_on_device(self.module, self.src_device_obj)
        [part], [named_part] = self.scatter(inputs, kwargs, self.device_ids)
        return self.module(*part, **named_part)

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        """Return a replica of `module` per device."""
        return replicate(module, [as_device(device_id) for device_id in device_ids], self._copies)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        """Return positional and named arguments for each replica."""
        return scatter_arguments(inputs, kwargs or {}, [as_device(device_id) for device_id in device_ids], self.dim)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica with its arguments, all devices of `device_ids` at the same time."""
        devices = [as_device(device_id) for device_id in self.device_ids[: len(replicas)]]
        calls = [partial(call, *part, **named) for call, part, named in zip(replicas, inputs, kwargs, strict=True)]
        # Dropout draws random numbers in training mode; activation checkpointing needs gradients. See threads.py.
        one_at_a_time = torch.is_grad_enabled() or any(module.training for module in self.modules())
        return self._threads.run(calls, devices, one_at_a_time=one_at_a_time)

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        """Join the replicas' outputs on one device."""
        return join_outputs(outputs, as_device(output_device), self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceId] | None = None,
    output_device: DeviceId | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call `module` once as `DataParallel` would, without reusing memory or threads.

        scores = ls.data_parallel(model, inputs, device_ids=["cpu", "cpu"])

    Args:
        module: See `DataParallel`.
        inputs: A tuple of positional arguments, the only one, or None for none.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`; -1 for the CPU.
        dim: See `DataParallel`.
        module_kwargs: Named arguments.

    Raises:
        DeviceError: A device does not exist on this machine.
        RuntimeError: A parameter or buffer is not on the first device, or outputs do not fit together.
        ValueError: Inputs do not fit together.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    home = None if not device_ids else as_device(device_ids[0])
    if home is not None and len(device_ids or ()) == 1:
        check_on_device(module, home)  # which the class would move
    return DataParallel(module, device_ids, output_device, dim)(*inputs, **(module_kwargs or {}))


def _visible_ids() -> list[DeviceId]:
    """Return the numbers of all accelerators that this process may use; none where torch's DataParallel uses none."""
    if not torch.accelerator.is_available() or _accelerator_type() == "mps":
        return []
    return list(range(torch.accelerator.device_count()))


def as_device(device_id: DeviceId) -> torch.device:
    if isinstance(device_id, torch.cuda.device | torch.xpu.device):
        device_id = f"{'cuda' if isinstance(device_id, torch.cuda.device) else 'xpu'}:{device_id.idx}"
    if isinstance(device_id, bool) or not isinstance(device_id, SupportsIndex | str | torch.device):
        raise TypeError(
            f"{device_id!r} names no device. Say the number of a GPU, a torch.device or a name such as "
            '"cuda:1" or "cpu". (LS351)'
        )
    if isinstance(device_id, SupportsIndex):
        device_id = operator.index(device_id)
    if device_id == -1:
        return _CPU
    kind = _accelerator_type()
    number = device_id if isinstance(device_id, int) else 0
    device = torch.device(kind or "cuda", max(number, 0)) if isinstance(device_id, int) else torch.device(device_id)
    if device.type == "cpu":
        return _CPU
    index: int | None = device.index
    if index is None and kind is not None and device.type == kind:
        device = torch.device(kind, torch.accelerator.current_device_index())
    here = torch.accelerator.device_count() if kind else 0
    if device.type != kind or device.index >= here or number < 0:
        seen = f"{here} of {kind}" if kind else "no accelerator"
        raise DeviceError(
            f"A replica or its output is to be on device {device_id!r}, but {seen} can be seen here. "
            'Leave device_ids out to use what is here, or name the CPU, once per replica: ["cpu", "cpu"]. (LS351)'
        )
    return device


def as_id(device: torch.device) -> int | torch.device:
    """Return a number for an accelerator, for scripts write `f"cuda:{model.device_ids[0]}"`; the device for the CPU."""
    return device if device.type == "cpu" else device.index


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type
