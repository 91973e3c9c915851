"""What each collective makes of what all ranks give it. Pure: tensors of every rank in, tensors of every rank out."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

PerRank = list[list[Tensor]]
"""Tensors of rank 0, of rank 1, ..."""
Combine = Callable[[PerRank], PerRank]
"""Returns what every rank receives of what every rank has sent."""

_ADDITIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: lambda left, right: left | right if left.dtype is torch.bool else left + right,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def kind_of(operation: Any) -> Any:
    """Return the kind of a reduce operation, which torch gives as an object or as its kind."""
    return getattr(operation, "op", operation)


def reduce_over_ranks(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    """Reduce one tensor of every rank, in rank order."""
    kind = kind_of(operation)
    if kind not in _ADDITIONS:
        raise NotImplementedError(f"Threaded groups do not reduce by {operation}.")
    total = reduce(_ADDITIONS[kind], tensors)
    return total / len(tensors) if kind == ReduceOp.AVG else total


def all_reduce(operation: Any) -> Combine:
    def combine(given: PerRank) -> PerRank:
        reduced = [reduce_over_ranks(tensors, operation) for tensors in zip(*given, strict=True)]
        return [reduced for _ in given]

    return combine


def broadcast(root: int) -> Combine:
    return lambda given: [[] if rank == root else given[root] for rank in range(len(given))]


def reduce_to(operation: Any, root: int) -> Combine:
    def combine(given: PerRank) -> PerRank:
        reduced = [reduce_over_ranks([tensor for (tensor,) in given], operation)]
        return [reduced if rank == root else [] for rank in range(len(given))]

    return combine


def all_gather(given: PerRank) -> PerRank:
    gathered = [tensor for tensors in zip(*given, strict=True) for tensor in tensors]
    return [gathered for _ in given]


def all_gather_single(given: PerRank) -> PerRank:
    """Every rank receives, for each tensor, those of all ranks one after another."""
    gathered = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in zip(*given, strict=True)]
    return [gathered for _ in given]


def gather_to(root: int) -> Combine:
    return lambda given: [[tensor for (tensor,) in given] if rank == root else [] for rank in range(len(given))]


def scatter_from(root: int) -> Combine:
    """Every rank receives one tensor of the root's."""
    return lambda given: [[given[root][rank]] for rank in range(len(given))]


def reduce_scatter(operation: Any) -> Combine:
    """Rank r receives the reduction of all ranks' tensors number r."""
    return lambda given: [
        [reduce_over_ranks([tensors[rank] for tensors in given], operation)] for rank in range(len(given))
    ]


def reduce_scatter_single(operation: Any) -> Combine:
    """Rank r receives chunk r of the reduction of each tensor."""

    def combine(given: PerRank) -> PerRank:
        reduced = [
            reduce_over_ranks(tensors, operation).reshape(len(given), -1) for tensors in zip(*given, strict=True)
        ]
        return [[rows[rank] for rows in reduced] for rank in range(len(given))]

    return combine


def all_to_all(given: PerRank) -> PerRank:
    """Rank r receives tensor number r of every rank."""
    return [[tensors[rank] for tensors in given] for rank in range(len(given))]


def all_to_all_single(given: PerRank) -> PerRank:
    """Rank r receives tensor number r of every rank, as rows of one."""
    return [[torch.cat([tensor.reshape(-1) for tensor in tensors])] for tensors in all_to_all(given)]
