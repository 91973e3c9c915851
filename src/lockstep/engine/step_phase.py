"""The phases of a step, and which may follow which."""

from enum import Enum, auto
from typing import Final


class StepPhase(Enum):
    """What an engine is doing; `lockstep.engine.step_engine` says what belongs to each phase.

        IDLE -> PREPARE -> COMPUTE -> REDUCE -> AGREE -> COMMIT -> IDLE -> CLOSED
                   |          |          |        |        |
                   +----------+----------+--------+--------+--> IDLE

    The lower arrows are those of a step that fails. From the first four phases all that lasts is as it was before the
    step, on every worker. From COMMIT it is so too if the failed call has written nothing; else the trainer cannot be
    used before a checkpoint is loaded. `StepEngine` makes every transition in one method.
    """

    IDLE = auto()
    PREPARE = auto()
    COMPUTE = auto()
    REDUCE = auto()
    AGREE = auto()
    COMMIT = auto()
    CLOSED = auto()


ALLOWED_TRANSITIONS: Final = {
    StepPhase.IDLE: {StepPhase.PREPARE, StepPhase.CLOSED},
    StepPhase.PREPARE: {StepPhase.COMPUTE, StepPhase.IDLE},
    StepPhase.COMPUTE: {StepPhase.REDUCE, StepPhase.IDLE},
    StepPhase.REDUCE: {StepPhase.AGREE, StepPhase.IDLE},
    StepPhase.AGREE: {StepPhase.COMMIT, StepPhase.IDLE},
    StepPhase.COMMIT: {StepPhase.IDLE},
    StepPhase.CLOSED: set[StepPhase](),
}
