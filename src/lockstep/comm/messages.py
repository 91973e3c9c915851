"""What ranks exchange: messages and gathers, and the checks and the flat form of tensors before them."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.world import World, current_world
from lockstep.errors import GroupError

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
    """Return `tensor` if it can be summed over a group."""
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


def flatten(tensor: Tensor, min_elements: int) -> Tensor:
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


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `flat`, which `flatten` made of `tensor`, into it, unless they share memory."""
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


def pass_on(sent: Tensor, target: int, received: Tensor, source: int, world: World) -> list[dist.Work]:
    """Start sending one tensor to a rank and receiving one from a rank (collective: every rank of the group calls).

    Both are contiguous, and `sent` is left alone until the work is done.
    """
    if sent.device.type == "cpu":
        return post_messages([(target, sent)], [(source, received)], world)
    # One call: Gloo has no messages for other devices, and NCCL would run two messages one after another.
    num_sent, num_received = [0] * world.world_size, [0] * world.world_size
    num_sent[target], num_received[source] = sent.nbytes, received.nbytes
    places = received.view(torch.uint8), sent.view(torch.uint8)
    work = dist.all_to_all_single(*places, num_received, num_sent, group=world.group, async_op=True)
    return [] if work is None else [work]


def gather_single(output: Tensor, piece: Tensor, world: World) -> list[dist.Work]:
    """Start gathering pieces in one flat tensor, which may have `piece` in its place (collective over the group)."""
    work = _all_gather_single(output, piece, group=world.group, async_op=True)
    return [] if work is None else [work]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for messages; on a GPU the current stream waits, and the host does not."""
    for work in works:
        work.wait()
