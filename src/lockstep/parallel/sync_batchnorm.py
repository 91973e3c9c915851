"""`SyncBatchNorm`: BatchNorm whose batch is that of all ranks together, on any device and any group.

torch's refuses tensors on the CPU. Ours does there what it does on a GPU, so that a model can be tested where it is
written. What travels, per layer and step:

    forward    1 all-gather of (mean, summed squared deviation, count)   -> statistics of the whole batch
    backward   1 all-reduce of (sum of dy, sum of dy * (x - mean))       -> gradient of the input

[Note: every rank's backward] A collective needs all ranks. torch leaves out that of backward where the local input
needs no gradient, and hangs if another rank's does. Ours takes place wherever backward runs, whatever needs a gradient
there. A rank whose forward autograd did not record has no backward at all; so ranks exchange in forward whether
autograd records them, and a backward that would wait for such a rank raises. That is so on the CPU only: on a GPU,
reading the answer would wait for the device, and there the group's timeout ends the wait.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lockstep.comm import World
from lockstep.comm.messages import joined_world
from lockstep.errors import ReductionError
from lockstep.torch_private.compiler import forget_compiled_call, is_compiled_module, original_of_compiled
from lockstep.torch_private.modules import (
    AnyBatchNorm,
    TorchsSyncBatchNorm,
    has_kernel,
    module_registry,
    separate_registries,
)

_KERNELS = tuple(f"aten::batch_norm_{name}" for name in ("stats", "elemt", "backward_reduce", "backward_elemt"))
"""Those of torch's SyncBatchNorm, where the device has them: CUDA, ROCm, XPU, and plug-ins for other accelerators.
Elsewhere these are plain sums and products, and BatchNorm's own kernel for the normalisation."""
_BEGINNING = "This was the"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """What the parts of all ranks are together; the same on every rank."""

    mean: Tensor
    """Mean, per channel; float32, or float64 for such inputs."""
    var: Tensor
    """Mean squared deviation, per channel: divided by the count, not by one less."""
    count: Tensor
    """How many values each channel has; a scalar of the mean's dtype and device."""
    records: Tensor
    """One number per rank: 1 where autograd records the forward, else 0."""


@final
class SyncBatchNorm(TorchsSyncBatchNorm):
    """Normalise by the statistics of all ranks' batches together, while training.

        model = ls.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    Same names and meaning as `torch.nn.SyncBatchNorm`, and an instance of it. Output and gradient of the input are
    those of BatchNorm on all batches in one; ranks may hold different numbers of samples, or none. Gradients of weight
    and bias are sums over this rank's samples, as every layer's are: `DistributedDataParallel` averages them.

    In eval mode, without a process group and in a group of one rank this is BatchNorm, bit for bit. Otherwise forward
    and backward are collective, and a step that runs backward on one rank must on all. Its calls and those for
    gradients must come in the same order on every rank, so every rank must use the same layers, in the same order. A
    second process group is no way around that: where two NCCL groups use one GPU, their calls must be in the same order
    on all ranks too, or they may deadlock. If ranks use different branches, use GroupNorm or LayerNorm in them.
    Gradients of gradients are an error, which `create_graph=True` alone is not.

    A rank that does not call the layer leaves the others waiting until the group's timeout; their error then says in
    which layer.

    Args:
        num_features: Number of channels: C of an input (N, C, ...).
        eps: Added to the variance.
        momentum: Weight of a new batch in the running statistics; None for the average over all batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics, for eval mode.
        process_group: The group; None for what is the default group at each forward.
        device: Of parameters and buffers.
        dtype: Likewise.
        bias: False for a weight without a bias.
    """

    _name = ""
    """Where the layer was in the module that was converted."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype)
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise (collective while training in a group of more than one rank).

        Raises:
            GroupError: This rank is not in the layer's group, or the group was torn down.
            ValueError: The input has fewer than two dimensions, no channels, or not as many as the layer; or all ranks
                together have at most one value per channel.
        """
        world = self._world()
        if world.world_size == 1:
            return AnyBatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        num_channels = input.size(1)
        for values in (self.weight, self.running_mean):
            if values is not None and values.numel() != num_channels:
                raise ValueError(
                    f"The input has {num_channels} channels (size {list(input.shape)}), and this SyncBatchNorm "
                    f"{values.numel()}. Build the layer with num_features={num_channels}. (LS331)"
                )
        sources = (in_kernel_layout(input), self.weight, self.bias)
        is_recorded = torch.is_grad_enabled() and any(source is not None and source.requires_grad for source in sources)
        called = f"SyncBatchNorm {self._name!r}" if self._name else f"a SyncBatchNorm of {self.num_features} channels"
        statistics = gather_statistics(sources[0], self.eps, world, is_recorded=is_recorded, called=called)
        self._update_running(statistics)
        normalized: Tensor = _Normalize.apply(*sources, statistics, self.eps, world, called)  # type: ignore[no-untyped-call]
        return normalized

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
        """Replace every BatchNorm in `module`, torch's SyncBatchNorm included, and return the module (local).

        Parameters, buffers, hooks and all other attributes are taken over as they are: an optimizer that holds the
        parameters goes on. A layer that is used in two places stays one layer.

        Returns:
            `module`; if it is a BatchNorm itself, the new layer.

        Raises:
            ValueError: A layer is lazy and has seen no input yet, or has something that would be lost: a forward of its
                own, parametrizations, or `torch.compile` around it. Nothing was replaced.
        """
        layers = {layer: name for name, layer in module.named_modules()}
        for layer, name in layers.items():
            _check_convertible(name, layer)
        converted: dict[nn.Module, nn.Module] = {}
        result = cls._convert(module, process_group, converted)
        for layer, taken in converted.items():
            if isinstance(taken, cls):
                taken._name = layers[layer]  # noqa: SLF001 - one of this class
        return result

    @classmethod
    def _convert(
        cls, module: nn.Module, group: ProcessGroup | None, converted: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module not in converted:
            result = cls._take_over(module, group) if isinstance(module, AnyBatchNorm) else module
            converted[module] = result
            # Not `named_children`, which leaves out the second name of a layer that has two.
            for name, child in list(module_registry(module).items()):
                if child is not None:
                    result.add_module(name, cls._convert(child, group, converted))
        return converted[module]

    @classmethod
    def _take_over(cls, layer: AnyBatchNorm, group: ProcessGroup | None) -> Self:
        taken = cls.__new__(cls)
        # As unpickling does, but from another class.
        state = dict(layer.__dict__)
        forget_compiled_call(state)
        separate_registries(state)
        taken.__setstate__(state)  # type: ignore[no-untyped-call]
        taken.process_group = group
        return taken

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same group: a group cannot be copied."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self.process_group)] = self.process_group
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _world(self) -> World:
        if self.training and dist.is_available() and dist.is_initialized():
            return joined_world(self.process_group)
        return World(rank=0, world_size=1, group=None)

    @torch.no_grad()
    def _update_running(self, statistics: BatchStatistics) -> None:
        if not self.track_running_stats:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        unbiased_var = statistics.var * (statistics.count / (statistics.count - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased_var)):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum or 0.0)


class _Normalize(Function):
    """Normalisation by given statistics, whose backward knows that they came from every rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: BatchStatistics,
        eps: float,
        world: World,
        called: str,
    ) -> Tensor:
        invstd = inverse_deviation(statistics.var, eps)
        ctx.save_for_backward(inputs, weight, bias, statistics.mean, invstd, statistics.count, statistics.records)
        ctx.world, ctx.called = world, called
        return normalize(inputs, weight, bias, statistics.mean, statistics.var, eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients (collective: [Note: every rank's backward])."""
        with torch.no_grad():
            gradients = _gradients(ctx, *grad_outputs)
        if torch.is_grad_enabled():
            # Whatever needs a gradient here: they depend on inputs and weight too, and would pass for constants.
            gradients = [None if each is None else _refuse(each.requires_grad_()) for each in gradients]
        return *gradients, *[None] * 4  # statistics, eps, world, called


def _gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    inputs, weight, bias, mean, invstd, count, records = ctx.saved_tensors
    _check_all_recorded(records, ctx.world)
    sum_dy, sum_dy_xmu = gradient_sums(grad_output, inputs, mean, invstd)
    sums = torch.cat([sum_dy, sum_dy_xmu])
    with naming_the_layer(ctx.called, "backward", ctx.world):
        dist.all_reduce(sums, group=ctx.world.group)
    needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    global_sums = (*sums.chunk(2), count)
    return [
        input_gradient(grad_output, inputs, weight, mean, invstd, global_sums) if needs_input else None,
        (sum_dy_xmu * invstd).to(weight.dtype) if needs_weight else None,
        sum_dy.to(bias.dtype) if needs_bias else None,
    ]


class _Refuse(Function):
    """Stands in the graph where a gradient of a gradient would begin."""

    @staticmethod
    def forward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise RuntimeError(
            "SyncBatchNorm cannot be differentiated twice. Leave out create_graph=True, or use BatchNorm where "
            "gradients of gradients are needed. (LS332)"
        )


_refuse: Any = _Refuse.apply


def _check_all_recorded(records: Tensor, world: World) -> None:
    if records.device.type == "cpu" and not records.all():
        missing = (records == 0).nonzero().flatten().tolist()
        raise ReductionError(
            f"SyncBatchNorm's backward on rank {world.rank} needs all {world.world_size} ranks, and rank(s) "
            f"{', '.join(map(str, missing))} ran the forward without recording it: under torch.no_grad(), or with an "
            "input, weight and bias that need no gradient. Run the forward alike on every rank, or switch the layer to "
            "eval(). (LS330)"
        )


def _check_convertible(name: str, layer: nn.Module) -> None:
    if is_compiled_module(layer) and isinstance(original_of_compiled(layer), AnyBatchNorm):
        raise ValueError(
            f"{name or 'The module'} is what torch.compile made of a BatchNorm, and would go on running that one. "
            "Convert before compiling. (LS331)"
        )
    if not isinstance(layer, AnyBatchNorm):
        return
    called = f"{name or 'The module'} is a {type(layer).__name__}"
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(  # noqa: TRY004 - the class is right, the time is not
            f"{called} that has seen no input yet. Run a forward with a sample before converting it. (LS331)"
        )
    if parametrize.is_parametrized(layer):
        raise ValueError(
            f"{called} with parametrizations, which would be lost in a SyncBatchNorm. Convert it first, and register "
            "them on the new layer. (LS331)"
        )
    known = {AnyBatchNorm.forward, TorchsSyncBatchNorm.forward, SyncBatchNorm.forward}
    if "forward" in vars(layer) or type(layer).forward not in known:
        raise ValueError(
            f"{called}, whose forward is its own and would be lost in a SyncBatchNorm. Replace it by a BatchNorm, "
            "followed by a module for what it does beyond that. (LS331)"
        )


@torch.no_grad()
def gather_statistics(inputs: Tensor, eps: float, world: World, *, is_recorded: bool, called: str) -> BatchStatistics:
    """Return the statistics of every rank's `inputs`, in kernel layout and maybe empty, together (collective).

    Each rank sends mean, summed squared deviation and count of its own part, and not sums of x and of x squared: where
    the mean is large beside the deviation, the difference of those sums is nothing but rounding. Every rank then
    combines the same rows in the same way, so that running statistics stay equal on all of them, bit for bit.
    """
    count = inputs.numel() // inputs.size(1)
    mean, deviation = local_moments(inputs, eps)
    row = torch.cat([mean, deviation, mean.new_full((1,), count), mean.new_full((1,), is_recorded)])
    # A list of rows: the call for one tensor has one name up to torch 2.12 and another from 2.13 on.
    rows = row.new_empty(world.world_size, row.numel())
    with naming_the_layer(called, "forward", world):
        dist.all_gather(list(rows.unbind()), row, group=world.group)
    statistics = combine(rows)
    # Where there is at most one value on all ranks there is at most one here. So whoever has more need not look at the
    # sum, for which it would have to wait for its GPU.
    if count <= 1 and (total := int(statistics.count)) <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {total} on all {world.world_size} ranks "
            f"together (input size {list(inputs.shape)} on rank {world.rank}). Feed larger batches, drop the last "
            "incomplete one, or switch the layer to eval(). (LS330)"
        )
    return statistics


@contextmanager
def naming_the_layer(called: str, phase: str, world: World) -> Iterator[None]:
    """Add to an error of a collective call whose it was: a wait that ends by timeout, or with a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        # A group that has failed raises the same error in every call: what was said of another call is no longer true.
        error.__notes__ = [note for note in getattr(error, "__notes__", []) if not note.startswith(_BEGINNING)]
        error.add_note(
            f"{_BEGINNING} {phase} of {called} on rank {world.rank}. It is collective while training: all "
            f"{world.world_size} ranks of its group must run the layer's forward, and the backward that follows, "
            "equally often and in the same order. Look for a branch or a loop that differs between ranks."
        )
        raise


def combine(rows: Tensor) -> BatchStatistics:
    """Combine the parts of all ranks (pure); a row is mean and deviation per channel, count, whether it is recorded."""
    num_channels = rows.size(1) // 2 - 1
    means, deviations, counts, records = rows.split([num_channels, num_channels, 1, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    weights = counts / divisor
    rough = (weights * means).sum(0)
    # The rounding of the first sum is relative to the mean; the second one takes it away.
    mean = rough + (weights * (means - rough)).sum(0)
    var = (deviations / divisor + weights * (means - mean).square()).sum(0)
    return BatchStatistics(mean=mean, var=var, count=count, records=records.squeeze(1))


def in_kernel_layout(inputs: Tensor) -> Tensor:
    """Return `inputs` in a layout that the kernels of their device take; channels_last stays what it is."""
    return inputs.contiguous(memory_format=_layout(inputs)) if _has_kernels(inputs) else inputs


def local_moments(inputs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and summed squared deviation per channel of inputs in kernel layout; zeros for an empty part."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
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
    return (var + eps).rsqrt()


def gradient_sums(grad_output: Tensor, inputs: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of dy and of dy * (x - mean), per channel."""
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


def _has_kernels(inputs: Tensor) -> bool:
    return all(has_kernel(kernel, inputs.device.type) for kernel in _KERNELS)


def _layout(inputs: Tensor) -> torch.memory_format:
    for layout in (torch.channels_last, torch.channels_last_3d):
        if inputs.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def _reduced_dims(inputs: Tensor) -> tuple[int, ...]:
    return (0, *range(2, inputs.dim()))


def _per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (inputs.dim() - 2))
