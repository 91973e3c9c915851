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

import torch

from lockstep.checkpoint.atomic_write import remove_half_line
from lockstep.checkpoint.step_files import find_checkpoints, global_step_of, peek_manifest
from lockstep.engine.audit import FACTS, NUM_MARKS, find_differing
from lockstep.errors import CheckpointError, UsageError, counted
from lockstep.events import CheckpointSaved, Event, RunStarted, StepAudited
from lockstep.processes.stop_signals import StopRequest
from lockstep.runs.changes import ALL, find_changes
from lockstep.runs.config import Config
from lockstep.runs.directory import AUDIT_NAME, errors_of_writing, read_starts
from lockstep.runs.fit import fit
from lockstep.runs.saving import Resume

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
    """Of the last begin, as is the config."""
    first_step: int = 0
    """The first step that was trained as the config says; 0 where there is none."""
    last_step: int = 0
    steps: dict[StepKey, Mapping[str, Any]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    """Of checkpoints, by the number of steps before them."""
    num_lines: int = 0
    problem: str = ""
    """The first thing in the log that cannot be, in words."""
    _is_other: bool = True
    """Whether the next step is the first with this config."""

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        match values.get("kind"):
            case "begin":
                self._is_other |= bool(describe_changes(self.config, values["config"]))
                self.config, self.fingerprint = values["config"], values["fingerprint"]
            case "checkpoint":
                self.digests[values["step"]] = values["digest"]
            case _:
                self._add_step(number, (values["step"], values.get("update", "")), values)

    def _add_step(self, number: int, key: StepKey, values: Mapping[str, Any]) -> None:
        step, _ = key
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
    path = run_dir / AUDIT_NAME
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise UsageError(
            f"{run_dir} has no audit log ({error.strerror}). Train with audit=true, which writes one. (LS824)"
        ) from error
    found = ReadLog()
    before = ""
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n") and number == len(lines):
            break  # its writer was killed
        body, chain = split_line(line[:-1])
        if chain != chain_of_line(before, body):
            found.tell(f"Line {number} was altered, or does not belong behind the one before it.")
        before = chain
        try:
            found.add(number, _parse(body))
        except (KeyError, TypeError):
            found.tell(f"Line {number} is damaged.")
        found.num_lines = number
    return found


def _parse(line: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
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
        "as it begins, {} has other bits, although all before it agrees: a fault of memory or of the update, or code "
        "that writes between two steps"
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


def compare_logs(one: ReadLog, other: ReadLog) -> tuple[list[str], Difference | None]:
    """Return in what configs and conditions two runs differ, and the first step at which they part."""
    changes = describe_changes(one.config, other.config)
    if one.fingerprint != other.fingerprint:
        changes.append(f"the conditions were {one.fingerprint} and are now {other.fingerprint}")
    shared = [(logged, other.steps[key]) for key, logged in sorted(one.steps.items()) if key in other.steps]
    found = (find_difference(logged, theirs, num_shards_of(one), {}) for logged, theirs in shared)
    return changes, next((each for each in found if each is not None), None)


def num_shards_of(log: ReadLog) -> int:
    return int(log.config["num_shards"]) * int(log.config["accumulate"])


@final
@dataclass(slots=True)
class Replay:
    """A recorder that compares the steps that are taken again with their lines, and stops at the first difference."""

    log: ReadLog
    last: int
    num_confirmed: int = 0
    num_digests: int = 0
    difference: Difference | None = None
    fingerprint: str = ""
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def is_confirmed(self) -> bool:
        return self.difference is None and self.num_confirmed > 0

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.fingerprint = event.fingerprint
            case StepAudited() if self.difference is None and event.global_step <= self.last:
                logged = self.log.steps.get((event.global_step, event.update))
                if logged is not None:
                    self.difference = find_difference(logged, event.facts, num_shards_of(self.log), event.places)
                    self.num_confirmed += self.difference is None
            case CheckpointSaved() if self.difference is None and event.global_step in self.log.digests:
                if peek_manifest(event.path).get("digest") != self.log.digests[event.global_step]:
                    self.difference = Difference(global_step=event.global_step, fact="digest")
                self.num_digests += self.difference is None
        if self.difference is not None or (isinstance(event, StepAudited) and event.global_step >= self.last):
            self.stop.make()


def describe_replay(log: ReadLog, found: Replay, run_dir: Path) -> str:
    """Return in words what steps that were taken again have shown."""
    also = f", and {counted(found.num_digests, 'digest')} of the whole state" if found.num_digests else ""
    confirmed = f"{counted(found.num_confirmed, 'update')}{also}"
    if found.difference is None:
        return f"confirmed {confirmed}" if found.is_confirmed else "no step was taken that the log knows (LS824)"
    lines = [f"confirmed {confirmed}, then NOT EQUAL at {found.difference} (LS824)"]
    if found.fingerprint != log.fingerprint:
        lines.append(f"  the conditions are other ones: {found.fingerprint}; the run had {log.fingerprint}")
    states = [each.get("code") or {} for each in read_starts(run_dir)[:1]]
    if states and states[0].get("commit"):
        lines.append(f"  the run's code was commit {states[0]['commit']}, with changes: {states[0].get('is_changed')}")
    return "\n".join(lines)


def choose_start(log: ReadLog, run_dir: Path, first: int) -> Path | None:
    """Return the newest checkpoint from which step `first` can be taken again; None for the beginning of the run."""
    for path in find_checkpoints(run_dir):
        number = global_step_of(path)
        if number >= first or number + 1 < log.first_step:
            continue
        found, logged = str(peek_manifest(path).get("digest")), log.digests.get(number)
        if logged not in {None, found}:
            raise CheckpointError(
                f"{path} has the digest {found[:16]}, and the log says that it was written with {str(logged)[:16]}: it "
                "was replaced. Put it away to begin with another checkpoint, or give --steps before it. (LS824)"
            )
        return path
    if log.first_step > 1:
        raise UsageError(
            f"Step {first} cannot be taken again: the log begins with step {log.first_step}, and {run_dir} has no "
            "checkpoint between them. Give --steps FIRST:LAST with steps after the oldest checkpoint. (LS824)"
        )
    return None


def take_again(
    config: Config, log: ReadLog, start: Path | None, last: int, device: torch.device, folder: Path
) -> Replay:
    """Take steps again, from a checkpoint or from the beginning up to `last`, in a new folder (collective)."""
    replay = Replay(log, last)
    resume = None
    if start is not None:
        resume = Resume(path=start, allowed=frozenset({ALL}), epoch_loss=0.0, epoch_weight=0.0)
    fit(config, device=device, run_dir=folder, recorder=replay, resume=resume, stop=replay.stop)
    replay.stop = StopRequest()  # it listens to a trainer, which cannot be sent
    return replay
