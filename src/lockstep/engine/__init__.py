"""The engine: the step of data-parallel training over shards, and evaluation.

A *step* is forward and backward of every shard, one reduction, one optimizer update. It is a function that is called,
not a loop that is unrolled, and its random state is derived from (seed, epoch, step, shard), never stored.

Invariants: a step's gradient is `sum(w_s * g_s) / sum(w_s)` over all shards of all workers; after a step every worker
has the same parameters and buffers; evaluation counts every sample exactly once.
"""

from lockstep.engine.metrics import Mean, accuracy
from lockstep.engine.state_file import LoadedState
from lockstep.engine.trainer import Loss, Metric, StepResult, Trainer

__all__ = [
    "LoadedState",
    "Loss",
    "Mean",
    "Metric",
    "StepResult",
    "Trainer",
    "accuracy",
]
