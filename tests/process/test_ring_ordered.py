"""Ring and ordered reduction on real groups, against the sums that one process computes.

Each test runs one scenario, on ranks that stay from one to the next.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import RankPool
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls
from lockstep.comm.ordered import ordered_all_reduce, ordered_hook
from lockstep.comm.ring import ring_all_reduce, ring_hook
from lockstep.errors import GroupError
from lockstep.shards import add_in_tree_order, completed_nodes, partial_nodes, shard_range
from lockstep.shards.tree import Node

SHARDS = (2, 3, 4, 5, 8, 11)
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 1000, 100_003)
PERIOD, NUM_PERIODS = 10_007, 900
"""Of a tensor of 36 MB, long enough for several chunks of the ring and several rounds of ordered reduction."""
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
ORDERED_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int32)
SMALL_BUCKETS_MB = 0.001
FUNCTIONS: dict[str, Any] = {"ring": ring_all_reduce, "ordered": ordered_all_reduce}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def whole_numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum is exact in every dtype, in every order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (length,), generator=generator).to(dtype)


def wild_numbers(shard: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(shard)
    span = 3 if dtype in {torch.float16, torch.bfloat16} else 8
    exponents = torch.randint(-span, span, (length,), generator=generator)
    numbers = torch.randn(length, generator=generator, dtype=torch.float64) * torch.pow(10.0, exponents)
    return torch.complex(numbers, numbers.flip(0)).to(dtype) if dtype.is_complex else numbers.to(dtype)


def add(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def sum_of(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def tree_sum(values: list[Tensor]) -> Tensor:
    return add_in_tree_order({(shard, shard + 1): value for shard, value in enumerate(values)}, len(values), add)


def partials_of(values: list[Tensor], start: int, stop: int) -> dict[Node, Tensor]:
    """Add as a worker does that runs its shards in order."""
    stack: list[tuple[Node, Tensor]] = []
    for shard in range(start, stop):
        leaf, *sums = completed_nodes(shard, start, len(values))
        stack.append((leaf, values[shard]))
        for node in sums:
            (_, right), (_, left) = stack.pop(), stack.pop()
            stack.append((node, left + right))
    return dict(stack)


def ring_sums_are_those_of_one_process(rank: int) -> Claims:
    world_size = dist.get_world_size()

    def values_of(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [whole_numbers(other, length, dtype) for other in range(world_size)]

    for length in LENGTHS:
        values = values_of(length)
        tensor = values[rank].clone()
        yield f"{length} elements, in place", ring_all_reduce(tensor) is tensor, True
        yield f"{length} elements", tensor, sum_of(values)
    for dtype in DTYPES:
        values = values_of(10_001, dtype)
        yield f"{dtype}", ring_all_reduce(values[rank].clone()), sum_of(values)
    values = values_of(600)
    yield "scalar", ring_all_reduce(values[rank][0].clone()), sum_of([value[0] for value in values])
    yield "parameter", ring_all_reduce(nn.Parameter(values[rank].clone())).data, sum_of(values)
    columns = [value.view(20, 30).T for value in values]
    with_holes = torch.zeros(30, 40)
    view = with_holes[:, ::2]
    view.copy_(columns[rank])
    yield "in a view with holes", ring_all_reduce(view), sum_of(columns)
    yield "the holes", with_holes[:, 1::2], torch.zeros(30, 20)
    # The same numbers, with other strides on rank 0: elements are matched by their place, not by their memory.
    strided = columns[rank].clone(memory_format=torch.contiguous_format) if rank == 0 else columns[rank].clone()
    yield "of other strides on one rank", ring_all_reduce(strided), sum_of(columns)

    wild = [wild_numbers(other, 10_001) for other in range(world_size)]
    first, second = (ring_all_reduce(wild[rank].clone()) for _ in range(2))
    yield "again", first, second
    yield "near the truth", torch.allclose(first, sum_of(wild), rtol=1e-4), True
    yield "one result on every rank", len(set(everyone(digest(first)))), 1


def subgroups_add_among_themselves(rank: int) -> Claims:
    world_size = dist.get_world_size()
    members = list(range(1, world_size, 2)) if world_size != 3 else [0, 2]
    group: Any = dist.new_group(members)
    values = [wild_numbers(member, 1001) for member in members]
    if rank in members:
        mine = values[members.index(rank)]
        yield "ring", torch.allclose(ring_all_reduce(mine.clone(), group), sum_of(values)), True
        yield "ordered", ordered_all_reduce(mine.clone(), group), tree_sum(values)
        node = (members.index(rank), members.index(rank) + 1)
        yield "partials", ordered_all_reduce({node: mine}, group, num_shards=len(members)), tree_sum(values)
    else:
        for reduce in FUNCTIONS.values():
            said = "does not belong to this group"
            yield "not a member", found_in(error_of(partial(reduce, torch.ones(2), group)), said), said


def the_ring_leaves_a_users_messages_alone(rank: int) -> Claims:
    landing = torch.zeros(1)
    work = dist.irecv(landing, src=0) if rank == 1 else None
    total = ring_all_reduce(torch.ones(1))
    if rank == 0:
        dist.send(torch.tensor([42.0]), dst=1)
    if work is not None:
        work.wait()
    yield "the sum", total.item(), dist.get_world_size()
    yield "the message", landing.item(), 42.0 if rank == 1 else 0.0


def ordered_sums_have_the_bits_of_one_worker(rank: int) -> Claims:
    world_size = dist.get_world_size()
    for num_shards in SHARDS:
        if num_shards >= world_size:
            yield from _sums_of_partials(rank, world_size, num_shards)
    for length in LENGTHS:
        values = [wild_numbers(other, length) for other in range(world_size)]
        mine = values[rank].clone()
        leaf = {(rank, rank + 1): values[rank]}
        yield f"partials, {length}", ordered_all_reduce(leaf, num_shards=world_size), tree_sum(values)
        yield f"{length} elements, in place", ordered_all_reduce(mine) is mine, True
        yield f"{length} elements", digest(mine), digest(tree_sum(values))
    for dtype in ORDERED_DTYPES:
        values = [wild_numbers(other, 1001, dtype) for other in range(world_size)]
        yield f"{dtype}", digest(ordered_all_reduce(values[rank].clone())), digest(tree_sum(values))
    values = [wild_numbers(other, 12).view(3, 4).T for other in range(world_size)]
    yield "strided", ordered_all_reduce(values[rank].clone()), tree_sum(values)
    out = torch.zeros(4, 6)[:, ::2]
    before = values[rank].clone()
    yield "is out", ordered_all_reduce(values[rank][:, :3], out=out) is out, True
    yield "out", out, tree_sum(values)[:, :3]
    yield "the input of out", values[rank], before
    # Infinities of a complex sum, where a multiplication by 1 + 0j would make NaN of the other part.
    total = torch.view_as_real(ordered_all_reduce(torch.tensor([complex(torch.inf, -0.0)] * 7)))
    yield "infinite", total, torch.tensor([[torch.inf, -0.0]] * 7)
    yield "negative zero", bool(torch.signbit(total[:, 1]).all()), True


def _sums_of_partials(rank: int, world_size: int, num_shards: int) -> Claims:
    """Claim that one sum is the same, taken in every way."""
    length = 1001
    values = [wild_numbers(shard, length) for shard in range(num_shards)]
    expected = digest(tree_sum(values))
    # Two and three shards have one order each, (0 + 1) and 0 + (1 + 2); else these claims could not be wrong.
    yield "the order matters for these numbers", digest(sum_of(values)) != expected, num_shards > 2
    ranges = [shard_range(other, world_size, num_shards) for other in range(world_size)]
    layout = [partial_nodes(owned.start, owned.stop, num_shards) for owned in ranges]
    partials = partials_of(values, ranges[rank].start, ranges[rank].stop)
    before = {node: digest(value) for node, value in partials.items()}
    what = f"{num_shards} shards"
    yield f"{what}, agreed", digest(ordered_all_reduce(partials, num_shards=num_shards)), expected
    yield f"{what}, layout", digest(ordered_all_reduce(partials, num_shards=num_shards, layout=layout)), expected
    out = torch.full((length,), 7.0)
    returned = ordered_all_reduce(partials, num_shards=num_shards, layout=layout, out=out)
    yield f"{what}, out", digest(out) if returned is out else "another tensor", expected
    yield f"{what}, inputs", {node: digest(value) for node, value in partials.items()}, before
    into_one = {node: value.clone() for node, value in partials.items()}
    last = next(reversed(into_one.values()))
    yield f"{what}, into one", digest(ordered_all_reduce(into_one, num_shards=num_shards, out=last)), expected

    dealt_out = {(shard, shard + 1): values[shard] for shard in range(num_shards) if shard % world_size == rank}
    yield f"{what}, dealt out", digest(ordered_all_reduce(dealt_out, num_shards=num_shards)), expected
    all_on_last = partials_of(values, 0, num_shards) if rank == world_size - 1 else {}
    out = torch.empty(length)
    yield f"{what}, on one rank", digest(ordered_all_reduce(all_on_last, num_shards=num_shards, out=out)), expected
    strided = {node: value.repeat(2, 1).T[:, 0] for node, value in partials.items()}
    yield f"{what}, strided", digest(ordered_all_reduce(strided, num_shards=num_shards)), expected


def long_tensors_are_reduced_in_parts(rank: int) -> Claims:
    world_size = dist.get_world_size()
    num_shards = world_size + 1
    periods = [wild_numbers(shard, PERIOD) for shard in range(num_shards)]

    def whole(period: Tensor) -> Tensor:
        return period.repeat(NUM_PERIODS)

    owned = shard_range(rank, world_size, num_shards)
    partials = {node: whole(value) for node, value in partials_of(periods, owned.start, owned.stop).items()}
    yield "partials", ordered_all_reduce(partials, num_shards=num_shards), whole(tree_sum(periods))
    yield "ordered", ordered_all_reduce(whole(periods[rank])), whole(tree_sum(periods[:world_size]))
    numbers = [whole_numbers(other, PERIOD, torch.float32) for other in range(world_size)]
    yield "ring", ring_all_reduce(whole(numbers[rank])), whole(sum_of(numbers))


def a_mistake_is_named_on_every_rank(rank: int) -> Claims:
    world_size = dist.get_world_size()
    one = torch.ones(3)
    leaves = {(rank, rank + 1): one}
    other_layout = [[(0, world_size)], *[[]] * (world_size - 1)]
    shared = torch.ones(1).expand(3)
    mistakes: list[tuple[str, Any, dict[str, Any]]] = [
        ("ValueError: No rank holds shard", leaves, {"num_shards": world_size + 2}),
        (
            "ValueError: Shard 1 is held twice: by rank 0 in (1, 2) and by rank 1 in (1, 2)",
            leaves if rank else {**leaves, (1, 2): one},
            {},
        ),
        ("ValueError: Rank 0 holds (0, 7), which is not a subtree", leaves if rank else {(0, 7): one}, {}),
        ("ValueError: Rank 0 holds '0', which is not a subtree", leaves if rank else {"0": one}, {}),
        ("ValueError: Rank 1 has shape (4,), rank 0 has (3,)", {(rank, rank + 1): torch.ones(3 + rank)}, {}),
        (
            "ValueError: Rank 1 has dtype torch.float64, rank 0 has torch.float32",
            {(rank, rank + 1): one.to(torch.float64 if rank else torch.float32)},
            {},
        ),
        ("ValueError: Rank 1 has num_shards", leaves, {"num_shards": world_size + rank}),
        ("ValueError: The layout lists 1 ranks, and the group has", leaves, {"layout": [[(0, world_size)]]}),
        (", and the layout has [", leaves, {"layout": other_layout}),
        ("ValueError: Shard 0 is held twice", leaves, {"layout": [[(0, 1)]] * world_size}),
        ("TypeError: num_shards is missing", leaves, {"num_shards": None}),
        ("holds no partial, so shape and dtype of the result are not known. Give out.", {}, {}),
        (
            "the partial (1, 2) is [4] torch.float32 on cpu, and the result [3] torch.float32 on cpu",
            {(0, 1): one, (1, 2): torch.ones(4)},
            {},
        ),
        (
            "[3] torch.float32 on cpu, and the result [3, 1] torch.float32 on cpu",
            leaves,
            {"out": torch.ones(3, 1)},
        ),
        ("TypeError: the partial (0, 1) is a int, expected a torch.Tensor", {(0, 1): 5}, {}),
        ("ValueError: One tensor per rank makes", one, {"num_shards": world_size + 1}),
    ]
    for said, given, options in mistakes:
        call = partial(ordered_all_reduce, given, **{"num_shards": world_size, **options})
        yield "message", found_in(error_of(call), said), said
    for name, function in FUNCTIONS.items():
        for said, arguments in (
            ("TypeError: tensor is a list", ([1.0],)),
            ("ValueError: tensor has layout torch.sparse_coo", (one.to_sparse(),)),
            ("ValueError: tensor is an expanded tensor", (shared,)),
            ("TypeError: group is a str", (one, "gloo")),
        ):
            yield name, found_in(error_of(partial(function, *arguments)), said), said
        yield f"{name} after mistakes", function(one.clone()), one * world_size


def every_rank_is_told_of_what_differs(rank: int) -> Claims:
    """Bytes were added as whatever the receiver had, and all ranks ended well: the last one passes something else."""
    world_size = dist.get_world_size()
    is_odd = rank == world_size - 1
    one = torch.ones(4)
    layout = [[(other, other + 1)] for other in range(world_size)]
    calls: dict[str, Callable[[], object]] = {}
    tensors = {}
    for name, pair in {
        "dtype": (one, one.int()),
        "equal bytes": (one, one[:2].double()),
        "half precisions": (one.half(), one.bfloat16()),
        "shape": (torch.ones(2, 3), torch.ones(3, 2)),
        "complex": (one.to(torch.complex64), torch.ones(8)),
        "nothing": (one, one[:0]),
    }.items():
        tensor = tensors[name] = pair[is_odd].clone()
        leaf = {(rank, rank + 1): tensor}
        calls[f"{name} in ring"] = partial(ring_all_reduce, tensor)
        calls[f"{name} in ordered"] = partial(ordered_all_reduce, tensor)
        calls[f"{name} in partials"] = partial(ordered_all_reduce, leaf, num_shards=world_size, layout=layout)
    calls["functions"] = partial(ring_all_reduce if is_odd else ordered_all_reduce, one)
    other_layout = [[], [(0, 2)]] if world_size == 2 else [[(0, 1)], [], [(1, 3)]]
    mine = other_layout if is_odd else layout
    nodes = dict.fromkeys(mine[rank], one)
    calls["layouts"] = partial(ordered_all_reduce, nodes, num_shards=world_size, layout=mine, out=torch.empty(4))
    calls["ways to say what is held"] = (
        partial(ordered_all_reduce, {(rank, rank + 1): one}, num_shards=world_size)
        if is_odd
        else partial(ordered_all_reduce, one.clone())
    )
    messages = {name: error_of(call) for name, call in calls.items()}
    for name, message in messages.items():
        for said in ("CollectiveMismatchError", f"rank {world_size - 1} calls "):
            yield name, found_in(message, said), said
    for said in ("ring_all_reduce(float32 [4])", f"rank {world_size - 1} calls ring_all_reduce(int32 [4])"):
        yield "dtype in ring", found_in(messages["dtype in ring"], said), said
    yield "one message for all", len(set(map(str, everyone(messages)))), 1
    yield "left alone", [name for name, tensor in tensors.items() if not (tensor == 1).all()], []
    for name, function in FUNCTIONS.items():
        yield f"{name} after differences", function(one.clone()), one * world_size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


def gradients(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return all gradients of the second of two backwards: torch's wrapper rebuilds its buckets after the first."""
    for _ in range(2):
        model.zero_grad()
        model(inputs).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def hooks_average_gradients_as_torch_does(rank: int) -> Claims:
    world_size = dist.get_world_size()
    inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(other)) for other in range(world_size)]

    def wrapped(hook: Any, state: Any) -> Tensor:
        model = TorchDDP(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
        if hook is not None:
            model.register_comm_hook(state, hook)
        return gradients(model, inputs[rank])

    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
    expected = wrapped(None, None)
    close(wrapped(ring_hook, dist.group.WORLD), expected)
    ordered = wrapped(ordered_hook, None)
    close(ordered, expected)
    yield "ordered again", wrapped(ordered_hook, dist.group.WORLD), ordered
    truth = tree_sum([gradients(Net(), inputs[other]) for other in range(world_size)]) / world_size
    yield "ordered, the bits", digest(ordered), digest(truth)


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(worlds: RankPool, scenario: Scenario) -> None:
    assert wrong_in(worlds, scenario) == []


@pytest.fixture
def group_of_one() -> Iterator[None]:
    ls.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    ls.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_one_rank_adds_alone() -> None:
    values = [wild_numbers(shard, 1001) for shard in range(5)]
    leaves = {(shard, shard + 1): value for shard, value in enumerate(values)}
    assert torch.equal(ring_all_reduce(values[0].clone()), values[0])
    assert torch.equal(ordered_all_reduce(values[0].clone()), values[0])
    assert torch.equal(ordered_all_reduce(leaves, num_shards=5), tree_sum(values))
    assert torch.equal(ordered_all_reduce({(0, 5): values[0]}, num_shards=5), values[0])
    assert [digest(value) for value in values] == [digest(wild_numbers(shard, 1001)) for shard in range(5)]


@pytest.mark.usefixtures("group_of_one")
def test_one_tensor_may_be_several_partials_and_the_result() -> None:
    # Each of them was once taken for memory to add in, and so for the others' changed: the sum of three ones was 4.
    tensor = torch.ones(4)
    assert ordered_all_reduce({(shard, shard + 1): tensor for shard in range(3)}, num_shards=3, out=tensor) is tensor
    assert tensor.tolist() == [3.0] * 4


@pytest.mark.usefixtures("group_of_one")
def test_a_group_that_was_torn_down_is_told() -> None:
    group = dist.new_group([0])
    assert group is not None
    ls.destroy_process_group(group)
    with pytest.raises(GroupError, match="torn down already"):
        ring_all_reduce(torch.ones(1), group)


@pytest.mark.parametrize("reduce", [ring_all_reduce, ordered_all_reduce])
def test_without_a_group_the_remedy_is_named(reduce: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(GroupError, match=r"ls.init_process_group\(\) first"):
        reduce(torch.ones(1))
