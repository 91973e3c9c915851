"""Collectives and messages of the backend "shm" on real groups, against Gloo and against what one process computes.

Each test runs one scenario, on ranks that stay from one to the next.
"""

import itertools
import operator
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.scenarios import Claims, ShmScenario, ShmScenarios, name_of, scenarios_in
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from lockstep.comm.shm.file_layout import FileLayout
from lockstep.shards import add_in_tree_order, partial_nodes

WORLDS = (2, 3, 4)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ONLY_MOVED = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bool),
)
OPERATIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
BY_GLOO = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int32, torch.uint8)
PERIOD = 10_007
WAIT_SECONDS = 60


def whole(rank: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that no dtype rounds, however they are combined."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randint(0, 4, (shape,) if isinstance(shape, int) else tuple(shape), generator=generator)
    return torch.complex(numbers.double(), -numbers.double()).to(dtype) if dtype.is_complex else numbers.to(dtype)


def wild(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    period = min(length, PERIOD)
    span = 2 if dtype in {torch.float16, torch.bfloat16} else 8
    exponents = torch.randint(-span, span, (period,), generator=generator)
    numbers = torch.randn(period, generator=generator, dtype=torch.float64) * torch.pow(10.0, exponents)
    return numbers.to(dtype).repeat(-(-length // PERIOD))[:length]


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    leaves = {(rank, rank + 1): value for rank, value in enumerate(values)}
    return add_in_tree_order(leaves, len(values), operator.add)


def reduced(operation: Any, values: Sequence[Tensor]) -> Tensor:
    """Reduce in this process; booleans as torch's conversions to and from numbers have it."""
    if values[0].dtype is torch.bool:
        return reduced(operation, [value.to(torch.uint8) for value in values]).to(torch.bool)
    if values[0].is_complex():
        return torch.view_as_complex(reduced(operation, [torch.view_as_real(value) for value in values]))
    total = reduce(OPERATIONS[operation], values)
    if operation is not ReduceOp.AVG:
        return total
    mode = None if total.is_floating_point() else "trunc"
    return torch.div(total, len(values), rounding_mode=mode)


def operations_of(dtype: torch.dtype) -> list[Any]:
    if dtype is torch.bool:
        return [operation for operation in OPERATIONS if operation is not ReduceOp.AVG]
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]
    return [operation for operation in OPERATIONS if dtype in INTEGERS or operation not in BITWISE]


def lengths_near_a_switch(size: int) -> list[int]:
    """Lengths in float32 elements, on both sides of every power of two at which the path may change."""
    near = [(1 << power) // 4 + step for power in range(14, 22) for step in (-1, 0, 1)]
    chunk = FileLayout(size).send_buffer_bytes // 4
    return [0, 1, 2, 3, 5, 63, 64, 65, 1000, *near, chunk - 1, chunk + 1, 2 * chunk + size + 1]


# -- All-reduce ------------------------------------------------------------------------------------------------------


def all_reduce_has_the_values_of_gloo(rank: int, size: int, group: Any) -> Claims:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        values = [whole(other, 37, dtype) for other in range(size)]
        for operation in operations_of(dtype):
            tensor = values[rank].clone()
            dist.all_reduce(tensor, operation, group)
            yield f"{operation} of {dtype}", tensor, reduced(operation, values)
            if dtype not in BY_GLOO or operation in {ReduceOp.AVG, ReduceOp.BXOR}:
                continue
            by_gloo = values[rank].clone()
            dist.all_reduce(by_gloo, operation)
            yield f"Gloo's {operation} of {dtype}", tensor, by_gloo


def all_reduce_refuses_what_has_no_meaning(rank: int, size: int, group: Any) -> Claims:
    for operation, dtype in ((ReduceOp.BAND, torch.float32), (ReduceOp.AVG, torch.bool), (ReduceOp.SUM, torch.uint16)):
        try:
            dist.all_reduce(torch.ones(3, dtype=dtype), operation, group)
        except TypeError as error:
            yield f"{operation} of {dtype}", f"{operation}".rpartition(".")[2] in str(error), True
        else:
            yield f"{operation} of {dtype}", "no error", "TypeError"
    # Said before anything was exchanged, on every rank alike.
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    yield "afterwards", tensor, torch.full((3,), float(size))


def all_reduce_with_a_factor(rank: int, size: int, group: Any) -> Claims:
    for length in (5, 100_003):
        values = [whole(other, length) for other in range(size)]
        for factor in (0.5, torch.tensor([0.5])):
            operation = dist._make_nccl_premul_sum(factor)
            tensor = values[rank].clone()
            dist.all_reduce(tensor, operation, group)
            yield f"{length} elements times {factor}", tensor, tree_sum(values) * 0.5
            source = torch.cat(values)
            output = torch.empty(length)
            dist.reduce_scatter_tensor(output, source, operation, group)
            yield "scattered", output, values[rank] * (0.5 * size)
            yield "what is scattered stays", source, torch.cat(values)


def all_reduce_adds_in_the_order_of_the_tree(rank: int, size: int, group: Any) -> Claims:
    """Whether a message is short, long or in the group's memory."""
    differs = 0
    for length in lengths_near_a_switch(size):
        values = [wild(other, length) for other in range(size)]
        expected = tree_sum(values)
        differs += not torch.equal(expected, reduce(operator.add, values))
        tensor = values[rank].clone()
        dist.all_reduce(tensor, group=group)
        yield f"{length} elements", tensor, expected
        if length in {3, 1000} or length > 1 << 15:
            tensor = group.allocate_tensor(length, dtype=torch.float32, device=torch.device("cpu")).copy_(values[rank])
            dist.all_reduce(tensor, group=group)
            yield f"{length} allocated elements", tensor, expected
    yield "another order gives other bits", differs > 10, size > 2


def all_reduce_of_every_float_in_the_order_of_the_tree(rank: int, size: int, group: Any) -> Claims:
    for dtype in FLOATS:
        for length in (1000, 200_003):
            values = [wild(other, length, dtype) for other in range(size)]
            tensor = values[rank].clone()
            dist.all_reduce(tensor, group=group)
            yield f"{length} of {dtype}", tensor, tree_sum(values)
            tensor = values[rank].clone()
            dist.all_reduce(tensor, ReduceOp.AVG, group)
            yield f"average of {length} of {dtype}", tensor, tree_sum(values) / size


def all_reduce_in_the_groups_memory(rank: int, size: int, group: Any) -> Claims:
    length = 300_001
    values = [wild(other, length) for other in range(size)]
    expected = tree_sum(values)

    def allocate(num_elements: int) -> Tensor:
        tensor: Tensor = group.allocate_tensor(num_elements, dtype=torch.float32, device=torch.device("cpu"))
        return tensor

    whole_tensor = allocate(length + 1000)
    yield "zeros at first", whole_tensor, torch.zeros(length + 1000)
    for start in (0, 1, 17 + rank):  # the last one is elsewhere on every rank
        view = whole_tensor[start : start + length]
        whole_tensor.fill_(5)
        view.copy_(values[rank])
        dist.all_reduce(view, group=group)
        yield f"in a view from {start}", view, expected
        yield "beside the view", whole_tensor[start + length :].unique().tolist(), [5.0]
    for who in ({0}, {size - 1}, set(range(1, size))):
        tensor = allocate(length) if rank in who else torch.empty(length)
        tensor.copy_(values[rank])
        dist.all_reduce(tensor, group=group)
        yield f"on ranks {who} alone", tensor, expected
    columns = allocate(600 * 500).view(600, 500).T.copy_(values[rank][:300_000].view(500, 600))
    dist.all_reduce(columns, group=group)
    yield "strided on every rank", columns, expected[:300_000].view(500, 600)
    works = []
    many = [allocate(50_000 + number) for number in range(4)]
    for number, tensor in enumerate(many):
        tensor.copy_(values[rank][: tensor.numel()])
        works.append(dist.all_reduce(tensor, [ReduceOp.SUM, ReduceOp.MAX][number % 2], group, async_op=True))
    for number, work in enumerate(works):
        work.wait()
        parts = [value[: many[number].numel()] for value in values]
        yield "several at once", many[number], reduce(torch.maximum, parts) if number % 2 else tree_sum(parts)
    other_group = dist.new_group(backend="shm")
    whole_tensor[:length].copy_(values[rank])
    dist.all_reduce(whole_tensor[:length], group=other_group)
    yield "in another group", whole_tensor[:length], expected
    dist.destroy_process_group(other_group)
    for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        tensor = group.allocate_tensor(400_000, dtype=dtype, device=None)
        source = [whole(other, 400_000, dtype) for other in range(size)]
        tensor.copy_(source[rank])
        dist.all_reduce(tensor, group=group)
        yield f"of {dtype}", tensor, reduced(ReduceOp.SUM, source)
    yield "nothing allocated", allocate(0).shape, torch.Size([0])


def group_memory_is_given_back(rank: int, size: int, group: Any) -> Claims:
    values = [wild(other, 1 << 20) for other in range(size)]
    for turn in range(30):
        tensor = group.allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cpu"))
        yield f"zeros in turn {turn}", tensor[:: PERIOD + 1].any().item(), False
        tensor.copy_(values[rank])
        if turn % 10 == 0:
            dist.all_reduce(tensor, group=group)
            yield f"sum in turn {turn}", tensor, tree_sum(values)
    part = tensor[5:10]
    del tensor
    yield "a view outlives its tensor", part, tree_sum(values)[5:10] if turn % 10 == 0 else values[rank][5:10]


def parts_of_any_rank_are_added_in_the_order_of_the_tree(rank: int, size: int, group: Any) -> Claims:
    """Random layouts: several parts on a rank, or none, not in the order of the ranks, in whatever memory."""
    draw, alone = random.Random(size), random.Random(100 + rank)
    for number in range(40):
        num_shards = draw.choice((max(size - 1, 1), size, size, draw.randrange(1, 3 * size + 1)))
        bounds = sorted([0, num_shards, *(draw.randrange(num_shards + 1) for _ in range(size - 1))])
        if num_shards == size and draw.random() < 0.7:
            bounds = [*range(size + 1)]
        layout = [partial_nodes(start, stop, num_shards) for start, stop in itertools.pairwise(bounds)]
        draw.shuffle(layout)
        length, dtype = draw.choice((1, 77, 5000, 250_001, 600_007)), draw.choice((*FLOATS, torch.int16, torch.cfloat))
        values = {
            node: (whole if dtype in {torch.int16, torch.cfloat} else wild)(shard, length, dtype)
            for shard, node in enumerate(node for nodes in layout for node in nodes)
        }
        # What only this rank knows: where its tensors lie, and whether the result is one of them.
        parts = [
            (group.allocate_tensor(length, dtype=dtype) if alone.random() < 0.7 else torch.empty(length, dtype=dtype))
            for _ in layout[rank]
        ]
        for part, node in zip(parts, layout[rank], strict=True):
            part.copy_(values[node])
        out = alone.choice(parts) if parts and alone.random() < 0.7 else torch.empty(length, dtype=dtype)
        call = f"sum {number}".encode()
        work = group.ordered_all_reduce(parts, out, layout, num_shards, call, is_async=draw.random() < 0.3)
        if work is not None:
            work.wait()
        expected = add_in_tree_order(values, num_shards, operator.add)
        yield f"{number}: {length} of {dtype} as {layout}", out, expected


def all_reduce_of_any_layout(rank: int, size: int, group: Any) -> Claims:
    def sources(*shape: int) -> list[Tensor]:
        return [whole(other, shape) for other in range(size)]

    for shape in ((8, 6), (300, 250)):
        values = sources(*shape)
        tensor = values[rank].clone().T
        dist.all_reduce(tensor, group=group)
        yield f"transposed {shape}", tensor, tree_sum(values).T
        holes = torch.full((shape[0], 2 * shape[1]), 7.0)
        holes[:, ::2] = values[rank]
        dist.all_reduce(holes[:, ::2], group=group)
        yield f"strided {shape}", holes[:, ::2], tree_sum(values)
        yield "the holes stay", holes[:, 1::2].unique().tolist(), [7.0]
        # Elements are matched by their place, not by their memory.
        tensor = values[rank].clone() if rank else values[rank].T.contiguous().T
        dist.all_reduce(tensor, group=group)
        yield f"of other strides on one rank {shape}", tensor, tree_sum(values)
    values = sources(2, 3, 5, 7)
    tensor = values[rank].clone(memory_format=torch.channels_last)
    dist.all_reduce(tensor, group=group)
    yield "channels_last", tensor, tree_sum(values)
    yield "still channels_last", tensor.is_contiguous(memory_format=torch.channels_last), True
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1, 1))
    for any_shape in shapes:
        values = sources(*any_shape)
        tensor = values[rank].clone()
        dist.all_reduce(tensor, group=group)
        yield f"of shape {any_shape}", tensor, tree_sum(values)


def all_reduce_carries_what_is_not_a_number(rank: int, size: int, group: Any) -> Claims:
    infinity, nan = float("inf"), float("nan")
    for length in (4, 400_000):
        tensor = torch.full((length,), float(rank))
        tensor[0], tensor[1], tensor[2] = (nan, infinity, -infinity) if rank == size - 1 else (1.0, 1.0, infinity)
        dist.all_reduce(tensor, group=group)
        yield f"sum of {length}", tensor[:4], torch.tensor([nan, infinity, nan, sum(range(size))])
        for operation in (ReduceOp.MIN, ReduceOp.MAX):
            tensor = torch.full((length,), float(rank))
            tensor[0] = nan if rank == 0 else 1.0
            dist.all_reduce(tensor, operation, group)
            yield f"{operation} of {length}", tensor[:2].isnan().tolist(), [True, False]


def collectives_do_not_meet_autograd(rank: int, size: int, group: Any) -> Claims:
    expected = torch.full((3,), float(size))
    parameter = nn.Parameter(torch.ones(3))
    version = parameter._version
    dist.all_reduce(parameter, group=group)
    yield "a parameter", parameter.data, expected
    yield "needs a gradient", parameter.requires_grad, True
    yield "its version", parameter._version - version <= 1, True
    tensor = torch.ones(3, requires_grad=True) * 1.0
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 0, group)
    yield "within a graph", tensor.detach(), expected
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, torch.full((3,), float(rank), requires_grad=True), group)
    yield "gathered", gathered, [torch.full((3,), float(other)) for other in range(size)]
    yield "gathered needs none", any(piece.requires_grad for piece in gathered), False


def inference_tensors_are_carried(rank: int, size: int, group: Any) -> Claims:
    for asynchronous in (False, True):
        with torch.inference_mode():
            inside, outside, root = torch.ones(3), torch.ones(3, 2).T, torch.full((2,), float(rank))
            work = dist.all_reduce(inside, group=group, async_op=asynchronous)
            if work is not None:
                work.wait()
        for tensor in (outside, root):
            if tensor is outside:
                work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
            else:
                work = dist.broadcast(tensor, 1, group, async_op=asynchronous)
            if work is not None:
                work.wait()
        output = torch.empty(size * 2)
        dist.all_gather_into_tensor(output, root, group)
        yield "in inference mode", inside.tolist(), [float(size)] * 3
        yield "outside of it", outside.tolist(), [[float(size)] * 3] * 2
        yield "broadcast", root.tolist(), [1.0, 1.0]
        yield "gathered", output.tolist(), [1.0] * (2 * size)


def inference_mode_leaves_nothing_behind(rank: int, size: int, group: Any) -> Claims:
    """Evaluating before training once broke the group: views of its memory were made in that mode, and kept."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (3, 600_000):
        with torch.inference_mode():
            allocated = group.allocate_tensor(length, dtype=torch.float32)
            dist.all_reduce(torch.ones(length), group=group)
            dist.all_reduce(allocated, group=group)
            work = dist.isend(torch.full((length,), float(rank)), after, group)
            tensor = torch.empty(length)
            dist.recv(tensor, before, group)
            work.wait()
        yield "message in inference mode", tensor.unique().tolist(), [float(before)]
        allocated += 1.0
        for mine in (torch.ones(length), allocated):
            dist.all_reduce(mine, group=group)
            yield f"sum of {length} afterwards", mine.unique().tolist(), [float(size)]
        work = dist.isend(mine, after, group)
        dist.recv(mine.clone(), before, group)
        work.wait()


def messages_into_inference_tensors(rank: int, size: int, group: Any) -> Claims:
    """A receive that another thread carries out, outside of inference mode, once broke the group."""
    after, before = (rank + 1) % size, (rank - 1) % size
    with torch.inference_mode():
        places = [torch.zeros(4), torch.zeros(4, 2).T, torch.zeros(300_000), torch.zeros(5)]
        works = [dist.irecv(place, before, group, tag) for tag, place in enumerate(places[:3])]
        received = [work.get_future() for work in works]  # has the lane's thread take the messages
    sent = [torch.full_like(place, rank + 1.0).contiguous() for place in places]
    sends = [dist.isend(tensor, after, group, tag) for tag, tensor in enumerate(sent)]
    for future in received:
        future.wait()
    with torch.inference_mode():
        dist.recv(places[3], before, group, 3)
    for work in sends:
        work.wait()
    for place in places:
        yield f"received as {list(place.shape)}", place.unique().tolist(), [before + 1.0]


def tensors_of_one_element_or_none_may_have_strides(rank: int, size: int, group: Any) -> Claims:
    """Torch calls them contiguous all the same, and yet they have no view as bytes: that once broke the group."""
    for length, stride in ((1, 2), (0, 2)):

        def cut(value: float, length: int = length, stride: int = stride) -> Tensor:
            return torch.full((4,), value)[::stride][:length]

        expected = [1.0] * length
        tensor = cut(float(rank))
        dist.broadcast(tensor, 1, group)
        yield "broadcast", tensor.tolist(), expected
        work = dist.isend(cut(1.0), (rank + 1) % size, group)
        dist.recv(tensor.zero_(), (rank - 1) % size, group)
        work.wait()
        yield "message", tensor.tolist(), expected
        outputs = [cut(0.0) for _ in range(size)]
        dist.all_gather(outputs, cut(1.0), group)
        yield "gathered", [output.tolist() for output in outputs], [expected] * size


def conjugate_views_are_filled_through_the_groups_methods(rank: int, size: int, group: Any) -> Claims:
    """`dist` resolves them first, for its own calls only; what came for them was once lost."""
    tensor = (whole(rank, 4, torch.complex64) + rank).conj()
    expected = (whole(1, 4, torch.complex64) + 1).conj().resolve_conj()
    group.broadcast([tensor], 1).wait()
    yield "broadcast", tensor.resolve_conj(), expected
    output = torch.zeros(4, dtype=torch.complex64).conj()
    if rank == 0:
        group.recv([output], 1).wait()
        yield "message", output.resolve_conj(), expected
    elif rank == 1:
        group.send([tensor], 0).wait()


def a_factor_does_not_change_the_dtype(rank: int, size: int, group: Any) -> Claims:
    """A tensor of float64 as a factor once made a product of float64, which the others read as float32."""
    factor = torch.tensor([2.0], dtype=torch.float64) if rank else 2.0
    tensor = torch.ones(5)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), group)
    yield "sum", tensor, torch.full((5,), 2.0 * size)


def all_reduce_of_several_tensors(rank: int, size: int, group: Any) -> Claims:
    shapes = ((3,), (0,), (2, 5), (70_001,), ())
    values = [[whole(other + 10 * number, shape) for number, shape in enumerate(shapes)] for other in range(size)]
    expected = [tree_sum(column) for column in zip(*values, strict=True)]
    tensors = [value.clone() for value in values[rank]]
    dist.all_reduce_coalesced(tensors, group=group)
    yield "coalesced", tensors, expected
    tensors = [value.clone() for value in values[rank]]
    tensors[2] = tensors[2].T.contiguous().T
    future = dist.all_reduce_coalesced(tensors, ReduceOp.MAX, group, async_op=True)
    future.wait()
    yield "strided, later", tensors, [reduce(torch.maximum, column) for column in zip(*values, strict=True)]
    for asynchronous in (False, True):
        tensors = [value.clone() for value in values[rank]]
        with _coalescing_manager(group, async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        if asynchronous:
            manager.wait()
        yield "by the coalescing manager", tensors, expected


# -- Other collectives -----------------------------------------------------------------------------------------------


def broadcast_gives_the_roots_values(rank: int, size: int, group: Any) -> Claims:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *ONLY_MOVED):
        tensor = whole(rank, 33).to(dtype)
        dist.broadcast(tensor, size - 1, group)
        yield f"{dtype}", tensor, whole(size - 1, 33).to(dtype)
    outbox = FileLayout(size).send_buffer_bytes
    for length in (0, 1, outbox - 1, outbox, 2 * outbox + 1):
        for root in range(size):
            tensor = whole(rank, min(length, 1000), torch.uint8).repeat(-(-length // 1000))[:length]
            dist.broadcast(tensor, group=group, group_src=root)
            expected = whole(root, min(length, 1000), torch.uint8).repeat(-(-length // 1000))[:length]
            yield f"{length} bytes from {root}", tensor, expected
    tensor = whole(rank, (5, 4)).T
    dist.broadcast(tensor, 1, group)
    yield "transposed", tensor, whole(1, (5, 4)).T


def reduce_gives_the_root_the_reduction(rank: int, size: int, group: Any) -> Claims:
    for length in (0, 5, 2 * FileLayout(size).send_buffer_bytes // 4 + 1):
        values = [wild(other, length) for other in range(size)]
        for root in range(size):
            tensor = values[rank].clone()
            dist.reduce(tensor, root, group=group)
            yield f"{length} elements to {root}", tensor, tree_sum(values) if rank == root else values[rank]
    values = [whole(other, (4, 6)) for other in range(size)]
    for operation in (ReduceOp.AVG, ReduceOp.MAX, dist._make_nccl_premul_sum(2.0)):
        tensor = values[rank].T.clone(memory_format=torch.preserve_format)
        dist.reduce(tensor, 0, operation, group)
        known = {ReduceOp.AVG: tree_sum(values) / size, ReduceOp.MAX: reduce(torch.maximum, values)}
        expected = known.get(operation, 2 * tree_sum(values)) if isinstance(operation, ReduceOp.RedOpType) else None
        expected = 2 * tree_sum(values) if expected is None else expected
        yield f"{operation}", tensor, expected.T if rank == 0 else values[rank].T


def all_gather_collects_every_rank(rank: int, size: int, group: Any) -> Claims:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *ONLY_MOVED):
        values = [whole(other, (3, 5)).to(dtype) for other in range(size)]
        outputs = [torch.zeros(3, 5, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values[rank], group)
        yield f"list of {dtype}", outputs, values
        for shape in ((3 * size, 5), (size, 3, 5)):
            output = torch.zeros(shape, dtype=dtype)
            dist.all_gather_into_tensor(output, values[rank], group)
            yield f"tensor {shape} of {dtype}", output.view(-1), torch.stack(values).view(-1)
    for length in (0, 1, FileLayout(size).send_buffer_bytes + 1):
        values = [wild(other, -(-length // 8), torch.float64) for other in range(size)]
        outputs = [torch.zeros_like(value) for value in values]
        dist.all_gather(outputs, values[rank], group)
        yield f"list of {length} bytes", outputs, values
        output = torch.zeros(size * values[0].numel(), dtype=torch.float64)
        output.chunk(size)[rank].copy_(values[rank]) if length else None
        dist.all_gather_into_tensor(output, output.view(size, -1)[rank], group)
        yield f"in place, {length} bytes", output, torch.cat(values)
    strided = [torch.zeros(5, 3).T for _ in range(size)]
    values = [whole(other, (3, 5)) for other in range(size)]
    dist.all_gather(strided, values[rank].T.contiguous().T, group)
    yield "strided", strided, values
    scalars = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(scalars, torch.tensor(float(rank)), group)
    yield "scalars", torch.stack(scalars), torch.arange(float(size))


def gathers_of_several_tensors(rank: int, size: int, group: Any) -> Claims:
    shapes = ((3,), (2, 2), (0,), (70_001,))
    values = [[whole(other, shape) for shape in shapes] for other in range(size)]
    outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(outputs, values[rank], group)
    yield "all_gather_coalesced", list(itertools.chain(*outputs)), list(itertools.chain(*values))
    flat = [torch.zeros(size * value.numel()) for value in values[rank]]
    with _coalescing_manager(group, async_ops=True) as manager:
        for output, value in zip(flat, values[rank], strict=True):
            dist.all_gather_into_tensor(output, value.view(-1), group)
    manager.wait()
    yield "coalescing manager", flat, [torch.cat([v.view(-1) for v in column]) for column in zip(*values, strict=True)]
    sources = [[whole(10 * other + number, size * 3) for number in range(4)] for other in range(size)]
    outputs_of_rank = [torch.zeros(3) for _ in range(4)]
    with _coalescing_manager(group):
        for output, source in zip(outputs_of_rank, sources[rank], strict=True):
            dist.reduce_scatter_tensor(output, source, group=group)
    sums = [tree_sum(column).chunk(size)[rank] for column in zip(*sources, strict=True)]
    yield "reduce_scatter by the coalescing manager", outputs_of_rank, sums


def reduce_scatter_gives_every_rank_its_piece(rank: int, size: int, group: Any) -> Claims:
    for length in (0, 1, 5, 1000, FileLayout(size).send_buffer_bytes // 4 + 1):
        values = [wild(other, size * length) for other in range(size)]
        expected = tree_sum(values).view(size, length)[rank]
        output = torch.zeros(length)
        dist.reduce_scatter(output, list(values[rank].clone().view(size, length).unbind()), group=group)
        yield f"list of {length}", output, expected
        source = values[rank].clone()
        dist.reduce_scatter_tensor(output.zero_(), source, group=group)
        yield f"tensor of {length}", output, expected
        yield "what is scattered stays", source, values[rank]
        own = source.view(size, length)[rank]
        dist.reduce_scatter_tensor(own, source, group=group)
        yield f"in place, {length}", own, expected
    values = [whole(other, (size, 4, 3)) for other in range(size)]
    for operation in (ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT):
        output = torch.zeros(3, 4).T
        dist.reduce_scatter(output, list(values[rank].unbind()), operation, group)
        yield f"{operation}, strided", output, reduced(operation, values)[rank]
    stacked = torch.zeros(4, 3)
    dist.reduce_scatter_tensor(stacked, values[rank], group=group)
    yield "stacked", stacked, tree_sum(values)[rank]


def all_to_all_exchanges_pieces(rank: int, size: int, group: Any) -> Claims:
    def piece(source: int, target: int, scale: int = 1) -> Tensor:
        return wild(10 * source + target, scale * ((source + 2 * target) % 4))

    for scale in (1, FileLayout(size).send_buffer_bytes // 8):
        inputs = [piece(rank, other, scale) for other in range(size)]
        expected = [piece(other, rank, scale) for other in range(size)]
        outputs = [torch.zeros_like(value) for value in expected]
        dist.all_to_all(outputs, inputs, group)
        yield f"list, times {scale}", outputs, expected
        output = torch.zeros(sum(value.numel() for value in expected))
        received, sent = [len(value) for value in expected], [len(value) for value in inputs]
        dist.all_to_all_single(output, torch.cat(inputs), received, sent, group)
        yield f"uneven splits, times {scale}", output, torch.cat(expected)
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *ONLY_MOVED):
        source = whole(rank, (2 * size, 3)).to(dtype)
        output = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(output, source, group=group)
        expected_rows = [whole(other, (2 * size, 3))[2 * rank : 2 * rank + 2] for other in range(size)]
        yield f"even rows of {dtype}", output, torch.cat(expected_rows).to(dtype)
    outputs = [torch.zeros(2, 3).T for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((3, 2), 10.0 * rank + other) for other in range(size)], group)
    yield "strided", outputs, [torch.full((3, 2), 10.0 * other + rank) for other in range(size)]
    nothing = torch.zeros(0, 3)
    dist.all_to_all_single(nothing, torch.zeros(0, 3), group=group)
    yield "nothing", nothing.shape, torch.Size([0, 3])
    # All rows go from rank 0 to the last rank.
    sent = [0] * (size - 1) + [5 if rank == 0 else 0]
    received = [5 if rank == size - 1 else 0] + [0] * (size - 1)
    output = torch.zeros(sum(received), 2)
    dist.all_to_all_single(output, torch.full((sum(sent), 2), 3.0), received, sent, group)
    yield "one pair", output, torch.full((sum(received), 2), 3.0)


def gather_and_scatter_have_a_root(rank: int, size: int, group: Any) -> Claims:
    for length in (0, 1, 7, FileLayout(size).send_buffer_bytes // 4 + 3):
        values = [wild(other, length) for other in range(size)]
        for root in {0, size - 1}:
            outputs = [torch.zeros(length) for _ in range(size)] if rank == root else None
            dist.gather(values[rank], outputs, root, group)
            yield f"gather {length} to {root}", outputs, values if rank == root else None
            # As torch 2.15 calls it, whose `dist.gather_single` gives other ranks an empty tensor.
            whole_output = torch.zeros(size, length).T.contiguous().T if rank == root else torch.empty(0)
            group.gather_single(whole_output, values[rank], root).wait()
            yield f"gather_single {length} to {root}", list(whole_output), values if rank == root else []
            output = torch.zeros(length)
            dist.scatter(output, values if rank == root else None, root, group)
            yield f"scatter {length} from {root}", output, values[rank]
    for dtype in (torch.bool, torch.float8_e5m2, torch.complex64, torch.int16):
        values = [whole(other, (2, 3)).to(dtype) for other in range(size)]
        outputs = [torch.zeros(3, 2, dtype=dtype).T for _ in range(size)] if rank == 1 else None
        dist.gather(values[rank], outputs, 1, group)
        yield f"gather {dtype}", outputs, values if rank == 1 else None
        output = torch.zeros(3, 2, dtype=dtype).T
        dist.scatter(output, values if rank == 1 else None, 1, group)
        yield f"scatter {dtype}", output, values[rank]


def lazily_negated_tensors_are_carried_by_value(rank: int, size: int, group: Any) -> Claims:
    """The imaginary part of a conjugate is a view of numbers with the other sign."""

    def negated(other: int) -> Tensor:
        return whole(other + 1, 6, torch.complex64).conj().imag

    def plain(other: int) -> Tensor:
        return negated(other).resolve_neg()

    tensor = negated(rank)
    yield "lazily negated", tensor.is_neg(), True
    dist.broadcast(tensor, 1, group)
    yield "broadcast", tensor.resolve_neg(), plain(1)
    tensor = negated(rank)
    dist.all_reduce(tensor, group=group)
    yield "sum", tensor.resolve_neg(), tree_sum([plain(other) for other in range(size)])
    outputs = [negated(rank) for _ in range(size)]
    dist.all_gather(outputs, negated(rank), group)
    yield "gathered", [output.resolve_neg() for output in outputs], [plain(other) for other in range(size)]


def barrier_waits_for_every_rank(rank: int, size: int, group: Any) -> Claims:
    moments = []
    for turn in range(20):
        came = time.monotonic_ns()  # the same clock in every process
        if turn % 2:
            dist.barrier(group, async_op=True).wait()
        else:
            dist.barrier(group)
        moments.append((came, time.monotonic_ns()))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, moments, group)
    for turn, of_turn in enumerate(zip(*everyone, strict=True)):
        yield f"turn {turn}", max(came for came, _ in of_turn) < min(went for _, went in of_turn), True


def objects_are_carried(rank: int, size: int, group: Any) -> Claims:
    def thing(other: int) -> dict[str, Any]:
        return {"rank": other, "list": list(range(1000 * other)), "none": None}

    everything = [thing(other) for other in range(size)]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, thing(rank), group)
    yield "all_gather_object", gathered, everything
    root = size - 1
    collected: list[Any] | None = [None] * size if rank == root else None
    dist.gather_object(thing(rank), collected, root, group)
    yield "gather_object", collected, everything if rank == root else None
    given = [thing(7), "text", 3] if rank == root else [None] * 3
    dist.broadcast_object_list(given, root, group)
    yield "broadcast_object_list", given, [thing(7), "text", 3]
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, everything if rank == root else None, root, group)
    yield "scatter_object_list", taken, [thing(rank)]
    if rank == 0:
        dist.send_object_list([thing(2), 5], 1, group)
    if rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0, group)
        yield "recv_object_list", received, [thing(2), 5]


# -- Messages --------------------------------------------------------------------------------------------------------


def messages_find_the_receive_with_their_tag(rank: int, size: int, group: Any) -> Claims:
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, group, tag) for tag in (1, 2, 3, 2)]
        works += [dist.isend(wild(9, 1_000_003), 1, group, 4), dist.isend(torch.tensor(5.0), 1, group, 5)]
        for work in works:
            work.wait()
        dist.send(torch.arange(4), 1, group)
    if rank == 1:
        for tag in (3, 2, 1, 2):
            tensor = torch.zeros(3)
            yield "rank of the sender", dist.recv(tensor, 0, group, tag), 0
            yield f"tag {tag}", tensor, torch.full((3,), float(tag))
        scalar, large = torch.tensor(0.0), torch.zeros(1_000_003)
        dist.recv(scalar, 0, group, 5)
        dist.recv(large, 0, group, 4)
        yield "scalar", scalar, torch.tensor(5.0)
        yield "large, kept for later", large, wild(9, 1_000_003)
        numbers = torch.zeros(2, 2, dtype=torch.int64).T
        dist.recv(numbers, 0, group)
        yield "into another shape and layout", numbers, torch.arange(4).view(2, 2)


def messages_of_every_kind(rank: int, size: int, group: Any) -> Claims:
    slot = FileLayout(size).slot_bytes
    kinds = [whole(1, 33).to(dtype) for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *ONLY_MOVED)]
    kinds += [torch.zeros(0), torch.ones(2, 0), torch.tensor(3), whole(2, (4, 6)).T]
    kinds += [whole(3, length, torch.uint8) for length in (slot - 1, slot, slot + 1, 2 * slot, 2 * slot + 1, 5 * slot)]
    for number, value in enumerate(kinds):
        if rank == number % size:
            dist.send(value, (rank + 1) % size, group)
        if rank == (number + 1) % size:
            tensor = torch.zeros_like(value)
            dist.recv(tensor, number % size, group)
            yield f"{value.dtype} {list(value.shape)}", tensor, value


def messages_from_any_rank(rank: int, size: int, group: Any) -> Claims:
    if rank:
        for turn in range(3):
            dist.send(torch.full((2,), float(10 * rank + turn)), 0, group, tag=turn)
    else:
        for turn in (2, 0, 1):
            seen = {}
            for _ in range(size - 1):
                tensor = torch.zeros(2)
                source = dist.recv(tensor, None, group, turn)
                seen[source] = tensor.tolist()
            yield f"turn {turn}", seen, {other: [10.0 * other + turn] * 2 for other in range(1, size)}


def messages_from_any_rank_out_of_order(rank: int, size: int, group: Any) -> Claims:
    """Receives from one rank and from any, under way together, with different tags."""
    if rank:
        works = [dist.isend(torch.tensor([float(rank), tag]), 0, group, tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    else:
        fixed = {other: torch.zeros(2) for other in range(1, size)}
        works = [dist.irecv(tensor, other, group, 2) for other, tensor in fixed.items()]
        loose = [torch.zeros(2) for _ in range(1, size)]
        works += [dist.irecv(tensor, None, group, 1) for tensor in loose]
        for work in reversed(works):
            work.wait()
        yield "from one", list(fixed.values()), [torch.tensor([float(other), 2]) for other in fixed]
        yield "from any", sorted(tensor.tolist() for tensor in loose), [[float(other), 1] for other in range(1, size)]


def messages_around_a_ring(rank: int, size: int, group: Any) -> Claims:
    before, after = (rank - 1) % size, (rank + 1) % size
    for length in (3, 1_000_003):
        for receives_first in (False, True):
            received, sent = torch.zeros(length), wild(rank, length)
            steps = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
            for work in dist.batch_isend_irecv(steps[::-1] if receives_first else steps):
                work.wait()
            yield f"{length} elements, receives first: {receives_first}", received, wild(before, length)
    everyone = [other for other in range(size) if other != rank]
    received_from = {other: torch.zeros(5) for other in everyone}
    steps = [dist.P2POp(dist.irecv, received_from[other], other, group) for other in everyone]
    steps += [dist.P2POp(dist.isend, torch.full((5,), 10.0 * rank + other), other, group) for other in everyone]
    for work in dist.batch_isend_irecv(steps):
        work.wait()
    yield "all pairs", list(received_from.values()), [torch.full((5,), 10.0 * other + rank) for other in everyone]


def messages_keep_their_order(rank: int, size: int, group: Any) -> Claims:
    if rank == 0:
        works = [dist.isend(torch.tensor([number]), 1, group) for number in range(50)]
        for work in works:
            work.wait()
    if rank == 1:
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(50)]
        for work in [dist.irecv(tensor, 0, group) for tensor in tensors]:
            work.wait()
        yield "in order", torch.cat(tensors), torch.arange(50)


# -- Calls that nobody waits for yet, and many at once ---------------------------------------------------------------


def calls_may_be_waited_for_in_any_order(rank: int, size: int, group: Any) -> Claims:
    lengths = (1, 1000, 500_000, 3, 0)
    values = [[wild(other, length) for length in lengths] for other in range(size)]
    expected = [tree_sum(column) for column in zip(*values, strict=True)]
    for order in (slice(None), slice(None, None, -1)):
        tensors = [value.clone() for value in values[rank]]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works[order]:
            yield "wait", work.wait(), True
            yield "done", work.is_completed(), True
        yield f"{order}", tensors, expected
    # No two of these may overtake each other, whoever waits for which.
    tensor = torch.ones(3)
    first = dist.all_reduce(tensor, group=group, async_op=True)
    second = dist.all_reduce(tensor, group=group, async_op=True)
    gathered = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(gathered, tensor, group)
    yield "the same tensor twice, then gathered", gathered, [torch.full((3,), float(size**2))] * size
    yield "earlier ones are done", [first.is_completed(), second.is_completed()], [True, True]


def calls_go_on_though_nobody_waits(rank: int, size: int, group: Any) -> Claims:
    tensor = torch.ones(100_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    deadline = time.monotonic() + WAIT_SECONDS
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    yield "done", work.is_completed(), True
    yield "sum", tensor, torch.full((100_000,), float(size))
    yield "result", [value.data_ptr() for value in work.result()], [tensor.data_ptr()]


def a_future_is_told_though_an_older_receive_waits(rank: int, size: int, group: Any) -> Claims:
    """It was once told when the older receive had its message, which here is sent only in answer: a deadlock."""
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        older = dist.irecv(first, 1, group, 1)
        dist.irecv(second, 1, group, 2).get_future().wait()
        yield "second", second.item(), 2.0
        dist.send(second, 1, group, 3)
        older.wait()
        yield "first", first.item(), 1.0
    elif rank == 1:
        dist.send(torch.full((1,), 2.0), 0, group, 2)
        dist.recv(torch.zeros(1), 0, group, 3)
        dist.send(torch.ones(1), 0, group, 1)


def futures_hold_the_tensors(rank: int, size: int, group: Any) -> Claims:
    for length in (3, 300_000):
        tensor = torch.full((length,), float(rank))
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).wait()
        yield f"then, {length}", doubled, torch.full((length,), 2.0 * sum(range(size)))
        yield "value", future.wait()[0].data_ptr(), tensor.data_ptr()
        work = dist.broadcast(tensor.fill_(rank), 1, group, async_op=True)
        work.wait()
        yield "of a call that is done", work.get_future().then(lambda done: done.value()[0]).wait(), torch.ones(length)
    futures = []
    for number in range(6):
        work = dist.all_reduce(torch.full((2,), float(number)), group=group, async_op=True)
        futures.append(work.get_future().then(lambda done: done.value()[0]))
    for number, value in enumerate(torch.futures.wait_all(futures)):
        yield "several", value, torch.full((2,), float(number * size))


def a_callback_may_communicate(rank: int, size: int, group: Any) -> Claims:
    """As torch's PowerSGD hook does: it waits for an all-reduce in what follows another."""

    def start() -> Any:
        return dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()

    def waits_for_a_future(done: Any) -> Tensor:
        value: Tensor = dist.all_reduce(done.value()[0], group=group, async_op=True).get_future().wait()[0]
        return value

    def waits_for_a_call(done: Any) -> Tensor:
        tensor: Tensor = done.value()[0]
        dist.all_reduce(tensor, group=group)
        return tensor

    def complete(future: Any, what: str) -> Tensor:
        deadline = time.monotonic() + WAIT_SECONDS
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert future.done(), f"{what} hangs"
        value: Tensor = future.value()
        return value

    for callback in (waits_for_a_future, waits_for_a_call):
        value = complete(start().then(callback), callback.__name__)
        yield callback.__name__, value, torch.full((3,), float(size**2))
    first, second = start(), start()
    value = complete(first.then(lambda _: second.wait()[0]), "a callback that waits for the next call")
    yield "waits for the next call", value, torch.full((3,), float(size))


def synchronous_calls_take_their_turn(rank: int, size: int, group: Any) -> Claims:
    pending = []
    for turn in range(10):
        later, now = torch.full((50_000,), float(turn)), torch.full((4,), float(rank))
        pending.append((turn, later, dist.all_reduce(later, group=group, async_op=True)))
        dist.broadcast(now, turn % size, group)
        yield f"broadcast of turn {turn}", now, torch.full((4,), float(turn % size))
    for turn, later, work in pending:
        work.wait()
        yield f"sum of turn {turn}", later, torch.full((50_000,), float(turn * size))


def groups_are_apart(rank: int, size: int, group: Any) -> Claims:
    groups = [group, dist.new_group(backend="shm"), dist.new_group(backend="shm")]
    tensors = [torch.full((length,), float(rank)) for length in (5, 300_000, 40)]
    works = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in (2, 0, 1)]
    for work in works:
        work.wait()
    yield "sums", [tensor[0].item() for tensor in tensors], [float(sum(range(size)))] * 3
    # Groups in another order on another rank: each has its own calls.
    for number in range(3)[:: 1 if rank % 2 else -1]:
        tensors[number].fill_(number)
        works[number] = dist.all_reduce(tensors[number], group=groups[number], async_op=True)
    for work in works:
        work.wait()
    yield "in another order", [tensor[0].item() for tensor in tensors], [float(number * size) for number in range(3)]
    for other in groups[1:]:
        dist.destroy_process_group(other)


def part_of_the_ranks_may_be_a_group(rank: int, size: int, group: Any) -> Claims:
    for members in ([0, size - 1], list(range(1, size)), [size - 1], list(range(size))[::-1]):
        part = dist.new_group(members, backend="shm")
        if rank in members:
            values = [wild(other, 70_001) for other in sorted(members)]
            tensor = wild(rank, 70_001)
            dist.all_reduce(tensor, group=part)
            yield f"sum of {members}", tensor, tree_sum(values)
            root = members[-1]
            tensor = torch.full((2,), float(rank))
            dist.broadcast(tensor, root, part)
            yield f"broadcast from {root} of {members}", tensor, torch.full((2,), float(root))
            gathered: list[Any] = [None] * len(members)
            dist.all_gather_object(gathered, rank, part)
            yield f"gathered from {members}", gathered, sorted(members)
            dist.destroy_process_group(part)
    halves, _ = dist.new_subgroups_by_enumeration([[0], list(range(1, size))], backend="shm")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=halves)
    yield "enumerated", tensor, torch.full((3,), 1.0 if rank == 0 else size - 1.0)
    dist.destroy_process_group(halves)


def threads_with_a_group_each(rank: int, size: int, group: Any) -> Claims:
    groups = [group, *(dist.new_group(backend="shm") for _ in range(2))]
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        found[number] = []
        for turn in range(20):
            tensor = torch.full((10 ** (turn % 5) + number,), float(turn))
            dist.all_reduce(tensor, group=groups[number])
            found[number].append(tensor.unique().tolist())

    run_threads([lambda number=number: work(number) for number in range(3)])  # type: ignore[misc]
    yield "sums", found, {number: [[float(turn * size)] for turn in range(20)] for number in range(3)}
    for other in groups[1:]:
        dist.destroy_process_group(other)


def threads_with_one_group(rank: int, size: int, group: Any) -> Claims:
    """The calls are alike, so it does not matter which call of one rank meets which of another."""
    found: list[Any] = []

    def work() -> None:
        for turn in range(20):
            tensor = torch.ones(3)
            handle = dist.all_reduce(tensor, group=group, async_op=turn % 2 == 0)
            if handle is not None:
                handle.wait()
            found.append(tensor.tolist())

    run_threads([work] * 3)
    yield "sums", found, [[float(size)] * 3] * 60
    tensor = torch.ones(50_000)
    handle = dist.all_reduce(tensor, group=group, async_op=True)
    seen: list[Any] = []
    run_threads([lambda: seen.append((handle.wait(), tensor[0].item()))] * 3)
    yield "three wait for one call", seen, [(True, float(size))] * 3


def run_threads(tasks: Sequence[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "a thread hangs"


# -- What has no form in shared memory -------------------------------------------------------------------------------


def sparse_tensors_are_added(rank: int, size: int, group: Any) -> Claims:
    for asynchronous in (False, True):
        dense = torch.zeros(5, 2)
        dense[rank] = rank + 1.0
        dense[4] = 1.0
        tensor = dense.to_sparse()
        work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
        expected = torch.zeros(5, 2)
        expected[4] = size
        for other in range(size):
            expected[other] += other + 1.0 if other < 4 else 0.0
        yield f"later: {asynchronous}", tensor.to_dense(), expected
    sparse = torch.eye(2).to_sparse()
    # What Gloo refuses too, but once the others waited for it, which broke the group.
    refused: tuple[Callable[[], Any], ...] = (
        lambda: dist.broadcast(sparse, 0, group),
        lambda: dist.all_reduce(sparse, ReduceOp.MAX, group),
        lambda: dist.all_reduce(sparse.to_sparse_csr(), group=group),
        lambda: dist.all_reduce_coalesced([sparse], group=group),
        lambda: dist.send(sparse, (rank + 1) % size, group),
        lambda: dist.recv(sparse, (rank - 1) % size, group),
        lambda: dist.recv(sparse, group=group),
    )
    for number, call in enumerate(refused):
        try:
            call()
        except ValueError as error:
            yield f"refusal {number}", "sparse" in str(error), True
        else:
            yield f"refusal {number}", "no error", "ValueError"
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    yield "dense afterwards", tensor, torch.full((3,), float(size))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(shm_scenarios: ShmScenarios, scenario: ShmScenario, world_size: int) -> None:
    assert shm_scenarios.wrong_in(scenario, world_size) == []
