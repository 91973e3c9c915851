"""Training: the step, and the run that a config describes.

A *step* is forward and backward of every shard, one reduction, one optimizer update. It is a function that is called,
not a loop that is unrolled, and its random state is derived from (seed, epoch, step, shard), never stored.

Invariants: a step's gradient is `sum(w_s * g_s) / sum(w_s)` over all shards of all workers; after a step every worker
has the same parameters and buffers; evaluation counts every sample exactly once.
"""

from lockstep.train.metrics import Mean, accuracy
from lockstep.train.reproducibility import seed_generators, set_deterministic
from lockstep.train.state_file import LoadedState
from lockstep.train.trainer import Loss, Metric, StepResult, Trainer

__all__ = [
    "LoadedState",
    "Loss",
    "Mean",
    "Metric",
    "StepResult",
    "Trainer",
    "accuracy",
    "seed_generators",
    "set_deterministic",
]
