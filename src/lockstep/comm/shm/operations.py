"""How shared memory checks and makes each collective: one pair of functions for each line of the table.

The functions take a call as `Collective.read` returns it. `check_...` functions run in the caller's thread, before
anything is exchanged, and raise ValueError for arguments that do not fit the group. `run_...` functions are collective
over the group of the exchange; they flatten the tensors and let `collectives` move the data.
"""

from collections.abc import Sequence

from torch import Tensor

from lockstep.comm.collective_call import CollectiveCall
from lockstep.comm.shm import collectives
from lockstep.comm.shm.arguments import check_alike, flatten, premultiply, write_back
from lockstep.comm.shm.phases import PhaseExchange

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
        collectives.all_reduce(exchange, flat, how, call.description)
        write_back(tensor, flat)


def run_broadcast(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,) = call.outputs
    flat = flatten(tensor)
    collectives.broadcast(exchange, flat, call.root, call.description)
    write_back(tensor, flat)


def run_reduce(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (tensor,), (how,) = call.outputs, call.reductions
    flat = premultiply(tensor, how)
    collectives.reduce(exchange, flat, how, call.root, call.description)
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
        collectives.gather(exchange, None, flatten(call.inputs[0]), call.description)


def run_all_gather_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        flat = flatten(output)
        pieces = flat.split(max(tensor.numel(), 1)) if flat.numel() else [flat] * exchange.size
        collectives.gather(exchange, pieces, flatten(tensor), call.description)
        write_back(output, flat)


def run_reduce_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,), (how,) = call.outputs, call.reductions
    flat = flatten(output)
    pieces = [premultiply(piece, how) for piece in call.inputs]
    collectives.reduce_scatter(exchange, flat, pieces, how, call.description)
    write_back(output, flat)


def run_reduce_scatter_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    for output, tensor, how in zip(call.outputs, call.inputs, call.reductions, strict=True):
        flat, whole = flatten(output), premultiply(tensor, how)
        pieces = whole.split(max(flat.numel(), 1)) if whole.numel() else [whole] * exchange.size
        collectives.reduce_scatter(exchange, flat, pieces, how, call.description)
        write_back(output, flat)


def run_scatter(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,) = call.outputs
    flat = flatten(output)
    sources = [flatten(piece) for piece in call.inputs] if exchange.rank == call.root else None
    collectives.scatter(exchange, flat, sources, call.root, call.description)
    write_back(output, flat)


def run_all_to_all(exchange: PhaseExchange, call: CollectiveCall) -> None:
    flats = [flatten(output) for output in call.outputs]
    collectives.all_to_all(exchange, flats, [flatten(piece) for piece in call.inputs], call.description)
    for output, flat in zip(call.outputs, flats, strict=True):
        write_back(output, flat)


def run_all_to_all_single(exchange: PhaseExchange, call: CollectiveCall) -> None:
    (output,), (tensor,) = call.outputs, call.inputs
    _, _, output_splits, input_splits = call.arguments[:4]
    sent = _split_lengths(exchange, "input", tensor, input_splits)
    received = _split_lengths(exchange, "output", output, output_splits)
    flat = flatten(output)
    collectives.all_to_all(exchange, flat.split(received), flatten(tensor).split(sent), call.description)
    write_back(output, flat)


def run_barrier(exchange: PhaseExchange, call: CollectiveCall) -> None:
    """Return when every rank has reached it: comparing the calls is all."""
    exchange.compare_calls(call.description)


# -- Within ------------------------------------------------------------------------------------------------------------


def _gather(exchange: PhaseExchange, outputs: Sequence[Tensor], tensor: Tensor, description: bytes) -> None:
    flats = [flatten(output) for output in outputs]
    collectives.gather(exchange, flats or None, flatten(tensor), description)
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
