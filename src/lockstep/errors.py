"""Every exception that Lockstep raises, except `ValueError` and `TypeError` for bad arguments.

The tree:

    LockstepError                    RuntimeError
    +-- UsageError                   the command line prints the message alone and exits with 2
    |   +-- ConfigError              a config file or one of its values
    |   +-- DataFileError            a data file that is missing, truncated or has other content than expected
    |   +-- DeviceError              devices that do not exist, are not free, or are too few
    |   +-- RunDirectoryError        a run directory that exists, or cannot be made
    |   +-- CheckpointError          a checkpoint that cannot be written or read
    |       +-- LaterFormatError     a checkpoint that a later version of Lockstep has written
    +-- GroupError                   process groups: set-up, tear-down, use before set-up
    |   +-- CollectiveMismatchError  ranks make different calls
    |   +-- CollectiveTimeoutError   a call is not complete in time, and no rank was lost
    |   +-- PeerLostError            a rank was killed, failed, or exited while others need it
    +-- ParameterMismatchError       ranks wrap different models
    +-- ReductionError               gradients arrived in a way that cannot be reduced correctly
    +-- LossError                    a loss that is not a finite scalar, or a weight that is not positive
    +-- UnusableStateError           an update failed in the middle, so a trainer needs a checkpoint to continue
    +-- PeerFailedError              another worker raised an error in a collective operation
    +-- WorkerFailedError            a worker raised, was killed, or returned a value that cannot be sent

A data-loading process or a worker sends its exception to its parent, which makes it again from its message. So each
class here can be made from one string.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


def counted(number: int, noun: str) -> str:
    """Return "1 worker" or "3 workers", for messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clause(message: object) -> str:
    """Return a message as a part of a sentence: without its full stop, which may stand before a code."""
    return re.sub(r"\.?((?: \(LS\d{3}\))*)$", r"\1", str(message))


def without_code(message: object) -> str:
    """Return a message without the codes at its end, to say more after it and end with another one."""
    return re.sub(r"(?: \(LS\d{3}\))+$", "", str(message))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or what it was raised in the handling of, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def missing_extra(error: ImportError) -> Exception:
    """Return what to raise for a package that could not be imported: an error that names the extra which brings it."""
    package = (error.name or "").partition(".")[0]
    found = [(extra, what) for extra, (what, packages) in _EXTRAS.items() if package in packages]
    if not found:
        return error
    [(extra, what)] = found
    return UsageError(
        f"{what} needs the package {package}, which is not installed: pip install 'lockstep-ddp[{extra}]'. (LS822)"
    )


def describe_exception(error: BaseException) -> str:
    """Return its class and its text, for a message; also where the text cannot be made, or is not to be encoded."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        text = "<its text cannot be made>"
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


_EXTRAS = {
    "train": ("The command lockstep, or a config,", {"PIL", "pydantic", "pydantic_core", "rich", "ruamel", "typer"}),
    "report": ("report.html", {"bokeh", "jinja2"}),
}
"""By its name in pyproject.toml: what an extra is for, and its packages as they are imported."""


class LockstepError(RuntimeError):
    """Root of the tree."""


class UsageError(LockstepError):
    """A mistake that the user can correct without reading a traceback."""


class ConfigError(UsageError):
    """A config file, or a value in it, is not usable."""


class DataFileError(UsageError):
    """A data file is missing, truncated or has other content than expected."""


class DeviceError(UsageError):
    """The requested devices do not exist, or are not free."""


class RunDirectoryError(UsageError):
    """A run directory exists already, is missing, or cannot be made."""


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read."""


class LaterFormatError(CheckpointError):
    """A checkpoint of a later format than this Lockstep knows; it is not damaged."""


class GroupError(LockstepError):
    """A process group cannot be set up, or is used before it is."""


class CollectiveMismatchError(GroupError):
    """Ranks of a group make different calls, or the same call with different arguments."""

    calls: Mapping[int, bytes] = MappingProxyType({})
    """The call of each rank, by its number in the default group, as far as it is known."""


class CollectiveTimeoutError(GroupError):
    """A collective or a message is not complete in time, although no rank was lost."""


class PeerLostError(GroupError):
    """A rank was killed, failed with an exception, or exited while others need it.

    Attributes:
        rank: Number of that rank in the default group, also in errors of a subgroup; -1 when it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> "tuple[type[PeerLostError], tuple[str, int]]":
        """Keep the rank when the error is sent to another process."""
        return type(self), (str(self), self.rank)


class ParameterMismatchError(LockstepError):
    """Two ranks wrap models that differ."""


class ReductionError(LockstepError):
    """Gradients arrived in a way that cannot be reduced correctly."""


class LossError(LockstepError):
    """A loss function returned something that cannot be trained on."""


class UnusableStateError(LockstepError):
    """An update failed in the middle. Parameters and optimizer are inconsistent, so a state must be loaded."""


class PeerFailedError(LockstepError):
    """Another worker raised an error in a collective operation, so this one cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """How one worker failed."""

    rank: int
    reason: str
    """One line: the exception, the signal or the exit code."""
    traceback: str
    """The worker's traceback; empty if it ended without one."""
    error: BaseException | None
    """The exception; None if there was none or it could not be pickled."""


class WorkerFailedError(LockstepError):
    """A worker raised, was killed, or returned a value that cannot be sent.

    Attributes:
        failures: Every failure seen, the first in time (the cause) first.
    """

    def __init__(self, message: str, failures: tuple[WorkerFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    @property
    def rank(self) -> int:
        """Rank of the worker that failed first, or -1 when it is not known."""
        return self.failures[0].rank if self.failures else -1
