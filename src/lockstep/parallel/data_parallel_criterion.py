"""`DataParallelCriterion`: the loss of a batch whose outputs were left on the devices where they were computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.parallel.copies import Copies
from lockstep.parallel.replica_devices import DeviceId, as_device
from lockstep.parallel.replica_threads import ReplicaThreads
from lockstep.parallel.replicas import Replicas, check_home, replicate
from lockstep.parallel.scatter import join_outputs, map_tensors, scatter_arguments

_WEIGHED_BY_TARGET = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
"""Losses whose mean is not over samples but over what their class weights and `ignore_index` leave."""


@final
class DataParallelCriterion(nn.Module):
    """Compute a loss where the replicas' outputs are, and return that of the whole batch.

        model = ls.DataParallel(net, gather_output=False)
        criterion = ls.DataParallelCriterion(nn.CrossEntropyLoss())
        criterion(model(inputs), targets).backward()

    With `DataParallel` alone the first device holds the whole batch's outputs, their gradients and the loss; here one
    number per replica travels.

    A loss whose `reduction` is "sum" is summed, one with "none" joined along `dim`. All others are taken as means over
    samples and weighted by their number, which gives the mean over the batch however unevenly it was cut.
    `CrossEntropyLoss` and `NLLLoss` divide by the summed class weights of the targets that are not ignored; so does
    this. A criterion that averages over something else (tokens that are no padding) returns `(loss, weight)`, as for
    `ls.Trainer`.

    Args:
        criterion: A module, on the first output's device if it has parameters or buffers; or a function.
        device_ids: Where outputs must be, to have it checked; None for wherever they are.
        output_device: Where the loss is returned; None for the first output's device.
        dim: Along which targets are cut, as for `DataParallel`.
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

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            outputs: The list that a `DataParallel` with `gather_output=False` returned.
            targets: Of the whole batch; cut here as the inputs were cut there.
            kwargs: Further arguments of the criterion, cut likewise.

        Raises:
            RuntimeError: The criterion's parameters or buffers are elsewhere than the first output.
            TypeError: Outputs that were joined already, or without a tensor.
            ValueError: Targets or devices that do not belong to the outputs, or a loss that is not one number.
        """
        devices = self._locate(outputs)
        parts = self._cut(outputs, targets, kwargs, devices)
        criteria = self._replicate(devices)
        calls = [partial(_share, criterion, *part, self.dim) for criterion, part in zip(criteria, parts, strict=True)]
        shares: list[_Share] = self._threads.run(calls, devices)
        if isinstance(criteria, Replicas):
            criteria.keep_buffers()
        return self._combine(shares, devices[0] if self.output_device is None else as_device(self.output_device))

    def _locate(self, outputs: Sequence[Any]) -> list[torch.device]:
        if not isinstance(outputs, list):
            raise TypeError(
                f"DataParallelCriterion takes the list of the replicas' outputs, but got {type(outputs).__name__}. "
                "Build the model with DataParallel(..., gather_output=False), or use the criterion itself."
            )
        found = [_tensors(output) for output in outputs]
        if not found or not all(found):
            raise TypeError(
                "There are outputs without a tensor among those of the replicas; no loss can be had of them."
            )
        devices = [tensors[0].device for tensors in found]
        if self.device_ids is not None:
            expected = [as_device(device_id) for device_id in self.device_ids[: len(outputs)]]
            if devices != expected:
                raise ValueError(
                    f"Outputs are on {', '.join(map(str, devices))}, but device_ids says "
                    f"{', '.join(map(str, expected))}. Leave device_ids out, or give the model's."
                )
        return devices

    def _cut(
        self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any], devices: list[torch.device]
    ) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        if not _tensors((targets, kwargs)):
            return [(output, targets, kwargs) for output in outputs]
        parts, named_parts = scatter_arguments(targets, kwargs, devices, self.dim)
        if len(parts) != len(outputs):
            raise ValueError(
                f"There are {len(outputs)} outputs, but the targets fall into {len(parts)} parts. "
                "Give the targets of the whole batch that went into the model, as many as its samples."
            )
        return list(zip(outputs, parts, named_parts, strict=True))

    def _replicate(self, devices: list[torch.device]) -> Sequence[Callable[..., Any]]:
        if not isinstance(self.criterion, nn.Module):
            return [self.criterion] * len(devices)
        check_home(self.criterion, devices[0])
        return replicate(self.criterion, devices, self._copies)

    def _combine(self, shares: Sequence["_Share"], home: torch.device) -> Tensor:
        reduction = getattr(self.criterion, "reduction", "mean")
        if reduction == "none":
            joined: Tensor = join_outputs([share.loss for share in shares], home, self.dim)
            return joined
        for share in shares:
            if share.loss.dim() != 0:
                raise ValueError(
                    f"The criterion returned a loss of shape {tuple(share.loss.shape)} for a replica, expected one "
                    'number. Let it average, or give it reduction="none".'
                )
        losses = [share.loss.to(home) for share in shares]
        if reduction == "sum":
            return torch.stack(losses).sum()
        weights = torch.stack([torch.as_tensor(share.weight, dtype=_wide(losses[0])).to(home) for share in shares])
        total = weights.sum()
        parts = [
            loss.to(total.dtype) / total if share.is_sum else loss * (weight / total)
            for loss, weight, share in zip(losses, weights, shares, strict=True)
        ]
        return torch.stack(parts).sum().to(shares[0].dtype)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one replica's part contributes to the loss."""

    loss: Tensor
    weight: Tensor | float
    """How much of the mean it is."""
    is_sum: bool
    """Whether `loss` is a sum still to be divided, rather than a mean."""
    dtype: torch.dtype
    """The loss's own."""


def _share(criterion: Any, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> _Share:
    divisor = _divisor(criterion, targets)
    if divisor is not None:
        # A sum, for a part whose targets are all ignored has the mean 0 / 0, which no weight would mend.
        criterion.reduction = "none"  # the replica's, which nobody else uses
        each: Tensor = criterion(output, *targets, **kwargs)
        return _Share(loss=each.sum(dtype=_wide(each)), weight=divisor, is_sum=True, dtype=each.dtype)
    result = criterion(output, *targets, **kwargs)
    if isinstance(result, tuple):
        loss, weight = result
    else:
        [counted, *_] = [*_tensors((targets, kwargs)), *_tensors(output)]
        loss, weight = result, counted.size(dim)
    return _Share(loss=loss, weight=weight, is_sum=False, dtype=loss.dtype)


def _divisor(criterion: Any, targets: tuple[Any, ...]) -> Tensor | None:
    """Return by what torch's classification losses divide; None for any other loss, weighted by samples."""
    if getattr(type(criterion), "forward", None) not in _WEIGHED_BY_TARGET or criterion.reduction != "mean":
        return None
    if len(targets) != 1 or targets[0].is_floating_point():  # probabilities: a mean over samples
        return None
    counts = targets[0] != criterion.ignore_index
    if criterion.weight is None:
        counts_as: Tensor = counts
    else:
        counts_as = criterion.weight[targets[0].masked_fill(~counts, 0)] * counts
    return counts_as.sum()


def _wide(tensor: Tensor) -> torch.dtype:
    """Return a type in which sums over a batch neither overflow nor lose their small change."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
