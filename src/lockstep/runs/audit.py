"""Taking steps of a run again, from its beginning or a checkpoint, and comparing them with its audit log."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from lockstep.checkpoint.step_files import find_checkpoints, global_step_of, peek_manifest
from lockstep.errors import CheckpointError, UsageError, counted
from lockstep.events import CheckpointSaved, Event, RunStarted, StepAudited
from lockstep.processes.stop_signals import StopRequest
from lockstep.runs.audit_log import Difference, ReadLog, find_difference, num_shards_of
from lockstep.runs.changes import ALL
from lockstep.runs.config import Config
from lockstep.runs.directory import read_starts
from lockstep.runs.fit import fit
from lockstep.runs.saving import Resume


@final
@dataclass(slots=True)
class Replay:
    """A recorder that compares the steps that are taken again with their lines, and stops at the first difference."""

    log: ReadLog
    last: int
    num_confirmed: int = 0
    last_confirmed: int = 0
    num_digests: int = 0
    difference: Difference | None = None
    fingerprint: str = ""
    is_read_in_turn: bool = False
    """[Note: audited in turn] in `lockstep.engine.audit`."""
    _places: Sequence[str] = ()
    """Of the state, in the last step."""
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def is_confirmed(self) -> bool:
        return self.difference is None and self.last_confirmed == self.last

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.fingerprint = event.fingerprint
            case StepAudited() if self.difference is None and event.global_step <= self.last:
                places = event.places.get("state", ())
                self.is_read_in_turn |= bool(self._places) and places != self._places
                self._places = places
                logged = self.log.steps.get((event.global_step, event.update))
                if logged is not None:
                    self.difference = find_difference(logged, event.facts, num_shards_of(self.log), event.places)
                    if self.difference is None:
                        self.num_confirmed, self.last_confirmed = self.num_confirmed + 1, event.global_step
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
    if found.is_confirmed:
        return f"confirmed {confirmed}"
    if found.difference is None:
        return f"confirmed {confirmed}, then the training ENDED, and the log has steps up to {found.last} (LS824)"
    lines = [f"confirmed {confirmed}, then NOT EQUAL at {found.difference} (LS824)"]
    if found.is_read_in_turn and found.difference.fact not in {"options", "samples"}:
        lines.append(
            "  each step looks at a part of a model of this size: it may have begun elsewhere, some steps before"
        )
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
    replay.log, replay.stop = ReadLog(), StopRequest()  # this listens to a trainer, which cannot be sent
    return replay
