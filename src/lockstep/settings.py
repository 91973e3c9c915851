"""The one file that reads and writes the environment of this process, and the names of all variables that count.

All other code gets frozen values from here: `read_settings()` copies the variables once, and `Settings` says what
they mean. So this file shows every variable that changes what Lockstep does. User code may set variables after the
import, so each entry point (a launch, the making of a group, the start of a recording) takes a copy of its own.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lockstep.errors import UsageError
from lockstep.secrets import hide_password, is_secret_variable

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""The cuBLAS workspace under which its results are reproducible (cuBLAS manual, "Results reproducibility")."""

LAUNCHER_VARIABLES = (
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

_PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)

RECORDED_PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "KMP_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "OMPI_COMM_", "PYTORCH_"),
    *("SLURM_JOB_ID", "SLURM_STEP_", "SLURM_N", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_"),
)
"""How the names of variables begin that are recorded with a run."""

RECORDED = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED"),
        "NVIDIA_VISIBLE_DEVICES",
    }
)
"""Variables that are recorded with a run, besides those whose names begin with one of `RECORDED_PREFIXES`."""

KERNEL_VARIABLES = {
    "cpu": (
        *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA"),
    ),
    "cuda": (
        *(CUBLAS_VARIABLE, "CUBLASLT_WORKSPACE_SIZE", "DISABLE_ADDMM_CUDA_LT", "NVIDIA_TF32_OVERRIDE"),
        "TORCH_CUDNN_V8_API_DISABLED",
    ),
}
"""Variables from which libraries choose their kernels, by the type of device."""

_PORTABLE = {
    "LOCKSTEP_PORTABLE": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
    "TORCH_COMPILE_DISABLE": "1",  # of functions, which then run uncompiled
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
"""Has libraries compute as on a processor with SSE4.2 alone, in one thread; see `lockstep.torch_private.portable`."""
_GLIBC, _HWCAPS = "GLIBC_TUNABLES", "glibc.cpu.hwcaps="
_WITHOUT_FMA = f"{_HWCAPS}-FMA,-FMA4,-FMA_Usable,-FMA4_Usable"
"""Has glibc round after each multiplication; the later names are those of versions before 2.33."""

VISIBLE_VARIABLES = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""What hides accelerators other than CUDA's: their numbers, separated by commas."""

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""A variable that is equal to MASTER_PORT in the workers of `ls.launch`. These have torchrun's variables too. If a
worker starts another launcher, that launcher changes MASTER_PORT, so the two differ in its workers."""

_CHANNEL = "LOCKSTEP_CHANNEL"
"""A worker's channel to `lockstep run`: its descriptor, the launcher's process, the MASTER_PORT of the launch."""

RUN_ID = "lockstep-"
"""How TORCHELASTIC_RUN_ID begins in the workers of `lockstep run`."""

_FOLDER = "LOCKSTEP_FOLDER"
"""A folder for temporary files of a worker of `lockstep run`, which is deleted when the workers have ended."""

OBSERVATION = "LOCKSTEP_OBSERVATION"
"""Where `lockstep verify SCRIPT` has its workers write down what they do: a number of batches, a comma, a folder."""

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
_STALL_SECONDS = 60.0
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """Which GPUs CUDA shows to this process, as text; None for variables that are not set."""

    devices: str | None
    """Their UUIDs or numbers."""
    order: str | None
    """How CUDA numbers them; None for the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    is_wanted: bool
    """Whether what this process does is recorded: to keep it, or to say why the job stands still."""
    is_kept: bool
    """Whether it is there when the job has ended."""
    directory: str
    """The folder that the launcher of this process has chosen; empty if there is none."""
    capacity: int
    """How many events are kept, a power of two."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the variables of a process mean. A test makes one of a mapping; all else calls `read_settings`."""

    variables: Mapping[str, str]

    def launchers(self) -> dict[str, str]:
        """Return the variables that launchers set for a worker, without empty ones."""
        found = {name: self.variables[name] for name in LAUNCHER_VARIABLES if self.variables.get(name)}
        is_ours = found.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)
        if is_ours and self.variables.get(_CHANNEL, "").rpartition(",")[2] not in {"", found.get("MASTER_PORT")}:
            found.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # at an address of the script's own nobody serves a store
        return found

    def job(self) -> str | None:
        """Return what identifies this process' job, also when it is requeued or its workers are started again."""
        torchrun = self.variables.get("TORCHELASTIC_RUN_ID", "")
        if torchrun not in _NO_RUN_ID:
            return f"torchrun {torchrun}"
        if self.variables.get("SLURM_JOB_ID"):
            return f"Slurm {self.variables['SLURM_JOB_ID']}.{self.variables.get('SLURM_STEP_ID', 'batch')}"
        return None

    def is_profiled(self) -> bool:
        """Return whether this process may hold a library that was put into it from outside, such as a profiler."""
        return any(self.variables.get(name) for name in ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH"))

    def is_launched(self) -> bool:
        return bool(self.variables.get(LAUNCHED)) and self.variables[LAUNCHED] == self.variables.get("MASTER_PORT")

    def folder(self) -> str:
        """Return the folder for temporary files of a worker of `lockstep run`; empty if there is none.

        It counts only where `channel` finds one: processes that a worker starts may outlive the folder.
        """
        return self.variables.get(_FOLDER, "")

    def channel(self) -> int | None:
        """Return the descriptor of this process' channel to `lockstep run`; None if that did not start it as a worker.

        A process that a worker starts has the variable too, but its parent is another one. So has the worker of another
        launcher that a worker has started; the port of its rendezvous is another one, too.
        """
        descriptor, _, rest = self.variables.get(_CHANNEL, "").partition(",")
        is_own = rest == f"{os.getppid()},{self.variables.get('MASTER_PORT')}"
        return int(descriptor) if is_own and descriptor.isdecimal() else None

    def visible_devices(self) -> VisibleDevices:
        variables = self.variables
        return VisibleDevices(devices=variables.get("CUDA_VISIBLE_DEVICES"), order=variables.get("CUDA_DEVICE_ORDER"))

    def visible_numbers(self, kind: str) -> str | None:
        """Return which "xpu" or "npu" devices their variable shows to this process; None if it is not set."""
        return self.variables.get(VISIBLE_VARIABLES[kind])

    def recording(self) -> RecordingSettings:
        """Return what is recorded; a value that is none counts as not set, since nothing depends on the recording."""
        launcher, _, directory = self.variables.get(_RECORDING_DIRECTORY, "").partition(",")
        events = self.variables.get("LOCKSTEP_RECORDING_EVENTS", "").strip()
        is_kept = self.variables.get("LOCKSTEP_RECORDING", "").strip().lower() not in _NO
        number = _EVENTS_OF_A_WATCH
        if is_kept:
            number = int(events) if events.isdecimal() else _NUM_EVENTS
        return RecordingSettings(
            is_wanted=is_kept or self.stall_seconds() > 0,
            is_kept=is_kept,
            directory=directory if launcher == str(os.getppid()) else "",
            capacity=1 << (min(max(number, _FEWEST_EVENTS), _MOST_EVENTS) - 1).bit_length(),
        )

    def token(self) -> str:
        return self.variables.get("LOCKSTEP_TOKEN", "")

    def observation(self) -> tuple[str, int] | None:
        """Return the folder for what this process does, and after how many batches a pass over the data ends."""
        limit, _, folder = self.variables.get(OBSERVATION, "").partition(",")
        return (folder, int(limit)) if folder and limit.isdecimal() else None

    def rank(self) -> int:
        text = self.variables.get("RANK", "")
        return int(text) if text.isdecimal() else 0

    def check(self) -> bool | None:
        """Return whether LOCKSTEP_CHECK demands that the calls of all ranks are compared; None if it is not set."""
        text = self.variables.get("LOCKSTEP_CHECK", "")
        value = text.strip().lower()
        if not value:
            return None
        if value not in _YES | _NO:
            raise UsageError(
                f"LOCKSTEP_CHECK is {text!r}, expected 1, true, yes or on to compare the calls of all ranks, or 0, "
                "false, no, off or nothing. (LS119)"
            )
        return value in _YES

    def cpu_backend(self) -> str:
        """Return what carries CPU tensors between workers of one host: LOCKSTEP_CPU_BACKEND, "shm" if it is not set."""
        text = self.variables.get("LOCKSTEP_CPU_BACKEND", "")
        value = text.strip().lower() or "shm"
        if value not in {"shm", "gloo"}:
            raise UsageError(
                f"LOCKSTEP_CPU_BACKEND is {text!r}, expected shm for shared memory, which is the default, or gloo for "
                "Gloo's sockets. (LS119)"
            )
        return value

    def stall_seconds(self) -> float:
        """Return after how long without a reduction the ranks report: LOCKSTEP_STALL_SECONDS; 0 for never."""
        text = self.variables.get("LOCKSTEP_STALL_SECONDS", "")
        try:
            seconds = float(text) if text.strip() else _STALL_SECONDS
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            raise UsageError(
                f"LOCKSTEP_STALL_SECONDS is {text!r}, expected a number of seconds, or 0 for no reports. (LS119)"
            )
        return max(seconds, 0.0)

    def launch_facts(self) -> dict[str, str]:
        """Return the variables that torch's DistributedDataParallel logs; "N/A" for those that are not set."""
        names = (
            *("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
            "GLOO_DEVICE_TRANSPORT",
        )
        return {name.lower(): self.variables.get(name, "N/A") for name in names}

    def gloo_interface(self) -> str:
        """Return the interface that the user has set for Gloo; empty if Lockstep may choose it."""
        name = self.variables.get("GLOO_SOCKET_IFNAME", "")
        return "" if name == self.variables.get(_CHOSEN_INTERFACE) else name

    def recorded(self) -> dict[str, str]:
        """Return only the variables that change how a run computes or communicates, and those of its launcher."""
        source = self.variables
        names = (name for name in sorted(source) if name in RECORDED or name.startswith(RECORDED_PREFIXES))
        return {name: hide_password(source[name]) for name in names if not is_secret_variable(name)}

    def num_threads(self) -> str | None:
        """Return OMP_NUM_THREADS, which may be a list."""
        return self.variables.get("OMP_NUM_THREADS")

    def for_worker(
        self, overrides: Mapping[str, str], *, defaults: Mapping[str, str] = MappingProxyType({}), seed: int = 0
    ) -> dict[str, str]:
        """Return the variables of a worker: these, but `overrides` replace them and they replace `defaults`.

        Two variables are read once, so they are set here, for all workers alike, unless the user has set them. Python's
        hash of a str depends on PYTHONHASHSEED, which is random by default: a vocabulary that is built from a set would
        have another order in every process. cuBLAS reads CUBLAS_WORKSPACE_CONFIG at the first matrix product, which may
        come before the trainer that asks for deterministic operators.
        """
        read_once = {"PYTHONHASHSEED": str(seed % _NUM_HASH_SEEDS), CUBLAS_VARIABLE: CUBLAS_WORKSPACE}
        unset = {name: value for name, value in read_once.items() if not self.variables.get(name)}  # empty: not set
        return {**defaults, **self.variables, **unset, **overrides}

    def is_portable(self) -> bool:
        return self.variables.get("LOCKSTEP_PORTABLE") == "1"

    def portable_variables(self) -> dict[str, str]:
        """Return what a process must be started with for the same bits on every processor."""
        import numpy as np

        known: Any = np.show_config(mode="dicts")
        vectors = known["SIMD Extensions"]  # above what this build of NumPy needs
        others = [each for each in self.variables.get(_GLIBC, "").split(":") if each and not each.startswith(_HWCAPS)]
        return {
            **_PORTABLE,
            _GLIBC: ":".join([*others, _WITHOUT_FMA]),
            "NPY_DISABLE_CPU_FEATURES": " ".join([*vectors.get("found", ()), *vectors.get("not found", ())]),
        }

    def missing_for_portable(self) -> dict[str, str]:
        """Return those of `portable_variables` that this process was started without, or that have changed since."""
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            begun = os.fsdecode(file.read()).split("\0")
        wanted = self.portable_variables()
        missing = {name for name, value in wanted.items() if f"{name}={value}" not in begun}
        missing |= {name for name, value in wanted.items() if self.variables.get(name) != value}
        if any(each.endswith(_WITHOUT_FMA) for each in begun):  # where glibc parses them, zeros stand for colons
            missing.discard(_GLIBC)
        return {name: value for name, value in wanted.items() if name in missing}

    def cublas_workspace(self) -> str:
        return self.variables.get(CUBLAS_VARIABLE, "")

    def kernel_variables(self, device_type: str) -> dict[str, str]:
        return {name: self.variables.get(name, "") for name in KERNEL_VARIABLES.get(device_type, ())}

    def is_chinese(self) -> bool:
        names = ("LC_ALL", "LC_MESSAGES", "LANG")
        return next((self.variables[name] for name in names if self.variables.get(name)), "").startswith("zh")

    def python_path(self) -> str | None:
        return self.variables.get("PYTHONPATH")


def read_settings() -> Settings:
    """Return a copy of this process' variables as they are now."""
    return Settings(dict(os.environ))


def channel_variables(descriptor: int, port: int, folder: str) -> dict[str, str]:
    """Return what tells a child of this process its channel, by the descriptor, and its folder."""
    return {_CHANNEL: f"{descriptor},{os.getpid()},{port}", _FOLDER: folder}


def recording_variable(directory: str) -> dict[str, str]:
    return {_RECORDING_DIRECTORY: f"{os.getpid()},{directory}"}


def write_variables(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def write_place(rank: int, world_size: int) -> None:
    """Set the variables that hold the place of a worker of `ls.launch`, all on this host, for code that reads them."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)


@contextmanager
def rank_variables_raised() -> Iterator[None]:
    """Let the variables that say a rank, or how many ranks there are, say one more within the block (local)."""
    before = {name: os.environ.get(name) for name in _PLACE_VARIABLES}
    os.environ.update({name: str(int(text) + 1) for name, text in before.items() if text and text.isdecimal()})
    if before["WORLD_SIZE"] is None:
        os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text


def set_gloo_interface(name: str) -> None:
    """Set the interface for Gloo, which reads it for each group, and record that Lockstep has chosen it."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ[_CHOSEN_INTERFACE] = name


def set_python_path(value: str | None) -> None:
    """Set it for the processes that this one starts; None to delete it."""
    if value is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = value


def set_rendezvous(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def set_determinism_variables(deterministic: bool) -> None:
    """Set what cuBLAS and torch's compiler read at their first use, but not a cuBLAS workspace that is set already."""
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    if deterministic:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
