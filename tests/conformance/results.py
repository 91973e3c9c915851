"""What became of each test: the record, the JSON file, the table, and the difference from another run."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    test: str
    status: str
    """One of `STATUSES`."""
    conditions: str
    """The backend name that the skip conditions saw; the group itself was always of the backend under test."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was skipped, or the traceback of the first worker that failed."""
    log: str = ""
    """The end of what the workers of a failed test wrote."""

    @property
    def ran(self) -> bool:
        """Whether its workers were started: they are not where a skip condition is known beforehand."""
        return self.seconds > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All outcomes of one run."""

    backend: str
    world_size: int
    conditions: tuple[str, ...]
    start: str
    outcomes: tuple[Outcome, ...]

    def count(self, status: str) -> int:
        return Counter(outcome.status for outcome in self.outcomes)[status]


def after(outcome: Outcome, before: Outcome | None) -> Outcome:
    """Return the outcome of a test that was skipped `before`, under other conditions: all reasons, if skipped again."""
    if outcome.ran or before is None:
        return outcome
    return before if outcome.reason in before.reason else replace(outcome, reason=f"{before.reason} / {outcome.reason}")


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1) + "\n", "utf-8")


def load(path: Path) -> Results:
    fields = json.loads(path.read_text("utf-8"))
    outcomes = tuple(Outcome(**outcome) for outcome in fields.pop("outcomes"))
    return Results(**{**fields, "conditions": tuple(fields["conditions"])}, outcomes=outcomes)


def regressions(results: Results, baseline: Results) -> list[Outcome]:
    """Return the tests that failed here and did not fail in `baseline`."""
    failed_there = {outcome.test for outcome in baseline.outcomes if outcome.status == "failed"}
    return [outcome for outcome in results.outcomes if outcome.status == "failed" and outcome.test not in failed_there]


def table(results: Results) -> str:
    """Return the failures one by one, the skips by reason, and the counts."""
    failed = [outcome for outcome in results.outcomes if outcome.status == "failed"]
    reasons = Counter(outcome.reason for outcome in results.outcomes if outcome.status == "skipped")
    counts = ", ".join(f"{results.count(status)} {status}" for status in STATUSES)
    lines = [
        *(f"failed   {describe(outcome)}" for outcome in failed),
        *(f"skipped  {number:4d}  {reason}" for reason, number in reasons.most_common()),
        f"{results.backend}, world size {results.world_size}, conditions of {', '.join(results.conditions)}: {counts}",
    ]
    return "\n".join(lines)


def describe(outcome: Outcome) -> str:
    """Return one line that says how a test ended and why."""
    return f"{outcome.test}  [{outcome.conditions}, {outcome.seconds:.1f} s]  {summary(outcome.reason)}"


def summary(reason: str) -> str:
    """Return the line of a traceback that names the error, or the reason itself when it is no traceback."""
    lines = [line for line in reason.splitlines() if line.strip()]
    named = [line for line in lines if line[0] not in " \t" and _names_an_error(line)]
    return (named or lines or [""])[-1][:200]


def _names_an_error(line: str) -> bool:
    return line.partition(":")[0].endswith(("Error", "Exception", "Exit", "Interrupt"))


def in_order(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    return tuple(sorted(outcomes, key=lambda outcome: outcome.test))
