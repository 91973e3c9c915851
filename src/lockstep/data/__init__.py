"""Data: which sample is seen where and when.

The *cursor* is the position of a run in its data: epoch and step, nothing else. The global batch of a step is a pure
function of (seed, epoch, step); it is cut into one slice per shard, and a worker loads the slices that it runs.

Invariants: within an epoch every sample is seen exactly once, nothing padded and nothing dropped, unless the user wants
the smaller last batch left out, or samples drawn by weights; what a slice holds does not depend on the number of
workers; the random state in which a sample is made is keyed by the sample, and by how often it came before in the
epoch, so it does not depend on the number of data-loading processes either.

A *stream* is read from its beginning: its order is a function of (stream, seed, epoch) too.
"""

from lockstep.data.batch import Cursor, ShardedBatch, Slice
from lockstep.data.contents import OTHER_DATA
from lockstep.data.loader import ShardedLoader
from lockstep.data.order import balanced_weights, read_lengths, read_weights
from lockstep.data.sampler import DistributedSampler
from lockstep.data.stream import Stream, as_stream

__all__ = [
    "OTHER_DATA",
    "Cursor",
    "DistributedSampler",
    "ShardedBatch",
    "ShardedLoader",
    "Slice",
    "Stream",
    "as_stream",
    "balanced_weights",
    "read_lengths",
    "read_weights",
]
