"""Random sequences of collectives on random tensors and groups, against what they must give, on shm and on Gloo."""

import os
import random
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.errors import WorkerFailedError
from torture.row import Row

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
_CALLS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "reduce")
_CALLS_OF_A_LAUNCH = 400


def run(row: Row, seed: int) -> None:
    """Launch workers that make random calls, until the time is over."""
    number = 0
    while row.has_time:
        workers, backend = 2 + number % 3, ("shm", "gloo")[number % 2]
        os.environ["LOCKSTEP_CPU_BACKEND"] = backend
        where = f"launch {number} ({workers} workers, {backend})"
        try:
            found = ls.launch(_fuzz, f"{seed} {number}", workers=workers, devices="cpu")
        except WorkerFailedError as error:
            row.note(f"{where}: {str(error).splitlines()[0]}")
        else:
            wrong = sorted({each for result in found for each in result})
            for index in range(_CALLS_OF_A_LAUNCH):
                row.note(f"{where}: {wrong[0]}" if index == 0 and wrong else "")
        finally:
            del os.environ["LOCKSTEP_CPU_BACKEND"]
        number += 1


def _fuzz(run_: ls.Run, seed: str) -> list[str]:
    draw = random.Random(seed)  # the same on all ranks
    halves = [list(range(run_.world_size)), list(range(run_.world_size - 1))]
    groups = [dist.new_group(ranks) for ranks in halves]
    wrong = []
    for number in range(_CALLS_OF_A_LAUNCH):
        index = draw.randrange(2)
        ranks = halves[index]
        name, dtype, size = draw.choice(_CALLS), draw.choice(_DTYPES), draw.choice([1, 3, 64, 1000, 70_000])
        root, tensor_seed = draw.choice(ranks), draw.randrange(2**31)
        if run_.rank not in ranks or len(ranks) == 1:
            continue
        inputs = [_tensor(tensor_seed + rank, dtype, size * len(ranks)) for rank in ranks]
        if not _is_right(name, inputs, ranks.index(run_.rank), ranks.index(root), groups[index]):
            wrong.append(f"call {number}: {name} of {size} {dtype} over {len(ranks)} ranks gave other values")
    return wrong


def _tensor(seed: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    # Small whole numbers: sums of them are exact in every dtype, in any order.
    return torch.randint(0, 9, (size,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _is_right(name: str, inputs: list[torch.Tensor], rank: int, root: int, group: Any) -> bool:
    own, num = inputs[rank].clone(), len(inputs)
    total = torch.stack(inputs).sum(0).to(own.dtype)
    pieces = [list(each.chunk(num)) for each in inputs]
    outputs = [torch.empty_like(piece) for piece in pieces[0]]
    if name == "all_reduce":
        dist.all_reduce(own, group=group)
        return torch.equal(own, total)
    if name == "reduce":
        dist.reduce(own, group_dst=root, group=group)
        return rank != root or torch.equal(own, total)
    if name == "broadcast":
        dist.broadcast(own, group_src=root, group=group)
        return torch.equal(own, inputs[root])
    if name == "all_gather":
        everything = [torch.empty_like(own) for _ in inputs]
        dist.all_gather(everything, own, group=group)
        return all(map(torch.equal, everything, inputs))
    if name == "reduce_scatter":
        dist.reduce_scatter(outputs[rank], [piece.clone() for piece in pieces[rank]], group=group)
        return torch.equal(outputs[rank], total.chunk(num)[rank])
    if name == "all_to_all":
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own, group=group)
        return torch.equal(received, torch.cat([each[rank] for each in pieces]))
    if name == "gather":
        everything = [torch.empty_like(own) for _ in inputs]
        dist.gather(own, everything if rank == root else None, group_dst=root, group=group)
        return rank != root or all(map(torch.equal, everything, inputs))
    dist.scatter(outputs[rank], pieces[root] if rank == root else None, group_src=root, group=group)
    return torch.equal(outputs[rank], pieces[root][rank])
