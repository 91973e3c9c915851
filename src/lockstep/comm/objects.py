"""Gathering objects, so that nothing that a stranger has sent is executed.

    what carries the group's messages             how objects travel
    --------------------------------------------  ----------------------------------------------------------
    memory that only the ranks have ("shm")       pickled
    sockets, and the ranks share a secret         pickled, with a code (HMAC-SHA256) that needs the secret
    sockets, and there is no secret               as plain data (`plain_objects.py`)

The secret is LOCKSTEP_TOKEN; or, where the launcher serves the store over channels that no other process can reach, a
random number that is kept there. Gloo's and NCCL's connections do not prove who is at their other end.
"""

import hashlib
import hmac
import pickle
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, ProcessGroup

from lockstep.comm.bootstrap.channel_store import launch_store
from lockstep.comm.capabilities import capabilities_of
from lockstep.comm.plain_objects import RefusedObjectError, pack_plain, unpack_plain
from lockstep.errors import GroupError
from lockstep.settings import read_settings
from lockstep.torch_private.groups import device_types, store_of

_SECRET_KEY = "lockstep/secret"  # noqa: S105 - the name of a key in a store
_SIGNED, _PLAIN = b"S", b"P"
_CODE_BYTES = hashlib.sha256().digest_size


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Return every rank's `value`, in rank order (collective; small, and plain data over sockets without a secret)."""
    if capabilities_of(group).owns_memory:
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, value, group=group)
        return found
    secret = find_secret(group)
    mine, problem = b"", None
    try:
        mine = pack_message(value, secret, group.rank())
    except RefusedObjectError as error:
        problem = GroupError(_explain_refused(error.name, group.rank()))
        mine = pack_message(problem, secret, group.rank())
    messages = _gather_bytes(mine, group)
    if problem is not None:
        raise problem
    values = [unpack_message(message, secret, rank) for rank, message in enumerate(messages)]
    refused = next(
        (each for each in values if isinstance(each, GroupError) and not isinstance(value, GroupError)), None
    )
    if refused is not None:
        raise refused
    return values


def pack_message(value: Any, secret: bytes | None, rank: int) -> bytes:
    """Return a rank's message; RefusedObjectError if there is no secret and the value is not plain data."""
    if secret is None:
        return _PLAIN + pack_plain(value)
    packed = pickle.dumps(value)
    return _SIGNED + _code(secret, rank, packed) + packed


def unpack_message(message: bytes, secret: bytes | None, rank: int) -> Any:
    """Return the value in the message of a rank."""
    kind, body = message[:1], message[1:]
    if kind != (_PLAIN if secret is None else _SIGNED):
        raise GroupError(
            f"LOCKSTEP_TOKEN is set on this rank and not on rank {rank}, or the other way round. Set it to the same "
            "text on all ranks, or on none. (LS115)"
        )
    if secret is None:
        try:
            return unpack_plain(body)
        except ValueError as error:
            raise GroupError(
                f"A message in the name of rank {rank} is not one of Lockstep's. {error} (LS115)"
            ) from error
    code, packed = body[:_CODE_BYTES], body[_CODE_BYTES:]
    if not hmac.compare_digest(code, _code(secret, rank, packed)):
        raise GroupError(
            f"A message in the name of rank {rank} was not sent by a rank of this training, or LOCKSTEP_TOKEN differs "
            "there. Nothing of it was used. (LS115)"
        )
    return pickle.loads(packed)  # noqa: S301 - its sender has the secret


def find_secret(group: ProcessGroup) -> bytes | None:
    """Return what only the ranks of this training know; None if there is no such thing (local)."""
    token = read_settings().token()
    if token:
        return hashlib.sha256(token.encode()).digest()
    store = launch_store(store_of(group))
    if store is None:
        return None
    try:
        return store.compare_set(_SECRET_KEY, "", secrets.token_hex(32))
    except DistNetworkError as error:
        raise GroupError(f"No objects can be sent to the other ranks: {error} (LS112)") from error


def _code(secret: bytes, rank: int, packed: bytes) -> bytes:
    return hmac.digest(secret, b"%d " % rank + packed, "sha256")


def _gather_bytes(mine: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank, in rank order (collective)."""
    devices = device_types(group)
    device = next((each for each in devices if each.type == "cpu"), devices[0])
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    lengths = _gather_tensor(torch.tensor([len(mine)], dtype=torch.int64, device=device), group)
    sizes = [int(length) for length in lengths]
    page = torch.zeros(max(sizes), dtype=torch.uint8)
    page[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    pages = _gather_tensor(page.to(device), group)
    return [page[:size].cpu().numpy().tobytes() for page, size in zip(pages, sizes, strict=True)]


def _gather_tensor(mine: Tensor, group: ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return found


def _explain_refused(name: str, rank: int) -> str:
    return (
        f"Rank {rank} sends an object of {name} to the other ranks, over sockets that do not prove who sends. Without "
        "a secret only plain data is accepted: numbers, texts, containers, tensors. Send such, or set LOCKSTEP_TOKEN "
        "to the same secret text on all ranks. (LS115)"
    )
