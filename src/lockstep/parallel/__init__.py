"""The drop-in layer: torch's names, signatures and semantics, on Lockstep's reducer.

Invariants: a wrapped module has rank 0's parameters and buffers from construction on; after every backward that is
not under `no_sync`, each parameter's `.grad` is the mean over ranks, however the forward was called.
"""

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.replicas.criterion import DataParallelCriterion
from lockstep.parallel.replicas.data_parallel import DataParallel, data_parallel
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["DataParallel", "DataParallelCriterion", "DistributedDataParallel", "SyncBatchNorm", "data_parallel"]
