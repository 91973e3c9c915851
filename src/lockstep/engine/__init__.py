"""The engine: the step of data-parallel training over shards, and evaluation.

A *step* is forward and backward of every shard, one reduction, one optimizer update. It is a function that is called,
not a loop that is unrolled, and its random state is derived from (seed, epoch, step, shard), never stored.

The *state* of a run (`RunState`: model, optimizer, scheduler, scaler, cursor) is kept when its workers change. An
*engine* (`StepEngine`) takes its steps with one set of workers, a *generation*, and is closed with it. A step has
phases (`StepPhase`): prepare, compute, reduce, agree, commit.

Invariants: a step's gradient is `sum(w_s * g_s) / sum(w_s)` over all shards of all workers; nothing that lasts is
written before commit, and commit begins only when every worker has all that it needs; after a step every worker has the
same parameters and buffers; a step that fails leaves everything as it was, on every worker; evaluation counts every
sample exactly once.
"""

from lockstep.engine.evaluation import Metric, accuracy
from lockstep.engine.run_state import RunState
from lockstep.engine.saving import LoadedState
from lockstep.engine.shard_runs import Loss
from lockstep.engine.step_engine import StepEngine
from lockstep.engine.step_table import StepResult
from lockstep.engine.trainer import Trainer
from lockstep.engine.user_function import StepPlace

__all__ = [
    "LoadedState",
    "Loss",
    "Metric",
    "RunState",
    "StepEngine",
    "StepPlace",
    "StepResult",
    "Trainer",
    "accuracy",
]
