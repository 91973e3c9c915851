"""`DataParallelCriterion`: the loss of a batch whose outputs stay on the replicas' devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature, unwrap
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.means import (
    WEIGHTED_BY_TARGET,
    Mean,
    divisor_of,
    has_class_numbers,
    has_own_forward,
    is_weighted_by_target,
)
from lockstep.parallel.replicas.copies import (
    Copies,
    Replicas,
    check_no_sync_batchnorm,
    check_on_device,
    replicate,
)
from lockstep.parallel.replicas.data_parallel import DeviceId, as_device
from lockstep.parallel.replicas.scatter import join_outputs, scatter_arguments, tensors_in
from lockstep.parallel.replicas.threads import ReplicaThreads
from lockstep.torch_private.compiler import is_compiled_function, keep_compiler_out, mark_uncompiled


@final
class DataParallelCriterion(nn.Module):
    """Compute the loss on the devices of the replicas' outputs, and return the loss of the whole batch.

        model = ls.DataParallel(net, gather_output=False)
        criterion = ls.DataParallelCriterion(nn.CrossEntropyLoss())
        criterion(model(inputs), targets).backward()

    With `DataParallel` alone, the first device holds the outputs of the whole batch and their gradients. Here each
    replica sends only its loss.

    The losses of replicas are combined by the criterion's `reduction`:

    - "sum": they are added. "none": they are concatenated along `dim`.
    - Otherwise each loss is a mean over samples. They are weighted by the number of samples, so that the result is the
      mean over the batch, even if the replicas had different numbers of samples.
    - `CrossEntropyLoss` and `NLLLoss` divide by the sum of the class weights of targets that are not ignored. This
      class divides by this sum over the batch, and so for `torch.nn.functional.cross_entropy` and `nll_loss`, also
      in a `functools.partial`.

    The inside of your own function or module cannot be inspected. If it averages over something else (such as tokens
    that are not padding), return `ls.Mean(total, weight)` as for `ls.Trainer`. If it sums, give it an attribute
    `reduction` with the value "sum".

    Args:
        criterion: A function, or a module, which is on the first output's device if it has parameters or buffers.
        device_ids: The devices on which outputs are expected; None for no check.
        output_device: The device of the returned loss; None for the first output's device.
        dim: The dimension along which targets are split, as for `DataParallel`.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.criterion = criterion
        self.device_ids = device_ids
        self.output_device = output_device
        self.dim = dim
        self._threads = ReplicaThreads()
        self._copies = Copies()

    @keep_compiler_out
    @mark_uncompiled
    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            outputs: The list that a `DataParallel` with `gather_output=False` returned.
            targets: Targets of the whole batch; split here as `DataParallel` splits inputs.
            kwargs: Further arguments of the criterion, split likewise.

        Raises:
            RuntimeError: The criterion's parameters or buffers are not on the first output's device.
            TypeError: The outputs are not a list or contain no tensor, or it is unknown what the criterion divides by.
            ValueError: Targets or devices do not match the outputs, or a loss is not a single number.
        """
        devices = self._check_outputs(outputs)
        criterion, targets, kwargs = _as_module(self.criterion, targets, kwargs)
        parts = self._split_targets(outputs, targets, kwargs, devices)
        criteria: Sequence[Callable[..., Any]] = [criterion] * len(devices)
        if isinstance(criterion, nn.Module):
            check_on_device(criterion, devices[0])
            if len(devices) > 1:
                check_no_sync_batchnorm(criterion)
            criteria = replicate(criterion, devices, self._copies)
        calls = [partial(_replica_loss, each, *part, self.dim) for each, part in zip(criteria, parts, strict=True)]
        results: list[_ReplicaLoss] = self._threads.run(calls, devices, one_at_a_time=True)
        if isinstance(criteria, Replicas):
            criteria.keep_buffers()
        home = devices[0] if self.output_device is None else as_device(self.output_device)
        options = {**criterion.keywords, **kwargs} if isinstance(criterion, partial) else kwargs
        reduction: str = options.get("reduction", getattr(criterion, "reduction", "mean"))
        return self._combine(results, reduction, home)

    def _check_outputs(self, outputs: Sequence[Any]) -> list[torch.device]:
        if not isinstance(outputs, list):
            raise TypeError(
                f"DataParallelCriterion expects the list of the replicas' outputs, but got {type(outputs).__name__}. "
                "Build the model with DataParallel(..., gather_output=False), or use the criterion without "
                "DataParallelCriterion. (LS354)"
            )
        found = [list(tensors_in(output)) for output in outputs]
        if not found or not all(found):
            raise TypeError(
                "A replica returned an output without a tensor, so its loss cannot be computed. Return the outputs as "
                "tensors. (LS354)"
            )
        devices = [tensors[0].device for tensors in found]
        if self.device_ids is not None:
            expected = [as_device(device_id) for device_id in self.device_ids[: len(outputs)]]
            if devices != expected:
                raise ValueError(
                    f"Outputs are on {', '.join(map(str, devices))}, but device_ids is "
                    f"{', '.join(map(str, expected))}. Leave device_ids out, or pass the model's device_ids. (LS354)"
                )
        return devices

    def _split_targets(
        self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any], devices: list[torch.device]
    ) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        if not any(True for _ in tensors_in((targets, kwargs))):
            return [(output, targets, kwargs) for output in outputs]
        parts, named_parts = scatter_arguments(targets, kwargs, devices, self.dim)
        if len(parts) != len(outputs):
            raise ValueError(
                f"There are {len(outputs)} outputs, but the targets split into {len(parts)} parts. "
                "Pass the targets of the whole batch that the model got, one per sample. (LS354)"
            )
        return list(zip(outputs, parts, named_parts, strict=True))

    def _combine(self, results: Sequence["_ReplicaLoss"], reduction: str, home: torch.device) -> Tensor:
        if reduction == "none":
            joined: Tensor = join_outputs([result.loss for result in results], home, self.dim)
            return joined
        for result in results:
            if result.loss.dim() != 0:
                raise ValueError(
                    f"The criterion returned a loss of shape {tuple(result.loss.shape)} for a replica, expected a "
                    'scalar. Use reduction="mean", or reduction="none" for one loss per sample. (LS354)'
                )
        losses = [result.loss.to(home) for result in results]
        if reduction == "sum":
            return torch.stack(losses).sum()
        weights = torch.stack(
            [torch.as_tensor(result.weight, dtype=_accumulation_dtype(losses[0])).to(home) for result in results]
        )
        total = weights.sum()
        parts = [
            loss.to(total.dtype) / total if result.is_sum else loss * (weight / total)
            for loss, weight, result in zip(losses, weights, results, strict=True)
        ]
        return torch.stack(parts).sum().to(results[0].dtype)


@dataclass(frozen=True, slots=True)
class _ReplicaLoss:
    loss: Tensor
    weight: Tensor | float
    """Its weight in the mean over the batch."""
    is_sum: bool
    """Whether `loss` is a sum that is not divided yet, instead of a mean."""
    dtype: torch.dtype


def _as_module(
    criterion: Callable[..., Any], targets: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a module for `cross_entropy` and `nll_loss`, as it keeps class weights, which must not be split."""
    bound = criterion if isinstance(criterion, partial) and not criterion.args else partial(criterion)
    for known, kind in WEIGHTED_BY_TARGET.items():
        if bound.func is known:
            options = signature(known).bind(None, *targets, **{**bound.keywords, **kwargs}).arguments
            target = options.pop("target")
            del options["input"]
            return kind(**options), (target,), {}
        if is_compiled_function(bound.func) and unwrap(bound.func) is known:
            raise TypeError(
                f"The criterion is a compiled {known.__name__}, so it is unknown what it divides by. Compile "
                f"torch.nn.{kind.__name__}() instead. (LS354)"
            )
    return criterion, targets, kwargs


def _replica_loss(
    criterion: Any, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any], dim: int
) -> _ReplicaLoss:
    target = targets[0] if targets else kwargs.get("target")
    is_weighted = is_weighted_by_target(criterion)
    is_unknown = is_weighted and has_own_forward(criterion)
    if is_weighted and not is_unknown and isinstance(target, Tensor) and has_class_numbers(target):
        # A sum and not a mean: if all targets of a replica are ignored, the mean is 0 / 0 and no weight can repair it.
        criterion.reduction = "none"  # the attribute of the replica, not of the user's module
        each: Tensor = criterion(output, *targets, **kwargs)
        return _ReplicaLoss(
            loss=each.sum(dtype=_accumulation_dtype(each)),
            weight=divisor_of(criterion, target),
            is_sum=True,
            dtype=each.dtype,
        )
    result = criterion(output, *targets, **kwargs)
    if isinstance(result, Mean):
        total = torch.as_tensor(result.total)
        return _ReplicaLoss(loss=total, weight=result.weight, is_sum=True, dtype=total.dtype)
    if isinstance(result, tuple):
        loss, weight = result
        return _ReplicaLoss(loss=loss, weight=weight, is_sum=False, dtype=loss.dtype)
    if is_unknown:
        raise TypeError(
            f"The criterion is a {type(criterion).__name__} with an overridden forward, so it is unknown what its mean "
            "divides by (class weights, ignore_index). "
            "Return ls.Mean(total, weight): the sum of the losses, and what the mean divides by. (LS354)"
        )
    [counted, *_] = [*tensors_in((targets, kwargs)), *tensors_in(output)]
    return _ReplicaLoss(loss=result, weight=counted.size(dim), is_sum=False, dtype=result.dtype)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return a dtype in which sums over a batch neither overflow nor lose small summands."""
    return torch.promote_types(tensor.dtype, torch.float32)
