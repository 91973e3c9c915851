"""What the bits of a run depend on, besides its code, its data and the number of shards."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.engine.kernel_choice import USUAL, Facts, describe_matmul_precision, in_present_names, read_kernel_choice

_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a digest depends on: two runs whose fingerprints are equal have equal digests, on any number of workers."""

    torch: str
    """Version of torch."""
    device: str
    """Type of device, and its name: kernels differ between models of GPU, and between CPUs."""
    threads: int
    """CPU threads per worker of torch's operators; they change the last bits on the CPU."""
    num_shards: int
    seed: int
    deterministic: bool
    matmul_precision: str
    """torch.get_float32_matmul_precision(): "highest" unless TensorFloat-32 or bfloat16 is allowed."""

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
        """Return in words how `other` differs; empty if it does not."""
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
    return f"cpu {_cpu_name()} {torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
