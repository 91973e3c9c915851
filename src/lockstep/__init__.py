"""Lockstep: data-parallel training for PyTorch.

It has two layers over one core. The drop-in layer has the names and signatures of torch's `DistributedDataParallel` and
related classes. The trainer layer (`Trainer`, `ShardedLoader`, `launch`) adds what these signatures do not allow: the
same model on any number of workers.
"""

from lockstep.checkpoint.interop.weights import load_weights
from lockstep.comm import (
    destroy_process_group,
    init_process_group,
    ordered_all_reduce,
    ordered_hook,
    ring_all_reduce,
    ring_hook,
)
from lockstep.data import DistributedSampler, ShardedBatch, ShardedLoader, Stream, balanced_weights
from lockstep.engine import StepPlace, Trainer, accuracy
from lockstep.engine.averaging import EMA, SWA
from lockstep.engine.callbacks import Callback
from lockstep.engine.schedules import ReduceLROnPlateau, make_schedule, parameter_groups
from lockstep.engine.stopping import EarlyStopping, Freeze, MaxSteps, MaxTime
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
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run
from lockstep.launch.restarts import Elastic
from lockstep.means import Mean, mean_over_ranks
from lockstep.parallel import (
    DataParallel,
    DataParallelCriterion,
    DistributedDataParallel,
    SyncBatchNorm,
    data_parallel,
)
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.torch_private.compiler_import import use_optimizers_without_compiler
from lockstep.version import VERSION

__version__ = VERSION

__all__ = [
    "EMA",
    "SWA",
    "Callback",
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
    "EarlyStopping",
    "Elastic",
    "Freeze",
    "GroupError",
    "LockstepError",
    "LossError",
    "MaxSteps",
    "MaxTime",
    "Mean",
    "ParameterMismatchError",
    "PeerLostError",
    "ReduceLROnPlateau",
    "ReductionError",
    "Run",
    "RunDirectoryError",
    "ShardedBatch",
    "ShardedLoader",
    "StepPlace",
    "Stream",
    "SyncBatchNorm",
    "Trainer",
    "UsageError",
    "WorkerFailedError",
    "__version__",
    "accuracy",
    "balanced_weights",
    "data_parallel",
    "destroy_process_group",
    "init_process_group",
    "launch",
    "load_weights",
    "make_schedule",
    "mean_over_ranks",
    "ordered_all_reduce",
    "ordered_hook",
    "parameter_groups",
    "ring_all_reduce",
    "ring_hook",
    "seed_generators",
    "set_deterministic",
]

use_optimizers_without_compiler()
