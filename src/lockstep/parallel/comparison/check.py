"""A rank check: something that the ranks of a wrapper do or have alike, in one backward after the other.

    backward begins     `begin`       what is there already; `forget_begin` if that backward accumulated nothing
    backward ends       `end_local`   what it has accumulated, where nothing is reduced
    before a message    `look_at`     gradients of this rank alone
    before the status   `fill_in`     fields of the status that are the check's own
                        `number`      one number for what must be the same on all ranks
    numbers differ      `record`      what the number stands for; every rank gets that of every rank
                        `judge`       an error, the same on all ranks, or a warning, or nothing
    after that          `reset`       nothing was done since the last reduction

To add one, derive from `Check`, say what turns it off (`scope`), and put it into the list in `RankComparison`. Nothing
else has to know it. The numbers of all checks are one number in the status: [Note: one number to compare] in
`lockstep.reduce.status`. So `number` must cost next to nothing, and `record` and `judge` may take long.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from torch import nn

from lockstep.errors import LockstepError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import GroupStatus, RankStatus
from lockstep.reduce.buckets import Bucket

_Object = TypeVar("_Object")
SWITCH = "If that is meant, wrap with compare=False."
"""What ends an alarm of a check that is not of `Scope.CALLS`."""


class Scope(Enum):
    """Where a check compares the ranks."""

    CALLS = auto()
    """Always: ranks that differ here would wait for one another, or get each other's gradients."""
    RUN = auto()
    """Unless the user has wrapped with `compare=False`."""
    REPLICAS = auto()
    """Nor with a communication hook after which the ranks may have other gradients."""


@dataclass(frozen=True, slots=True)
class Lines:
    forward: str
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    number: int
    status: GroupStatus


class Check:
    """Does nothing at each of its moments, until a subclass does; all but `judge` are local."""

    scope = Scope.CALLS
    is_compared = True
    """Whether the ranks compare it now: by its scope, and not while ranks may have run out of inputs."""

    def know(self, named: Sequence[tuple[str, nn.Parameter]], module: nn.Module | None) -> None:
        """Take note of the parameters that the model has from now on."""

    def begin(self) -> None:
        """Look at what there is: the first backward since a reduction begins, or another one."""

    def forget_begin(self) -> None:
        """Forget the last `begin`: that backward has accumulated nothing."""

    def end_local(self) -> None:
        """Look at what a backward has accumulated that is not reduced."""

    def look_at(self, bucket: Bucket) -> None:
        """Look at the gradients of this rank, which are about to be reduced."""

    def fill_in(self, status: RankStatus) -> RankStatus:
        """Return the status with what this check sends in it; called before `number`."""
        return status

    def number(self) -> int:
        """Return a number for what must be the same on all ranks."""
        return 0

    def record(self) -> Any:
        """Return what the number stands for, to be sent to all ranks; this may take long."""
        return None

    def judge(self, found: Sequence[Any], lines: Sequence[Lines]) -> LockstepError | None:  # noqa: ARG002 - for those that do
        """Look at the records of all ranks, in rank order; return what all ranks raise, or warn of it on all."""
        return None

    def reset(self, reduction: Reduced | None) -> None:
        """Begin anew after a reduction; None where ranks may have done other things: after an error, or `join`."""


def others_than_first(found: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    return ((rank, record) for rank, record in enumerate(found[1:], start=1) if record != found[0])


def find_objects(kind: type[_Object]) -> list[_Object]:
    """Return the objects of a class in this process; it takes some milliseconds, and up to 0.1 s where there are many.

    By their types, of which there are few; not by `isinstance`, which runs the code of objects that stand for others.
    """
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds] if kinds else []


def warn_once(text: str, start: str, *, if_meant: str = "If that is meant") -> None:
    """Warn at the user's line, and say how to leave the warning out; `start` begins the text, a code ends it."""
    assert text.startswith(start)
    said, _, code = text.rpartition(" ")
    warnings.warn(
        f'{said} {if_meant}, ignore this warning: warnings.filterwarnings("ignore", message="{start}"). It is given '
        f"once. {code}",
        stacklevel=stacklevel_of_user(),
    )
