"""Do all ranks wrap the same model? Compared at construction, because later it shows only as wrong numbers."""

import hashlib
from itertools import zip_longest

from torch import Tensor

from lockstep.comm import World
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.model import TrainedModel

_REMEDY = "Build the model identically on every rank before wrapping it."


def check_same_model(model: TrainedModel, world: World) -> None:
    """Compare the parameters and buffers of `model` across ranks (collective).

    Trainable parameters must agree in names, order, shapes, dtypes and strides; frozen ones and buffers, which are
    broadcast, in names, order, shapes and dtypes.

    Args:
        model: This rank's model.
        world: The workers; each must call.

    Raises:
        ParameterMismatchError: On every rank alike, naming the first rank and parameter that differ from rank 0's.
    """
    described = _describe(model)
    fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()
    if len(set(world.gather_objects(fingerprint))) == 1:
        return
    # Only now, when something differs, are the descriptions themselves worth sending.
    expected, *others = world.gather_objects(described)
    for rank, found in enumerate(others, start=1):
        for kind in expected:
            if found[kind] != expected[kind]:
                raise ParameterMismatchError(_explain(rank, kind, found[kind], expected[kind]))


def _describe(model: TrainedModel) -> dict[str, list[str]]:
    return {
        "trainable parameter": [str(each.spec) for each in model.trained],
        "frozen parameter": [_describe_tensor(name, value) for name, value in model.frozen()],
        "buffer": [_describe_tensor(name, value) for name, value in model.buffers()],
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
    return f"{start} is {kind} {number}: rank {rank} has {here}, rank 0 has {there}. {_REMEDY}"
