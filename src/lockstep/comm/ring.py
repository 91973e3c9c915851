"""All-reduce around a ring, over any process group that can send and receive.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
and Distributed Computing 69(2), 2009: each rank talks to its two neighbours only, and sends 2 (W - 1) / W times the
tensor, which no algorithm that starts with one tensor on each of W ranks can undercut.

A chunk is sent on when it has been received and added; meanwhile the next one is on its way:

    turn          0          1          2          3          4
    send, take    chunk 0    chunk 1    chunk 2    chunk 0    chunk 1   of the next segment
    add                      chunk 0    chunk 1    chunk 2    chunk 0

Segment k is added in the order of ranks k, k + 1, ..., k - 1, so the result is the same on every rank and in every
run, and another one, in its last bits, on another number of ranks. `ordered_all_reduce` has the same on any.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.messages import (
    all_to_all,
    check_summable,
    describe_use,
    from_real_row,
    joined_world,
    post_messages,
    require_same_call,
    to_real_row,
    wait_all,
)
from lockstep.comm.segments import plan_ring, ring_transfers
from lockstep.comm.world import World

_CHUNK_BYTES = 2 << 20
_MAX_IN_FLIGHT = 2


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `tensor` over the ranks of `group`, in place (collective: every rank of the group calls).

        total = ls.ring_all_reduce(torch.ones(3))    # as many as there are ranks, on each of them

    Before the first chunk the ranks compare shape and dtype, in a small message. The algorithm is that of Patarasuk and
    Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Memory beside the tensor: two chunks of 2 MiB; for a non-contiguous tensor a contiguous copy.

    Args:
        tensor: Dense, the same shape, dtype and kind of device on every rank; any strides. Integers wrap
            around, booleans are or-ed, as torch adds them.
        group: The group; None for the default one.

    Returns:
        `tensor`.

    Raises:
        CollectiveMismatchError: The ranks pass tensors of different shape, dtype or kind of device, or make different
            calls; on every rank alike. On groups that compare no calls, only calls of this function and of
            `ordered_all_reduce` are distinguished.
        GroupError: There is no group, or this worker is not in it.
        TypeError: `tensor` or `group` is something else.
        ValueError: The tensor is sparse, expanded, or of a dtype that torch cannot add.
    """
    world = joined_world(group)
    check_summable(tensor, "tensor", is_written=True)
    require_same_call(describe_use("ring_all_reduce", tensor), tensor.device, world)
    if world.world_size > 1 and tensor.numel() > 0:
        flat = to_real_row(tensor, min_elements=world.world_size)
        _reduce(flat, world)
        from_real_row(flat, tensor)
    return tensor


def ring_hook(state: ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of torch's DistributedDataParallel around the ring; its register_comm_hook takes this.

        torch.nn.parallel.DistributedDataParallel(model).register_comm_hook(None, ls.ring_hook)

    Gradients are divided before they are added, as torch does, so that half precision does not overflow. The hook
    returns when the bucket is reduced: nothing of the backward overlaps with it.

    Args:
        state: The group to average over, that of the wrapper: a bucket does not contain it. None for the default group;
            under a wrapper over a subgroup it would wait for ranks that make no such call.
        bucket: The bucket, reduced in place.

    Raises:
        GroupError: As `ring_all_reduce`.
    """
    averaged = bucket.buffer().div_(joined_world(state).world_size)
    return resolved(ring_all_reduce(averaged, state))


def resolved(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that holds `tensor` already; on a GPU, work queued on the current stream included (local)."""
    devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


def _reduce(flat: Tensor, world: World) -> None:
    """Sum a 1-D contiguous tensor with an element or more per rank, in place."""
    chunks = plan_ring(flat.numel(), world.world_size, _CHUNK_BYTES // flat.element_size())
    # A turn may start when the one that brought what it sends is finished: with one chunk, that is the one before it.
    max_in_flight = min(_MAX_IN_FLIGHT, len(chunks[0]))
    longest = max(stop - start for start, stop in chunks[0])
    landings = [flat.new_empty(longest) for _ in range(max_in_flight)]
    in_flight: deque[tuple[list[dist.Work], Tensor, Tensor | None]] = deque()

    def finish() -> None:
        works, target, landing = in_flight.popleft()
        wait_all(works)
        if landing is not None:
            target.add_(landing)

    for number, transfer in enumerate(ring_transfers(world.rank, chunks)):
        if len(in_flight) == max_in_flight:
            finish()
        sent, target = flat[slice(*transfer.sent)], flat[slice(*transfer.received)]
        landing = landings[number % max_in_flight][: target.numel()] if transfer.is_added else None
        works = _pass_on(sent, target if landing is None else landing, world)
        in_flight.append((works, target, landing))
    while in_flight:
        finish()


def _pass_on(sent: Tensor, received: Tensor, world: World) -> list[dist.Work]:
    """Start sending a part to the next rank and receiving one from the previous rank (collective)."""
    following, previous = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    if sent.device.type == "cpu":
        return post_messages([(following, sent)], [(previous, received)], world)
    # One call: Gloo has no messages for other devices, and NCCL would run two messages one after another.
    num_sent, num_received = [0] * world.world_size, [0] * world.world_size
    num_sent[following], num_received[previous] = sent.nbytes, received.nbytes
    return all_to_all(received, sent, num_received, num_sent, world)
