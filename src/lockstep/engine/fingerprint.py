"""What the bits of a run depend on, besides its code, its data and the number of shards; and torch's switches for it.

Of a device only what can change bits on it is listed: cuDNN's version is no difference between runs on the CPU. NCCL's
version is not listed: of more than two ranks NCCL copies alone, and our code adds, see [Note: one addition].
"""

import os
import platform
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch

from lockstep.processes.reproducibility import set_deterministic
from lockstep.settings import read_settings
from lockstep.torch_private.compiler_import import is_inductor_deterministic, set_inductor_deterministic

Facts = Mapping[str, bool | str]

USUAL: Facts = {
    "compiled": False,
    "default dtype": "float32",
    "flush denormal": False,
    "deterministic.warn_only": False,
    "attention.flash": True,
    "attention.mem_efficient": True,
    "attention.math": True,
    "attention.cudnn": True,
    "attention.math.reduced_precision": False,
    "mkldnn": True,
    "mkldnn.deterministic": False,
    "mkldnn.matmul.fp32_precision": "ieee",
    "mkldnn.conv.fp32_precision": "ieee",
    "mkldnn.rnn.fp32_precision": "ieee",
    "cudnn": True,
    "cudnn.deterministic": True,
    "cudnn.benchmark": False,
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "cuda.matmul.fp32_precision": "ieee",
    "cuda.matmul.fp16_reduced_precision_reduction": True,
    "cuda.matmul.fp16_reduced_precision_reduction_split_k": True,
    "cuda.matmul.bf16_reduced_precision_reduction": True,
    "cuda.matmul.bf16_reduced_precision_reduction_split_k": True,
    "cuda.matmul.fp16_accumulation": False,
    "cuda.linalg": "Default",
}
"""What the switches are after `set_deterministic(True)` in a process that sets no other."""

_REDUCTIONS = tuple(name for name in USUAL if name.startswith(("cuda.matmul.fp16", "cuda.matmul.bf16")))
_LIBRARIES = {
    "BLAS": re.compile(r"\bBLAS_INFO=([^,\s]+)"),
    "MKL": re.compile(r"Math Kernel Library Version (\S+)"),
    "oneDNN": re.compile(r"MKL-DNN (v\S+)"),
}
"""Where `torch.__config__.show()` names the libraries of a build: builds of one version may have different ones."""
_NONE = "none"
_OLD_TF32 = "cudnn.allow_tf32"
"""The name under which earlier versions recorded both precisions of cuDNN, as one bool."""
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a digest depends on: two runs whose fingerprints are equal have equal digests, on any number of workers."""

    torch: str
    device: str
    """Type of device, and its name: kernels differ between models of GPU, and between CPUs."""
    threads: int
    """CPU threads per worker of torch's operators; they change the last bits on the CPU."""
    num_shards: int
    seed: int
    deterministic: bool
    matmul_precision: str

    switches: Facts = field(default_factory=dict)
    """What else chooses between kernels or rounds otherwise, by name: torch's switches, versions of libraries."""

    def __str__(self) -> str:
        """Show it in one line; of the switches those that are not as usual."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        shards = "1 shard" if self.num_shards == 1 else f"{self.num_shards} shards"
        how = "deterministic" if self.deterministic else "not deterministic"
        return (
            f"torch {self.torch}, {self.device}, {threads}, {shards}, seed {self.seed}, {how}"
            + ("" if self.matmul_precision == "highest" else f", matmul precision {self.matmul_precision}")
            + "".join(f", {name} {value}" for name, value in self.switches.items() if value != USUAL.get(name, value))
        )

    def differences(self, other: "Fingerprint") -> list[str]:
        mine, theirs = _flat(self), _flat(other)
        # A switch that only one has was recorded by another version of Lockstep, or for another type of device.
        return [
            f"{name} is {mine[name]!r} and {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs.get(name, mine[name])
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        """Return what `to_dict` was called on, also by an earlier version of Lockstep."""
        return cls(**{**values, "switches": in_present_names(values.get("switches", {}))})


def take_fingerprint(device: torch.device, *, num_shards: int, seed: int, is_compiled: bool = False) -> Fingerprint:
    return Fingerprint(
        torch=str(torch.__version__),  # it is of a class of its own
        device=_describe_device(device),
        threads=torch.get_num_threads(),
        num_shards=num_shards,
        seed=seed,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        matmul_precision=describe_matmul_precision(),
        switches={**read_kernel_choice(device), "compiled": is_compiled},
    )


def _flat(fingerprint: Fingerprint) -> dict[str, Any]:
    values = fingerprint.to_dict()
    switches = values.pop("switches")
    return {**values, **switches}


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    if read_settings().is_portable():
        return "cpu portable"
    return f"cpu {_cpu_name()} {torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def read_kernel_choice(device: torch.device) -> dict[str, bool | str]:
    found = {**_read_common(), **_read_cpu()}
    if device.type == "cuda":
        found |= _read_cuda()
    elif device.type != "cpu":
        found |= {"device name": _name_device(device)}
    settings = read_settings()
    if settings.is_portable():
        found |= {"libc": os.confstr("CS_GNU_LIBC_VERSION") or _NONE, "NumPy": np.__version__}
    return found | {f"${name}": value for name, value in settings.kernel_variables(device.type).items()}


def in_present_names(facts: Facts) -> Facts:
    if _OLD_TF32 not in facts:
        return facts
    precision = "tf32" if facts[_OLD_TF32] else "ieee"
    others = {name: value for name, value in facts.items() if name != _OLD_TF32}
    return {"cudnn.conv.fp32_precision": precision, "cudnn.rnn.fp32_precision": precision, **others}


def describe_matmul_precision() -> str:
    """Torch raises where the precision was set for one library alone; that of each library is among the switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "set for each library"


def _read_common() -> dict[str, bool | str]:
    backends: Any = torch.backends
    attention, einsum = backends.cuda, backends.opt_einsum  # the switches of attention hold for all devices
    return {
        "torch source": str(torch.version.git_version)[:12],
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic.warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "attention.flash": attention.flash_sdp_enabled(),
        "attention.mem_efficient": attention.mem_efficient_sdp_enabled(),
        "attention.math": attention.math_sdp_enabled(),
        "attention.cudnn": attention.cudnn_sdp_enabled(),
        "attention.math.reduced_precision": attention.fp16_bf16_reduction_math_sdp_allowed(),
        "einsum": str(einsum.strategy or "auto") if einsum.is_available() and einsum.enabled else "in order",
    }


def _read_cpu() -> dict[str, bool | str]:
    """Return what holds for operators on the CPU, which a run on a GPU may have too."""
    build = torch.__config__.show()
    mkldnn: Any = torch.backends.mkldnn
    matches = {name: pattern.search(build) for name, pattern in _LIBRARIES.items()}
    return {
        **{name: _NONE if match is None else match[1] for name, match in matches.items()},
        "flush denormal": _flushes_denormal(),
        "mkldnn": bool(mkldnn.enabled),
        "mkldnn.deterministic": bool(mkldnn.deterministic),
        **_read_precisions("mkldnn", mkldnn, ("matmul", "conv", "rnn")),
    }


def _read_cuda() -> dict[str, bool | str]:
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return {
        "CUDA": str(torch.version.cuda or torch.version.hip or _NONE),
        "cuDNN": str(cudnn.version() or _NONE),
        "cudnn": cudnn.enabled,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        **_read_precisions("cudnn", cudnn, ("conv", "rnn")),
        **_read_precisions("cuda", cuda, ("matmul",)),
        **{name: getattr(cuda.matmul, f"allow_{name.rpartition('.')[2]}", True) for name in _REDUCTIONS},
        "cuda.blas": _name_of(cuda.preferred_blas_library),
        "cuda.linalg": _name_of(cuda.preferred_linalg_library),
    }


def _read_precisions(name: str, backend: Any, operators: tuple[str, ...]) -> dict[str, str]:
    """Return the precision of float32 in each kind of operator. "none" stands for the default: full precision."""
    values = {operator: getattr(backend, operator).fp32_precision for operator in operators}
    return {
        f"{name}.{operator}.fp32_precision": "ieee" if value == _NONE else value for operator, value in values.items()
    }


def _name_device(device: torch.device) -> str:
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)  # torch.xpu, torch.npu, ...
    return _NONE if get_name is None else str(get_name(device))


def _name_of(preferred: Callable[[], Any]) -> str:
    return str(preferred()).rpartition(".")[2]


def _flushes_denormal() -> bool:
    """Whether torch.set_flush_denormal is on, for which torch has no function: a tiny number becomes zero."""
    return not bool(torch.full((1,), 1e-310, dtype=torch.float64).mul(1.0).item())


@final
class DeterminismSwitches:
    """Restores torch's switches, but no environment variables: what reads these has done so already."""

    def __init__(self, *, deterministic: bool) -> None:
        cudnn = torch.backends.cudnn
        self._before: tuple[Any, ...] = (
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            (cudnn.deterministic, cudnn.benchmark),
            is_inductor_deterministic(),
        )
        _SET.append(weakref.ref(self))
        set_deterministic(deterministic)

    def restore(self) -> None:
        """Restore what was set before; a later trainer that is not closed does that in the place of this one."""
        alive = [each for each in (reference() for reference in _SET) if each is not None]
        if self not in alive:
            return
        later = alive[alive.index(self) + 1 :]
        _SET[:] = [weakref.ref(each) for each in alive if each is not self]
        if later:
            later[0]._before = self._before  # noqa: SLF001 - one of this class
            return
        debug_mode, fills_memory, cudnn, compiler = self._before
        torch.set_deterministic_debug_mode(debug_mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        set_inductor_deterministic(compiler)


_SET: Final[list["weakref.ref[DeterminismSwitches]"]] = []
"""Of trainers that are not closed, in the order in which they were made: torch's switches are of the process too."""
