"""Letting malloc keep the memory that a worker frees (glibc; see mallopt(3)).

By default malloc returns large blocks to the system, and each step gets them again, page by page. That costs a quarter
of a microsecond or more for every 4 KiB of activations and gradients.

The threshold for the end of the heap alone makes it worse: glibc does not adapt the other one then, and gets each block
of 128 KiB or more by itself. Before 2.35 glibc refuses blocks of more than 32 MiB.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
_LARGEST_BLOCK_OF_OLD = 1 << 25

FREED_MEMORY_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": str(_LARGEST_BLOCK_OF_OLD), "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES)}
)
"""What has a program keep freed memory that is started with these variables, with any glibc."""


def keep_freed_memory(mallopt: Callable[[int, int], int] | None = None) -> None:
    """Let malloc keep blocks of up to 1 GiB when they are freed, or of 32 MiB; without glibc does nothing (local)."""
    mallopt = _find_mallopt() if mallopt is None else mallopt
    if mallopt is not None and (
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_OF_OLD)
    ):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _find_mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return found
