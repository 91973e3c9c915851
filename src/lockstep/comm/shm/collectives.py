"""The collectives, as rounds of an exchange. Every function is collective over the group of the exchange.

All take flat, contiguous CPU tensors and the description of the call, and raise what the exchange raises. What is
only moved travels as bytes, so every dtype does.

An all-reduce of a long tensor is a reduce-scatter and an all-gather in one pipeline of rounds. Round i of n + 1, for
rank r, with chunk i cut into one slice per rank:

    1 write   slices of chunk i that others own, and (from step 4 of the round before) the reduced slice r of chunk i-1
    2 swap
    3 read    the reduced slices of chunk i-1 from their owners
    4 reduce  slice r of chunk i, from all ranks' outboxes, into the tensor and into the next outbox
"""

import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lockstep.comm.shm.arithmetic import Reduction, reduce_into
from lockstep.comm.shm.exchange import NOWHERE, Exchange
from lockstep.errors import CollectiveMismatchError

_ALIGNMENT: Final = 64
_SHORT_BYTES: Final = 128 << 10
"""Up to here every rank reduces the whole message by itself: one swap fewer, more arithmetic."""


def all_reduce(exchange: Exchange, tensor: Tensor, how: Reduction, call: bytes) -> None:
    """Replace `tensor` by its reduction over all ranks."""
    if tensor.nbytes <= _SHORT_BYTES:
        _all_reduce_short(exchange, tensor, how, call)
        return
    location = exchange.memory.locate(tensor)
    if location == NOWHERE:
        _write_slices(exchange, tensor, _chunk(exchange, tensor, 0))
    locations = exchange.agree(call, location)
    if NOWHERE not in locations:
        _all_reduce_in_place(exchange, tensor, how, locations)
    elif all(place == NOWHERE for place in locations):
        _all_reduce_in_chunks(exchange, tensor, how)
    else:
        # Some ranks, being in the group's memory, have not written their first chunk.
        _write_slices(exchange, tensor, _chunk(exchange, tensor, 0))
        exchange.swap()
        _all_reduce_in_chunks(exchange, tensor, how)


def reduce(exchange: Exchange, tensor: Tensor, how: Reduction, root: int, call: bytes) -> None:
    """Replace `tensor` on the root by the reduction over all ranks; it stays as it is on the others."""
    length = exchange.outbox_bytes // tensor.element_size()
    for number, piece in enumerate(tensor.split(length) if tensor.numel() else [tensor]):
        if exchange.rank != root:
            exchange.outbox(tensor.dtype)[: piece.numel()].copy_(piece)
        _end_round(exchange, call, number)
        if exchange.rank == root:
            parts = [
                piece if rank == root else exchange.inbox(rank, tensor.dtype)[: piece.numel()]
                for rank in range(exchange.size)
            ]
            reduce_into(piece, parts, how)


def reduce_scatter(exchange: Exchange, output: Tensor, inputs: Sequence[Tensor], how: Reduction, call: bytes) -> None:
    """Reduce `inputs[r]` of all ranks into `output` of rank r; all of one length."""
    stride = _stride(exchange, output.element_size())
    for number, start in enumerate(range(0, max(output.numel(), 1), stride)):
        stop = min(start + stride, output.numel())
        mine = exchange.outbox(output.dtype)
        for rank, piece in enumerate(inputs):
            if rank != exchange.rank:
                mine[rank * stride : rank * stride + stop - start].copy_(piece[start:stop])
        _end_round(exchange, call, number)
        own = slice(exchange.rank * stride, exchange.rank * stride + stop - start)
        parts = [
            inputs[rank][start:stop] if rank == exchange.rank else exchange.inbox(rank, output.dtype)[own]
            for rank in range(exchange.size)
        ]
        reduce_into(output[start:stop], parts, how)


def broadcast(exchange: Exchange, tensor: Tensor, root: int, call: bytes) -> None:
    """Replace `tensor` by the root's."""
    data = as_bytes(tensor)
    for number, piece in enumerate(data.split(exchange.outbox_bytes) if data.numel() else [data]):
        if exchange.rank == root:
            exchange.outbox(torch.uint8)[: piece.numel()].copy_(piece)
        _end_round(exchange, call, number)
        if exchange.rank != root:
            piece.copy_(exchange.inbox(root, torch.uint8)[: piece.numel()])


def gather(exchange: Exchange, outputs: Sequence[Tensor] | None, tensor: Tensor, call: bytes) -> None:
    """Collect `tensor` of rank r in `outputs[r]` wherever outputs are given; all of one length."""
    data = as_bytes(tensor)
    targets = None if outputs is None else [as_bytes(output) for output in outputs]
    for number, start in enumerate(range(0, max(data.numel(), 1), exchange.outbox_bytes)):
        piece = data[start : start + exchange.outbox_bytes]
        exchange.outbox(torch.uint8)[: piece.numel()].copy_(piece)
        _end_round(exchange, call, number)
        for rank, target in enumerate(targets or ()):
            place = target[start : start + exchange.outbox_bytes]
            place.copy_(piece if rank == exchange.rank else exchange.inbox(rank, torch.uint8)[: piece.numel()])


def scatter(exchange: Exchange, output: Tensor, inputs: Sequence[Tensor] | None, root: int, call: bytes) -> None:
    """Put `inputs[r]` of the root into `output` of rank r; all of one length."""
    data = as_bytes(output)
    sources = None if inputs is None else [as_bytes(piece) for piece in inputs]
    stride = _stride(exchange, 1)
    for number, start in enumerate(range(0, max(data.numel(), 1), stride)):
        place = data[start : start + stride]
        if sources is not None:
            mine = exchange.outbox(torch.uint8)
            for rank, source in enumerate(sources):
                mine[rank * stride : rank * stride + place.numel()].copy_(source[start : start + stride])
        _end_round(exchange, call, number)
        own = exchange.rank * stride
        place.copy_(exchange.inbox(root, torch.uint8)[own : own + place.numel()])


def all_to_all(exchange: Exchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: bytes) -> None:
    """Put `inputs[q]` of rank r into `outputs[r]` of rank q; lengths may differ from pair to pair.

    Raises:
        CollectiveMismatchError: On every rank alike: a rank sends a length that the other does not expect.
    """
    sources, targets = [as_bytes(piece) for piece in inputs], [as_bytes(piece) for piece in outputs]
    lengths = _agree_on_lengths(exchange, sources, targets, call)
    stride = _stride(exchange, 1)
    for start in range(0, max(max(row) for row in lengths), stride):
        mine = exchange.outbox(torch.uint8)
        for rank, source in enumerate(sources):
            piece = source[start : start + stride]
            if rank != exchange.rank and piece.numel():
                mine[rank * stride : rank * stride + piece.numel()].copy_(piece)
        exchange.swap()
        own = exchange.rank * stride
        for rank, target in enumerate(targets):
            place = target[start : start + stride]
            if rank == exchange.rank:
                place.copy_(sources[rank][start : start + stride])
            elif place.numel():
                place.copy_(exchange.inbox(rank, torch.uint8)[own : own + place.numel()])


def as_bytes(tensor: Tensor) -> Tensor:
    """View a flat contiguous tensor as bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).reshape(-1)
    return tensor.view(torch.uint8)


def _all_reduce_short(exchange: Exchange, tensor: Tensor, how: Reduction, call: bytes) -> None:
    length = tensor.numel()
    exchange.outbox(tensor.dtype)[:length].copy_(tensor)
    exchange.agree(call)
    reduce_into(tensor, [exchange.inbox(rank, tensor.dtype)[:length] for rank in range(exchange.size)], how)


def _all_reduce_in_place(exchange: Exchange, tensor: Tensor, how: Reduction, locations: Sequence[int]) -> None:
    """Reduce tensors that every rank can see where they are: each rank reduces its slice and writes it to all."""
    bounds = _slice(tensor.numel(), exchange.size, exchange.rank, tensor.element_size())
    everyone = [
        tensor if rank == exchange.rank else exchange.memory.peer_tensor(rank, place, tensor.numel(), tensor.dtype)
        for rank, place in enumerate(locations)
    ]
    parts = [part[bounds] for part in everyone]
    others = [part for rank, part in enumerate(parts) if rank != exchange.rank]
    reduce_into(parts[exchange.rank], parts, how, copies=others)
    exchange.swap()


def _all_reduce_in_chunks(exchange: Exchange, tensor: Tensor, how: Reduction) -> None:
    """Reduce by the pipeline above, from after its first swap."""
    chunk = _chunk(exchange, tensor, 0)
    _reduce_slice(exchange, tensor, chunk, how)
    number = 1
    while chunk.start < tensor.numel():
        following = _chunk(exchange, tensor, number)
        _write_slices(exchange, tensor, following)
        exchange.swap()
        _read_slices(exchange, tensor, chunk)
        _reduce_slice(exchange, tensor, following, how)
        chunk = following
        number += 1


def _chunk(exchange: Exchange, tensor: Tensor, number: int) -> slice:
    length = _stride(exchange, tensor.element_size()) * exchange.size
    return slice(min(number * length, tensor.numel()), min((number + 1) * length, tensor.numel()))


def _write_slices(exchange: Exchange, tensor: Tensor, chunk: slice) -> None:
    stride = _stride(exchange, tensor.element_size())
    mine = exchange.outbox(tensor.dtype)
    for rank, piece in enumerate(_slices(tensor, chunk, exchange.size)):
        if rank != exchange.rank:
            mine[rank * stride : rank * stride + piece.numel()].copy_(piece)


def _read_slices(exchange: Exchange, tensor: Tensor, chunk: slice) -> None:
    stride = _stride(exchange, tensor.element_size())
    for rank, piece in enumerate(_slices(tensor, chunk, exchange.size)):
        if rank != exchange.rank:
            piece.copy_(exchange.inbox(rank, tensor.dtype)[rank * stride : rank * stride + piece.numel()])


def _reduce_slice(exchange: Exchange, tensor: Tensor, chunk: slice, how: Reduction) -> None:
    own = _slices(tensor, chunk, exchange.size)[exchange.rank]
    start = exchange.rank * _stride(exchange, tensor.element_size())
    place = slice(start, start + own.numel())
    parts = [
        own if rank == exchange.rank else exchange.inbox(rank, tensor.dtype)[place] for rank in range(exchange.size)
    ]
    reduce_into(own, parts, how, copies=[exchange.outbox(tensor.dtype)[place]])


def _slices(tensor: Tensor, chunk: slice, num_ranks: int) -> list[Tensor]:
    piece = tensor[chunk]
    return [piece[_slice(piece.numel(), num_ranks, rank, tensor.element_size())] for rank in range(num_ranks)]


def _slice(length: int, num_ranks: int, rank: int, element_bytes: int) -> slice:
    """Return the elements that `rank` owns of `length`: equal shares that begin on a cache line."""
    align = max(_ALIGNMENT // element_bytes, 1)
    share = -(-length // (num_ranks * align)) * align
    return slice(min(rank * share, length), min((rank + 1) * share, length))


def _stride(exchange: Exchange, element_bytes: int) -> int:
    """Return how many elements of its outbox a rank has for each rank."""
    align = max(_ALIGNMENT // element_bytes, 1)
    return exchange.outbox_bytes // element_bytes // exchange.size // align * align


def _agree_on_lengths(
    exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor], call: bytes
) -> list[tuple[int, ...]]:
    size = exchange.size
    table = struct.pack(f"<{2 * size}q", *(piece.numel() for piece in (*sources, *targets)))
    exchange.outbox(torch.uint8)[: len(table)].copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
    exchange.agree(call)
    rows = [exchange.inbox(rank, torch.int64)[: 2 * size].tolist() for rank in range(size)]
    for source in range(size):
        for target in range(size):
            sent, expected = rows[source][target], rows[target][size + source]
            if sent != expected:
                raise CollectiveMismatchError(
                    f"{call.decode()}: rank {source} sends {sent} bytes to rank {target}, which expects {expected}. "
                    "The input split of one must be the output split of the other. Nothing was exchanged."
                )
    return [tuple(row[:size]) for row in rows]


def _end_round(exchange: Exchange, call: bytes, number: int) -> None:
    if number == 0:
        exchange.agree(call)
    else:
        exchange.swap()
