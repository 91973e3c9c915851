"""Reduction: from gradients on every worker to the reduced gradient on all of them.

A *bucket* is a flat buffer that holds many gradients and travels as one message; a *plan* says which gradient lies
where in which bucket; the *reducer* watches gradients arrive and sends each bucket when it is full.

Invariants:

- `.grad` of a parameter is a view into its bucket: a gradient exists once.
- Buckets travel in the same order on every rank, whatever the order in which gradients arrive.
- What is reduced is the content of `.grad` *after* accumulation. Where ranks agree on what was accumulated before,
  reducing again gives the same, so a backward may be reduced as often as it comes.
- A parameter that no rank had a gradient for keeps its `.grad` as it was. [Note: presence]
"""

from lockstep.reduce.comm_hook import CommHook, GradBucket
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.options import ReducerOptions
from lockstep.reduce.plan import BucketLimits, ParameterSpec, plan_buckets
from lockstep.reduce.reducer import Reducer
from lockstep.reduce.same_model import check_same_model
from lockstep.reduce.shard_reducer import ShardReducer
from lockstep.reduce.status import Notes

__all__ = [
    "BucketLimits",
    "CommHook",
    "GradBucket",
    "Notes",
    "ParameterSpec",
    "Reducer",
    "ReducerOptions",
    "ShardReducer",
    "TrainedModel",
    "check_same_model",
    "plan_buckets",
]
