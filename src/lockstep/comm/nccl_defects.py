"""Versions of NCCL that are known to return wrong results without an error.

The table has what NCCL's release notes and issues report of the collectives that data-parallel training uses. Defects
of memory that a program registers as symmetric are left out: nothing here registers any.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

Version = tuple[int, int, int]


class Condition(Enum):
    ANYWHERE = "anywhere"
    ONE_RANK = "in a group of one rank"
    SEVERAL_HOSTS = "between hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclDefect:
    first: Version
    """The first version that has it, as far as known."""
    fixed: Version
    """The first version without it."""
    condition: Condition
    effect: str
    """What goes wrong, as a clause."""
    remedy: str
    """What to do if NCCL cannot be replaced."""
    source: str


_OLDEST: Final[Version] = (2, 0, 0)
DEFECTS: Final = (
    NcclDefect(
        first=_OLDEST,
        fixed=(2, 12, 7),
        condition=Condition.ANYWHERE,
        effect="data may be corrupted on hosts where an NVLink is down",
        remedy="NCCL_PROTO=^LL128",
        source="https://github.com/NVIDIA/nccl/issues/596",
    ),
    NcclDefect(
        first=_OLDEST,
        fixed=(2, 15, 5),
        condition=Condition.ANYWHERE,
        effect="tensors whose memory is not aligned may be corrupted",
        remedy="NCCL_PROTO=^LL128",
        source="https://github.com/NVIDIA/nccl, notes of release 2.15.5",
    ),
    NcclDefect(
        first=(2, 18, 1),
        fixed=(2, 18, 3),
        condition=Condition.SEVERAL_HOSTS,
        effect="data may be corrupted on hosts with one network card per GPU",
        remedy="NCCL_PROTO=^LL128",
        source="https://docs.nvidia.com/deeplearning/nccl/release-notes/rel_2-18-1.html",
    ),
    NcclDefect(
        first=_OLDEST,
        fixed=(2, 29, 7),
        condition=Condition.ONE_RANK,
        effect="ReduceOp.AVG may leave the last elements of a tensor as they were",
        remedy="ReduceOp.SUM",
        source="https://github.com/NVIDIA/nccl/issues/1950",
    ),
)


def explain_defects(version: Version, *, world_size: int, is_one_host: bool) -> str:
    """Return a warning about a version of NCCL; empty if no defect is known that can show in this group (pure)."""
    shows = {
        Condition.ANYWHERE: world_size > 1,
        Condition.ONE_RANK: world_size == 1,
        Condition.SEVERAL_HOSTS: not is_one_host,
    }
    found = [defect for defect in DEFECTS if defect.first <= version < defect.fixed and shows[defect.condition]]
    if not found:
        return ""
    effects = "; ".join(f"{defect.effect} (use {defect.remedy}; {defect.source})" for defect in found)
    fixed = max(defect.fixed for defect in found)
    return (
        f"NCCL {_name(version)} is known to return wrong results: {effects}. Use NCCL {_name(fixed)} or later, which a "
        "newer torch brings. `lockstep devices --test` checks the GPUs of this host. (LS117)"
    )


def _name(version: Version) -> str:
    return ".".join(map(str, version))
