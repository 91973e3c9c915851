"""What ranks exchange: messages and gathers, and what is checked and compared before them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.calls import describe_call, explain_mismatch, pack_text, unpack_text
from lockstep.comm.capabilities import ComparesCalls, OwnsMemory, capabilities_of
from lockstep.comm.world import World, current_world
from lockstep.errors import GroupError
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.groups import device_types

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name of torch 2.13, or of those before it."""
_TAG = 0x10C5
"""Distinguishes our messages from those that a user has under way with tag 0, on backends with tags."""

_SUMMABLE = frozenset({
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
})  # fmt: skip


def joined_world(group: ProcessGroup | None) -> World:
    """Return this worker's place in `group`, or in the default group (local)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupError(
            "There is no process group to reduce over. Call ls.init_process_group() first, or start the function with "
            "ls.launch. (LS127)"
        )
    no_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if group == no_member:
        raise GroupError(
            f"Rank {dist.get_rank()} does not belong to this group, and only its members may call. "
            "Call it under `if group is not dist.GroupMember.NON_GROUP_MEMBER`. (LS206)"
        )
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup or None. (LS206)"
        )
    world = current_world(group)
    if not world.is_torchs:
        raise GroupError(
            "The process group was torn down already, or was not made by torch.distributed. Make another, or leave "
            "group out. (LS204)"
        )
    return world


def check_summable(tensor: object, name: str, *, is_written: bool) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor. (LS207)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}, expected a dense tensor. Give {name}.to_dense(). (LS207)")
    if tensor.dtype not in _SUMMABLE:
        raise ValueError(
            f"{name} is {tensor.dtype}, which torch cannot add. Convert it to float32 or int64 first. (LS207)"
        )
    if is_written and any(stride == 0 < size - 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{name} is an expanded tensor, several of its elements share memory, and the sum cannot be written into "
            f"it. Give {name}.contiguous(). (LS207)"
        )
    return tensor


def to_real_row(tensor: Tensor, min_elements: int) -> Tensor:
    """Return the elements of `tensor` in their logical order: its own memory where it lies in that order, else a copy.

    Complex numbers become pairs of real ones: adding those is the same in every part of a vectorised loop, while a
    complex addition may multiply by 1 + 0j first, which infinities do not survive.
    The result is 1-D, without autograd, and padded with zeros to `min_elements`.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    num_missing = min_elements - flat.numel()
    return torch.cat([flat, flat.new_zeros(num_missing)]) if num_missing > 0 else flat


def from_real_row(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `flat`, which `to_real_row` made of `tensor`, into it, unless they share memory."""
    if flat.data_ptr() != tensor.data_ptr():
        values = flat[: tensor.nbytes // flat.element_size()].view(tensor.dtype)
        tensor.detach().copy_(values.view(tensor.shape))


def post_messages(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], world: World
) -> list[dist.Work]:
    """Start sending and receiving (every rank of the group must call, in one order for each pair of ranks).

    All of one call are one batch: NCCL would wait for ever for two ranks that each send first.
    Ranks are those of the group. Tensors are contiguous; those that are sent are left alone until the work is done.
    """

    def message(operation: object, peer: int, part: Tensor) -> dist.P2POp:
        # Bytes, so that every dtype travels, those included that a backend does not know.
        return dist.P2POp(operation, part.view(torch.uint8), group=world.group, tag=_TAG, group_peer=peer)  # type: ignore[arg-type]

    messages = [message(dist.irecv, peer, part) for peer, part in receives]
    messages += [message(dist.isend, peer, part) for peer, part in sends]
    return dist.batch_isend_irecv(messages) if messages else []


def all_to_all(
    target: Tensor, source: Tensor, received_bytes: Sequence[int], sent_bytes: Sequence[int], world: World
) -> list[dist.Work]:
    """Start sending each rank its part of a flat tensor, in rank order, and receiving such (collective)."""
    places = target.view(torch.uint8), source.view(torch.uint8)
    work = dist.all_to_all_single(*places, list(received_bytes), list(sent_bytes), group=world.group, async_op=True)
    return [] if work is None else [work]


def gather_single(output: Tensor, piece: Tensor, world: World) -> list[dist.Work]:
    """Start gathering pieces in one flat tensor, which may have `piece` in its place (collective over the group)."""
    work = _all_gather_single(output, piece, group=world.group, async_op=True)
    return [] if work is None else [work]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for messages; on a GPU the current stream waits, and the host does not."""
    for work in works:
        work.wait()


def allocate_buffer(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a flat tensor of zeros that the group reduces with as few copies as it can (local)."""
    if device.type == "cpu" and capabilities_of(group).owns_memory:
        with suppress(GroupError):  # a rank is lost: the first call says so, unless the workers are replaced before
            return cast("OwnsMemory", group).allocate_tensor(num_elements, dtype=dtype, device=device)
    return torch.zeros(num_elements, dtype=dtype, device=device)


def describe_use(operation: str, tensor: Tensor, detail: str = "") -> bytes:
    parts = [detail] if detail else []
    if tensor.device.type != "cpu":
        parts.append(f"on {tensor.device.type}")
    return describe_call(operation, ((tensor.dtype, tensor.shape),), ", ".join(parts))


def require_same_call(call: bytes, device: torch.device, world: World) -> None:
    """Return when every rank has made the same call, or raise on all alike if they differ (collective).

    Before the first message: messages carry bytes, and four float32 that are sent to a rank that expects four int32
    would be added as int32. Groups that compare calls by themselves do so; on all others each rank sends its
    description to each other one.
    """
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
        global_ranks = dist.get_process_group_ranks(world.group)
        raise explain_mismatch(dict(zip(global_ranks, calls, strict=True)), dict(zip(global_ranks, lines, strict=True)))


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
