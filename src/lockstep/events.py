"""Events of a run, and the recorders that receive them.

A progress bar or a metrics file is a recorder, passed in from outside. Code in which something happens calls
`recorder.record(event)`.

In events, epochs and steps are counted from 0: `epoch` and `step` are those that the event is of, and a step is one
within its epoch. `global_step` is the number of updates since the run began, that of a finished step included. A
`generation` is the number of a set of workers, from 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Training begins, or is resumed."""

    world_size: int
    device: str
    num_shards: int
    num_parameters: int
    """Trainable parameters, in elements."""
    num_train_samples: int | None
    """Samples of the training set; None for a stream whose end is not known."""
    num_test_samples: int | None
    """Samples of the test set; 0 without one, and None for a stream whose end is not known."""
    first_epoch: int
    num_epochs: int
    num_steps: int | None
    """Steps of one epoch; None where they are not known."""
    first_step: int = 0
    """First step within the first epoch; greater than 0 if a run is resumed in the middle of an epoch."""
    fingerprint: str = ""
    """What its bits depend on besides code and data, in a line."""
    patch: str = ""
    """The file with the changes of the code that are not committed; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """One optimizer update is done on every worker."""

    epoch: int
    step: int
    global_step: int
    loss: float
    """Weighted mean loss of the global batch."""
    weight: float = 1.0
    """Weight of this step in the mean of the epoch; 0 for a step that was skipped."""
    learning_rate: float | None = None
    """Learning rate of the first parameter group in this step; None where it is on a device."""
    grad_norm: float | None = None
    """2-norm of the gradient before it is clipped; None if it was not computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAudited:
    """The bits of an update that is done on every worker."""

    epoch: int
    step: int
    global_step: int
    update: str
    """Which of a step's updates, where it has several."""
    workers: int
    facts: Mapping[str, str]
    """Texts that are equal if the bits are, by what they are of: see `lockstep.engine.audit`."""
    places: Mapping[str, Sequence[str]]
    """Which tensors the numbers in a fact are of, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFinished:
    """One pass over the training set is done and evaluated."""

    epoch: int
    global_step: int
    train_loss: float
    """Weighted mean of the losses of the epoch's steps."""
    measured: Mapping[str, float]
    """Mean of each metric over each set that is evaluated, each sample counted once: `test_loss`, `val_loss`."""
    samples_per_second: float
    """Training samples of all workers per second of training time."""
    learning_rate: float
    """Learning rate of the first parameter group, in the epoch's last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A loop of the user's own has evaluated."""

    global_step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete and on the disk."""

    path: Path
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A worker without which the others continue."""

    rank: int
    """Its rank before."""
    pid: int
    reason: str
    """How it ended: "killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersChanged:
    """Workers were lost, have joined or have left, and the run continues with those that there are now.

    `epoch` and `step` are those of the next step.
    """

    generation: int
    lost: tuple[WorkerEnded, ...]
    joined: tuple[tuple[int, int], ...] = ()
    """Who is new: rank now, and process."""
    left: tuple[tuple[int, int], ...] = ()
    """Who has left, as it was asked to: rank before, and process."""
    epoch: int
    step: int
    global_step: int
    repeats_step: bool
    """Whether the next step had begun, and is repeated."""
    seconds: float
    """How long the workers that are left did not train, from the error of their call on."""
    shards: tuple[range, ...]
    """Which shards each worker runs now, in rank order."""
    text: str
    """All this in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingProcessLost:
    """A process that loads samples for a worker was killed; the worker has started it anew, or ends.

    `epoch` and `step` are those of the next step.
    """

    process: WorkerEnded
    """The process, and the rank of its worker."""
    generation: int
    epoch: int
    step: int
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingTakenOver:
    """This process records from now on, in place of one that has ended."""

    run: RunStarted
    global_step: int


Event = (
    RunStarted
    | StepFinished
    | StepAudited
    | EpochFinished
    | Evaluated
    | CheckpointSaved
    | WorkersChanged
    | LoadingProcessLost
    | RecordingTakenOver
)


class Recorder(Protocol):
    def record(self, event: Event) -> None:
        """Take one event; called on the worker's main thread, in order."""


@final
class Recorders:
    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders

    def record(self, event: Event) -> None:
        for each in self._recorders:
            each.record(event)
