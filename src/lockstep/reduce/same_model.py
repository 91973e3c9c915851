"""Check that all ranks wrap the same model, at construction: later a difference shows only as wrong numbers."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from lockstep.comm import World
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.model import TrainedModel, TrainedParameter

_BEFORE_WRAPPING = "Build the model identically on every rank before wrapping it. (LS304)"
_ARGUMENT = "argument of the wrapper"
_ALIKE = "Give DistributedDataParallel the same arguments on every rank. (LS304)"
_AFTER_WRAPPING = "It was changed after wrapping: make the same change on every rank, before the same step. (LS305)"


def check_same_model(
    model: TrainedModel,
    world: World,
    *,
    is_wrapped: bool = False,
    with_buffers: bool = True,
    arguments: Sequence[str] = (),
) -> None:
    """Compare the parameters and buffers of `model` across ranks; raise on every rank if they differ (collective).

    Trainable parameters must agree in names, order, shapes, dtypes and strides; frozen ones and buffers, which are
    broadcast, in names, order, shapes and dtypes.
    """
    described = {_ARGUMENT: [*arguments], **_describe(model, with_buffers=with_buffers)}
    fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()
    if len(set(world.gather_objects(fingerprint))) == 1:
        return
    # The descriptions are long, so they are sent only when the hashes differ.
    expected, *others = world.gather_objects(described)
    for rank, found in enumerate(others, start=1):
        for kind in expected:
            if found[kind] != expected[kind]:
                difference = _explain(rank, kind, found[kind], expected[kind])
                remedy = _ALIKE if kind == _ARGUMENT else _AFTER_WRAPPING if is_wrapped else _BEFORE_WRAPPING
                raise ParameterMismatchError(f"{difference} {remedy}")


def check_same_values(parameters: Sequence[TrainedParameter], world: World) -> None:
    """Compare the values of parameters that were added after rank 0's were broadcast at construction (collective)."""
    digests = {each.spec.name: hashlib.sha256(_bytes(each.parameter)).hexdigest() for each in parameters}
    expected, *others = world.gather_objects(digests)
    for rank, found in enumerate(others, start=1):
        for name in {**expected, **found}:
            if name not in expected or name not in found:
                changed, same = (rank, 0) if name in found else (0, rank)
                raise ParameterMismatchError(
                    f"Parameter {name} was replaced, unfrozen or changed after wrapping on rank {changed}, and not on "
                    f"rank {same}. Make the same change on every rank, before the same step. (LS305)"
                )
            if found[name] != expected[name]:
                raise ParameterMismatchError(
                    f"Parameter {name} was added, unfrozen or changed after wrapping, and its values on rank {rank} "
                    "are not those on rank 0. Call torch.manual_seed with the same seed on every rank before "
                    "making it, or make it before wrapping. (LS305)"
                )


def _bytes(parameter: Tensor) -> bytes:
    flat = parameter.detach().cpu().contiguous().reshape(-1)
    values: bytes = flat.view(torch.uint8).numpy().tobytes()
    return values


def _describe(model: TrainedModel, *, with_buffers: bool) -> dict[str, list[str]]:
    return {
        "trainable parameter": [str(each.spec) for each in model.trained],
        "frozen parameter": [_describe_tensor(name, value) for name, value in model.frozen()],
        "buffer": [_describe_tensor(name, value) for name, value in model.buffers() if with_buffers],
    }


def _describe_tensor(name: str, value: Tensor) -> str:
    shape = "x".join(map(str, value.shape)) or "scalar"
    return f"{name} ({shape}, {value.dtype})"


def _explain(rank: int, kind: str, found: list[str], expected: list[str]) -> str:
    pairs = enumerate(zip_longest(found, expected, fillvalue="nothing"))
    number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    start = "The first difference"
    if len(found) != len(expected):
        start = f"Rank {rank} has {len(found)} {kind}s but rank 0 has {len(expected)}; the first difference"
    return f"{start} is {kind} {number}: rank {rank} has {here}, rank 0 has {there}."
