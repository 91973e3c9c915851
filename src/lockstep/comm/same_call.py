"""Comparing what ranks pass to a collective that is made of messages, before the first message.

Messages carry bytes: four float32 that are sent to a rank which expects four int32 would be added as such. Groups that
compare calls by themselves are asked to; on all others each rank sends its description to each.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.calls import LONGEST_CALL, describe_call, explain_mismatch
from lockstep.comm.capabilities import ComparesCalls, capabilities_of
from lockstep.comm.messages import post_messages, wait_all
from lockstep.comm.world import World
from lockstep.torch_private import device_types


def describe_use(operation: str, tensor: Tensor, detail: str = "") -> bytes:
    """Describe a call with one tensor, by what must agree between ranks."""
    parts = [detail] if detail else []
    if tensor.device.type != "cpu":
        parts.append(f"on {tensor.device.type}")
    return describe_call(operation, ((tensor.dtype, tensor.shape),), ", ".join(parts))


def require_same_call(call: bytes, device: torch.device, world: World) -> None:
    """Return when every rank has come with the same call (collective).

    Args:
        call: Its description.
        device: That of the tensors which the call is about.
        world: The group.

    Raises:
        CollectiveMismatchError: The calls differ; on every rank alike.
    """
    if world.group is None or world.world_size == 1:
        return
    if capabilities_of(world.group).compares_calls:
        cast("ComparesCalls", world.group).compare_calls(call)
        return
    # On the CPU where the group has a backend for it: no rank waits for a GPU or a missing receiver.
    has_cpu = any(known.type == "cpu" for known in device_types(world.group))
    mine = torch.zeros(LONGEST_CALL, dtype=torch.uint8, device="cpu")
    mine[: len(call)] = torch.frombuffer(bytearray(call), dtype=torch.uint8)
    mine = mine if has_cpu else mine.to(device)
    pages = {peer: torch.empty_like(mine) for peer in range(world.world_size) if peer != world.rank}
    wait_all(post_messages([(peer, mine) for peer in pages], list(pages.items()), world))
    calls = {peer: bytes(page.tolist()).rstrip(b"\0") for peer, page in (*pages.items(), (world.rank, mine))}
    if any(other != call for other in calls.values()):
        names = dist.get_process_group_ranks(world.group)
        raise explain_mismatch({names[peer]: other for peer, other in calls.items()})
