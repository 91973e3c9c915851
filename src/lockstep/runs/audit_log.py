"""The audit log of a run: written in each step, read, compared with another one, and with the steps taken again.

audit.jsonl has one JSON object per line; nothing but a half line at its end is ever removed.

    begin        a run begins or is resumed: config, fingerprint, workers
    (no kind)    the facts of an update: see `lockstep.engine.audit`; up to 300 bytes
    checkpoint   a checkpoint is on the disk: its digest, which is of the whole state

Each line ends with a hash of itself and of the hash of the line before. So a line that was altered, removed or added
shows, unless all hashes behind it were made anew: whoever must rule that out signs the last one.

A step that is taken once more, by a run that is resumed, has a second line, with the same facts.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from lockstep.audit_facts import FACTS, NUM_MARKS, find_differing
from lockstep.checkpoint.atomic_write import remove_half_line
from lockstep.checkpoint.step_files import peek_manifest
from lockstep.errors import UsageError
from lockstep.events import CheckpointSaved, Event, RunStarted, StepAudited
from lockstep.runs.changes import find_changes
from lockstep.runs.directory import AUDIT_NAME, errors_of_writing

StepKey = tuple[int, str]
"""The number of a step in its run, from 1, and which of its updates."""

_CHAIN: Final = ',"chain":"'
_CHAIN_CHARACTERS: Final = 16


@final
class AuditLog:
    """A recorder that appends to the log of a run; `record` returns after the line was written to the page cache."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._path = run_dir / AUDIT_NAME
        self._config = config
        self._chain: str | None = None

    def record(self, event: Event) -> None:
        values = self._values_of(event)
        if values is None:
            return
        with errors_of_writing(self._path):
            if self._chain is None:
                self.take_over()
            body = json.dumps(values, separators=(",", ":"))
            self._chain = chain_of_line(self._chain or "", body)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f'{body[:-1]}{_CHAIN}{self._chain}"}}\n')

    def take_over(self) -> frozenset[tuple[str, int]]:
        with errors_of_writing(self._path):
            lines = remove_half_line(self._path)
        self._chain = split_line(lines[-1])[1] if lines else ""
        found = (_parse(line) for line in lines)
        return frozenset(_key_of_row(each) for each in found if "kind" not in each)

    def key_of(self, event: Event) -> tuple[str, int] | None:
        return (event.update, event.global_step) if isinstance(event, StepAudited) else None

    def _values_of(self, event: Event) -> dict[str, Any] | None:
        match event:
            case RunStarted():
                begun = {"kind": "begin", "cursor": [event.first_epoch, event.first_step]}
                return {**begun, "workers": event.world_size, "fingerprint": event.fingerprint, "config": self._config}
            case StepAudited():
                place = {"step": event.global_step, "cursor": [event.epoch, event.step]}
                update = {"update": event.update} if event.update else {}
                return {**place, **update, "workers": event.workers, **{name: event.facts[name] for name in FACTS}}
            case CheckpointSaved():
                digest = peek_manifest(event.path).get("digest")
                return {"kind": "checkpoint", "step": event.global_step, "digest": digest}
            case _:
                return None


def chain_of_line(before: str, body: str) -> str:
    digest = hashlib.sha256(f"{before}\n{body}".encode()).digest()
    return base64.urlsafe_b64encode(digest)[:_CHAIN_CHARACTERS].decode()


def split_line(line: str) -> tuple[str, str]:
    """Return a line without its hash, and that; an empty one where it has none."""
    body, found, end = line.rpartition(_CHAIN)
    return (f"{body}}}", end.removesuffix('"}')) if found else (line, "")


@final
@dataclass(slots=True)
class ReadLog:
    """What a log says; where a step was taken again, what its last line says."""

    config: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    """Of the last begin that a step came after, as is the config."""
    first_step: int = 0
    """The first step that was trained as the config says; 0 where there is none."""
    last_step: int = 0
    steps: dict[StepKey, Mapping[str, Any]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    """Of checkpoints, by the number of steps before them."""
    num_lines: int = 0
    problem: str = ""
    """The first thing in the log that cannot be, in words."""
    _begun: tuple[Mapping[str, Any], str] | None = None
    """The config and the conditions of the next step, where the run has begun or was resumed before it."""
    _is_other: bool = True
    """Whether the next step is the first with this config."""

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        match values.get("kind"):
            case "begin":
                self._begun = values["config"], values["fingerprint"]
            case "checkpoint":
                self.digests[values["step"]] = values["digest"]
            case _:
                self._add_step(number, (values["step"], values.get("update", "")), values)

    def _add_step(self, number: int, key: StepKey, values: Mapping[str, Any]) -> None:
        step, _ = key
        if self._begun is not None:
            config, self.fingerprint = self._begun
            self._is_other |= bool(describe_changes(self.config, config))
            self.config, self._begun = config, None
        if self._is_other:
            self._is_other, self.first_step = False, step
            self.steps = {known: each for known, each in self.steps.items() if known[0] < step}
        before = self.steps.get(key)
        odd = next((name for name in FACTS if before is not None and before[name] != values[name]), "")
        if odd:
            self.tell(f"Line {number} is of step {step}, which was taken before, with another {odd}.")
        if self.last_step and step > self.last_step + 1:
            self.tell(f"Line {number} is of step {step}, and no line is of step {self.last_step + 1}.")
        self.last_step = max(self.last_step, step)
        self.steps[key] = values

    def tell(self, problem: str) -> None:
        self.problem = self.problem or problem


def read_log(run_dir: Path) -> ReadLog:
    """Read the log of a run (local); UsageError where there is none."""
    found = ReadLog()
    before = ""
    try:
        file = (run_dir / AUDIT_NAME).open(encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise UsageError(
            f"{run_dir} has no audit log ({error.strerror}). Train with audit=true, which writes one. (LS824)"
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break  # its writer was killed, or is writing
            body, chain = split_line(line[:-1])
            if chain != chain_of_line(before, body):
                found.tell(f"Line {number} was altered, or does not belong behind the one before it.")
            before = chain
            try:
                found.add(number, _parse(body))
            except (AttributeError, KeyError, TypeError):
                found.tell(f"Line {number} is damaged.")
            found.num_lines = number
    return found


def _parse(line: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _key_of_row(values: Mapping[str, Any]) -> tuple[str, int]:
    return values.get("update", ""), values.get("step", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step that two logs, or a log and the step that is taken again, do not agree on."""

    global_step: int
    fact: str
    """What differs; of several facts the first cause."""
    where: tuple[str, ...] = ()
    """In which shards, or tensors, it may differ."""

    def __str__(self) -> str:
        named = ", ".join(self.where[:_MOST_NAMED]) or _UNNAMED.get(self.fact, "a shard")
        more = len(self.where) - _MOST_NAMED
        return f"step {self.global_step}: {_MEANINGS[self.fact].format(named + f' or {more} more' * (more > 0))}"


_MOST_NAMED: Final = 4
_UNNAMED: Final = {"state": "a parameter or buffer", "gradient": "a parameter"}
_MEANINGS: Final = {
    "options": "the optimizer had other options, such as another learning rate",
    "samples": "the samples of {} have other bits: other data, or a data set that does not give the same twice",
    "state": (
        "as it begins, {} has other bits, although all before it agrees: other code, as that which makes the model "
        "or writes between two steps, or a fault of memory or of the update"
    ),
    "loss": "from the same samples and parameters {} has another loss: other code, other hardware, or a fault of it",
    "gradient": (
        "the gradient of {} has other bits, although the losses agree: other code, other hardware, or a fault of it or "
        "of the sum over the workers"
    ),
    "digest": "after it the whole state has another digest, where no step has shown it: a part that is read in turn",
}


def find_difference(
    logged: Mapping[str, Any], found: Mapping[str, Any], num_shards: int, places: Mapping[str, Sequence[str]]
) -> Difference | None:
    """Return what a step has otherwise than its line says; None if they agree."""
    fact = next((name for name in FACTS if logged[name] != found[name]), None)
    if fact is None:
        return None
    names = places.get(fact, [f"shard {shard}" for shard in range(num_shards)] if fact in _OF_SHARDS else [])
    marks = find_differing(logged[fact], found[fact], len(names), NUM_MARKS.get(fact, 0))
    where = tuple(dict.fromkeys(names[place] for place in marks))
    return Difference(global_step=logged["step"], fact=fact, where=where)


_OF_SHARDS: Final = ("samples", "loss")


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two configs differ that changes results."""
    return [str(each) for each in find_changes(before, now, is_mid_epoch=False) if each.needs_allow]


def compare_logs(one: ReadLog, other: ReadLog) -> tuple[list[str], int, Difference | None]:
    """Return in what configs and conditions two runs differ, how many updates both have, and where they part first."""
    changes = describe_changes(one.config, other.config)
    if one.fingerprint != other.fingerprint:
        changes.append(f"the conditions were {one.fingerprint} and are now {other.fingerprint}")
    shared = [(logged, other.steps[key]) for key, logged in sorted(one.steps.items()) if key in other.steps]
    found = (find_difference(logged, theirs, num_shards_of(one), {}) for logged, theirs in shared)
    return changes, len(shared), next((each for each in found if each is not None), None)


def num_shards_of(log: ReadLog) -> int:
    return int(log.config["num_shards"]) * int(log.config["accumulate"])


def describe_log(run_dir: Path) -> str:
    """Return in a line what a run's log says of itself; empty where there is none."""
    if not (run_dir / AUDIT_NAME).exists():
        return ""
    log = read_log(run_dir)
    return f"up to step {log.last_step}, {'NOT INTACT: ' + log.problem if log.problem else 'intact'}"
