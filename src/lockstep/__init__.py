"""Lockstep: data-parallel training for PyTorch.

It has two layers over one core. The drop-in layer has the names and signatures of torch's `DistributedDataParallel` and
related classes. The trainer layer (`Trainer`, `ShardedLoader`, `launch`) adds what these signatures do not allow: the
same model on any number of workers.

`lockstep.comm` is imported at once, which makes the backends known to torch. The rest is imported when a name of it is
used: a script that takes the wrapper alone needs neither the trainer nor the launcher.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.torch_private.compiler_import import use_optimizers_without_compiler
from lockstep.version import VERSION

if TYPE_CHECKING:
    from lockstep.checkpoint.interop.names import LoadedWeights
    from lockstep.checkpoint.interop.weights import load_weights
    from lockstep.comm import (
        World,
        destroy_process_group,
        init_process_group,
        ordered_all_reduce,
        ordered_hook,
        ring_all_reduce,
        ring_hook,
    )
    from lockstep.comm.one_rank import barrier, is_main, once_per_host
    from lockstep.data import DistributedSampler, ShardedBatch, ShardedLoader, Stream, balanced_weights
    from lockstep.data.batch import Cursor
    from lockstep.engine import StepPlace, Trainer, accuracy
    from lockstep.engine.averaging import EMA, SWA
    from lockstep.engine.callbacks import Callback
    from lockstep.engine.fingerprint import Fingerprint
    from lockstep.engine.saving import LoadedState
    from lockstep.engine.schedules import ReduceLROnPlateau, make_schedule, parameter_groups
    from lockstep.engine.step_table import StepResult
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
        PeerFailedError,
        PeerLostError,
        ReductionError,
        RunDirectoryError,
        UnusableStateError,
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
    from lockstep.reduce import BucketLimits
    from lockstep.report.trackers.callback import Track


__version__ = VERSION

__all__ = [
    "EMA",
    "SWA",
    "BucketLimits",
    "Callback",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigError",
    "Cursor",
    "DataFileError",
    "DataParallel",
    "DataParallelCriterion",
    "DeviceError",
    "DistributedDataParallel",
    "DistributedSampler",
    "EarlyStopping",
    "Elastic",
    "Fingerprint",
    "Freeze",
    "GroupError",
    "LoadedState",
    "LoadedWeights",
    "LockstepError",
    "LossError",
    "MaxSteps",
    "MaxTime",
    "Mean",
    "ParameterMismatchError",
    "PeerFailedError",
    "PeerLostError",
    "ReduceLROnPlateau",
    "ReductionError",
    "Run",
    "RunDirectoryError",
    "ShardedBatch",
    "ShardedLoader",
    "StepPlace",
    "StepResult",
    "Stream",
    "SyncBatchNorm",
    "Track",
    "Trainer",
    "UnusableStateError",
    "UsageError",
    "WorkerFailedError",
    "World",
    "__version__",
    "accuracy",
    "balanced_weights",
    "barrier",
    "data_parallel",
    "destroy_process_group",
    "init_process_group",
    "is_main",
    "launch",
    "load_weights",
    "make_schedule",
    "mean_over_ranks",
    "once_per_host",
    "ordered_all_reduce",
    "ordered_hook",
    "parameter_groups",
    "ring_all_reduce",
    "ring_hook",
    "seed_generators",
    "set_deterministic",
]

_PLACES = {
    "lockstep.checkpoint.interop.names": "LoadedWeights",
    "lockstep.checkpoint.interop.weights": "load_weights",
    "lockstep.comm": (
        "World destroy_process_group init_process_group ordered_all_reduce ordered_hook ring_all_reduce ring_hook"
    ),
    "lockstep.comm.one_rank": "barrier is_main once_per_host",
    "lockstep.data": "DistributedSampler ShardedBatch ShardedLoader Stream balanced_weights",
    "lockstep.data.batch": "Cursor",
    "lockstep.engine": "StepPlace Trainer accuracy",
    "lockstep.engine.averaging": "EMA SWA",
    "lockstep.engine.callbacks": "Callback",
    "lockstep.engine.fingerprint": "Fingerprint",
    "lockstep.engine.saving": "LoadedState",
    "lockstep.engine.schedules": "ReduceLROnPlateau make_schedule parameter_groups",
    "lockstep.engine.step_table": "StepResult",
    "lockstep.engine.stopping": "EarlyStopping Freeze MaxSteps MaxTime",
    "lockstep.errors": (
        "CheckpointError CollectiveMismatchError CollectiveTimeoutError ConfigError DataFileError DeviceError "
        "GroupError LockstepError LossError ParameterMismatchError PeerFailedError PeerLostError "
        "ReductionError RunDirectoryError UnusableStateError UsageError WorkerFailedError"
    ),
    "lockstep.launch.launcher": "launch",
    "lockstep.launch.messages": "Run",
    "lockstep.launch.restarts": "Elastic",
    "lockstep.means": "Mean mean_over_ranks",
    "lockstep.parallel": "DataParallel DataParallelCriterion DistributedDataParallel SyncBatchNorm data_parallel",
    "lockstep.processes.reproducibility": "seed_generators set_deterministic",
    "lockstep.reduce": "BucketLimits",
    "lockstep.report.trackers.callback": "Track",
}
"""The modules that have the names of `__all__`."""

_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect no garbage: imports make none, and a collection looks at all objects of torch, which takes 60 ms."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _import(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    with _collector_paused():
        found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


if not TYPE_CHECKING:  # a checker would take every name for one that there is
    __getattr__ = _import


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


with _collector_paused():
    import_module("lockstep.comm")
    import_module("lockstep.launch")
    import_module("lockstep.torch_private.loaders")  # takes note of the iterators of loaders from now on
    import_module("lockstep.processes.loaded_states").watch_loaded_states()
globals().pop("launch", None)  # the package, which is bound by its import and never again: the name is the function
use_optimizers_without_compiler()
