"""Lockstep: data-parallel training for PyTorch.

Two ways in, on one engine. The drop-in layer has the names and signatures of torch's `DistributedDataParallel` and
what belongs to it; the trainer layer (`Trainer`, `ShardedLoader`, `launch`) adds what those signatures cannot say:
the same model on any number of workers.
"""

from importlib.metadata import version

from lockstep.checkpoint import load_weights
from lockstep.comm import destroy_process_group, init_process_group
from lockstep.data import DistributedSampler, ShardedBatch, ShardedLoader
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataFileError,
    DeviceError,
    GroupError,
    LockstepError,
    LossError,
    ParameterMismatchError,
    ReductionError,
    RunDirectoryError,
    UsageError,
    WorkerFailedError,
)
from lockstep.launch import Run, launch
from lockstep.parallel import DistributedDataParallel
from lockstep.train import Trainer, accuracy, seed_generators, set_deterministic

__version__ = version("lockstep")

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataFileError",
    "DeviceError",
    "DistributedDataParallel",
    "DistributedSampler",
    "GroupError",
    "LockstepError",
    "LossError",
    "ParameterMismatchError",
    "ReductionError",
    "Run",
    "RunDirectoryError",
    "ShardedBatch",
    "ShardedLoader",
    "Trainer",
    "UsageError",
    "WorkerFailedError",
    "__version__",
    "accuracy",
    "destroy_process_group",
    "init_process_group",
    "launch",
    "load_weights",
    "seed_generators",
    "set_deterministic",
]
