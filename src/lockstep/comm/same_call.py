"""Comparing what ranks pass to a collective that is made of messages, before the first message.

Messages carry bytes: four float32 that are sent to a rank that expects four int32 would be added as int32. Groups that
compare calls by themselves do so; on all others each rank sends its description to each other one.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.calls import describe_call, explain_mismatch, pack_text, unpack_text
from lockstep.comm.capabilities import ComparesCalls, capabilities_of
from lockstep.comm.messages import gather_single, post_messages, wait_all
from lockstep.comm.user_line import find_user_line
from lockstep.comm.world import World
from lockstep.torch_private.groups import device_types


def describe_use(operation: str, tensor: Tensor, detail: str = "") -> bytes:
    """Describe a call with one tensor, by what must agree between ranks."""
    parts = [detail] if detail else []
    if tensor.device.type != "cpu":
        parts.append(f"on {tensor.device.type}")
    return describe_call(operation, ((tensor.dtype, tensor.shape),), ", ".join(parts))


def require_same_call(call: bytes, device: torch.device, world: World) -> None:
    """Return when every rank has made the same call, or raise on all alike if they differ (collective)."""
    if world.group is None or world.world_size == 1:
        return
    if capabilities_of(world.group).compares_calls:
        cast("ComparesCalls", world.group).compare_calls(call)
        return
    # On the CPU where the group has a backend for it: no rank waits for a GPU or a missing receiver.
    has_cpu = any(known.type == "cpu" for known in device_types(world.group))
    where = torch.device("cpu") if has_cpu else device
    calls = _exchange_texts(call, where, world)
    if any(other != call for other in calls):
        lines = [line.decode(errors="replace") for line in _exchange_texts(find_user_line().encode(), where, world)]
        names = dist.get_process_group_ranks(world.group)
        raise explain_mismatch(dict(zip(names, calls, strict=True)), dict(zip(names, lines, strict=True)))


def _exchange_texts(text: bytes, device: torch.device, world: World) -> list[bytes]:
    """Return the text of every rank, in rank order (collective)."""
    mine = pack_text(text).to(device)
    if device.type != "cpu":
        output = mine.new_empty(world.world_size * mine.numel())
        wait_all(gather_single(output, mine, world))
        return [unpack_text(page) for page in output.view(world.world_size, -1)]
    pages = [mine if peer == world.rank else torch.empty_like(mine) for peer in range(world.world_size)]
    others = [(peer, page) for peer, page in enumerate(pages) if peer != world.rank]
    wait_all(post_messages([(peer, mine) for peer, _ in others], others, world))
    return [unpack_text(page) for page in pages]
