"""The one file that reads and writes the environment of this process.

All other code gets frozen values from here. So this file shows every variable that changes what Lockstep does, and a
test can pass a mapping instead of the environment.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.errors import UsageError

CUBLAS_WORKSPACE = ":4096:8"
"""The cuBLAS workspace under which its results are reproducible (cuBLAS manual, "Results reproducibility")."""

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""A variable that is equal to MASTER_PORT in the workers of `ls.launch`. These have torchrun's variables too. If a
worker starts another launcher, that launcher changes MASTER_PORT, so the two differ in its workers."""

_CHANNEL = "LOCKSTEP_CHANNEL"
"""A worker's channel to `lockstep run`: its descriptor, the launcher's process, the MASTER_PORT of the launch."""

_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PET_NNODES", "PET_NPROC_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("OMPI_MCA_ess_base_jobid", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "PMI_KVSNAME", "PMI_ID"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK"),
    "SLURM_STEP_RESV_PORTS",
)
_RECORDED_PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "KMP_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "OMPI_COMM_", "PYTORCH_"),
    *("SLURM_JOB_ID", "SLURM_STEP_", "SLURM_N", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_"),
)
_RECORDED = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED"),
        "NVIDIA_VISIBLE_DEVICES",
    }
)
"""Variables that are recorded with a run, besides those whose names begin with one of `_RECORDED_PREFIXES`."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
"""A variable whose name has one of these may hold a secret and is not recorded."""
_SECRET_WORDS = frozenset(
    {
        *("apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "key", "passphrase"),
        *("passwd", "password", "pat", "pwd", "secret", "secrets", "token"),
    }
)
"""An option one of whose words is one of these may hold a secret: `--api-key`, `data_args.token`."""
_OPTION = re.compile(r"(?P<name>-{0,2}[\w.-]*[\w])=(?P<value>.+)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_CHOSEN_INTERFACE = "LOCKSTEP_GLOO_SOCKET_IFNAME"
_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_KERNEL_VARIABLES = {
    "cpu": (
        *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA"),
    ),
    "cuda": (
        *(_CUBLAS_VARIABLE, "CUBLASLT_WORKSPACE_SIZE", "DISABLE_ADDMM_CUDA_LT", "NVIDIA_TF32_OVERRIDE"),
        "TORCH_CUDNN_V8_API_DISABLED",
    ),
}
"""Variables from which libraries choose their kernels, by the type of device."""
_NUM_HASH_SEEDS = 2**32
"""PYTHONHASHSEED is less than this."""
_NO_RUN_ID = frozenset({"", "none"})
"""What torchrun sets without `--rdzv-id` and `--standalone`: every job on the machine has it."""
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVariables:
    """A launcher's variables about this worker, as text; None for those that are not set."""

    rank: str | None
    """RANK: number of this worker in the world."""
    world_size: str | None
    """WORLD_SIZE: how many workers there are."""
    local_rank: str | None
    """LOCAL_RANK: number of this worker on its host."""
    local_world_size: str | None
    """LOCAL_WORLD_SIZE: how many workers are on its host."""
    master_addr: str | None
    """MASTER_ADDR: host of the rendezvous."""
    master_port: str | None
    """MASTER_PORT: its TCP port."""
    agent_store: str | None
    """TORCHELASTIC_USE_AGENT_STORE: "True" if torchrun's agent serves the rendezvous, and not rank 0."""
    launcher: str
    """Name of the launcher, for messages: `"Slurm"`."""
    remedy: str
    """What the user can do if one of the variables is missing."""


def read_launchers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that launchers set for a worker, by name, without empty ones.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    return {name: source[name] for name in _LAUNCHER_VARIABLES if source.get(name)}


def read_job(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what identifies the job to which this process belongs, also when its workers are started again; or None.

    That is the number of a Slurm job and step, which a requeued job keeps, or the run id of torchrun, which restarts of
    its workers keep.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    torchrun = source.get("TORCHELASTIC_RUN_ID", "")
    if torchrun not in _NO_RUN_ID:
        return f"torchrun {torchrun}"
    if source.get("SLURM_JOB_ID"):
        return f"Slurm {source['SLURM_JOB_ID']}.{source.get('SLURM_STEP_ID', 'batch')}"
    return None


def write_place(rank: int, world_size: int) -> None:
    """Set the variables that hold the place of a worker of `ls.launch`, for code that reads them.

    Args:
        rank: Its rank.
        world_size: How many workers there are, all on this host.
    """
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)


def read_is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is a worker that `ls.launch` started.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    return bool(source.get(LAUNCHED)) and source[LAUNCHED] == source.get("MASTER_PORT")


def channel_variable(descriptor: int, port: int) -> dict[str, str]:
    """Return the variable that tells a child of this process which descriptor is its channel."""
    return {_CHANNEL: f"{descriptor},{os.getpid()},{port}"}


def read_channel(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the descriptor of this process' channel to `lockstep run`; None if that did not start it as a worker.

    A process that a worker starts has the variable too, but its parent is another one. So has the worker of another
    launcher that a worker has started; the port of its rendezvous is another one, too.

    Args:
        environ: Mapping to read instead of this process' environment.
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
    """Read the variables that hide GPUs from this process.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    return VisibleDevices(devices=source.get("CUDA_VISIBLE_DEVICES"), order=source.get("CUDA_DEVICE_ORDER"))


VISIBLE_VARIABLES = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variables that hide accelerators other than CUDA's: their numbers, separated by commas."""


def read_visible_numbers(kind: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return which "xpu" or "npu" devices their variable shows to this process; None if it is not set.

    Args:
        kind: Type of the device.
        environ: Mapping to read instead of this process' environment.
    """
    return (os.environ if environ is None else environ).get(VISIBLE_VARIABLES[kind])


def read_token(environ: Mapping[str, str] | None = None) -> str:
    """Return LOCKSTEP_TOKEN, the secret that the workers of one training share; empty if it is not set.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    return (os.environ if environ is None else environ).get("LOCKSTEP_TOKEN", "")


def read_check(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return whether LOCKSTEP_CHECK demands that the calls of all ranks are compared; None if it is not set.

    Args:
        environ: Mapping to read instead of this process' environment.

    Raises:
        UsageError: The value is not one of those for yes or no.
    """
    text = (os.environ if environ is None else environ).get("LOCKSTEP_CHECK", "")
    value = text.strip().lower()
    if not value:
        return None
    if value not in _YES | _NO:
        raise UsageError(
            f"LOCKSTEP_CHECK is {text!r}, expected 1, true, yes or on to compare the calls of all ranks, or 0, false, "
            "no, off or nothing."
        )
    return value in _YES


def read_stall_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return after how long without a reduction the ranks report their progress: LOCKSTEP_STALL_SECONDS; 0 for never.

    Args:
        environ: Mapping to read instead of this process' environment.

    Raises:
        UsageError: It is not a number.
    """
    text = (os.environ if environ is None else environ).get("LOCKSTEP_STALL_SECONDS", "60")
    try:
        return max(float(text), 0.0)
    except ValueError as error:
        raise UsageError(
            f"LOCKSTEP_STALL_SECONDS is {text!r}, expected a number of seconds, or 0 for no reports."
        ) from error


def read_launch_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that torch's DistributedDataParallel logs; "N/A" for those that are not set.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
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
    """Return the interface that the user has set for Gloo, GLOO_SOCKET_IFNAME; empty if Lockstep may choose it.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    name = source.get("GLOO_SOCKET_IFNAME", "")
    return "" if name == source.get(_CHOSEN_INTERFACE) else name


def set_gloo_interface(name: str) -> None:
    """Set the interface for Gloo, which reads it for each group, and record that Lockstep has chosen it."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ[_CHOSEN_INTERFACE] = name


def read_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return only the variables that change how a run computes or communicates, and those of its launcher.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    names = (name for name in sorted(source) if name in _RECORDED or name.startswith(_RECORDED_PREFIXES))
    found = {name: source[name] for name in names if not _SECRET.search(name)}
    return {name: _URL_PASSWORD.sub(_HIDDEN, value) for name, value in found.items()}


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without what may be secret: values of such names, users in addresses.

    Args:
        arguments: A command, as `sys.argv` has it.
    """
    shown = []
    is_value = False
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option is not None and _is_secret_name(option["name"]):
            shown.append(f"{option['name']}={_HIDDEN}")
        else:
            hides = is_value and not argument.startswith("-")
            shown.append(_HIDDEN if hides else _URL_PASSWORD.sub(_HIDDEN, argument))
        is_value = option is None and argument.startswith("-") and _is_secret_name(argument)
    return shown


def _is_secret_name(name: str) -> bool:
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z]+", name.lower()))


def read_num_threads(environ: Mapping[str, str] | None = None) -> str | None:
    """Return OMP_NUM_THREADS as text, which may be a list; None if it is not set.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
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

    Args:
        overrides: Variables that replace those of this process.
        environ: Mapping to use instead of this process' environment.
        defaults: Variables for which this process' values have precedence.
        seed: The number from which PYTHONHASHSEED is made.
    """
    source = os.environ if environ is None else environ
    read_once = {"PYTHONHASHSEED": str(seed % _NUM_HASH_SEEDS), _CUBLAS_VARIABLE: CUBLAS_WORKSPACE}
    unset = {name: value for name, value in read_once.items() if not source.get(name)}  # empty counts as not set
    return {**defaults, **source, **unset, **overrides}


def read_cublas_workspace(environ: Mapping[str, str] | None = None) -> str:
    """Return CUBLAS_WORKSPACE_CONFIG; empty if it is not set.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    return (os.environ if environ is None else environ).get(_CUBLAS_VARIABLE, "")


def read_kernel_variables(device_type: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables from which a device's libraries choose their kernels; empty for those that are not set.

    Args:
        device_type: "cpu", "cuda", ...
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    return {name: source.get(name, "") for name in _KERNEL_VARIABLES.get(device_type, ())}


def read_python_path(environ: Mapping[str, str] | None = None) -> str | None:
    """Return PYTHONPATH; None if it is not set.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
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
        os.environ.setdefault(_CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
