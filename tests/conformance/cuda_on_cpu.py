"""Cuda devices that are the CPU: lets tests that are gated on GPUs, and need none for what they assert, run without.

Two parts, for two times:

    before torch's tests are imported   `gates_open`: the conditions "skip if fewer than n GPUs" become "skip if fewer
                                        than n workers"; torch.cuda.is_available() itself goes on saying no, so that
                                        nothing in torch takes a path that needs a driver
    while a test runs in a worker       `cuda_on_cpu`: cuda devices are the CPU, streams and events do nothing, and
                                        `device_ids` of DistributedDataParallel, which a CPU module refuses, is None

Devices are mapped by a `TorchFunctionMode`, not by patched methods: it is the one place through which factories
(`torch.ones(2, device=rank)`), methods (`.cuda()`, `.to(0)`), the parsing of `Module.to` and the constructor
`torch.device("cuda", 1)` all come, and it leaves the types alone, so that isinstance and pickle do not notice.
"""

import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def gates_open(world_size: int) -> Iterator[None]:
    """Let a test module that is imported meanwhile ask for workers where it asks for GPUs."""

    def skip_if_fewer_workers(number: int, *, allow_cpu: bool = False) -> Decorator:
        return unittest.skipIf(world_size < number, f"Needs a world size of {number}.")

    def run_anyway(test: Callable[..., Any]) -> Callable[..., Any]:
        return test

    def one_device_each(workers: int, _backend: str) -> dict[int, list[int]]:
        return {rank: [rank] for rank in range(workers)}

    with (
        mock.patch.object(common_distributed, "skip_if_lt_x_gpu", skip_if_fewer_workers),
        mock.patch.object(common_distributed, "skip_if_no_gpu", run_anyway),
        mock.patch.object(common_distributed, "init_multigpu_helper", one_device_each),
        # Says only which tests torch has switched off on its own Linux machines, most of them for being flaky there.
        mock.patch.object(common_utils, "IS_LINUX", False),
    ):
        yield


@contextmanager
def cuda_on_cpu(test_module: ModuleType, *wrappers: type[nn.Module]) -> Iterator[None]:
    """Let this thread take the CPU for each cuda device, and `wrappers` for None what they get as `device_ids`."""
    stand_ins: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            **{name: _nothing_to_do() for name in ("set_device", "synchronize")},
            **{name: _idle(name) for name in ("Stream", "Event", "device", "stream", "current_stream")},
            "current_device": lambda: 0,
        },
        # Mixed precision asks for these by their general names.
        torch: {"Stream": _idle("Stream"), "Event": _idle("Event")},
        torch.accelerator: {"current_stream": _idle("current_stream")},
        device_mesh: {"init_device_mesh": partial(_init_mesh_on_cpu, device_mesh.init_device_mesh)},
        test_module: {
            "autocast": partial(torch.amp.autocast, "cpu"),
            "GradScaler": partial(torch.amp.GradScaler, "cpu"),
        },
    }
    with ExitStack() as stack:
        for place, by_name in stand_ins.items():
            stack.enter_context(mock.patch.multiple(place, **by_name))
        stack.enter_context(CudaOnCpu())
        for wrapper in wrappers:
            if "__init__" in vars(wrapper):
                stack.enter_context(mock.patch.object(wrapper, "__init__", _without_device_ids(wrapper)))
        yield


class CudaOnCpu(TorchFunctionMode):
    """Puts the CPU in the place of a cuda device in each call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:
            return on_cpu(torch.device("cuda")) if _names_cuda(*args, **kwargs) else torch.device(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(on_cpu(argument) for argument in args[1:2]), *args[2:])
        if func is torch._C._nn._parse_to:
            args = (*(on_cpu(argument) for argument in args[:1]), *args[1:])
        return func(*args, **kwargs)


class Idle:
    """A stream, an event, or the choice of a device: done at once, so that whatever is asked of it is nothing to do."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing_to_do()


def on_cpu(device: Any) -> Any:
    """Return the CPU for a cuda device, however it is written, and anything else as it is."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    is_device = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if is_number or is_name or is_device else device


def _names_cuda(type: Any = None, index: int | None = None, *, device: Any = None) -> bool:  # noqa: A002  (torch's names)
    return on_cpu(type if device is None else device) == torch.device("cpu")


def _nothing_to_do() -> Callable[..., None]:
    # A new one for each name: torch.compile keeps a table by function, and refuses one that has two names.
    return lambda *_arguments, **_options: None


def _idle(name: str) -> type[Idle]:
    return type(name, (Idle,), {})


def _init_mesh_on_cpu(init_mesh: Callable[..., Any], device_type: str, *arguments: Any, **options: Any) -> Any:
    return init_mesh("cpu" if device_type == "cuda" else device_type, *arguments, **options)


def _without_device_ids(wrapper: type[nn.Module]) -> Callable[..., None]:
    init: Callable[..., None] = wrapper.__init__

    @wraps(init)
    def init_on_cpu(
        self: nn.Module,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *rest: Any,
        **options: Any,
    ) -> None:
        init(self, module, None, None, *rest, **options)

    return init_on_cpu
