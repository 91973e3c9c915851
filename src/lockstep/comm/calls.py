"""Descriptions of calls, which ranks compare: different calls are an error then, not a sum of unrelated tensors.

Pure: descriptions in, texts out. A description is a short line such as `all_reduce(sum, float32 [2, 3])`; ranks
compare it byte for byte and a person reads it in the message.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from typing import Final, final

import torch
from torch import Tensor

from lockstep.errors import CollectiveMismatchError

LAYOUT_MARK: Final = ", tensors: "
"""Before the description of tensors that travel as bytes."""
LONGEST_CALL = 1000
"""Bytes of the longest description."""
_PURPOSE: Final = ContextVar("what the calls of this thread are for", default="")


def calls_for(purpose: str) -> "_Described":
    """Add a purpose to the descriptions of the calls within: the user who reads them did not write these calls.

    It is the same on every rank: they compare it.
    """
    return _Described(f" for {purpose}" if purpose else "")


def calls_of(layout: str) -> "_Described":
    """Add a description of tensors that travel as bytes to those of the calls within."""
    return _Described(f"{_PURPOSE.get()}{LAYOUT_MARK}{layout}")


@final
class _Described:
    """A block with a further description of its calls: a class, as each step has several."""

    __slots__ = ("_before", "_further")

    def __init__(self, further: str) -> None:
        self._further = further

    def __enter__(self) -> None:
        self._before = _PURPOSE.set(self._further)

    def __exit__(self, *_: object) -> None:
        _PURPOSE.reset(self._before)


def purpose_of_calls() -> str:
    """Return what the calls of this thread are for: a part of their descriptions."""
    return _PURPOSE.get()


def describe_call(operation: str, tensors: tuple[tuple[torch.dtype, torch.Size], ...], detail: str = "") -> bytes:
    """Describe a call in one line, by what must agree between ranks (`detail`: the reduce operation, the root)."""
    return _describe(operation, tensors, detail, _PURPOSE.get())


@lru_cache(maxsize=4096)
def _describe(operation: str, tensors: tuple[tuple[torch.dtype, torch.Size], ...], detail: str, purpose: str) -> bytes:
    parts = [detail] if detail else []
    parts += [describe_kind(dtype, shape) for dtype, shape in tensors]
    text = f"{operation}({', '.join(parts)}){purpose}".encode()
    if len(text) > LONGEST_CALL:
        digest = hashlib.sha256(text).hexdigest()[:16]
        text = text[: LONGEST_CALL - 60] + f"... {len(tensors)} tensors, digest {digest})".encode()
    return text


def describe_kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def pack_text(text: bytes) -> Tensor:
    """Return a text of at most `LONGEST_CALL` bytes, the rest is cut, as a tensor of bytes on the CPU."""
    page = torch.zeros(LONGEST_CALL, dtype=torch.uint8, device="cpu")
    cut = text[:LONGEST_CALL]
    if cut:
        page[: len(cut)] = torch.frombuffer(bytearray(cut), dtype=torch.uint8)
    return page


def unpack_text(page: Tensor) -> bytes:
    return bytes(page.tolist()).rstrip(b"\0")


def require_equal_texts(
    call: bytes,
    exchange: Callable[[bytes], list[bytes]],
    find_line: Callable[[], str],
    global_ranks: Sequence[int],
    made_at: str = "",
) -> None:
    """Raise on every rank alike if their calls differ; `exchange` returns the text of each (collective)."""
    calls = exchange(call)
    if all(other == call for other in calls):
        return
    lines = [line.decode(errors="replace") for line in exchange(find_line().encode())]
    ranks = dict(zip(global_ranks, calls, strict=True)), dict(zip(global_ranks, lines, strict=True))
    raise explain_mismatch(*ranks, made_at=made_at)


def explain_mismatch(
    calls: Mapping[int, bytes], lines: Mapping[int, str] = MappingProxyType({}), *, made_at: str = ""
) -> CollectiveMismatchError:
    """Return the error for other calls; `made_at` names the group, where it is not the default group."""
    ranks: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        line = lines.get(rank)
        ranks.setdefault(f"{call.decode(errors='replace')}{f' at {line}' if line else ''}", []).append(rank)
    said = "; ".join(f"{_name_ranks(who)} {call}" for call, who in ranks.items())
    error = CollectiveMismatchError(
        f"The ranks of the group{made_at} do not make the same call: {said}. Every rank must make the same calls in "
        "the same order, with tensors of the same shape and dtype. Nothing was exchanged. (LS201)"
    )
    error.calls = dict(calls)
    return error


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} calls"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} call"
