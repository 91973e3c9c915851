"""`DataParallelCriterion`: the loss of a batch whose outputs were left on the devices where they were computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature, unwrap
from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.parallel.compiled import not_compiled
from lockstep.parallel.replicas.copies import Copies
from lockstep.parallel.replicas.devices import DeviceId, as_device
from lockstep.parallel.replicas.modules import Replicas, check_home, check_not_synchronized, replicate
from lockstep.parallel.replicas.scatter import join_outputs, scatter_arguments, tensors_in
from lockstep.parallel.replicas.threads import ReplicaThreads
from lockstep.torch_private import is_compiled_function

_WEIGHED_BY_TARGET = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Losses whose mean is not over samples but over what their class weights and `ignore_index` leave."""

_CLASS_OF: tuple[tuple[Callable[..., Any], type[nn.Module]], ...] = (
    (functional.cross_entropy, nn.CrossEntropyLoss),
    (functional.nll_loss, nn.NLLLoss),
)
"""Which of them torch's functions are."""


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
    this, also for `torch.nn.functional.cross_entropy` and `nll_loss`, as they are or in a `functools.partial`. What
    happens within a function or a module of your own cannot be seen: if it averages over something else (tokens that
    are no padding), it returns `(loss, weight)`, as for `ls.Trainer`; if it sums, it has an attribute `reduction`,
    which is "sum".

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

    @not_compiled
    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            outputs: The list that a `DataParallel` with `gather_output=False` returned.
            targets: Of the whole batch; cut here as the inputs were cut there.
            kwargs: Further arguments of the criterion, cut likewise.

        Raises:
            RuntimeError: The criterion's parameters or buffers are elsewhere than the first output.
            TypeError: Outputs that were joined already, or without a tensor; or a criterion that cannot be told by what
                it divides.
            ValueError: Targets or devices that do not belong to the outputs, or a loss that is not one number.
        """
        devices = self._locate(outputs)
        criterion, targets, kwargs = _as_module(self.criterion, targets, kwargs)
        parts = self._cut(outputs, targets, kwargs, devices)
        criteria = self._replicate(criterion, devices)
        calls = [partial(_share, each, *part, self.dim) for each, part in zip(criteria, parts, strict=True)]
        shares: list[_Share] = self._threads.run(calls, devices, take_turns=True)
        if isinstance(criteria, Replicas):
            criteria.keep_buffers()
        home = devices[0] if self.output_device is None else as_device(self.output_device)
        return self._combine(shares, _reduction(criterion, kwargs), home)

    def _locate(self, outputs: Sequence[Any]) -> list[torch.device]:
        if not isinstance(outputs, list):
            raise TypeError(
                f"DataParallelCriterion takes the list of the replicas' outputs, but got {type(outputs).__name__}. "
                "Build the model with DataParallel(..., gather_output=False), or use the criterion itself."
            )
        found = [list(tensors_in(output)) for output in outputs]
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
        if not any(True for _ in tensors_in((targets, kwargs))):
            return [(output, targets, kwargs) for output in outputs]
        parts, named_parts = scatter_arguments(targets, kwargs, devices, self.dim)
        if len(parts) != len(outputs):
            raise ValueError(
                f"There are {len(outputs)} outputs, but the targets fall into {len(parts)} parts. "
                "Give the targets of the whole batch that went into the model, as many as its samples."
            )
        return list(zip(outputs, parts, named_parts, strict=True))

    def _replicate(self, criterion: Callable[..., Any], devices: list[torch.device]) -> Sequence[Callable[..., Any]]:
        if not isinstance(criterion, nn.Module):
            return [criterion] * len(devices)
        check_home(criterion, devices[0])
        if len(devices) > 1:
            check_not_synchronized(criterion)
        return replicate(criterion, devices, self._copies)

    def _combine(self, shares: Sequence["_Share"], reduction: str, home: torch.device) -> Tensor:
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


def _as_module(
    criterion: Callable[..., Any], targets: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a loss with its arguments; torch's functions that are weighed by target, as the modules they are.

    There what belongs to the batch is told from what belongs to the loss: class weights are not to be cut.
    """
    bound = criterion if isinstance(criterion, partial) and not criterion.args else partial(criterion)
    for known, kind in _CLASS_OF:
        if bound.func is known:
            options = signature(known).bind(None, *targets, **{**bound.keywords, **kwargs}).arguments
            target = options.pop("target")
            del options["input"]
            return kind(**options), (target,), {}
        if is_compiled_function(bound.func) and unwrap(bound.func) is known:
            raise TypeError(
                f"The criterion is what torch.compile made of {known.__name__}, which does not say by what it divides. "
                f"Compile torch.nn.{kind.__name__}() instead."
            )
    return criterion, targets, kwargs


def _reduction(criterion: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """Return what a criterion makes of the losses of samples: "mean" where nothing says otherwise."""
    given = {**criterion.keywords, **kwargs} if isinstance(criterion, partial) else kwargs
    reduction: str = given.get("reduction", getattr(criterion, "reduction", "mean"))
    return reduction


def _share(criterion: Any, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> _Share:
    target = targets[0] if targets else kwargs.get("target")
    is_weighed = isinstance(criterion, _WEIGHED_BY_TARGET) and criterion.reduction == "mean"
    if is_weighed and _has_torchs_forward(criterion) and _is_of_classes(target):
        # A sum, for a part whose targets are all ignored has the mean 0 / 0, which no weight would mend.
        criterion.reduction = "none"  # the replica's, which nobody else uses
        each: Tensor = criterion(output, *targets, **kwargs)
        return _Share(
            loss=each.sum(dtype=_wide(each)), weight=_divisor(criterion, target), is_sum=True, dtype=each.dtype
        )
    result = criterion(output, *targets, **kwargs)
    if isinstance(result, tuple):
        loss, weight = result
        return _Share(loss=loss, weight=weight, is_sum=False, dtype=loss.dtype)
    if is_weighed and not _has_torchs_forward(criterion):
        raise TypeError(
            f"The criterion is a {type(criterion).__name__} with a forward of its own, whose mean may be over fewer "
            "targets than there are, by class weights and ignore_index. Return (loss, weight), where weight is what "
            "the loss was divided by."
        )
    [counted, *_] = [*tensors_in((targets, kwargs)), *tensors_in(output)]
    return _Share(loss=result, weight=counted.size(dim), is_sum=False, dtype=result.dtype)


def _has_torchs_forward(criterion: nn.Module) -> bool:
    own = (kind.forward for kind in _WEIGHED_BY_TARGET)
    return "forward" not in vars(criterion) and type(criterion).forward in own


def _is_of_classes(target: Any) -> TypeGuard[Tensor]:
    """Return whether a target is the numbers of classes; else it is probabilities, whose mean is over samples."""
    return isinstance(target, Tensor) and not target.is_floating_point()


def _divisor(criterion: Any, target: Tensor) -> Tensor:
    """Return by what torch's classification losses divide."""
    counts: Tensor = target != criterion.ignore_index
    if criterion.weight is None:
        return counts.sum()
    weights: Tensor = criterion.weight[target.masked_fill(~counts, 0)] * counts
    return weights.sum()


def _wide(tensor: Tensor) -> torch.dtype:
    """Return a type in which sums over a batch neither overflow nor lose their small change."""
    return torch.promote_types(tensor.dtype, torch.float32)
