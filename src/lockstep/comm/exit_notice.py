"""A worker that dies of an exception tells the others, so that their errors name it and not a lost connection."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, final, runtime_checkable

import torch.distributed as dist

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


@runtime_checkable
class Tells(Protocol):
    """A process group that can tell its other ranks something."""

    def fail(self, error: BaseException) -> None:
        """Tell them that this rank ends because of `error`."""


@runtime_checkable
class Leaves(Protocol):
    """A process group that can tell its other ranks that this one is done."""

    def leave(self) -> None:
        """Tell them that this rank makes no more calls."""


def send_exit_notices() -> None:
    """Tell the other ranks of every group of this process that it makes no more calls (local).

    Whoever still calls for it has an error at once, and not when the timeout is up. Groups of torch's own backends say
    nothing.
    """
    if dist.is_available() and dist.is_initialized():
        for group in tuple(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - torch has no public list of groups
            if isinstance(group, Leaves):
                group.leave()


def report_failure(error: BaseException) -> None:
    """Tell the other ranks of every group of this process that it ends because of `error` (local).

    What the first call says stays. Groups of torch's own backends, unless made with `check=True`, say nothing.
    """
    if dist.is_available() and dist.is_initialized():
        for group in tuple(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - torch has no public list of groups
            if isinstance(group, Tells):
                group.fail(error)


def report_uncaught_exceptions() -> None:
    """Have an exception that ends this process told to its peers; calling it again changes nothing (local)."""
    if not isinstance(sys.excepthook, _TellThenShow):
        sys.excepthook = _TellThenShow(sys.excepthook)


@final
class _TellThenShow:
    """An except hook that tells the peers and then does what the one before it does."""

    def __init__(self, previous: ExceptHook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report_failure(error)
        self._previous(kind, error, traceback)
