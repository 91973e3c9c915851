"""The collectives of the table: how arguments are read and checked, and how each is made with programs of phases.

What checks runs in the caller's thread, before anything is exchanged, and raises ValueError for arguments that do not
fit the group. What runs is collective over the group of the exchange, and raises what the exchange raises. It takes
tensors as one row each; what is only moved travels as bytes, so every dtype does.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.comm.collectives import CollectiveCall
from lockstep.comm.shm import programs
from lockstep.comm.shm.arithmetic import Reduction, schedule_nodes
from lockstep.comm.shm.phases import NOWHERE, PhaseExchange
from lockstep.comm.shm.programs import HeldParts
from lockstep.errors import CollectiveMismatchError
from lockstep.shards.tree import Node

# -- Tensors and shapes as torch passes them ---------------------------------------------------------------------------


def is_plain(tensor: Tensor) -> bool:
    """Return whether shared memory can carry the tensor: dense, on the CPU."""
    return tensor.is_cpu and tensor.layout is torch.strided


def read_one(tensors: Any) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise ValueError(f"Expected one tensor, got {len(found)}. (LS209)")
    return found


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in order as one row: a view where they lie so, else a copy.

    `data`, because a collective writes values without autograd's knowledge, as torch's own do.
    """
    flat = tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)
    # Torch calls one element, or none, contiguous whatever its stride; but then it has no view as bytes.
    return flat if flat.numel() > 1 else flat.as_strided((flat.numel(),), (1,))


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor with its elements in order in its memory: this one where they lie so, else a copy in a row."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return flatten(tensor)


def premultiply(tensor: Tensor, how: Reduction) -> Tensor:
    """Return the elements in order, times the factor of the reduction if it has one: then in new memory."""
    if how.factor is None:
        return as_stored(tensor)
    return (flatten(tensor) * how.factor).detach().to(tensor.dtype)  # the factor may have a wider one


def write_back(tensor: Tensor, flat: Tensor) -> None:
    """Put the elements back where they do not lie in the tensor's own memory."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        copy_into(tensor.data, flat.view(tensor.shape))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy values, in whatever thread: into a tensor of inference mode nothing else may write."""
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name}: the tensor has layout {tensor.layout}, expected a dense one; sparse ones can only be summed over "
            "all ranks. Give tensor.to_dense(). (LS207)"
        )


def check_writable(tensors: Sequence[Tensor]) -> None:
    """Check that every element has memory of its own."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_contiguous():
            continue
        if any(stride == 0 < size - 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"A tensor of shape {list(tensor.shape)} is expanded: several of its elements share memory, so nothing "
                "can be written into it. Give tensor.contiguous(). (LS207)"
            )


def describe_message(tensor: Tensor) -> bytes:
    """Describe what is sent: the shape may differ on the other side, not the dtype and the number of elements."""
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}".encode()


def check_alike(name: str, tensor: Tensor, others: Sequence[Tensor]) -> None:
    for other in others:
        if other.dtype != tensor.dtype or other.numel() != tensor.numel():
            raise ValueError(
                f"{name}: a tensor is {other.dtype} {list(other.shape)}, expected {tensor.dtype} "
                f"{list(tensor.shape)}. (LS209)"
            )


def read_allocation(size: int | Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> torch.Size:
    sizes = (size,) if isinstance(size, int) else size
    if not isinstance(sizes, Sequence) or any(type(length) is not int for length in sizes):
        raise TypeError(f"size is {size!r}, expected a number of elements, or a shape of such numbers. (LS209)")
    if any(length < 0 for length in sizes):
        raise ValueError(f"size is {size!r}, expected no negative number. (LS209)")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype such as torch.float32. (LS209)")
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"The shm backend allocates on the CPU, not on {device}. (LS207)")
    return torch.Size(sizes)


# -- Checks ------------------------------------------------------------------------------------------------------------


def _check_one(exchange: PhaseExchange, call: CollectiveCall) -> None:  # noqa: ARG001 - as the others
    read_one(call.inputs)


def _check_gather(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _check_pieces(exchange, call, call.inputs, call.outputs, "output", "" if call.name == "all_gather" else "to")


def _check_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _check_pieces(exchange, call, call.outputs, call.inputs, "input", "" if call.name == "reduce_scatter" else "from")


def _check_pieces(  # which is which, and how messages name it
    exchange: PhaseExchange,
    call: CollectiveCall,
    own: Sequence[Tensor],
    pieces: Sequence[Tensor],
    role: str,
    direction: str,
) -> None:
    """Check for one tensor of each rank, and a piece for each rank: on all ranks, or those `direction` the root."""
    (piece,) = read_one(own)
    if not direction or exchange.rank == call.root:
        _require_one_per_rank(exchange, call, role, pieces)
        check_alike(call.name, piece, pieces)
    elif pieces:
        root, rank = exchange.global_ranks[call.root], exchange.global_ranks[exchange.rank]
        raise ValueError(
            f"{call.name} {direction} rank {root}: rank {rank} gives {role} tensors, expected none. (LS209)"
        )


def _check_outputs_of_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    if call.name != "gather_single" or exchange.rank == call.root:
        for output, tensor in zip(call.outputs, call.inputs, strict=True):
            _require_multiple(exchange, call, output, tensor)


def _check_inputs_for_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        _require_multiple(exchange, call, tensor, output)


def _check_rows_of_outputs(exchange: PhaseExchange, call: CollectiveCall) -> None:
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


def _check_all_to_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _require_one_per_rank(exchange, call, "output", call.outputs)
    _require_one_per_rank(exchange, call, "input", call.inputs)


def _check_all_to_all_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Check that the rows divide among the ranks, or that the splits add up to them."""
    _, _, output_splits, input_splits = call.arguments[:4]
    _split_lengths(exchange, "input", call.inputs[0], input_splits)
    _split_lengths(exchange, "output", call.outputs[0], output_splits)


# -- Runs --------------------------------------------------------------------------------------------------------------


def _run_all_reduce(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for tensor, how in zip(call.outputs, call.reductions, strict=True):
        flat = premultiply(tensor, how)
        parts = programs.one_part_each(exchange.size, how.kind, flat.element_size() // how.width)
        reduce_everywhere(exchange, parts, flat, [flat], how, call.description)
        write_back(tensor, flat)


def ordered_all_reduce(  # what is reduced, and what is compared
    exchange: PhaseExchange,
    tensors: Sequence[Tensor],
    out: Tensor,
    layout: Sequence[Sequence[Node]],
    num_shards: int,
    how: Reduction,
    call: bytes,
) -> None:
    """Reduce subtrees of shards, several on each rank, into `out` on every rank; all flat and alike."""
    placed = sorted((node, (rank, slot)) for rank, nodes in enumerate(layout) for slot, node in enumerate(nodes))
    parts = HeldParts(
        kind=how.kind,
        element_bytes=out.element_size() // how.width,
        holders=tuple(holder for _, holder in placed),
        steps=schedule_nodes(tuple(node for node, _ in placed), num_shards),
        num_slots=max(len(nodes) for nodes in layout),
    )
    reduce_everywhere(exchange, parts, out, tensors, how, call)


def _run_reduce(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,), (how,) = call.outputs, call.reductions
    flat = premultiply(tensor, how)
    parts = programs.one_part_each(exchange.size, how.kind, flat.element_size() // how.width)
    program = programs.reduce_to(exchange.ranks, parts, flat.numel() * how.width, call.root)
    exchange.run(program, [flat.data_ptr()], call.description, how=(how, flat.dtype))
    if exchange.rank == call.root:
        write_back(tensor, flat)


def _run_reduce_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _reduce_scatter(exchange, call, call.outputs[0], call.inputs, call.reductions[0])


def _run_reduce_scatter_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor, how in zip(call.outputs, call.inputs, call.reductions, strict=True):
        _reduce_scatter(exchange, call, output, _equal_pieces(exchange, flatten(tensor)), how)


def _run_broadcast(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,) = call.outputs
    flat = as_stored(tensor)
    program = programs.broadcast(exchange.ranks, flat.nbytes, call.root)
    exchange.run(program, [flat.data_ptr()], call.description)
    write_back(tensor, flat)


def _run_gather(exchange: PhaseExchange, call: CollectiveCall) -> None:
    _gather(exchange, call.outputs, call.inputs[0], call.description)


def _run_gather_rows(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for number, tensor in enumerate(call.inputs):
        _gather(exchange, [row[number] for row in call.arguments[0]], tensor, call.description)


def _run_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    if exchange.rank == call.root:
        _run_all_gather_single(exchange, call)
    else:
        _gather(exchange, (), call.inputs[0], call.description)


def _run_all_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        flat = flatten(output)
        _gather(exchange, _equal_pieces(exchange, flat), tensor, call.description)
        write_back(output, flat)


def _run_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,) = call.outputs
    flat = flatten(output)
    sources = [flatten(piece) for piece in call.inputs] if exchange.rank == call.root else []
    program = programs.scatter(exchange.ranks, flat.nbytes, call.root)
    exchange.run(program, [flat.data_ptr(), *(source.data_ptr() for source in sources)], call.description)
    write_back(output, flat)


def _run_all_to_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    flats = [flatten(output) for output in call.outputs]
    _all_to_all(exchange, flats, [flatten(piece) for piece in call.inputs], call.description)
    for output, flat in zip(call.outputs, flats, strict=True):
        write_back(output, flat)


def _run_all_to_all_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,), (tensor,) = call.outputs, call.inputs
    _, _, output_splits, input_splits = call.arguments[:4]
    sent = _split_lengths(exchange, "input", tensor, input_splits)
    received = _split_lengths(exchange, "output", output, output_splits)
    flat = flatten(output)
    _all_to_all(exchange, flat.split(received), flatten(tensor).split(sent), call.description)
    write_back(output, flat)


def _run_barrier(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Return when every rank has reached it: comparing the calls is all."""
    exchange.compare_calls(call.description)


# -- Within ------------------------------------------------------------------------------------------------------------


def reduce_everywhere(  # what is reduced, and what is compared
    exchange: PhaseExchange, parts: HeldParts, out: Tensor, tensors: Sequence[Tensor], how: Reduction, call: bytes
) -> None:
    """Reduce parts, those of this rank as `tensors`, into `out` on every rank."""
    count, ranks = out.numel() * how.width, exchange.ranks
    addresses = [out.data_ptr(), *(tensor.data_ptr() for tensor in tensors)]
    by_torch = how, out.dtype
    if exchange.size == 1 and tensors[0] is out and len(tensors) == 1:
        exchange.compare_calls(call)  # it is the sum
        return
    if programs.is_short(ranks, parts, count):
        exchange.run(programs.reduce_short(ranks, parts, count), addresses, call, how=by_torch)
        return
    # What only this rank knows, such as `out`, must not choose the program: the others would run another.
    is_in_place = len(tensors) == 1 and tensors[0] is out
    location = exchange.memory.locate(out) if is_in_place else NOWHERE
    for first, length in programs.cut(ranks, parts, count):
        offset = first * parts.element_bytes
        here = [address + offset for address in addresses]
        program = programs.reduce_long(ranks, parts, length, lies_in_group=location != NOWHERE)
        if not exchange.run(program, here, call, NOWHERE if location == NOWHERE else location + offset, how=by_torch):
            continue
        locations = exchange.locations(length * parts.element_bytes)
        if NOWHERE in locations:
            exchange.run(programs.reduce_long(ranks, parts, length, is_compared=True), here, call, how=by_torch)
            continue
        everyone = [
            here[0]
            if rank == exchange.rank
            else exchange.memory.peer_address(rank, place, length * parts.element_bytes)
            for rank, place in enumerate(locations)
        ]
        exchange.run(programs.reduce_in_place(ranks, parts, length), everyone, call, how=by_torch)


def _reduce_scatter(
    exchange: PhaseExchange, call: CollectiveCall, output: Tensor, inputs: Sequence[Tensor], how: Reduction
) -> None:
    flat, pieces = as_stored(output), [premultiply(piece, how) for piece in inputs]
    parts = programs.one_part_each(exchange.size, how.kind, flat.element_size() // how.width)
    program = programs.reduce_scatter(exchange.ranks, parts, flat.numel() * how.width)
    addresses = [flat.data_ptr(), *(piece.data_ptr() for piece in pieces)]
    exchange.run(program, addresses, call.description, how=(how, flat.dtype))
    write_back(output, flat)


def _gather(exchange: PhaseExchange, outputs: Sequence[Tensor], tensor: Tensor, description: bytes) -> None:
    flat, flats = as_stored(tensor), [as_stored(output) for output in outputs]
    program = programs.gather(exchange.ranks, flat.nbytes, takes=bool(flats))
    exchange.run(program, [flat.data_ptr(), *(each.data_ptr() for each in flats)], description)
    for output, each in zip(outputs, flats, strict=True):
        write_back(output, each)


def _all_to_all(exchange: PhaseExchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: bytes) -> None:
    """Put `inputs[q]` of rank r into `outputs[r]` of rank q; lengths may differ from pair to pair."""
    size = exchange.size
    lengths = array("q", [piece.nbytes for piece in (*inputs, *outputs)])
    found = array("q", bytes(8 * 2 * size * size))
    num_bytes = 8 * len(lengths)
    places = range(found.buffer_info()[0], found.buffer_info()[0] + size * num_bytes, num_bytes)
    exchange.run(programs.gather(exchange.ranks, num_bytes, takes=True), [lengths.buffer_info()[0], *places], call)
    rows = [found[2 * size * number : 2 * size * (number + 1)] for number in range(size)]
    for source in range(size):
        for target in range(size):
            sent, expected = rows[source][target], rows[target][size + source]
            if sent != expected:
                raise CollectiveMismatchError(
                    f"{call.decode()}: rank {exchange.global_ranks[source]} sends {sent} bytes to rank "
                    f"{exchange.global_ranks[target]}, which expects {expected}. "
                    "The input split of one must be the output split of the other. Nothing was exchanged. (LS201)"
                )
    longest = max(max(row[:size]) for row in rows)
    program = programs.all_to_all(exchange.ranks, lengths[:size], lengths[size:], longest)
    exchange.run(program, [piece.data_ptr() for piece in (*inputs, *outputs)], call)


def _equal_pieces(exchange: PhaseExchange, flat: Tensor) -> Sequence[Tensor]:
    return flat.split(flat.numel() // exchange.size) if flat.numel() else [flat] * exchange.size


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


# -- The table ---------------------------------------------------------------------------------------------------------


_Step = Callable[[PhaseExchange, CollectiveCall], None]
BY_NAME: Final[Mapping[str, tuple[_Step | None, _Step]]] = {
    "all_reduce": (_check_one, _run_all_reduce),
    "all_reduce_coalesced": (None, _run_all_reduce),
    "broadcast": (_check_one, _run_broadcast),
    "reduce": (_check_one, _run_reduce),
    "all_gather": (_check_gather, _run_gather),
    "all_gather_into_tensor": (_check_outputs_of_all, _run_all_gather_single),
    "all_gather_coalesced": (_check_rows_of_outputs, _run_gather_rows),
    "all_gather_into_tensor_coalesced": (_check_outputs_of_all, _run_all_gather_single),
    "reduce_scatter": (_check_scatter, _run_reduce_scatter),
    "reduce_scatter_tensor": (_check_inputs_for_all, _run_reduce_scatter_single),
    "reduce_scatter_tensor_coalesced": (_check_inputs_for_all, _run_reduce_scatter_single),
    "all_to_all": (_check_all_to_all, _run_all_to_all),
    "all_to_all_single": (_check_all_to_all_single, _run_all_to_all_single),
    "gather": (_check_gather, _run_gather),
    "gather_single": (_check_outputs_of_all, _run_gather_single),
    "scatter": (_check_scatter, _run_scatter),
    "barrier": (None, _run_barrier),
}
"""What checks the arguments of each collective, if anything is to be checked, and what makes it."""
