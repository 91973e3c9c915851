"""Reduction: from gradients on every worker to the reduced gradient on all of them.

A *bucket* is a flat buffer that holds many gradients and is sent as one message; a *plan* is which gradient lies
where in which bucket. A *reducer* has three parts, none of which depends on the others: what watches a backward
(`backward_watch`), what schedules buckets (`schedule`), and how one bucket is reduced (`reduction`).

Invariants:

- `.grad` of a parameter is a view into its bucket: a gradient exists once.
- Buckets are sent in the same order on every rank, whatever the order in which gradients arrive.
- What is reduced is the content of `.grad` *after* accumulation. Where ranks agree on what was accumulated before,
  reducing again gives the same result, so the same gradients may be reduced several times.
- A parameter that no rank had a gradient for keeps its `.grad` as it was. [Note: used-parameter counts]
- A backward that fails on one rank is an error of that backward on every rank. [Note: a whole backward]
"""

from lockstep.reduce.current_plan import ReducerOptions
from lockstep.reduce.model import TrainedModel, check_same_model
from lockstep.reduce.plan import BucketLimits, ParameterSpec, plan_buckets
from lockstep.reduce.reducer import Reducer
from lockstep.reduce.reduction import CommHook, GradBucket, HookReduction, MeanReduction, TreeReduction
from lockstep.reduce.schedule import BackwardObserver
from lockstep.reduce.shard_reducer import ShardReducer
from lockstep.reduce.status import GroupStatus, RankStatus

__all__ = [
    "BackwardObserver",
    "BucketLimits",
    "CommHook",
    "GradBucket",
    "GroupStatus",
    "HookReduction",
    "MeanReduction",
    "ParameterSpec",
    "RankStatus",
    "Reducer",
    "ReducerOptions",
    "ShardReducer",
    "TrainedModel",
    "TreeReduction",
    "check_same_model",
    "plan_buckets",
]
