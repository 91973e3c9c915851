"""What shows a program the device that is not there, and follows what it does. [`asynchronous_device`]"""

from collections.abc import Iterable
from typing import Any, Final, final

import torch
from tests.support.fake_device import DEVICE, FakeDevice
from tests.support.memory_accesses import is_on_device, known, mark, memory_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS: Final = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero")
"""Operations whose result the host must have."""
_FROM_THE_HOST: Final = torch.tensor, torch.as_tensor, Tensor.new_tensor
"""Functions that copy values of the host to the device, from memory that is not pinned."""


def _names_device(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == DEVICE.type


@final
class Transfers(TorchFunctionMode):
    """Shows which tensors are on the device, and takes what moves them."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._device.is_paused:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return self._look(func, args[0])
        if func is Tensor.to:
            return self._to(args[0], args[1:], kwargs)
        if func is Tensor.cpu:
            return self._move(args[0], torch.device("cpu"), non_blocking=False)
        if func in {Tensor.tolist, Tensor.numpy, Tensor.__array__}:
            self._device.read_on_host(args[0], func.__name__)
            with self._device.paused():
                return func(*args, **kwargs)
        if func is Tensor.get_device:
            return 0 if is_on_device(args[0]) else -1
        if func is Tensor.is_pinned:
            return memory_of(args[0]).is_pinned
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            mark(pinned, is_on_device=False, is_pinned=True)
            return pinned
        return self._make(func, args, kwargs)

    def _look(self, func: Any, tensor: Tensor) -> Any:
        attribute = func.__self__
        if attribute is Tensor.device and is_on_device(tensor):
            return DEVICE
        if attribute is Tensor.is_cpu and is_on_device(tensor):
            return False
        return func(tensor)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        place = None
        if kwargs.get("device") is not None:
            place = _names_device(kwargs["device"])
            kwargs["device"] = "cpu" if place else kwargs["device"]
        with self._device.new_tensors(is_on_device=place):
            result = func(*args, **kwargs)
        if func in _FROM_THE_HOST and (place or (func is Tensor.new_tensor and is_on_device(args[0]))):
            self._device.wait_on_host(self._device.stream.clock, f"{func.__name__} of values of the host")
        if isinstance(result, Tensor) and (is_pinned or (place is not None and known(result) is None)):
            mark(result, is_on_device=bool(place), is_pinned=is_pinned)
        return result

    def _to(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        device, dtype, non_blocking = _read_target(args, kwargs)
        options = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
        options["dtype"] = tensor.dtype if dtype is None else dtype
        if device is None or _names_device(device) == is_on_device(tensor):
            return tensor.to(**options)
        return self._move(tensor, device, non_blocking=non_blocking, **options)

    def _move(self, tensor: Tensor, device: Any, *, non_blocking: bool, **options: Any) -> Tensor:
        there, to_device = is_on_device(tensor), _names_device(device)
        if there == to_device:
            return tensor
        with self._device.paused():
            moved = tensor.to(**{"dtype": tensor.dtype, **options, "copy": True})
        mark(moved, is_on_device=to_device)
        _follow_copy(self._device, tensor, moved, is_to_host=there, non_blocking=non_blocking)
        return moved


def _follow_copy(
    device: FakeDevice,
    source: Tensor,
    target: Tensor,
    *,
    is_to_host: bool,
    non_blocking: bool,
    is_number: bool = False,
) -> None:
    """Follow a copy from the device or to it, on the current stream.

    Args:
        device: The device.
        source: What is copied.
        target: Where to.
        is_to_host: Whether it comes from the device.
        non_blocking: Whether the host does not wait.
        is_number: Whether it may be the number of `tensor[index] = number`, which torch makes on a real device.
    """
    if not is_to_host and not (non_blocking and memory_of(source).is_pinned):
        device.run(device.host, [source], [], "a copy to the device")  # torch has read it when the call returns
        if not is_number:
            device.wait_on_host(device.stream.clock, "a copy to the device, from memory that is not pinned or blocking")
        device.run(device.stream, [], [target], "a copy to the device")
        return
    device.run(device.stream, [source], [target], "a copy between host and device")
    if not non_blocking:
        device.wait_on_host(device.stream.clock, "a copy to the host" if is_to_host else "a copy to the device")


def _read_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Return device, dtype and `non_blocking` of a call of `Tensor.to`; None for those that it leaves out."""
    if args and isinstance(args[0], Tensor):
        other = args[0]
        args = (DEVICE if is_on_device(other) else other.device, other.dtype, *args[1:])
    flags = [argument for argument in args if isinstance(argument, bool)]
    plain = [argument for argument in args if not isinstance(argument, bool)]
    plain += [kwargs[name] for name in ("device", "dtype") if kwargs.get(name) is not None]
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    devices = [value for value in plain if isinstance(value, str | int | torch.device)]
    dtypes = [value for value in plain if isinstance(value, torch.dtype)]
    return (devices[0] if devices else None, dtypes[0] if dtypes else None, non_blocking)


@final
class Operations(TorchDispatchMode):
    """Follows each operation."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._device.is_paused:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # or `Transfers` would see how this looks at tensors: half of the time
            return self._follow(func, args, kwargs)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads, writes = _read_and_written(func, args, kwargs)
        before = {id(tensor) for tensor in (*reads, *writes)}
        on_device = any(is_on_device(tensor) for tensor in (*reads, *writes))
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_" and is_on_device(args[0]) != is_on_device(args[1]):
            result = func(*args, **kwargs)
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            is_to_host, is_number = is_on_device(args[1]), not args[1].dim()
            _follow_copy(
                self._device, args[1], args[0], is_to_host=is_to_host, non_blocking=not waits, is_number=is_number
            )
            return result
        if func.is_view or name == "detach":
            return func(*args, **kwargs)
        self._device.follow(reads, writes, name)
        if on_device and (name in _WAITS or _has_mask(name, args)):
            self._device.wait_on_host(self._device.stream.clock, name)
        result = func(*args, **kwargs)
        made = [
            tensor
            for tensor in tree_leaves(result)
            if isinstance(tensor, Tensor) and id(tensor) not in before and not _shares(tensor, (*reads, *writes))
        ]
        self._device.made(made, on_device=on_device)
        stream = self._device.stream if any(map(is_on_device, made)) else self._device.host
        self._device.run(stream, [], made, name)
        return result


def _read_and_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        (writes if _is_written(argument) else reads).extend(_tensors(value))
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            (writes if _is_written(argument) else reads).extend(_tensors(kwargs[argument.name]))
    return reads, writes


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    is_index = name in {"index", "index_put", "index_put_", "_index_put_impl_"}
    return is_index and any(tensor.dtype is torch.bool for tensor in _tensors(args[1]))


def _shares(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    if tensor.layout is not torch.strided:
        return True
    memory = tensor.untyped_storage()._cdata
    return any(other.layout is torch.strided and other.untyped_storage()._cdata == memory for other in others)
