"""What a worker did last, from its events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lockstep.recording.file_format import GROUP_SHIFT, EventKind, StepPhase
from lockstep.recording.reading import FileEvents, OneEvent

_TURNS: Final = (EventKind.FORWARD, EventKind.GENERATION)
_WITHIN_A_TURN: Final = (EventKind.SHARD, EventKind.BACKWARD, EventKind.REDUCING, EventKind.BUCKET, EventKind.LOADING)
"""What has ended, with an error, when the next forward of a wrapper, or another set of workers, begins."""
_OUTSIDE: Final = (StepPhase.IDLE, StepPhase.CLOSED)
_FEWEST_SHARDS: Final = 4
"""From so many shards it is known how long one takes."""
_OWN_WORK: Final = (EventKind.SHARD, EventKind.LOADING, EventKind.EVALUATING)
_SAVING: Final = {
    "wait": "waits until a checkpoint is written",
    "copy": "copies the state to save it",
    "save": "writes a checkpoint",
}
PHASE_NAMES: Final[dict[int, str]] = {
    StepPhase.IDLE: "between two steps",
    StepPhase.PREPARE: "prepares a step",
    StepPhase.COMPUTE: "computes",
    StepPhase.REDUCE: "reduces gradients",
    StepPhase.AGREE: "agrees on the step",
    StepPhase.COMMIT: "updates the model",
    StepPhase.CLOSED: "has closed its trainer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    step: int = 0
    doing: str
    """In words, after the name of the worker: "computes shard 3"."""
    since_ns: int
    awaited: frozenset[int] = frozenset()
    """The ranks for which it waits; -1 in it for any rank; empty if it does not wait, or it is not known."""
    call: str = ""
    """The call of a group that it is in, as ranks compare it; empty if it is in none."""
    call_number: int | None = None
    """Number of that call, the same on all ranks of the group; None if it is in none."""
    last_calls: Mapping[int, int] = field(default_factory=dict)
    line: str = ""
    """The line of the user's code that made the call; empty if it was not recorded."""
    is_loading: bool = False
    reducing: int | None = None
    """The step of whose gradients it waits; None if it does not."""
    last_reduced: int = -1
    """The last step of which it has begun to wait for the gradients; -1 for none."""
    is_inside: bool = True
    """Whether it is in a step, an evaluation, a save or a call, and not in the user's code around these."""
    is_starting: bool = False
    longest_shard: float = 0.0
    """If it computes a shard: seconds of the longest one after the first step; 0 if there were too few."""
    has_ended: bool = False


def last_activity(file: FileEvents) -> Activity:
    open_events = _really_under_way(file)
    waits = [each for each in open_events if each.kind == EventKind.WAITING]
    calls = [each for each in open_events if each.kind == EventKind.COLLECTIVE]
    own = [
        each
        for each in open_events
        if each.kind in _OWN_WORK or (each.kind == EventKind.SAVING and each.text != "write")
    ]
    reducing = [each for each in open_events if each.kind == EventKind.REDUCING]
    last_reduced = file.last(EventKind.REDUCING)
    phase = file.last(EventKind.PHASE)
    doing, since = _describe(file, waits, calls, own)
    if reducing and not calls and not waits:
        buckets = [each for each in open_events if each.kind == EventKind.BUCKET]
        doing = _reducing_in_words(buckets)
    last_calls: dict[int, int] = {}
    table = file.table
    for index in table["index"][table["kind"] == EventKind.COLLECTIVE].tolist():
        last_calls[index >> GROUP_SHIFT] = index
    call = calls[0] if calls else None
    return Activity(
        step=int(table["step"][-1]) if len(table) else 0,
        doing=doing,
        since_ns=since,
        awaited=frozenset(each.index for each in waits),
        call=call.text if call is not None else waits[-1].text if waits else "",
        call_number=None if call is None else call.index,
        last_calls=last_calls,
        line=_line_after(file, waits[-1]) if waits else "",
        is_loading=bool(own) and own[-1].kind == EventKind.LOADING and not waits,
        reducing=reducing[-1].step if reducing else None,
        last_reduced=-1 if last_reduced is None else last_reduced.step,
        is_inside=bool(own or calls or waits or reducing)
        or any(each.kind == EventKind.BACKWARD for each in open_events)
        or (phase is not None and phase.index not in _OUTSIDE),
        is_starting=_is_starting(file),
        longest_shard=_longest_shard(file) if own and own[-1].kind == EventKind.SHARD else 0.0,
        has_ended=bool(file.header.ended_ns),
    )


def _longest_shard(file: FileEvents) -> float:
    rows = file.table[(file.table["kind"] == EventKind.SHARD) & (file.table["end"] > 0)]
    rows = rows[rows["step"] > rows["step"].min()] if len(rows) else rows  # those of the first step load libraries
    return float((rows["end"] - rows["begin"]).max()) / 1e9 if len(rows) >= _FEWEST_SHARDS else 0.0


def _is_starting(file: FileEvents) -> bool:
    table = file.table
    if len(table) and not (table["kind"] == EventKind.STARTED).any():  # the oldest events are gone
        return False
    updates = (table["kind"] == EventKind.PHASE) & (table["index"] == StepPhase.COMMIT)
    backwards = (table["kind"] == EventKind.BACKWARD) & (table["end"] > 0)
    return not bool((updates | backwards).any())


def _really_under_way(file: FileEvents) -> list[OneEvent]:
    """Return the events that have not ended, without those of which an error, or nobody's wait, has hidden the end."""
    turns = [each.number for kind in _TURNS if (each := file.last(kind)) is not None]
    last_turn = max(turns, default=-1)
    table = file.table
    ended = table["index"][(table["kind"] == EventKind.COLLECTIVE) & (table["end"] > 0)]
    last_ended: dict[int, int] = {}
    for index in ended.tolist():
        last_ended[index >> GROUP_SHIFT] = max(index, last_ended.get(index >> GROUP_SHIFT, -1))
    return [
        each
        for each in file.under_way()
        if (each.kind not in _WITHIN_A_TURN or each.number > last_turn)
        and (each.kind != EventKind.COLLECTIVE or each.index > last_ended.get(each.index >> GROUP_SHIFT, -1))
    ]


def _reducing_in_words(buckets: list[OneEvent]) -> str:
    if not buckets:
        return "waits for the gradients of the others"
    first = buckets[0]
    return f"waits for bucket {first.index + 1} of the gradients" + (f" ({first.text})" if first.text else "")


def _describe(file: FileEvents, waits: list[OneEvent], calls: list[OneEvent], own: list[OneEvent]) -> tuple[str, int]:
    if waits:
        who = "any rank" if waits[-1].index < 0 else f"rank {waits[-1].index}"
        return f"waits for {who} in {waits[-1].text}", (calls[0] if calls else waits[-1]).begin
    if own and (not calls or own[-1].begin > calls[-1].begin):
        return _name(own[-1]), own[-1].begin
    if calls:
        return f"is in {calls[-1].text}", calls[-1].begin
    return _between(file)


def _name(event: OneEvent) -> str:
    match event.kind:
        case EventKind.SHARD:
            return f"computes shard {event.index}"
        case EventKind.LOADING:
            return f"waits for its data loader, for step {event.index} of epoch {event.size}"
        case EventKind.SAVING:
            return _SAVING.get(event.text, "saves")
        case _:
            return "evaluates"


def _between(file: FileEvents) -> tuple[str, int]:
    """Return what a worker does while no event is under way: what came last."""
    table = file.table
    if not len(table):
        return "has recorded nothing", file.header.opened_ns
    if file.header.ended_ns:
        return "has ended", file.header.ended_ns
    since = int(max(table["begin"][-1], table["end"].max()))
    last = file.event(-1)
    if last.kind == EventKind.PHASE:
        return PHASE_NAMES.get(last.index, "computes"), since
    phase = file.last(EventKind.PHASE)
    forward = file.last(EventKind.FORWARD)
    if phase is None and forward is None:
        return "has not begun its first step: it imports modules, or makes its data or model", since
    if forward is not None and last.kind == EventKind.FORWARD:
        return "computes a forward, or what follows it", since
    if phase is not None:
        return PHASE_NAMES.get(phase.index, "computes"), since
    return "is not in a call of Lockstep", since


def _line_after(file: FileEvents, wait: OneEvent) -> str:
    for position in range(len(file.table) - 1, -1, -1):
        row = file.table[position]
        if row["number"] <= wait.number:
            return ""
        if row["kind"] == EventKind.LINE:
            return file.event(position).text
    return ""
