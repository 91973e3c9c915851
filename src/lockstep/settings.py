"""The one file that reads and writes the environment of this process.

All other code gets frozen values from here. So this file shows every variable that changes what Lockstep does, and a
test can pass a mapping instead of the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.errors import UsageError
from lockstep.secrets import hide_password, is_secret_variable
from lockstep.variables import (
    CUBLAS_VARIABLE,
    KERNEL_VARIABLES,
    LAUNCHER_VARIABLES,
    RECORDED,
    RECORDED_PREFIXES,
    VISIBLE_VARIABLES,
)

CUBLAS_WORKSPACE = ":4096:8"
"""The cuBLAS workspace under which its results are reproducible (cuBLAS manual, "Results reproducibility")."""

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""A variable that is equal to MASTER_PORT in the workers of `ls.launch`. These have torchrun's variables too. If a
worker starts another launcher, that launcher changes MASTER_PORT, so the two differ in its workers."""

_CHANNEL = "LOCKSTEP_CHANNEL"
"""A worker's channel to `lockstep run`: its descriptor, the launcher's process, the MASTER_PORT of the launch."""

_FOLDER = "LOCKSTEP_FOLDER"
"""A folder for temporary files of a worker of `lockstep run`, which is deleted when the workers have ended."""

_CHOSEN_INTERFACE = "LOCKSTEP_GLOO_SOCKET_IFNAME"
_NUM_HASH_SEEDS = 2**32
"""PYTHONHASHSEED is less than this."""
_NO_RUN_ID = frozenset({"", "none"})
"""What torchrun sets without `--rdzv-id` and `--standalone`: every job on the machine has it."""
_RECORDING_DIRECTORY = "LOCKSTEP_RECORDING_DIRECTORY"
"""The launcher's process and the folder where its workers record."""
_NUM_EVENTS = 16384
"""So many events of a worker are kept: 1 MiB."""
_FEWEST_EVENTS, _MOST_EVENTS = 256, 1 << 24
_EVENTS_OF_A_WATCH = 512
"""What tells who is waited for needs so many, where nothing is kept."""
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


def read_launchers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that launchers set for a worker, by name, without empty ones."""
    source = os.environ if environ is None else environ
    return {name: source[name] for name in LAUNCHER_VARIABLES if source.get(name)}


def read_job(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what identifies the job to which this process belongs, also when its workers are started again; or None.

    That is the number of a Slurm job and step, which a requeued job keeps, or the run id of torchrun, which restarts of
    its workers keep.
    """
    source = os.environ if environ is None else environ
    torchrun = source.get("TORCHELASTIC_RUN_ID", "")
    if torchrun not in _NO_RUN_ID:
        return f"torchrun {torchrun}"
    if source.get("SLURM_JOB_ID"):
        return f"Slurm {source['SLURM_JOB_ID']}.{source.get('SLURM_STEP_ID', 'batch')}"
    return None


def write_place(rank: int, world_size: int) -> None:
    """Set the variables that hold the place of a worker of `ls.launch`, for code that reads them."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)


def read_is_profiled(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process may hold a library that was put into it from outside, such as a profiler."""
    source = os.environ if environ is None else environ
    return any(source.get(name) for name in ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH"))


def read_is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is a worker that `ls.launch` started."""
    source = os.environ if environ is None else environ
    return bool(source.get(LAUNCHED)) and source[LAUNCHED] == source.get("MASTER_PORT")


def channel_variables(descriptor: int, port: int, folder: str) -> dict[str, str]:
    """Return the variables that tell a child of this process its channel, by the descriptor, and its folder."""
    return {_CHANNEL: f"{descriptor},{os.getpid()},{port}", _FOLDER: folder}


def read_folder() -> str:
    """Return the folder for temporary files of a worker of `lockstep run`, if there is one; else an empty text.

    The processes that a worker starts have the variable too, and may live on when the folder is deleted. So it counts
    only where `read_channel` finds a channel.
    """
    return os.environ.get(_FOLDER, "")


def read_channel(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the descriptor of this process' channel to `lockstep run`; None if that did not start it as a worker.

    A process that a worker starts has the variable too, but its parent is another one. So has the worker of another
    launcher that a worker has started; the port of its rendezvous is another one, too.
    """
    source = os.environ if environ is None else environ
    descriptor, _, rest = source.get(_CHANNEL, "").partition(",")
    is_own = rest == f"{os.getppid()},{source.get('MASTER_PORT')}"
    return int(descriptor) if is_own and descriptor.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """Which GPUs CUDA shows to this process, as text; None for variables that are not set."""

    devices: str | None
    """CUDA_VISIBLE_DEVICES: their UUIDs or numbers."""
    order: str | None
    """CUDA_DEVICE_ORDER: how CUDA numbers them; None for the fastest first."""


def read_visible_devices(environ: Mapping[str, str] | None = None) -> VisibleDevices:
    """Read the variables that hide GPUs from this process."""
    source = os.environ if environ is None else environ
    return VisibleDevices(devices=source.get("CUDA_VISIBLE_DEVICES"), order=source.get("CUDA_DEVICE_ORDER"))


def read_visible_numbers(kind: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return which "xpu" or "npu" devices their variable shows to this process; None if it is not set."""
    return (os.environ if environ is None else environ).get(VISIBLE_VARIABLES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """What the environment says of the recording."""

    is_wanted: bool
    """Whether what this process does is recorded: to keep it, or to say why the job stands still."""
    is_kept: bool
    """Whether it is there when the job has ended: LOCKSTEP_RECORDING is not 0, false, no or off."""
    directory: str
    """The folder that the launcher of this process has chosen; empty if there is none."""
    capacity: int
    """How many events are kept, a power of two: LOCKSTEP_RECORDING_EVENTS."""


def read_recording_settings(environ: Mapping[str, str] | None = None) -> RecordingSettings:
    """Read whether, where and how much is recorded.

    A value that is none counts as not set: nothing depends on the recording.
    """
    source = os.environ if environ is None else environ
    launcher, _, directory = source.get(_RECORDING_DIRECTORY, "").partition(",")
    events = source.get("LOCKSTEP_RECORDING_EVENTS", "")
    is_kept = source.get("LOCKSTEP_RECORDING", "").strip().lower() not in _NO
    number = int(events) if events.isdecimal() else _NUM_EVENTS
    if not is_kept:
        number = _EVENTS_OF_A_WATCH
    return RecordingSettings(
        is_wanted=is_kept or read_stall_seconds(source) > 0,
        is_kept=is_kept,
        directory=directory if launcher == str(os.getppid()) else "",
        capacity=1 << (min(max(number, _FEWEST_EVENTS), _MOST_EVENTS) - 1).bit_length(),
    )


def recording_variable(directory: str) -> dict[str, str]:
    """Return the variable that tells a child of this process where it records."""
    return {_RECORDING_DIRECTORY: f"{os.getpid()},{directory}"}


def read_token(environ: Mapping[str, str] | None = None) -> str:
    """Return LOCKSTEP_TOKEN, the secret that the workers of one training share; empty if it is not set."""
    return (os.environ if environ is None else environ).get("LOCKSTEP_TOKEN", "")


def read_check(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return whether LOCKSTEP_CHECK demands that the calls of all ranks are compared; None if it is not set."""
    text = (os.environ if environ is None else environ).get("LOCKSTEP_CHECK", "")
    value = text.strip().lower()
    if not value:
        return None
    if value not in _YES | _NO:
        raise UsageError(
            f"LOCKSTEP_CHECK is {text!r}, expected 1, true, yes or on to compare the calls of all ranks, or 0, false, "
            "no, off or nothing. (LS119)"
        )
    return value in _YES


def read_cpu_backend(environ: Mapping[str, str] | None = None) -> str:
    """Return what carries CPU tensors between workers of one host: LOCKSTEP_CPU_BACKEND, "shm" if it is not set."""
    text = (os.environ if environ is None else environ).get("LOCKSTEP_CPU_BACKEND", "")
    value = text.strip().lower() or "shm"
    if value not in {"shm", "gloo"}:
        raise UsageError(
            f"LOCKSTEP_CPU_BACKEND is {text!r}, expected shm for shared memory, which is the default, or gloo for "
            "Gloo's sockets. (LS119)"
        )
    return value


def read_stall_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return after how long without a reduction the ranks report their progress: LOCKSTEP_STALL_SECONDS; 0 for never."""
    text = (os.environ if environ is None else environ).get("LOCKSTEP_STALL_SECONDS", "60")
    try:
        return max(float(text), 0.0)
    except ValueError as error:
        raise UsageError(
            f"LOCKSTEP_STALL_SECONDS is {text!r}, expected a number of seconds, or 0 for no reports. (LS119)"
        ) from error


def read_launch_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that torch's DistributedDataParallel logs; "N/A" for those that are not set."""
    source = os.environ if environ is None else environ
    names = (
        "MASTER_PORT",
        "MASTER_ADDR",
        "TORCH_DISTRIBUTED_DEBUG",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "GLOO_DEVICE_TRANSPORT",
    )
    return {name.lower(): source.get(name, "N/A") for name in names}


def read_gloo_interface(environ: Mapping[str, str] | None = None) -> str:
    """Return the interface that the user has set for Gloo, GLOO_SOCKET_IFNAME; empty if Lockstep may choose it."""
    source = os.environ if environ is None else environ
    name = source.get("GLOO_SOCKET_IFNAME", "")
    return "" if name == source.get(_CHOSEN_INTERFACE) else name


def set_gloo_interface(name: str) -> None:
    """Set the interface for Gloo, which reads it for each group, and record that Lockstep has chosen it."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ[_CHOSEN_INTERFACE] = name


def read_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return only the variables that change how a run computes or communicates, and those of its launcher."""
    source = os.environ if environ is None else environ
    names = (name for name in sorted(source) if name in RECORDED or name.startswith(RECORDED_PREFIXES))
    found = {name: source[name] for name in names if not is_secret_variable(name)}
    return {name: hide_password(value) for name, value in found.items()}


def read_num_threads(environ: Mapping[str, str] | None = None) -> str | None:
    """Return OMP_NUM_THREADS as text, which may be a list; None if it is not set."""
    return (os.environ if environ is None else environ).get("OMP_NUM_THREADS")


def worker_environment(
    overrides: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, str] = MappingProxyType({}),
    seed: int = 0,
) -> dict[str, str]:
    """Return the environment for a worker: this process' variables, with `overrides` and `defaults`.

    Two variables are read once, when a process or a library of it starts. So they are set here, for all workers alike,
    unless the user has set them. Python's hash of a str depends on PYTHONHASHSEED, which is random by default: then a
    vocabulary that is built from a set has another order in every process. cuBLAS reads CUBLAS_WORKSPACE_CONFIG at the
    first matrix product, which may come before the trainer that asks for deterministic operators.
    """
    source = os.environ if environ is None else environ
    read_once = {"PYTHONHASHSEED": str(seed % _NUM_HASH_SEEDS), CUBLAS_VARIABLE: CUBLAS_WORKSPACE}
    unset = {name: value for name, value in read_once.items() if not source.get(name)}  # empty counts as not set
    return {**defaults, **source, **unset, **overrides}


def read_cublas_workspace(environ: Mapping[str, str] | None = None) -> str:
    """Return CUBLAS_WORKSPACE_CONFIG; empty if it is not set."""
    return (os.environ if environ is None else environ).get(CUBLAS_VARIABLE, "")


def read_kernel_variables(device_type: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables from which a device's libraries choose their kernels; empty for those that are not set."""
    source = os.environ if environ is None else environ
    return {name: source.get(name, "") for name in KERNEL_VARIABLES.get(device_type, ())}


def read_python_path(environ: Mapping[str, str] | None = None) -> str | None:
    """Return PYTHONPATH; None if it is not set."""
    return (os.environ if environ is None else environ).get("PYTHONPATH")


def set_python_path(value: str | None) -> None:
    """Set PYTHONPATH for the processes that this one starts; None to delete it."""
    if value is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = value


def set_rendezvous(address: str, port: int) -> None:
    """Set MASTER_ADDR and MASTER_PORT, as launchers do."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def set_determinism_variables(deterministic: bool) -> None:
    """Set the variables that cuBLAS and torch's compiler read when they are first used.

    A cuBLAS workspace that the user has set is not changed.
    """
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    if deterministic:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
