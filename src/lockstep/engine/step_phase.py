"""The phases of a step, and which may follow which."""

from enum import Enum, auto
from typing import Final


class StepPhase(Enum):
    """What an engine is doing.

        IDLE -> PREPARE -> COMPUTE -> REDUCE -> AGREE -> COMMIT -> IDLE -> CLOSED
                   |          |          |        |        |
                   +----------+----------+--------+--------+--> IDLE

    The lower arrows are those of a step that fails. From the first four phases all that lasts is as it was before the
    step, on every worker. From COMMIT it is so too if the failed call has written nothing; else the trainer cannot be
    used before a checkpoint is loaded. `StepEngine` makes every transition in one method.
    """

    IDLE = auto()
    """Between two steps."""
    PREPARE = auto()
    """Check the batch, the model and the options; record what an error must put back."""
    COMPUTE = auto()
    """Forward and backward of this worker's shards. The backward of the last one starts to send buckets."""
    REDUCE = auto()
    """Send the rest of the buckets and shard 0's buffers, wait for all, and fill in the step table."""
    AGREE = auto()
    """Exchange the step table, and draw the same conclusions from it on every worker."""
    COMMIT = auto()
    """Write: parameters, optimizer, scaler, scheduler, buffers, cursor. Local, and the same on every worker."""
    CLOSED = auto()
    """Hooks, threads and buckets are released; no step can be taken any more."""


ALLOWED_TRANSITIONS: Final = {
    StepPhase.IDLE: {StepPhase.PREPARE, StepPhase.CLOSED},
    StepPhase.PREPARE: {StepPhase.COMPUTE, StepPhase.IDLE},
    StepPhase.COMPUTE: {StepPhase.REDUCE, StepPhase.IDLE},
    StepPhase.REDUCE: {StepPhase.AGREE, StepPhase.IDLE},
    StepPhase.AGREE: {StepPhase.COMMIT, StepPhase.IDLE},
    StepPhase.COMMIT: {StepPhase.IDLE},
    StepPhase.CLOSED: set[StepPhase](),
}
"""The phases that may follow each phase."""
