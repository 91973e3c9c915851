"""Lockstep: data-parallel training for PyTorch.

It has two layers over one core. The drop-in layer has the names and signatures of torch's `DistributedDataParallel` and
related classes. The trainer layer (`Trainer`, `ShardedLoader`, `launch`) adds what these signatures do not allow: the
same model on any number of workers.
"""

from importlib.metadata import version

from lockstep.checkpoint import load_weights
from lockstep.comm import (
    destroy_process_group,
    init_process_group,
    ordered_all_reduce,
    ordered_hook,
    ring_all_reduce,
    ring_hook,
)
from lockstep.data import DistributedSampler, ShardedBatch, ShardedLoader
from lockstep.engine import StepPlace, Trainer, accuracy
from lockstep.errors import (
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    DataFileError,
    DeviceError,
    GroupError,
    LockstepError,
    LossError,
    ParameterMismatchError,
    PeerLostError,
    ReductionError,
    RunDirectoryError,
    UsageError,
    WorkerFailedError,
)
from lockstep.launch.elastic import Elastic
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run
from lockstep.parallel import (
    DataParallel,
    DataParallelCriterion,
    DistributedDataParallel,
    SyncBatchNorm,
    data_parallel,
)
from lockstep.processes.reproducibility import seed_generators, set_deterministic

__version__ = version("lockstep")

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigError",
    "DataFileError",
    "DataParallel",
    "DataParallelCriterion",
    "DeviceError",
    "DistributedDataParallel",
    "DistributedSampler",
    "Elastic",
    "GroupError",
    "LockstepError",
    "LossError",
    "ParameterMismatchError",
    "PeerLostError",
    "ReductionError",
    "Run",
    "RunDirectoryError",
    "ShardedBatch",
    "ShardedLoader",
    "StepPlace",
    "SyncBatchNorm",
    "Trainer",
    "UsageError",
    "WorkerFailedError",
    "__version__",
    "accuracy",
    "data_parallel",
    "destroy_process_group",
    "init_process_group",
    "launch",
    "load_weights",
    "ordered_all_reduce",
    "ordered_hook",
    "ring_all_reduce",
    "ring_hook",
    "seed_generators",
    "set_deterministic",
]
