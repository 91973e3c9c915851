"""The random generators and deterministic switches on which the bits of a run depend."""

import random
import sys
from typing import Any

import torch

from lockstep.settings import set_determinism_variables
from lockstep.torch_private import set_inductor_deterministic

_DEVICES_WITH_GENERATORS: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy (if it is imported) and torch, CUDA's included (local).

    Args:
        seed: In [0, 2**63); NumPy gets it modulo 2**32.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def reseed_generators(seed: int) -> None:
    """Do what `seed_generators` does, in a process whose devices are in use already (local).

    `torch.manual_seed` also notes, with a traceback each, what to seed should a device be used one day: half a
    millisecond, for every shard of every step.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for device in _DEVICES_WITH_GENERATORS:
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def set_deterministic(deterministic: bool) -> None:
    """Set torch's switches for the whole process (local).

    True makes operators deterministic, or raise where they have no deterministic form, and cuDNN and cuBLAS
    repeatable; call it before CUDA is first used, for cuBLAS reads its setting once. False lets cuDNN pick the
    fastest kernel by trying.
    See https://docs.pytorch.org/docs/stable/notes/randomness.html.
    """
    set_determinism_variables(deterministic)
    set_inductor_deterministic(deterministic)
    # What torch.use_deterministic_algorithms does, but that imports the compiler, which takes a second.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Without this every torch.empty would be filled with NaN, a cost that only finds reads of unset memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
