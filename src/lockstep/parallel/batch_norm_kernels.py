"""What one rank computes of a batch normalisation by itself: sums over its own part, and the work per element.

Where the device has them, these are the kernels of torch's SyncBatchNorm: CUDA, ROCm, XPU, and plug-ins for other
accelerators. Elsewhere they are plain sums and products, and BatchNorm's own kernel for the normalisation. Statistics
and sums are float32, or float64 for such inputs, whatever the input is.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.torch_private.modules import has_kernel

_KERNELS = tuple(f"aten::batch_norm_{name}" for name in ("stats", "elemt", "backward_reduce", "backward_elemt"))


def _has_kernels(inputs: Tensor) -> bool:
    return all(has_kernel(kernel, inputs.device.type) for kernel in _KERNELS)


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    return torch.promote_types(inputs.dtype, torch.float32)


def in_kernel_layout(inputs: Tensor) -> Tensor:
    """Return `inputs` in a layout that the kernels of their device take; channels_last stays what it is."""
    return inputs.contiguous(memory_format=_layout(inputs)) if _has_kernels(inputs) else inputs


def local_moments(inputs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and summed squared deviation per channel of inputs in kernel layout; zeros for an empty part."""
    dtype = statistics_dtype(inputs)
    if inputs.numel() == 0:
        zeros = inputs.new_zeros(inputs.size(1), dtype=dtype)
        return zeros, zeros
    count = inputs.numel() // inputs.size(1)
    if _has_kernels(inputs):
        mean, invstd = torch.batch_norm_stats(inputs, eps)
        return mean, (invstd.pow(-2) - eps).clamp(min=0) * count
    # Not BatchNorm's own kernel: where channels lie innermost it adds float32 one after the other, and a mean of 1e4
    # over 200,000 values came out 12 too high, with deviation 1. `mean` adds pairwise, and the second one takes away
    # the rounding of the first.
    dims = _reduced_dims(inputs)
    rough = inputs.to(dtype).mean(dims)
    centered = inputs - _per_channel(rough, inputs)
    rest = centered.mean(dims)
    return rough + rest, centered.square_().sum(dims) - count * rest.square()


def normalize(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Return `(inputs - mean) / sqrt(var + eps) * weight + bias` in the inputs' dtype and layout."""
    # The kernels take float32 parameters with any input of at most that size.
    weight, bias = (None if values is None else values.to(mean.dtype) for values in (weight, bias))
    if inputs.numel() > 0 and _has_kernels(inputs):
        return torch.batch_norm_elemt(inputs, weight, bias, mean, inverse_deviation(var, eps), eps)
    return functional.batch_norm(inputs, mean, var, weight, bias, training=False, eps=eps)


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """Return the factor by which centered values are scaled."""
    return (var + eps).rsqrt()


def gradient_sums(grad_output: Tensor, inputs: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of dy and of dy * (x - mean), per channel; zeros for an empty part."""
    if inputs.numel() > 0 and _has_kernels(inputs):
        grad_output = grad_output.contiguous(memory_format=_layout(inputs))
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(
            grad_output, inputs, mean, invstd, None, input_g=True, weight_g=False, bias_g=False
        )
        return sum_dy, sum_dy_xmu
    dims = _reduced_dims(inputs)
    grad_output = grad_output.to(mean.dtype)
    return grad_output.sum(dims), (inputs - _per_channel(mean, inputs)).mul_(grad_output).sum(dims)


def input_gradient(
    grad_output: Tensor, inputs: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient of the input; `sums` are the whole batch's of dy and of dy * (x - mean), and its count."""
    sum_dy, sum_dy_xmu, count = sums
    weight = None if weight is None else weight.to(mean.dtype)
    if inputs.numel() > 0 and _has_kernels(inputs):
        grad_output = grad_output.contiguous(memory_format=_layout(inputs))
        counts = count.to(torch.int32).view(1)
        return torch.batch_norm_backward_elemt(grad_output, inputs, mean, invstd, weight, sum_dy, sum_dy_xmu, counts)
    slope = invstd.square() * sum_dy_xmu / count
    scale = invstd if weight is None else invstd * weight
    mean, slope, mean_dy, scale = (_per_channel(values, inputs) for values in (mean, slope, sum_dy / count, scale))
    return (inputs - mean).mul_(-slope).add_(grad_output).sub_(mean_dy).mul_(scale).to(inputs.dtype)


def _layout(inputs: Tensor) -> torch.memory_format:
    for layout in (torch.channels_last, torch.channels_last_3d):
        if inputs.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def _reduced_dims(inputs: Tensor) -> tuple[int, ...]:
    """Return the dimensions over which statistics are taken: all but the channels."""
    return (0, *range(2, inputs.dim()))


def _per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    """Return one value per channel in a shape that broadcasts over `inputs`."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))
