"""Every generator and every switch that decides whether a run can be repeated."""

import random
import sys

import torch

from lockstep.settings import set_determinism_variables


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


def set_deterministic(deterministic: bool) -> None:
    """Set torch's switches for the whole process (local).

    True makes operators deterministic, or raise where they have no deterministic form, and cuDNN and cuBLAS
    repeatable; call it before CUDA is first used, for cuBLAS reads its setting once. False lets cuDNN pick the
    fastest kernel by trying.
    See https://docs.pytorch.org/docs/stable/notes/randomness.html.
    """
    set_determinism_variables(deterministic)
    compiler = sys.modules.get("torch._inductor.config")
    if compiler is not None:
        compiler.deterministic = deterministic  # type: ignore[attr-defined]
    # What torch.use_deterministic_algorithms does, but that imports the compiler, which takes a second.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Without this every torch.empty would be filled with NaN, a cost that only finds reads of unset memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
