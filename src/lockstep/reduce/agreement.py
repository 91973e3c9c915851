"""Do all ranks wrap the same model? Compared at construction, because later it shows only as wrong numbers."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from lockstep.comm import World
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.plan import ParameterSpec

_REMEDY = "Build the model identically on every rank before wrapping it."


def check_same_parameters(specs: Sequence[ParameterSpec], world: World) -> None:
    """Compare names, shapes, dtypes, strides and order of the parameters across ranks (collective).

    Args:
        specs: This rank's trainable parameters, in registration order.
        world: The workers; each must call.

    Raises:
        ParameterMismatchError: On every rank alike, naming the first rank and parameter that differ from rank 0's.
    """
    lines = [str(spec) for spec in specs]
    fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(world.gather_objects(fingerprint))) == 1:
        return
    # Only now, when something differs, are the descriptions themselves worth sending.
    expected, *others = world.gather_objects(lines)
    for rank, found in enumerate(others, start=1):
        if found != expected:
            raise ParameterMismatchError(_describe_difference(rank, found, expected))


def _describe_difference(rank: int, found: list[str], expected: list[str]) -> str:
    if len(found) != len(expected):
        start = (
            f"Rank {rank} wraps {len(found)} trainable parameters but rank 0 wraps {len(expected)}; "
            "the first difference"
        )
    else:
        start = "The first difference"
    for number, (here, there) in enumerate(zip_longest(found, expected, fillvalue="nothing")):
        if here != there:
            return f"{start} is parameter {number}: rank {rank} has {here}, rank 0 has {there}. {_REMEDY}"
    raise AssertionError("called with equal lists")
