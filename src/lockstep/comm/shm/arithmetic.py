"""How what the ranks hold is added (or multiplied, or compared), in the order of the tree; and doing it with torch.

`native/shm.c` adds the common dtypes, with the same bits as torch; all else is reduced here, block by block.

[Note: one order] Every reduction of this backend combines the ranks as `shards/tree.py` defines, element by element.
So the bits do not depend on which rank owns a segment, on the length of the message or on where a chunk begins, and an
ordered all-reduce of one partial per rank is the plain one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.collectives import operation_name, split_operation
from lockstep.comm.shm import native
from lockstep.shards.tree import Node, add_in_tree_order

BY_TORCH: Final = -1
"""The kind of a reduction that `native/shm.c` does not do."""
# Its kinds; it wraps integers around, with or without a sign, and adds complex numbers as pairs.
_SUMS: Final[Mapping[torch.dtype, tuple[int, int]]] = {
    torch.float32: (0, 1),
    torch.float64: (1, 1),
    torch.complex64: (0, 2),
    torch.complex128: (1, 2),
    torch.bfloat16: (2, 1),
    torch.float16: (3, 1),
    torch.int8: (4, 1),
    torch.uint8: (4, 1),
    torch.int16: (5, 1),
    torch.int32: (6, 1),
    torch.int64: (7, 1),
}
Combine = Callable[..., Tensor]
"""Takes two tensors and `out`."""

_BLOCK_BYTES: Final = 256 << 10  # two operands and a result stay in a core's second-level cache
_OVER_NUMBERS: Final[Mapping[Any, Combine]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_OVER_BOOLEANS: Final[Mapping[Any, Combine]] = {
    ReduceOp.SUM: torch.logical_or,
    ReduceOp.PRODUCT: torch.logical_and,
    ReduceOp.MIN: torch.logical_and,
    ReduceOp.MAX: torch.logical_or,
    ReduceOp.BAND: torch.logical_and,
    ReduceOp.BOR: torch.logical_or,
    ReduceOp.BXOR: torch.logical_xor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    name: str
    """The operation's name in lower case, as in messages."""
    combine: Combine
    is_average: bool
    """Whether the result is divided by the number of ranks."""
    factor: float | Tensor | None
    """What each rank's values are multiplied by first, or None."""
    kind: int
    """How `native/shm.c` adds numbers, or `BY_TORCH`."""
    width: int
    """How many of those numbers an element has."""


@dataclass(frozen=True, slots=True)
class Step:
    """One addition, or product, or comparison: registers 0 .. n-1 are the operands, then scratch; -1 is the result."""

    left: int
    right: int
    target: int


def reduction(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    kind, factor = split_operation(op)
    how = _reduction(kind, dtype)
    if factor is None:
        return how
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"ReduceOp.PREMUL_SUM multiplies by {factor}, which {dtype} cannot hold; cast the tensor first. (LS208)"
        )
    return replace(how, factor=factor)


def reduce_into(
    out: Tensor, parts: Sequence[Tensor], how: Reduction, steps: Sequence[Step], copies: Sequence[Tensor] = ()
) -> None:
    """Reduce `parts`, in tree order, into `out` and then copy the result to `copies`, one block at a time.

    All are flat, of one length and dtype. `out` and `copies` may be parts, but must not overlap in another way.
    """
    if out.numel() == 0:
        return
    block = max(_BLOCK_BYTES // out.element_size(), 1)
    if out.numel() <= block:  # cutting tensors takes longer than adding short ones
        scratch = [torch.empty_like(out) for _ in range(count_scratch(steps, len(parts)))]
        _reduce_block(parts, out, scratch, steps, how)
        for copy in copies:
            copy.copy_(out)
        return
    columns = [tensor.split(block) for tensor in (*parts, out, *copies)]
    scratch = [torch.empty_like(columns[0][0]) for _ in range(count_scratch(steps, len(parts)))]
    for row in zip(*columns, strict=True):
        _reduce_block(row[: len(parts)], row[len(parts)], scratch, steps, how)
        for copy in row[len(parts) + 1 :]:
            copy.copy_(row[len(parts)])


def _reduce_block(
    parts: Sequence[Tensor], out: Tensor, scratch: Sequence[Tensor], steps: Sequence[Step], how: Reduction
) -> None:
    length = out.numel()
    registers = [*parts, *(space[:length] for space in scratch)]
    for step in steps:
        target = out if step.target < 0 else registers[step.target]
        how.combine(registers[step.left], registers[step.right], out=target)
    if not steps:
        out.copy_(parts[0])
    if how.is_average:
        if out.is_floating_point() or out.is_complex():
            out.div_(len(parts))
        else:
            torch.div(out, len(parts), rounding_mode="trunc", out=out)


def schedule(num_parts: int) -> tuple[Step, ...]:
    """Return the additions that combine one operand per rank in tree order."""
    return schedule_nodes(tuple((part, part + 1) for part in range(num_parts)), num_parts)


@lru_cache(maxsize=128)
def schedule_nodes(nodes: tuple[Node, ...], num_shards: int) -> tuple[Step, ...]:
    """Return the additions that combine the sums of subtrees in tree order, the last one into the result.

    Only the last writes the result, so that it may lie where an operand lies. `nodes` must cover every shard once.
    """
    num_parts = used = len(nodes)
    steps: list[Step] = []
    free: list[int] = []

    def add(left: int, right: int) -> int:
        nonlocal used
        free.extend(register for register in (left, right) if register >= num_parts)
        if free:
            target = free.pop()
        else:
            target, used = used, used + 1
        steps.append(Step(left, right, target))
        return target

    add_in_tree_order({node: part for part, node in enumerate(nodes)}, num_shards, add)
    if steps:
        steps[-1] = Step(steps[-1].left, steps[-1].right, -1)
    return tuple(steps)


def count_scratch(steps: Sequence[Step], num_parts: int) -> int:
    return max((step.target + 1 - num_parts for step in steps), default=0) if steps else 0


@lru_cache(maxsize=64)
@lru_cache(maxsize=256)
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    name = operation_name(kind)
    combine = (_OVER_BOOLEANS if dtype is torch.bool else _OVER_NUMBERS).get(kind)
    if combine is None:
        raise TypeError(
            f"ReduceOp.{name.upper()} has no meaning for {dtype}; cast the tensor to a number type first. (LS208)"
        )
    probe = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        combine(probe, probe, out=probe)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"ReduceOp.{name.upper()} does not work on {dtype} tensors on the CPU ({error}). "
            "Cast the tensor first. (LS208)"
        ) from error
    number, width = _SUMS.get(dtype, (BY_TORCH, 1)) if name in {"sum", "premul_sum"} else (BY_TORCH, 1)
    if number != BY_TORCH and not native.load().lockstep_adds(number):
        number, width = BY_TORCH, 1
    return Reduction(name=name, combine=combine, is_average=kind == ReduceOp.AVG, factor=None, kind=number, width=width)
