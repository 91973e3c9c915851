"""What came of a script on its ranks, from what each of them reported. Pure: values in and out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import torch
from tests.mistakes.script import SAME, Script
from torch import Tensor, nn

LIMIT_SECONDS = 45.0
"""Within this time every rank must be told of a mistake, on a slow and busy machine; nothing waits longer than 10 s."""


class Verdict(StrEnum):
    RIGHT = "RIGHT"
    """Every rank has the right result."""
    TOLD = "TOLD"
    """Every rank got an error or a warning that explains the mistake."""
    PARTLY = "PARTLY"
    """Some rank got no message, or one about something else."""
    SILENT = "SILENT"
    """The result is wrong, and no rank got a message."""
    HANG = "HANG"
    """A rank was not done in time, and no rank got a message."""
    FALSE_ALARM = "FALSE ALARM"
    """A script without a mistake got a message."""


GOOD = frozenset({Verdict.RIGHT, Verdict.TOLD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An error, a warning or a line of the log."""

    kind: str
    """Its class, or the level of the log."""
    text: str
    """What it says."""
    seconds: float
    """When it came, after the script had begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    messages: tuple[Message, ...]
    """What the user of this rank got to read, in order."""
    result: list[Tensor] | None
    """What the script returned; None if it did not."""
    end: str
    """How its process ended: `"returned"`, `"raised"`, `"exited"`, `"exit code -6"`, `"not done"`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a script."""

    verdict: Verdict
    """The verdict."""
    reports: tuple[Report, ...]
    """What the ranks reported."""

    @property
    def seconds(self) -> float:
        """After how many seconds the last rank got its first message; 0 without messages."""
        return max((report.messages[0].seconds for report in self.reports if report.messages), default=0.0)


def judge(script: Script, reports: Sequence[Report]) -> Outcome:
    return Outcome(verdict=_verdict(script, reports), reports=tuple(reports))


def tensors_of(result: object) -> list[Tensor]:
    """Return the tensors of what a script returned."""
    if isinstance(result, nn.Module):
        return [tensor.detach().clone() for tensor in (*result.parameters(), *result.buffers())]
    if isinstance(result, Tensor):
        return [result.detach().clone()]
    assert isinstance(result, list)
    return [tensor for each in result for tensor in tensors_of(each)]


def _verdict(script: Script, reports: Sequence[Report]) -> Verdict:
    hangs = any(report.end == "not done" for report in reports)
    has_messages = any(report.messages for report in reports)
    is_right = _is_right(script, reports)
    if script.cause is None:
        if has_messages:
            return Verdict.FALSE_ALARM
        return Verdict.RIGHT if is_right else Verdict.HANG if hangs else Verdict.SILENT
    if is_right:
        return Verdict.RIGHT
    told = [_is_told(report, script.cause) for report in reports]
    could = [not (script.ends_early and report.end in {"returned", "exited"}) for report in reports]
    if any(told) and not hangs and all(is_told or not can_be for is_told, can_be in zip(told, could, strict=True)):
        return Verdict.TOLD
    if has_messages or any(report.end.startswith("exit code") for report in reports):
        return Verdict.PARTLY
    return Verdict.HANG if hangs else Verdict.SILENT


def _is_told(report: Report, cause: str) -> bool:
    return any(
        message.seconds <= LIMIT_SECONDS
        and re.search(cause, f"{message.kind}: {message.text}", re.IGNORECASE | re.DOTALL)
        for message in report.messages
    )


def _is_right(script: Script, reports: Sequence[Report]) -> bool:
    results = [report.result for report in reports if report.end == "returned" and report.result is not None]
    if script.right is None or len(results) < len(reports):
        return False
    first = results[0]
    if not all(_are_close(first, other, exactly=True) for other in results):
        return False
    return script.right == SAME or not callable(script.right) or _are_close(first, tensors_of(script.right()))


def _are_close(ours: list[Tensor], theirs: list[Tensor], *, exactly: bool = False) -> bool:
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return False
    tolerance = 0.0 if exactly else 1e-5
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(ours, theirs, strict=True)
    )
