"""The one file that reads and writes the environment of this process.

Everything else gets frozen values from here, so that a grep of this file shows every variable that can change
what Lockstep does, and a test can hand in a mapping of its own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UsageError

CUBLAS_WORKSPACE = ":4096:8"
"""The cuBLAS workspace under which its results are reproducible (cuBLAS manual, "Results reproducibility")."""

_NUM_HASH_SEEDS = 2**32
"""PYTHONHASHSEED is below that."""
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVariables:
    """What a launcher said about this worker, as text; None where it said nothing."""

    rank: str | None
    """RANK: number of this worker in the world."""
    world_size: str | None
    """WORLD_SIZE: how many workers there are."""
    local_rank: str | None
    """LOCAL_RANK: number of this worker on its host."""
    master_addr: str | None
    """MASTER_ADDR: host of the rendezvous."""
    master_port: str | None
    """MASTER_PORT: its TCP port."""
    agent_store: str | None
    """TORCHELASTIC_USE_AGENT_STORE: "True" if torchrun's agent serves the rendezvous, and not rank 0."""


def read_world(environ: Mapping[str, str] | None = None) -> WorldVariables:
    """Read the `env://` variables of torch.distributed.

    Args:
        environ: Mapping to read instead of this process' environment.
    """
    source = os.environ if environ is None else environ
    return WorldVariables(
        rank=source.get("RANK"),
        world_size=source.get("WORLD_SIZE"),
        local_rank=source.get("LOCAL_RANK"),
        master_addr=source.get("MASTER_ADDR"),
        master_port=source.get("MASTER_PORT"),
        agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE"),
    )


def read_check(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether LOCKSTEP_CHECK asks for the calls of all ranks to be compared.

    Args:
        environ: Mapping to read instead of this process' environment.

    Raises:
        UsageError: It is neither a yes nor a no.
    """
    text = (os.environ if environ is None else environ).get("LOCKSTEP_CHECK", "")
    word = text.strip().lower()
    if word not in _YES | _NO:
        raise UsageError(
            f"LOCKSTEP_CHECK is {text!r}, expected 1, true, yes or on to have the calls of all ranks compared, or 0, "
            "false, no, off or nothing."
        )
    return word in _YES


def read_stall_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return after how long without a reduction the ranks say where they stand: LOCKSTEP_STALL_SECONDS; 0 for never.

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
            f"LOCKSTEP_STALL_SECONDS is {text!r}, expected a number of seconds, or 0 to say nothing."
        ) from error


def read_launch_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what torch's DistributedDataParallel logs of the environment, by its names; "N/A" where nothing is set.

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


def worker_environment(
    overrides: Mapping[str, str], environ: Mapping[str, str] | None = None, *, seed: int = 0
) -> dict[str, str]:
    """Return the environment for a worker: this process's, with `overrides` on top.

    Python hashes text with a key, so that a vocabulary that is built from a set has another order in every process. The
    key follows from `seed`, unless the user has set PYTHONHASHSEED.

    Args:
        overrides: Variables that replace others.
        environ: Mapping to take instead of this process's environment.
        seed: Of the worker's global generators.
    """
    key = {"PYTHONHASHSEED": str(seed % _NUM_HASH_SEEDS)}
    return {**key, **(os.environ if environ is None else environ), **overrides}


def set_determinism_variables(deterministic: bool) -> None:
    """Tell cuBLAS and torch's compiler, which read the environment when they are first used, what is wanted.

    A user's own choice of cuBLAS workspace stays.
    """
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
