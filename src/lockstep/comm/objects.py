"""Gathering objects, so that nothing that a stranger has sent is executed.

    what carries the group's messages             how objects travel
    --------------------------------------------  ----------------------------------------------------------
    memory that only the ranks have ("shm")       pickled
    sockets, and the ranks share a secret         pickled, with a code (HMAC-SHA256) that needs the secret
    sockets, and there is no secret               as plain data (`pack_plain`)

The secret is LOCKSTEP_TOKEN; or, where the launcher serves the store over channels that no other process can reach, a
random number that is kept there. Gloo's and NCCL's connections do not prove who is at their other end.
"""

import builtins
import dataclasses
import datetime
import hashlib
import hmac
import io
import pickle
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import PosixPath
from types import FunctionType
from typing import IO, Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, ProcessGroup

from lockstep.comm.bootstrap.channel_store import launch_store
from lockstep.comm.capabilities import capabilities_of
from lockstep.errors import GroupError, PeerFailedError, describe_exception
from lockstep.settings import read_settings
from lockstep.torch_private.groups import device_types, store_of
from lockstep.torch_private.modules import byte_view

_SECRET_KEY = "lockstep/secret"  # noqa: S105 - the name of a key in a store
_SIGNED, _PLAIN = b"S", b"P"
_LENGTH_BYTES = 8
_HEAD_BYTES = 1016
"""Messages up to this length take one exchange; of longer ones the rest takes another."""
_CODE_BYTES = hashlib.sha256().digest_size
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "range", "set", "slice"})
_CLASSES = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(OrderedDict, PosixPath, torch.Size, torch.device),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    )
}
_NUMPY = frozenset(
    {
        *(("numpy", "dtype"), ("numpy", "ndarray")),
        *(("numpy._core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct")),
        *(("numpy.core.multiarray", "scalar"), ("numpy.core.multiarray", "_reconstruct")),
    }
)


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Return every rank's `value`, in rank order (collective; small, and plain data over sockets without a secret)."""
    if capabilities_of(group).owns_memory:
        return [pickle.loads(each) for each in _gather_bytes(pickle.dumps(value), group)]  # noqa: S301 - only ranks send
    secret = find_secret(group)
    mine, problem = b"", None
    try:
        mine = pack_message(value, secret, group.rank())
    except RefusedObjectError as error:
        problem = GroupError(
            f"Rank {group.rank()} sends an object of {error.name} to the other ranks, over sockets that do not prove "
            "who sends. Without a secret only plain data is accepted: numbers, texts, containers, tensors. Send such, "
            "or set LOCKSTEP_TOKEN to the same secret text on all ranks. (LS115)"
        )
        mine = pack_message(problem, secret, group.rank())
    messages = _gather_bytes(mine, group)
    if problem is not None:
        raise problem
    values = [unpack_message(message, secret, rank) for rank, message in enumerate(messages)]
    for each in values:
        if isinstance(each, GroupError) and not isinstance(value, GroupError):
            raise each
    return values


def pack_message(value: Any, secret: bytes | None, rank: int) -> bytes:
    """Return a rank's message; RefusedObjectError if there is no secret and the value is not plain data."""
    if secret is None:
        return _PLAIN + pack_plain(value)
    packed = pickle.dumps(value)
    return _SIGNED + _code(secret, rank, packed) + packed


def unpack_message(message: bytes, secret: bytes | None, rank: int) -> Any:
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
    head = len(mine).to_bytes(_LENGTH_BYTES, "little") + mine[:_HEAD_BYTES]
    heads = _gather_page(head, _LENGTH_BYTES + _HEAD_BYTES, device, group)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in heads]
    longest = max(lengths) - _HEAD_BYTES
    rests = _gather_page(mine[_HEAD_BYTES:], longest, device, group) if longest > 0 else [b""] * len(heads)
    return [(head[_LENGTH_BYTES:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]


def _gather_page(mine: bytes, size: int, device: torch.device, group: ProcessGroup) -> list[bytes]:
    page = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    pages = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(group.size())]
    dist.all_gather(pages, page.to(device), group=group)
    return [each.cpu().numpy().tobytes() for each in pages]


class RefusedObjectError(ValueError):
    """A message holds an object that is more than data."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The message names {name}, which is not plain data.")
        self.name = name


def pack_plain(value: Any) -> bytes:
    """Return an object as bytes for `unpack_plain`; RefusedObjectError if something in it is not plain data."""
    stream = io.BytesIO()
    try:
        _PlainPickler(stream, protocol=4).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a local function, a lock, ...
        raise RefusedObjectError(type(value).__qualname__) from error
    packed = stream.getvalue()
    unpack_plain(packed)
    return packed


def to_plain_error(error: Exception, rank: int) -> Exception:
    """Return an exception as other ranks can read it: itself, or one that has its class and message as text."""
    try:
        pack_plain(error)
    except RefusedObjectError:
        return PeerFailedError(f"Rank {rank} has failed: {describe_exception(error)} (LS213)")
    return error


def unpack_plain(packed: bytes) -> Any:
    """Return the object that `pack_plain` was given; ValueError if it names anything else, which is not called.

    A pickle names functions, and reading it calls them, so one from a stranger runs what the stranger likes. Reading
    here accepts classes that hold data: Python's and NumPy's values, torch's types and tensors, our dataclasses,
    configs, enums and exceptions. All else is refused before it is called.
    """
    try:
        return RestrictedUnpickler(io.BytesIO(packed), _find, RefusedObjectError).load()
    except RefusedObjectError:
        raise
    except Exception as error:  # bytes of a stranger may raise anything
        raise ValueError(f"It cannot be read: {type(error).__name__}: {error}") from error


def tensor_from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


@final
class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return NotImplemented
        return tensor_from_bytes, (byte_view(value).numpy().tobytes(), value.dtype, tuple(value.shape))


@final
class RestrictedUnpickler(pickle._Unpickler):  # noqa: SLF001 - the C class has no `load_build` to override
    """Uses what `find` returns for a module and a name; where that is None, raises what `refuse` makes of them."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def __init__(self, stream: IO[bytes], find: Callable[[str, str], Any], refuse: Callable[[str], Exception]) -> None:
        super().__init__(stream)
        self._find = find
        self._refuse = refuse

    def load_build(self) -> None:
        """Refuse to set attributes of classes, functions and enum members, which the whole process shares."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type | FunctionType | Enum):
            raise self._refuse(f"{target.__module__}.{getattr(target, '__qualname__', target)}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        if found is None:
            raise self._refuse(f"{module}.{name}")
        return found


def _find(module: str, name: str) -> Any:
    """Return a class or function that can only make data; None for any other."""
    if (module, name) == (__name__, tensor_from_bytes.__name__):
        return tensor_from_bytes
    if (module, name) in _NUMPY:
        return getattr(sys.modules.get(module), name, None)
    if (module, name) in _CLASSES:
        return _CLASSES[module, name]
    if module == "torch":
        found = getattr(torch, name, None) if "." not in name else None
        return found if isinstance(found, torch.dtype) else None
    if module == "builtins":
        found = getattr(builtins, name, None)
        is_error = isinstance(found, type) and issubclass(found, Exception)
        return found if name in _BUILTINS or is_error else None
    if module.startswith("lockstep."):
        found = getattr(sys.modules.get(module), name, None)
        if not isinstance(found, type) or found.__module__ != module:
            return None
        is_record = dataclasses.is_dataclass(found) or "__pydantic_fields__" in vars(found)
        return found if is_record or issubclass(found, Enum | Exception | tuple) else None
    return None
