"""The collectives, as phases of an exchange; and how the table's calls are checked and made with them.

The functions above "Checks" are collective over the group of the exchange. They take flat, contiguous CPU tensors and
the description of the call, and raise what the exchange raises. What is only moved travels as bytes, so every dtype
does.

Those below are for the table, a pair for each of its lines, and take a call as `Collective.read` returns it. Those that
check run in the caller's thread, before anything is exchanged, and raise ValueError for arguments that do not fit the
group. Those that run, which are collective too, flatten the tensors and move them with the functions above.
"""

import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lockstep.comm.collective_call import CollectiveCall
from lockstep.comm.shm import phases
from lockstep.comm.shm.arguments import check_alike, flatten, premultiply, write_back
from lockstep.comm.shm.arithmetic import Reduction, reduce_into, schedule
from lockstep.comm.shm.phases import NOWHERE, PhaseExchange, room_per_rank, share
from lockstep.errors import CollectiveMismatchError

_SHORT_BYTES: Final = 2 << 20
"""Up to here, over all ranks, every rank reduces the whole message by itself: one phase fewer, more arithmetic."""


def all_reduce(exchange: PhaseExchange, tensor: Tensor, how: Reduction, call: bytes) -> None:
    reduction = phases.one_per_rank(exchange, tensor, how)
    if tensor.nbytes * exchange.size <= _SHORT_BYTES:
        phases.run_short(exchange, reduction, call)
        return
    location = exchange.memory.locate(tensor)
    if location == NOWHERE:
        phases.write_chunk(exchange, reduction, 0)
    locations = exchange.compare_calls(call, location)
    if NOWHERE not in locations:
        _all_reduce_in_place(exchange, tensor, how, locations)
        return
    if any(place != NOWHERE for place in locations):
        # Some ranks, being in the group's memory, have not written their first chunk.
        phases.write_chunk(exchange, reduction, 0)
        exchange.end_phase()
    phases.run_after_first_phase(exchange, reduction)


def ordered_all_reduce(exchange: PhaseExchange, reduction: phases.PartialReduction, call: bytes) -> None:
    """Reduce what the ranks hold, several partials each, into the result of the reduction on every rank."""
    if reduction.num_slots * reduction.out.nbytes * exchange.size <= _SHORT_BYTES:
        phases.run_short(exchange, reduction, call)
        return
    phases.write_chunk(exchange, reduction, 0)
    exchange.compare_calls(call)
    phases.run_after_first_phase(exchange, reduction)


def reduce(exchange: PhaseExchange, tensor: Tensor, how: Reduction, root: int, call: bytes) -> None:
    """Replace `tensor` on the root by the reduction over all ranks; it stays as it is on the others."""
    length = exchange.send_buffer_bytes // tensor.element_size()
    for number, piece in enumerate(tensor.split(length) if tensor.numel() else [tensor]):
        if exchange.rank != root:
            exchange.send_buffer(tensor.dtype)[: piece.numel()].copy_(piece)
        _end_phase(exchange, call, number)
        if exchange.rank == root:
            parts = [
                piece if rank == root else exchange.received(rank, tensor.dtype)[: piece.numel()]
                for rank in range(exchange.size)
            ]
            reduce_into(piece, parts, how, schedule(exchange.size))


def reduce_scatter(
    exchange: PhaseExchange, output: Tensor, inputs: Sequence[Tensor], how: Reduction, call: bytes
) -> None:
    """Reduce `inputs[r]` of all ranks into `output` of rank r; all of one length."""
    stride = room_per_rank(exchange, output.element_size())
    for number, start in enumerate(range(0, max(output.numel(), 1), stride)):
        stop = min(start + stride, output.numel())
        mine = exchange.send_buffer(output.dtype)
        for rank, piece in enumerate(inputs):
            if rank != exchange.rank:
                mine[rank * stride : rank * stride + stop - start].copy_(piece[start:stop])
        _end_phase(exchange, call, number)
        own = slice(exchange.rank * stride, exchange.rank * stride + stop - start)
        parts = [
            inputs[rank][start:stop] if rank == exchange.rank else exchange.received(rank, output.dtype)[own]
            for rank in range(exchange.size)
        ]
        reduce_into(output[start:stop], parts, how, schedule(exchange.size))


def broadcast(exchange: PhaseExchange, tensor: Tensor, root: int, call: bytes) -> None:
    data = as_bytes(tensor)
    for number, piece in enumerate(data.split(exchange.send_buffer_bytes) if data.numel() else [data]):
        if exchange.rank == root:
            exchange.send_buffer(torch.uint8)[: piece.numel()].copy_(piece)
        _end_phase(exchange, call, number)
        if exchange.rank != root:
            piece.copy_(exchange.received(root, torch.uint8)[: piece.numel()])


def gather(exchange: PhaseExchange, outputs: Sequence[Tensor] | None, tensor: Tensor, call: bytes) -> None:
    """Collect `tensor` of rank r in `outputs[r]` wherever outputs are given; all of one length."""
    data = as_bytes(tensor)
    targets = None if outputs is None else [as_bytes(output) for output in outputs]
    for number, start in enumerate(range(0, max(data.numel(), 1), exchange.send_buffer_bytes)):
        piece = data[start : start + exchange.send_buffer_bytes]
        exchange.send_buffer(torch.uint8)[: piece.numel()].copy_(piece)
        _end_phase(exchange, call, number)
        for rank, target in enumerate(targets or ()):
            place = target[start : start + exchange.send_buffer_bytes]
            place.copy_(piece if rank == exchange.rank else exchange.received(rank, torch.uint8)[: piece.numel()])


def scatter(exchange: PhaseExchange, output: Tensor, inputs: Sequence[Tensor] | None, root: int, call: bytes) -> None:
    """Put `inputs[r]` of the root into `output` of rank r; all of one length."""
    data = as_bytes(output)
    sources = None if inputs is None else [as_bytes(piece) for piece in inputs]
    stride = room_per_rank(exchange, 1)
    for number, start in enumerate(range(0, max(data.numel(), 1), stride)):
        place = data[start : start + stride]
        if sources is not None:
            mine = exchange.send_buffer(torch.uint8)
            for rank, source in enumerate(sources):
                mine[rank * stride : rank * stride + place.numel()].copy_(source[start : start + stride])
        _end_phase(exchange, call, number)
        own = exchange.rank * stride
        place.copy_(exchange.received(root, torch.uint8)[own : own + place.numel()])


def all_to_all(exchange: PhaseExchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: bytes) -> None:
    """Put `inputs[q]` of rank r into `outputs[r]` of rank q; lengths may differ from pair to pair."""
    sources, targets = [as_bytes(piece) for piece in inputs], [as_bytes(piece) for piece in outputs]
    lengths = _agree_on_lengths(exchange, sources, targets, call)
    stride = room_per_rank(exchange, 1)
    for start in range(0, max(max(row) for row in lengths), stride):
        mine = exchange.send_buffer(torch.uint8)
        for rank, source in enumerate(sources):
            piece = source[start : start + stride]
            if rank != exchange.rank and piece.numel():
                mine[rank * stride : rank * stride + piece.numel()].copy_(piece)
        exchange.end_phase()
        own = exchange.rank * stride
        for rank, target in enumerate(targets):
            place = target[start : start + stride]
            if rank == exchange.rank:
                place.copy_(sources[rank][start : start + stride])
            elif place.numel():
                place.copy_(exchange.received(rank, torch.uint8)[own : own + place.numel()])


def as_bytes(tensor: Tensor) -> Tensor:
    """View a flat contiguous tensor as bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).reshape(-1)
    return tensor.view(torch.uint8)


def _all_reduce_in_place(exchange: PhaseExchange, tensor: Tensor, how: Reduction, locations: Sequence[int]) -> None:
    """Reduce tensors that every rank can see where they are: each rank reduces its segment and writes it to all."""
    bounds = share(tensor.numel(), exchange.size, exchange.rank, tensor.element_size())
    everyone = [
        tensor if rank == exchange.rank else exchange.memory.peer_tensor(rank, place, tensor.numel(), tensor.dtype)
        for rank, place in enumerate(locations)
    ]
    parts = [part[bounds] for part in everyone]
    others = [part for rank, part in enumerate(parts) if rank != exchange.rank]
    reduce_into(parts[exchange.rank], parts, how, schedule(exchange.size), copies=others)
    exchange.end_phase()


def _agree_on_lengths(
    exchange: PhaseExchange, sources: Sequence[Tensor], targets: Sequence[Tensor], call: bytes
) -> list[tuple[int, ...]]:
    size = exchange.size
    table = struct.pack(f"<{2 * size}q", *(piece.numel() for piece in (*sources, *targets)))
    exchange.send_buffer(torch.uint8)[: len(table)].copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
    exchange.compare_calls(call)
    rows = [exchange.received(rank, torch.int64)[: 2 * size].tolist() for rank in range(size)]
    for source in range(size):
        for target in range(size):
            sent, expected = rows[source][target], rows[target][size + source]
            if sent != expected:
                raise CollectiveMismatchError(
                    f"{call.decode()}: rank {exchange.global_ranks[source]} sends {sent} bytes to rank "
                    f"{exchange.global_ranks[target]}, which expects {expected}. "
                    "The input split of one must be the output split of the other. Nothing was exchanged. (LS201)"
                )
    return [tuple(row[:size]) for row in rows]


def _end_phase(exchange: PhaseExchange, call: bytes, number: int) -> None:
    if number == 0:
        exchange.compare_calls(call)
    else:
        exchange.end_phase()


# -- Checks ------------------------------------------------------------------------------------------------------------


def check_nothing(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Accept all arguments."""


def check_one(exchange: PhaseExchange, call: CollectiveCall) -> None:  # noqa: ARG001 - as the others
    _require_one(call.inputs)


def check_gather_everywhere(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one(call.inputs)
    _require_one_per_rank(exchange, call, "output", call.outputs)
    check_alike(call.name, call.inputs[0], call.outputs)


def check_gather(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one(call.inputs)
    if exchange.rank == call.root:
        _require_one_per_rank(exchange, call, "output", call.outputs)
        check_alike(call.name, call.inputs[0], call.outputs)
    elif call.outputs:
        raise ValueError(f"gather {_root_and_rank(exchange, call, 'to')} gives output tensors, expected none. (LS209)")


def check_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    if exchange.rank == call.root:
        _require_multiple(exchange, call, call.outputs[0], call.inputs[0])


def check_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one(call.outputs)
    if exchange.rank == call.root:
        _require_one_per_rank(exchange, call, "input", call.inputs)
        check_alike(call.name, call.outputs[0], call.inputs)
    elif call.inputs:
        raise ValueError(
            f"scatter {_root_and_rank(exchange, call, 'from')} gives input tensors, expected none. (LS209)"
        )


def check_reduce_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one(call.outputs)
    _require_one_per_rank(exchange, call, "input", call.inputs)
    check_alike(call.name, call.outputs[0], call.inputs)


def check_outputs_of_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        _require_multiple(exchange, call, output, tensor)


def check_inputs_for_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        _require_multiple(exchange, call, tensor, output)


def check_rows_of_outputs(exchange: PhaseExchange, call: CollectiveCall) -> None:
    rows = call.arguments[0]
    _require_one_per_rank(exchange, call, "rows of output", rows)
    for row in rows:
        if len(row) != len(call.inputs):
            raise ValueError(
                f"{call.name}: a row of {len(row)} output tensors, expected one per input of "
                f"{len(call.inputs)}. (LS209)"
            )
        for output, tensor in zip(row, call.inputs, strict=True):
            check_alike(call.name, tensor, [output])


def check_all_to_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one_per_rank(exchange, call, "output", call.outputs)
    _require_one_per_rank(exchange, call, "input", call.inputs)


def check_all_to_all_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Check that the rows divide among the ranks, or that the splits add up to them."""
    _, _, output_splits, input_splits = call.arguments[:4]
    _split_lengths(exchange, "input", call.inputs[0], input_splits)
    _split_lengths(exchange, "output", call.outputs[0], output_splits)


# -- Runs --------------------------------------------------------------------------------------------------------------


def run_all_reduce(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for tensor, how in zip(call.outputs, call.reductions, strict=True):
        flat = premultiply(tensor, how)
        all_reduce(exchange, flat, how, call.description)
        write_back(tensor, flat)


def run_broadcast(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,) = call.outputs
    flat = flatten(tensor)
    broadcast(exchange, flat, call.root, call.description)
    write_back(tensor, flat)


def run_reduce(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,), (how,) = call.outputs, call.reductions
    flat = premultiply(tensor, how)
    reduce(exchange, flat, how, call.root, call.description)
    if exchange.rank == call.root:
        write_back(tensor, flat)


def run_gather(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _gather(exchange, call.outputs, call.inputs[0], call.description)


def run_gather_rows(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for number, tensor in enumerate(call.inputs):
        _gather(exchange, [row[number] for row in call.arguments[0]], tensor, call.description)


def run_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    if exchange.rank == call.root:
        run_all_gather_single(exchange, call)
    else:
        gather(exchange, None, flatten(call.inputs[0]), call.description)


def run_all_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        flat = flatten(output)
        pieces = flat.split(max(tensor.numel(), 1)) if flat.numel() else [flat] * exchange.size
        gather(exchange, pieces, flatten(tensor), call.description)
        write_back(output, flat)


def run_reduce_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,), (how,) = call.outputs, call.reductions
    flat = flatten(output)
    pieces = [premultiply(piece, how) for piece in call.inputs]
    reduce_scatter(exchange, flat, pieces, how, call.description)
    write_back(output, flat)


def run_reduce_scatter_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor, how in zip(call.outputs, call.inputs, call.reductions, strict=True):
        flat, whole = flatten(output), premultiply(tensor, how)
        pieces = whole.split(max(flat.numel(), 1)) if whole.numel() else [whole] * exchange.size
        reduce_scatter(exchange, flat, pieces, how, call.description)
        write_back(output, flat)


def run_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,) = call.outputs
    flat = flatten(output)
    sources = [flatten(piece) for piece in call.inputs] if exchange.rank == call.root else None
    scatter(exchange, flat, sources, call.root, call.description)
    write_back(output, flat)


def run_all_to_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    flats = [flatten(output) for output in call.outputs]
    all_to_all(exchange, flats, [flatten(piece) for piece in call.inputs], call.description)
    for output, flat in zip(call.outputs, flats, strict=True):
        write_back(output, flat)


def run_all_to_all_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,), (tensor,) = call.outputs, call.inputs
    _, _, output_splits, input_splits = call.arguments[:4]
    sent = _split_lengths(exchange, "input", tensor, input_splits)
    received = _split_lengths(exchange, "output", output, output_splits)
    flat = flatten(output)
    all_to_all(exchange, flat.split(received), flatten(tensor).split(sent), call.description)
    write_back(output, flat)


def run_barrier(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Return when every rank has reached it: comparing the calls is all."""
    exchange.compare_calls(call.description)


# -- Within ------------------------------------------------------------------------------------------------------------


def _gather(exchange: PhaseExchange, outputs: Sequence[Tensor], tensor: Tensor, description: bytes) -> None:
    flats = [flatten(output) for output in outputs]
    gather(exchange, flats or None, flatten(tensor), description)
    for output, flat in zip(outputs, flats, strict=True):
        write_back(output, flat)


def _require_one(tensors: Sequence[Tensor]) -> None:
    if len(tensors) != 1:
        raise ValueError(f"Expected one tensor, got {len(tensors)}. (LS209)")


def _require_one_per_rank(exchange: PhaseExchange, call: CollectiveCall, role: str, tensors: Sequence[object]) -> None:
    if len(tensors) != exchange.size:
        raise ValueError(
            f"{call.name}: {len(tensors)} {role} tensors, expected one per rank of {exchange.size}. (LS209)"
        )


def _require_multiple(exchange: PhaseExchange, call: CollectiveCall, whole: Tensor, piece: Tensor) -> None:
    if whole.numel() != piece.numel() * exchange.size or whole.dtype != piece.dtype:
        raise ValueError(
            f"{call.name}: one tensor is {whole.dtype} {list(whole.shape)} and the other {piece.dtype} "
            f"{list(piece.shape)}; the first must have the dtype and {exchange.size} times the elements of the "
            "other. (LS209)"
        )


def _root_and_rank(exchange: PhaseExchange, call: CollectiveCall, direction: str) -> str:
    return f"{direction} rank {exchange.global_ranks[call.root]}: rank {exchange.global_ranks[exchange.rank]}"


def _split_lengths(exchange: PhaseExchange, role: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
    """Return the number of elements for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % exchange.size:
            raise ValueError(
                f"all_to_all_single: {rows} {role} rows do not divide among {exchange.size} ranks. (LS209)"
            )
        splits = [rows // exchange.size] * exchange.size
    if len(splits) != exchange.size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {role} splits {list(splits)} must be {exchange.size} numbers that add up to "
            f"{rows}. (LS209)"
        )
    row = tensor.numel() // max(rows, 1)
    return [count * row for count in splits]
