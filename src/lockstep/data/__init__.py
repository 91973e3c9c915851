"""Data: which sample is seen where and when.

The *cursor* is the position of a run in its data: epoch and step, nothing else. The global batch of a step is a pure
function of (seed, epoch, step); it is cut into one slice per shard, and a worker loads the slices that it runs.

Invariants: within an epoch every sample is seen exactly once, nothing padded and nothing dropped, unless the user wants
the smaller last batch left out; what a slice holds does not depend on the number of workers; the random state in which
a sample is made is keyed by the sample, so it does not depend on the number of data-loading processes either.
"""

from lockstep.data.batch import ShardedBatch, Slice
from lockstep.data.contents import OTHER_DATA
from lockstep.data.cursor import Cursor
from lockstep.data.loader import ShardedLoader
from lockstep.data.sampler import DistributedSampler

__all__ = ["OTHER_DATA", "Cursor", "DistributedSampler", "ShardedBatch", "ShardedLoader", "Slice"]
