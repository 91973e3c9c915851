"""Reading what torch passes to a process group: tensors in lists and in lists of lists, options objects, layouts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.shm.arithmetic import Reduction


def is_plain(tensor: Tensor) -> bool:
    """Return whether shared memory can carry the tensor: dense, on the CPU."""
    return tensor.is_cpu and tensor.layout is torch.strided


def read_one(tensors: Any) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise ValueError(f"Expected one tensor, got {len(found)}. (LS209)")
    return found


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in order as one row: a view where they lie so, else a copy.

    `data`, because a collective writes values without autograd's knowledge, as torch's own do.
    """
    flat = tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)
    # Torch calls one element, or none, contiguous whatever its stride; but then it has no view as bytes.
    return flat if flat.numel() > 1 else flat.as_strided((flat.numel(),), (1,))


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor with its elements in order in its memory: this one where they lie so, else a copy in a row."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return flatten(tensor)


def premultiply(tensor: Tensor, how: Reduction) -> Tensor:
    """Return the elements in order, times the factor of the reduction if it has one: then in new memory."""
    if how.factor is None:
        return as_stored(tensor)
    return (flatten(tensor) * how.factor).detach().to(tensor.dtype)  # the factor may have a wider one


def write_back(tensor: Tensor, flat: Tensor) -> None:
    """Put the elements back where they do not lie in the tensor's own memory."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        copy_into(tensor.data, flat.view(tensor.shape))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy values, in whatever thread: into a tensor of inference mode nothing else may write."""
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name}: the tensor has layout {tensor.layout}, expected a dense one; sparse ones can only be summed over "
            "all ranks. Give tensor.to_dense(). (LS207)"
        )


def check_writable(tensors: Sequence[Tensor]) -> None:
    """Check that every element has memory of its own."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_contiguous():
            continue
        if any(stride == 0 < size - 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"A tensor of shape {list(tensor.shape)} is expanded: several of its elements share memory, so nothing "
                "can be written into it. Give tensor.contiguous(). (LS207)"
            )


def describe_message(tensor: Tensor) -> bytes:
    """Describe what is sent: the shape may differ on the other side, not the dtype and the number of elements."""
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}".encode()


def check_alike(name: str, tensor: Tensor, others: Sequence[Tensor]) -> None:
    for other in others:
        if other.dtype != tensor.dtype or other.numel() != tensor.numel():
            raise ValueError(
                f"{name}: a tensor is {other.dtype} {list(other.shape)}, expected {tensor.dtype} "
                f"{list(tensor.shape)}. (LS209)"
            )


def read_allocation(size: int | Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> torch.Size:
    sizes = (size,) if isinstance(size, int) else size
    if not isinstance(sizes, Sequence) or any(type(length) is not int for length in sizes):
        raise TypeError(f"size is {size!r}, expected a number of elements, or a shape of such numbers. (LS209)")
    if any(length < 0 for length in sizes):
        raise ValueError(f"size is {size!r}, expected no negative number. (LS209)")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype such as torch.float32. (LS209)")
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"The shm backend allocates on the CPU, not on {device}. (LS207)")
    return torch.Size(sizes)
