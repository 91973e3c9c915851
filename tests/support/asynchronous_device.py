"""A device that computes on the CPU and is asynchronous all the same: a stream error is an error at once.

    with asynchronous_device() as device:
        model.to(device.name)                    # "privateuseone:0"; tensors that are there say so
        with device.no_blocking_reads():
            step(model, batch)

Values are right at once, as on a CPU. What may be used where is followed instead: each stream counts its operations
and knows how many of which other stream it comes after, and each tensor knows which operation wrote it. The host is one
more stream, which knows of a device's operations only what it has waited for.

    stream A   writes x (A 1) -- record e (A 1)
    stream B                        wait_event(e): knows A 1 -- reads x: right. Without the wait: `StreamError`
    host       e.synchronize(): knows A 1 -- reads a copy made with non_blocking=True: right, else `StreamError`

It is seen that an operation comes too early, that tensors are on different devices, and how often the host has waited.
Not seen is memory that is freed while another stream still uses it. Each thread has a device of its own, or none.

Tensors are told apart by their storages; a `TorchFunctionMode` shows the device and takes transfers, and a
`TorchDispatchMode` follows operations, those of a backward too.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final
from unittest import mock

import torch
from tests.support.device_modes import Operations, Transfers
from tests.support.fake_device import DEVICE, FakeDevice, FakeEvent, FakeStream, as_current, current_device
from tests.support.memory_accesses import MEMORY, is_on_device
from torch.nn.utils import clip_grad
from torch.optim import optimizer


@contextmanager
def asynchronous_device() -> Iterator[FakeDevice]:
    """Give this thread a device of its own."""
    device = FakeDevice()
    with as_current(device), _PATCHES, Transfers(device), Operations(device):
        yield device


@final
class _Patches:
    """Torch's names for streams and events, which give those of this thread's device while some thread has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._install()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._stack.close()
                MEMORY.clear()

    def _install(self) -> None:
        def patch(place: Any, name: str, here: Callable[[FakeDevice], Any]) -> None:
            self._stack.enter_context(mock.patch.object(place, name, _choose(getattr(place, name), here)))

        importlib.import_module("torch._dynamo")  # derives classes from these when it is imported, by a dispatch mode
        for real, stands_for, here in (
            (torch.Stream, FakeStream, FakeDevice.new_stream),
            (torch.Event, FakeEvent, FakeEvent),
        ):
            patched = _ChosenClass(
                real.__name__, (), {"real": real, "stands_for": stands_for, "here": staticmethod(here)}
            )
            self._stack.enter_context(mock.patch.object(torch, real.__name__, patched))
        patch(torch.accelerator, "current_stream", lambda device: device.stream)
        patch(torch.accelerator, "current_accelerator", lambda _device: torch.device(DEVICE.type))
        patch(torch.accelerator, "synchronize", lambda device: device.synchronize())
        patch(torch.accelerator, "current_device_index", lambda _device: 0)
        patch(torch.Tensor, "record_stream", lambda _device: None)  # memory that is freed is not followed
        for module in (clip_grad, optimizer):
            name = "_group_tensors_by_device_and_dtype"
            self._stack.enter_context(mock.patch.object(module, name, _name_devices(getattr(module, name))))
        run_backward = torch.autograd._engine_run_backward

        def run_with_hooks(*args: Any, **kwargs: Any) -> Any:
            """Let hooks see devices: torch runs a backward as one call, within which a function mode is off."""
            device = current_device()
            if device is None:
                return run_backward(*args, **kwargs)
            with Transfers(device):
                return run_backward(*args, **kwargs)

        self._stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_with_hooks))


class _ChosenClass(type):
    """A class whose objects are torch's, or, in a thread that has a device, those that stand for them."""

    real: Any
    stands_for: type
    here: Callable[[FakeDevice], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        device = current_device()
        return cls.real(*args, **kwargs) if device is None else cls.here(device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.real, cls.stands_for))


def _choose(real: Callable[..., Any], here: Callable[[FakeDevice], Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        device = current_device()
        return real(*args, **kwargs) if device is None else here(device)

    return chosen


def _name_devices(group_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's grouping of tensors, which is C++, name the device on which they are."""

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group_tensors(lists, with_indices)
        if current_device() is None:
            return found
        assert len({is_on_device(tensor) for tensors in lists for tensor in tensors if tensor is not None}) == 1
        on_device = is_on_device(lists[0][0])
        return {(DEVICE if on_device else device, dtype): group for (device, dtype), group in found.items()}

    return grouped


_PATCHES: Final = _Patches()
