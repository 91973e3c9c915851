"""The ranks of comm.py: prepare a size, check it and time it, as the controller requests.

torch's columns run in the processes of one `ls.launch`, those of an MPI in processes that its mpiexec starts with this
file.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls

Call = Callable[[], object]
Bound = dict[str, tuple[torch.Tensor, Call]]
"""By column: a tensor, and the call that reduces it in place."""
SETTLING_BARRIERS = 10
"""Barriers before a batch. Ranks that have just been woken may share a core, and a rank that spins while it waits,
as OpenMPI's do, then blocks the other for a whole time slice: milliseconds, while a call takes microseconds."""


def serve_torch(place: ls.Run, address: str, columns: Sequence[str]) -> None:
    """Run as a rank of torch's columns until the controller closes the connection."""
    gloo = dist.new_group(backend="gloo")
    shm = dist.new_group(backend="shm") if needs_shm(columns) else None

    def bind(numel: int) -> Bound:
        ordinary = torch.zeros(numel)
        bound: Bound = {}
        for column in columns:
            match column:
                case "copy":
                    spare = torch.zeros(numel)
                    bound[column] = spare, partial(spare.copy_, ordinary)
                case "gloo":
                    bound[column] = ordinary, partial(dist.all_reduce, ordinary, group=gloo)
                case "shm":
                    bound[column] = ordinary, partial(dist.all_reduce, ordinary, group=shm)
                case "shm-own":
                    allocate: Callable[..., torch.Tensor] = shm.allocate_tensor  # type: ignore[union-attr]
                    owned = allocate(numel, dtype=torch.float32, device=torch.device("cpu"))
                    bound[column] = owned, partial(dist.all_reduce, owned, group=shm)
                case "ring":
                    from lockstep.comm.ring import ring_all_reduce

                    bound[column] = ordinary, partial(ring_all_reduce, ordinary, group=shm)
                case "ordered":
                    from lockstep.comm.ordered import ordered_all_reduce

                    bound[column] = ordinary, partial(ordered_all_reduce, ordinary, group=shm)
        return bound

    serve(address, place.rank, place.world_size, bind, partial(dist.barrier, group=gloo), "")


def serve_mpi(column: str, address: str) -> None:
    """Be a rank of the column of an MPI until the controller hangs up."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def bind(numel: int) -> Bound:
        tensor = torch.zeros(numel)
        return {column: (tensor, partial(world.Allreduce, MPI.IN_PLACE, tensor.numpy()))}

    torch.set_num_threads(1)
    version = " ".join(MPI.Get_library_version().partition(",")[0].partition("\n")[0].split())
    serve(address, world.rank, world.size, bind, world.Barrier, version)


def serve(address: str, rank: int, world_size: int, bind: Callable[[int], Bound], barrier: Call, version: str) -> None:
    """Answer the controller's orders, one line of JSON each, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        bound: Bound = {}
        answer: dict[str, Any] = {"rank": rank, "version": version}
        while True:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
            line = stream.readline()
            if not line:
                return
            order = json.loads(line)
            match order["do"]:
                case "bind":
                    bound = {}  # free the last size first
                    bound = bind(order["numel"])
                    answer = {}
                case "check":
                    answer = {"wrong": count_wrong(*bound[order["column"]], rank, world_size)}
                case "time":
                    for _ in range(SETTLING_BARRIERS):
                        barrier()
                    answer = {"seconds": time_calls(bound[order["column"]][1], order["calls"])}


def time_calls(call: Call, calls: int) -> float:
    """Return seconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def count_wrong(tensor: torch.Tensor, call: Call, rank: int, world_size: int) -> int:
    """Reduce twice without a pause, and return the number of wrong elements; leave zeros.

    The numbers are whole and small, so that the sums are exact in any order; a slice in the wrong place shows because
    the pattern's length is a prime. Zeros, because what is summed in place again and again would not stay finite.
    """
    pattern = torch.arange(251 * 4096).remainder_(251).float()
    chunks = [(chunk, pattern[: chunk.numel()]) for chunk in tensor.split(pattern.numel())]
    for chunk, numbers in chunks:
        torch.mul(numbers, rank + 1, out=chunk)
    call()
    call()
    factor = world_size * world_size * (world_size + 1) // 2
    wrong = sum(int((chunk != numbers * factor).sum()) for chunk, numbers in chunks)
    tensor.zero_()
    return wrong


def needs_shm(columns: Sequence[str]) -> bool:
    return not {"shm", "shm-own", "ring", "ordered"}.isdisjoint(columns)


if __name__ == "__main__":
    serve_mpi(*sys.argv[1:])
