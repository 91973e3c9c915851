"""Who is waited for, and why: from what each worker did last and what the system knows of it. A pure module.

rank 0 waits for rank 1, rank 2 for rank 1   ->   rank 1, if it waits for nobody: what does it do?
rank 0 waits for rank 1, rank 1 for rank 0   ->   they are in different calls: show both lines
nobody waits                                 ->   whoever has done nothing for the longest time
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.doctor.activity import Activity
from lockstep.doctor.system import ProcessFacts
from lockstep.recording.file_format import GROUP_SHIFT

STALL_SECONDS: Final = 10.0
"""A worker that has begun and ended nothing for so long counts as standing still."""
_BUSY: Final = 0.5
"""With so much of a core a process computes."""
_FAR_LONGER: Final = 20
"""A shard that takes so many times as long as the longest one before does not just take long."""
_MOST_NAMES: Final = 8
_SWAPPED: Final = 0.1
"""With this part of its memory in the swap space, a process is slow because of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingProcess:
    pid: int
    facts: ProcessFacts
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    rank: int
    pid: int
    activity: Activity
    seconds: float
    facts: ProcessFacts | None
    """What the system knows of it; None for a process that has ended, or of another host."""
    is_here: bool = True
    """Whether it is of this host, so that the system would know of it."""
    cpu_share: float = 0.0
    how_ended: str = ""
    line: str = ""
    """The user's line where its main thread is; empty if that is not known."""
    loading: tuple[LoadingProcess, ...] = ()
    is_loading: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def has_ended(self) -> bool:
        return self.is_here and self.facts is None

    @property
    def failed(self) -> bool:
        """Whether it is gone without an end of its own, or with an exit code that is not 0."""
        is_bad = bool(self.how_ended) and not self.how_ended.endswith(" 0")
        return self.has_ended and (is_bad or (not self.activity.has_ended and not self.how_ended))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    kind: str
    """"running", "stalled", "ended", "failed" or "empty"."""
    text: str
    advice: str = ""
    ranks: tuple[int, ...] = ()
    is_certain: bool = False
    """Whether a job that stands still does so for a reason that no healthy one has: somebody is waited for, say."""
    is_starting: bool = False
    is_elsewhere: bool = False
    """Whether a worker that is not of this host, or not in the recording, is the cause."""


def awaited_by(workers: Sequence[WorkerState]) -> dict[int, frozenset[int]]:
    """Return for each rank that waits, for which ranks it does.

    A wait that is recorded names the rank. For a call without, as of a backend of torch's, it is the ranks of its group
    that have not begun the call of this number.
    """
    found: dict[int, frozenset[int]] = {}
    for worker in workers:
        activity = worker.activity
        awaited = activity.awaited - {-1}
        step = activity.reducing
        if not awaited and activity.call_number is None and step is not None:
            awaited = frozenset(other.rank for other in workers if other.activity.last_reduced < step)
        elif activity.awaited and not awaited:
            awaited = frozenset(other.rank for other in workers if not _is_waiting(other))
        elif not awaited and activity.call_number is not None:
            number = activity.call_number
            awaited = frozenset(
                other.rank
                for other in workers
                if other is not worker
                and _is_behind(other.activity.last_calls, number, is_default=number >> GROUP_SHIFT == 0)
            )
        if awaited:
            found[worker.rank] = awaited
    return found


def _is_waiting(worker: WorkerState) -> bool:
    activity = worker.activity
    return bool(activity.awaited) or activity.call_number is not None or activity.reducing is not None


def _is_behind(last_calls: Mapping[int, int], number: int, *, is_default: bool) -> bool:
    last = last_calls.get(number >> GROUP_SHIFT)
    return is_default if last is None else last < number


def diagnose(
    workers: Sequence[WorkerState], stall_seconds: float = STALL_SECONDS, elsewhere: Sequence[int] = ()
) -> Verdict:
    """Return what is the matter with a job, of whose ranks `elsewhere` nothing is recorded here."""
    if not workers:
        return Verdict(kind="empty", text="The recording holds no worker.")
    failed = [worker for worker in workers if worker.failed]
    if all(worker.has_ended for worker in workers):
        return _ended(workers, failed)
    if failed:
        text = " ".join(f"{capitalized(worker.name)} {_end_of(worker)}." for worker in failed)
        rest = [worker for worker in workers if not worker.has_ended]
        return Verdict(
            kind="failed",
            text=f"{text} {_others(rest)}",
            advice="See the output of that worker. The others go on without it, or end, if the launcher lets them.",
            ranks=tuple(worker.rank for worker in failed),
        )
    living = [worker for worker in workers if not worker.has_ended]
    awaited = awaited_by(living)
    culprits = [
        worker
        for worker in living
        if worker.rank not in awaited and any(worker.rank in ranks for ranks in awaited.values())
    ]
    stopped = [worker for worker in living if worker.facts is not None and worker.facts.is_stopped]
    if stopped:
        return _stalled(stopped, living, awaited)
    if max(worker.seconds for worker in living) < stall_seconds:
        steps = [worker.activity.step for worker in living]
        where = f"step {steps[0]}" if len(set(steps)) == 1 else f"steps {min(steps)} to {max(steps)}"
        who = "The worker is" if len(living) == 1 else f"All {len(living)} workers are"
        return Verdict(kind="running", text=f"{who} in {where}; nobody stands still.")
    if elsewhere and all(_is_waiting(worker) for worker in culprits or living):
        return _waits_elsewhere(living, elsewhere)
    if culprits:
        return _stalled(culprits, living, awaited)
    if awaited and all(worker.rank in awaited for worker in living):
        return _apart(living)
    if len(living) > 1 and all(_is_waiting(worker) for worker in living):
        return _in_one_call(living)
    longest = max(living, key=lambda worker: worker.seconds)
    return _stalled([longest], living, awaited)


def _in_one_call(living: Sequence[WorkerState]) -> Verdict:
    first = living[0]
    all_in = "All ranks are in the same call, which does not end"
    if all(_is_being_connected(worker.activity) for worker in living):  # the user may have made no call
        all_in = "All ranks wait for each other, and nothing arrives"
    return Verdict(
        kind="stalled",
        text=f"{all_in}: {_others(living)}",
        advice=(
            "Their messages do not arrive: look at the network between the hosts, or the link between the devices "
            "(`lockstep devices --test`)."
        ),
        is_certain=first.seconds > 0,
    )


def _is_being_connected(activity: Activity) -> bool:
    return -1 in activity.awaited and activity.call_number is None and activity.reducing is None


def _waits_elsewhere(living: Sequence[WorkerState], elsewhere: Sequence[int]) -> Verdict:
    one_of = "rank" if len(elsewhere) == 1 else "one of the ranks"
    names = ", ".join(map(str, elsewhere[:_MOST_NAMES])) + (", ..." if len(elsewhere) > _MOST_NAMES else "")
    is_are = "is" if len(elsewhere) == 1 else "are"
    seconds = max(worker.seconds for worker in living)
    return Verdict(
        kind="stalled",
        text=(
            f"All ranks of this host wait for {one_of} {names}, which {is_are} on another host or did not begin. "
            f"For {seconds:.0f} s nothing was recorded here. {_others(living)}"
        ),
        advice="See the message of that host, or run `lockstep doctor` there.",
        ranks=tuple(elsewhere) if len(elsewhere) == 1 else (),
        is_certain=True,
        is_elsewhere=True,
    )


def _ended(workers: Sequence[WorkerState], failed: Sequence[WorkerState]) -> Verdict:
    step = max(worker.activity.step for worker in workers)
    if not failed:
        return Verdict(kind="ended", text=f"The job has ended, after {step} steps.")
    known = [worker for worker in failed if worker.how_ended] or failed
    if all(not worker.how_ended for worker in failed):
        text = (
            f"All workers and the launcher are gone, and none ended its recording: they were killed together, or the "
            f"host stopped. The last step was {step}."
        )
        advice = (
            "Look for the kernel's out-of-memory killer (dmesg, journalctl -k) and for limits of the job's scheduler."
        )
        return Verdict(kind="failed", text=text, advice=advice)
    first = known[0]
    line = f", at {first.activity.line}" if first.activity.line else ""
    text = (
        f"The job has ended: {first.name} {_end_of(first)}, in step {first.activity.step}; it did this last: "
        f"{first.activity.doing}{line}."
    )
    return Verdict(
        kind="failed", text=text, advice="See the output of that worker.", ranks=tuple(each.rank for each in known)
    )


def _end_of(worker: WorkerState) -> str:
    if not worker.how_ended:
        return "is gone, and nobody saw how it ended"
    return worker.how_ended if worker.how_ended.startswith("ended") else f"was {worker.how_ended}"


def _stalled(
    culprits: Sequence[WorkerState], living: Sequence[WorkerState], awaited: Mapping[int, frozenset[int]]
) -> Verdict:
    texts, advice = zip(*(_cause(worker) for worker in culprits), strict=True)
    others = [worker for worker in living if worker.rank in awaited]
    return Verdict(
        kind="stalled",
        text=" ".join((*texts, _others(others))).strip(),
        advice=" ".join(dict.fromkeys(advice)),
        ranks=tuple(worker.rank for worker in culprits),
        is_starting=all(worker.activity.is_starting for worker in culprits),
        is_certain=bool(awaited) or any(_never_by_itself(worker) for worker in culprits),
    )


def _never_by_itself(worker: WorkerState) -> bool:
    """Return whether a worker for which nobody waits stands still all the same: not one that just computes for long."""
    facts = worker.facts
    if facts is None:
        return False
    if facts.is_stopped or facts.call == "read of its input" or facts.state == "in disk sleep":
        return True
    if worker.seconds > _FAR_LONGER * worker.activity.longest_shard > 0:
        return True
    return worker.activity.is_inside and worker.cpu_share < _BUSY and facts.state != "running"


def _cause(worker: WorkerState) -> tuple[str, str]:
    facts, name = worker.facts, capitalized(worker.name)
    where = f" at {worker.line}" if worker.line else ""
    since = f" For {worker.seconds:.0f} s nothing of it was recorded."
    if facts is None:
        return f"{name} is on another host; it {worker.activity.doing}.{since}", "Run `lockstep doctor` on that host."
    if facts.is_stopped:
        return (
            f"{name} is {facts.state}: it runs no instruction.{since}",
            f"Continue it with: kill -CONT {worker.pid}. Ctrl-Z, a debugger, or a scheduler stops processes so.",
        )
    if facts.state == "in disk sleep":
        call = f" in {facts.call}" if facts.call else ""
        return (
            f"{name} is in disk sleep{call}{where}: its disk or network file system does not answer.{since}",
            "Look at the file system (df, dmesg). The process ends or continues only when the system call returns.",
        )
    swapped = ""
    if facts.swapped_bytes > _SWAPPED * max(facts.memory_bytes, 1):
        swapped = f" {facts.swapped_bytes / 2**30:.1f} GiB of it are swapped out: the host has too little memory."
    if worker.is_loading:
        text, advice = _loading_cause(worker)
        return f"{name} {text}.{since}{swapped}", advice
    if facts.call == "read of its input":
        return f"{name} waits for input{where}.{since}", "Remove input(), breakpoint() and the like from the script."
    if worker.cpu_share >= _BUSY or facts.state == "running":  # a busy machine may give it little
        return (
            f"{name} uses {worker.cpu_share:.0%} of a core{where}; it {worker.activity.doing}.{since}{swapped}",
            "If that line takes so long, give it time; if it is a loop, look for why it does not end.",
        )
    call = f", in the system call {facts.call}" if facts.call else ""
    meaning = {"futex": " (it waits for a lock or another thread)"}.get(facts.call, "")
    return (
        f"{name} is {facts.state}{where}{call}{meaning}; it {worker.activity.doing}.{since}{swapped}",
        "It must come from there to the call in which the others wait; --stacks shows how it came there.",
    )


def _loading_cause(worker: WorkerState) -> tuple[str, str]:
    doing = worker.activity.doing if worker.activity.is_loading else "waits for its data loader"
    at = [each for each in worker.loading if each.line]
    stopped = [each for each in worker.loading if each.facts.is_stopped]
    if stopped:
        return (
            f"{doing}, whose process {stopped[0].pid} is {stopped[0].facts.state}",
            f"Continue it with: kill -CONT {stopped[0].pid}.",
        )
    if at:
        first = at[0]
        call = f", in {first.facts.call}" if first.facts.call else ""
        return (
            f"{doing}, whose process {first.pid} is at {first.line} ({first.facts.state}{call})",
            "The data set takes long there, or does not return.",
        )
    if worker.line:
        facts = worker.facts
        call = f", in {facts.call}" if facts is not None and facts.call else ""
        busy = f", and uses {worker.cpu_share:.0%} of a core" if facts is not None and facts.state == "running" else ""
        return f"{doing}: it is at {worker.line}{call}{busy}", "The data set takes long there, or does not return."
    return doing, "Look at the data set: see the stacks with --stacks."


def _apart(living: Sequence[WorkerState]) -> Verdict:
    """Return the verdict on ranks that wait for each other, each in another call or at another line."""
    lines = "; ".join(
        f"rank {worker.rank} is in {worker.activity.call}" + (f" at {_line_of(worker)}" if _line_of(worker) else "")
        for worker in living
    )
    return Verdict(
        kind="stalled",
        text=f"The ranks wait for each other, in different calls or at different lines: {lines}.",
        advice="Look for a branch or a loop that differs between ranks: all must make the same calls in one order.",
        is_certain=True,
    )


def _line_of(worker: WorkerState) -> str:
    return worker.line or worker.activity.line


def _others(workers: Sequence[WorkerState]) -> str:
    by_doing: dict[str, list[WorkerState]] = {}
    for worker in workers:
        by_doing.setdefault(worker.activity.doing, []).append(worker)
    return " ".join(_same(doing, doers) for doing, doers in by_doing.items())


def _same(doing: str, doers: Sequence[WorkerState]) -> str:
    ranks = ", ".join(str(worker.rank) for worker in doers)
    lines = dict.fromkeys(_line_of(worker) for worker in doers if worker.facts is not None and _line_of(worker))
    return f"{'Ranks' if len(doers) > 1 else 'Rank'} {ranks}: {doing}{', at ' if lines else ''}{' and '.join(lines)}."


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]
