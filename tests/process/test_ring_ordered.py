"""Ring and ordered reduction on real groups, against the sums that one process computes.

Scenarios run on ranks that stay from one to the next; each test looks at answers of every rank.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, RankPool, join_default_group
from tests.process.scenarios import Answers, ScenarioAnswers, answers_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls
from lockstep.comm.ordered import ordered_all_reduce, ordered_hook
from lockstep.comm.ring import ring_all_reduce, ring_hook
from lockstep.errors import GroupError
from lockstep.shards import add_in_tree_order, completed_nodes, partial_nodes, shard_range
from lockstep.shards.tree import Node

WORLDS = (("gloo", 2), ("gloo", 3), ("shm", 3))
"""Backend, and number of workers."""
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


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (GroupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ring_sums(rank: int, world_size: int, answers: Answers) -> None:
    def check(name: str, tensor: Tensor, values: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
        returned = ring_all_reduce(tensor, group)
        answers[f"ring {name}"] = returned is tensor and torch.equal(tensor, sum_of(values))

    def values_of(length: int, dtype: torch.dtype) -> list[Tensor]:
        return [whole_numbers(other, length, dtype) for other in range(world_size)]

    for length in LENGTHS:
        values = values_of(length, torch.float32)
        check(f"of {length} elements", values[rank].clone(), values)
    for dtype in DTYPES:
        values = values_of(10_001, dtype)
        check(f"of {dtype}", values[rank].clone(), values)
    values = values_of(600, torch.float32)
    check("scalar", values[rank][0].clone(), [value[0] for value in values])
    columns = [value.view(20, 30).T for value in values]
    with_holes = torch.zeros(30, 40)
    view = with_holes[:, ::2]
    view.copy_(columns[rank])
    check("in a view with holes", view, columns)
    answers["ring left the holes alone"] = not with_holes[:, 1::2].any()
    # The same numbers, with other strides on rank 0: elements are matched by their place, not by their memory.
    strided = columns[rank].clone(memory_format=torch.contiguous_format) if rank == 0 else columns[rank].clone()
    check("of other strides on one rank", strided, columns)
    parameter = nn.Parameter(values[rank].clone())
    check("of a parameter", parameter, values)

    wild = [wild_numbers(other, 10_001) for other in range(world_size)]
    first, second = (ring_all_reduce(wild[rank].clone()) for _ in range(2))
    answers["ring again"] = torch.equal(first, second)
    answers["ring near the truth"] = torch.allclose(first, sum_of(wild), rtol=1e-4)
    answers["ring digest"] = digest(first)


def subgroups(rank: int, world_size: int, answers: Answers) -> None:
    members = list(range(1, world_size, 2)) if world_size != 3 else [0, 2]
    group: Any = dist.new_group(members)
    values = [wild_numbers(member, 1001) for member in members]
    if rank in members:
        mine = values[members.index(rank)]
        answers["ring in a subgroup"] = torch.allclose(ring_all_reduce(mine.clone(), group), sum_of(values))
        answers["ordered in a subgroup"] = torch.equal(ordered_all_reduce(mine.clone(), group), tree_sum(values))
        node = (members.index(rank), members.index(rank) + 1)
        partials = ordered_all_reduce({node: mine}, group, num_shards=len(members))
        answers["ordered partials in a subgroup"] = torch.equal(partials, tree_sum(values))
    else:
        answers["not a member"] = [
            message_of(lambda: ring_all_reduce(torch.ones(2), group)),
            message_of(lambda: ordered_all_reduce(torch.ones(2), group)),
        ]


def users_messages(rank: int, world_size: int, answers: Answers) -> None:
    """Reduce while a message of the user's own is on its way between two ranks."""
    landing = torch.zeros(1)
    work = dist.irecv(landing, src=0) if rank == 1 else None
    total = ring_all_reduce(torch.ones(1))
    if rank == 0:
        dist.send(torch.tensor([42.0]), dst=1)
    if work is not None:
        work.wait()
    answers["ring beside a message"] = total.item() == world_size and (rank != 1 or landing.item() == 42.0)


def ordered_sums(rank: int, world_size: int, answers: Answers) -> None:
    for num_shards in SHARDS:
        if num_shards >= world_size:
            for name, found in sums_of_partials(rank, world_size, num_shards):
                answers[f"{num_shards} shards, {name}"] = found
    for length in LENGTHS:
        values = [wild_numbers(other, length) for other in range(world_size)]
        mine = values[rank].clone()
        leaf = {(rank, rank + 1): values[rank]}
        answers[f"ordered partials, {length}"] = torch.equal(
            ordered_all_reduce(leaf, num_shards=world_size), tree_sum(values)
        )
        answers[f"ordered of {length} elements"] = ordered_all_reduce(mine) is mine
        answers[f"ordered of {length} elements, bits"] = digest(mine) == digest(tree_sum(values))
    for dtype in ORDERED_DTYPES:
        values = [wild_numbers(other, 1001, dtype) for other in range(world_size)]
        answers[f"ordered of {dtype}"] = digest(ordered_all_reduce(values[rank].clone())) == digest(tree_sum(values))
    values = [wild_numbers(other, 12).view(3, 4).T for other in range(world_size)]
    answers["ordered, strided"] = torch.equal(ordered_all_reduce(values[rank].clone()), tree_sum(values))
    out = torch.zeros(4, 6)[:, ::2]
    before = digest(values[rank])
    returned = ordered_all_reduce(values[rank][:, :3], out=out)
    answers["ordered, out"] = returned is out and torch.equal(out, tree_sum(values)[:, :3])
    answers["ordered, out, input"] = digest(values[rank]) == before
    # Infinities of a complex sum, where a multiplication by 1 + 0j would make NaN of the other part.
    total = torch.view_as_real(ordered_all_reduce(torch.tensor([complex(torch.inf, -0.0)] * 7)))
    answers["ordered, infinite"] = torch.equal(total, torch.tensor([[torch.inf, -0.0]] * 7))
    answers["ordered, negative zero"] = bool(torch.signbit(total[:, 1]).all())


def long_tensors(rank: int, world_size: int, answers: Answers) -> None:
    num_shards = world_size + 1
    periods = [wild_numbers(shard, PERIOD) for shard in range(num_shards)]

    def whole(period: Tensor) -> Tensor:
        return period.repeat(NUM_PERIODS)

    owned = shard_range(rank, world_size, num_shards)
    partials = {node: whole(value) for node, value in partials_of(periods, owned.start, owned.stop).items()}
    answers["ordered partials, long"] = torch.equal(
        ordered_all_reduce(partials, num_shards=num_shards), whole(tree_sum(periods))
    )
    mine = whole(periods[rank])
    answers["ordered, long"] = torch.equal(ordered_all_reduce(mine), whole(tree_sum(periods[:world_size])))
    numbers = [whole_numbers(other, PERIOD, torch.float32) for other in range(world_size)]
    answers["ring of many chunks"] = torch.equal(ring_all_reduce(whole(numbers[rank])), whole(sum_of(numbers)))


def sums_of_partials(rank: int, world_size: int, num_shards: int) -> Iterator[tuple[str, str]]:
    """Yield digests of one sum, taken in every way; they should all be one."""
    length = 1001
    values = [wild_numbers(shard, length) for shard in range(num_shards)]
    ranges = [shard_range(other, world_size, num_shards) for other in range(world_size)]
    layout = [partial_nodes(owned.start, owned.stop, num_shards) for owned in ranges]
    partials = partials_of(values, ranges[rank].start, ranges[rank].stop)
    before = {node: digest(value) for node, value in partials.items()}
    yield "agreed", digest(ordered_all_reduce(partials, num_shards=num_shards))
    yield "layout", digest(ordered_all_reduce(partials, num_shards=num_shards, layout=layout))
    out = torch.full((length,), 7.0)
    returned = ordered_all_reduce(partials, num_shards=num_shards, layout=layout, out=out)
    yield "out", digest(out) if returned is out else "another tensor"
    if {node: digest(value) for node, value in partials.items()} != before:
        yield "inputs", "changed"
    into_one = {node: value.clone() for node, value in partials.items()}
    last = next(reversed(into_one.values()))
    yield "out is a partial", digest(ordered_all_reduce(into_one, num_shards=num_shards, out=last))

    dealt_out = {(shard, shard + 1): values[shard] for shard in range(num_shards) if shard % world_size == rank}
    yield "dealt out", digest(ordered_all_reduce(dealt_out, num_shards=num_shards))
    all_on_last = partials_of(values, 0, num_shards) if rank == world_size - 1 else {}
    out = torch.empty(length)
    yield "all on one rank", digest(ordered_all_reduce(all_on_last, num_shards=num_shards, out=out))
    strided = {node: value.repeat(2, 1).T[:, 0] for node, value in partials.items()}
    yield "strided", digest(ordered_all_reduce(strided, num_shards=num_shards))


def mistakes(rank: int, world_size: int, answers: Answers) -> None:
    one = torch.ones(3)
    leaves = {(rank, rank + 1): one}

    def partials(values: Mapping[Any, Any], **options: Any) -> str:
        return message_of(lambda: ordered_all_reduce(values, **{"num_shards": world_size, **options}))

    answers["missing"] = partials(leaves, num_shards=world_size + 2)
    answers["twice"] = partials(leaves if rank else {**leaves, (1, 2): one})
    answers["no subtree"] = partials(leaves if rank else {(0, 7): one})
    answers["no pair"] = partials(leaves if rank else {"0": one})
    answers["shape"] = partials({(rank, rank + 1): torch.ones(3 + rank)})
    answers["dtype"] = partials({(rank, rank + 1): one.to(torch.float64 if rank else torch.float32)})
    answers["num_shards"] = partials(leaves, num_shards=world_size + rank)
    answers["length of layout"] = partials(leaves, layout=[[(0, world_size)]])
    answers["other layout"] = partials(leaves, layout=[[(0, world_size)], *[[]] * (world_size - 1)])
    answers["layout"] = partials(leaves, layout=[[(0, 1)]] * world_size)
    answers["no num_shards"] = partials(leaves, num_shards=None)
    answers["nothing held"] = partials({})
    answers["mixed"] = partials({(0, 1): one, (1, 2): torch.ones(4)})
    answers["out"] = partials(leaves, out=torch.ones(3, 1))
    answers["no partial"] = partials({(0, 1): 5})
    answers["one tensor"] = message_of(lambda: ordered_all_reduce(one, num_shards=world_size + 1))
    functions: dict[str, Any] = {"ring": ring_all_reduce, "ordered": ordered_all_reduce}
    for name, function in functions.items():
        answers[f"{name} list"] = message_of(partial(function, [1.0]))
        answers[f"{name} sparse"] = message_of(partial(function, one.to_sparse()))
        answers[f"{name} expanded"] = message_of(partial(function, torch.ones(1).expand(3)))
        answers[f"{name} group"] = message_of(partial(function, one, "gloo"))
        answers[f"{name} after mistakes"] = torch.equal(function(one.clone()), one * world_size)


def differences(rank: int, world_size: int, answers: Answers) -> None:
    """Calls in which the last rank passes something else than the others."""
    is_odd = rank == world_size - 1
    one = torch.ones(4)
    layout = [[(other, other + 1)] for other in range(world_size)]
    pairs = {
        "dtype": (one, one.int()),
        "equal bytes": (one, one[:2].double()),
        "half precisions": (one.half(), one.bfloat16()),
        "shape": (torch.ones(2, 3), torch.ones(3, 2)),
        "complex": (one.to(torch.complex64), torch.ones(8)),
        "nothing": (one, one[:0]),
    }
    for name, (common, odd) in pairs.items():
        tensor = (odd if is_odd else common).clone()
        answers[f"different {name} in ring"] = message_of(partial(ring_all_reduce, tensor))
        answers[f"different {name} in ordered"] = message_of(partial(ordered_all_reduce, tensor))
        answers[f"different left alone, {name}"] = bool((tensor == 1).all())
        leaf = {(rank, rank + 1): tensor}
        reduce_leaf = partial(ordered_all_reduce, leaf, num_shards=world_size, layout=layout)
        answers[f"different {name} in partials"] = message_of(reduce_leaf)
    reduce = ring_all_reduce if is_odd else ordered_all_reduce
    answers["different functions"] = message_of(partial(reduce, one))
    other_layout = [[], [(0, 2)]] if world_size == 2 else [[(0, 1)], [], [(1, 3)]]
    mine = other_layout if is_odd else layout
    nodes = dict.fromkeys(mine[rank], one)
    reduce_nodes = partial(ordered_all_reduce, nodes, num_shards=world_size, layout=mine, out=torch.empty(4))
    answers["different layouts"] = message_of(reduce_nodes)
    reduce_leaf = partial(ordered_all_reduce, {(rank, rank + 1): one}, num_shards=world_size)
    answers["different ways to say what is held"] = message_of(
        reduce_leaf if is_odd else partial(ordered_all_reduce, one.clone())
    )
    answers["ring after differences"] = torch.equal(ring_all_reduce(one.clone()), one * world_size)
    answers["ordered after differences"] = torch.equal(ordered_all_reduce(one.clone()), one * world_size)


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


def hooks(rank: int, world_size: int, answers: Answers) -> None:
    inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(other)) for other in range(world_size)]

    def wrapped(hook: Any, state: Any) -> Tensor:
        model = TorchDDP(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
        if hook is not None:
            model.register_comm_hook(state, hook)
        return gradients(model, inputs[rank])

    expected = wrapped(None, None)
    answers["ring hook"] = torch.allclose(wrapped(ring_hook, dist.group.WORLD), expected, rtol=1e-5, atol=1e-7)
    ordered = wrapped(ordered_hook, None)
    answers["ordered hook"] = torch.allclose(ordered, expected, rtol=1e-5, atol=1e-7)
    answers["ordered hook again"] = digest(wrapped(ordered_hook, dist.group.WORLD)) == digest(ordered)
    truth = tree_sum([gradients(Net(), inputs[other]) for other in range(world_size)]) / world_size
    answers["ordered hook bits"] = digest(truth) == digest(ordered)


SCENARIOS = (ring_sums, subgroups, users_messages, ordered_sums, long_tensors, mistakes, differences, hooks)


@final
class JoinGroup:
    """Makes a default group of one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __call__(self, rank: Rank) -> ls.Run:
        run = join_default_group(rank)
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        ls.destroy_process_group()
        dist.init_process_group(self._backend, store=store, rank=run.rank, world_size=run.world_size)
        return run


def call_scenario(run: ls.Run, scenario: Callable[[int, int, Answers], None], answers: Answers) -> None:
    scenario(run.rank, run.world_size, answers)


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def answers(request: pytest.FixtureRequest) -> Iterator[list[ScenarioAnswers]]:
    backend, world_size = request.param
    with RankPool(world_size, JoinGroup(backend)) as pool:
        yield answers_of(pool, SCENARIOS, call_scenario)


def wrong(answers: list[ScenarioAnswers], prefix: str) -> list[str]:
    """Name what is not true among the answers of every rank that begin with `prefix`."""
    chosen = [item for answer in answers for item in answer.starting_with(prefix).items()]
    assert chosen
    return [name for name, found in chosen if found is False]


@pytest.mark.parametrize("prefix", ["ring of", "ring in", "ring left", "ring scalar", "ring again", "ring near"])
def test_the_ring_has_the_sum_of_one_process(answers: list[ScenarioAnswers], prefix: str) -> None:
    assert wrong(answers, prefix) == []


def test_the_ring_has_one_result_on_every_rank(answers: list[ScenarioAnswers]) -> None:
    assert len({answer["ring digest"] for answer in answers}) == 1


def test_the_ring_leaves_a_users_messages_alone(answers: list[ScenarioAnswers]) -> None:
    assert wrong(answers, "ring beside a message") == []


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[str, str]]:
    """Digests of the sum in tree order and of the sum from left to right, by number of shards."""
    found = {}
    for num_shards in SHARDS:
        values = [wild_numbers(shard, 1001) for shard in range(num_shards)]
        found[num_shards] = digest(tree_sum(values)), digest(sum_of(values))
    return found


@pytest.mark.parametrize("num_shards", SHARDS)
def test_ordered_has_the_bits_of_one_worker(
    answers: list[ScenarioAnswers], alone: dict[int, tuple[str, str]], num_shards: int
) -> None:
    if num_shards < len(answers):
        pytest.skip("more workers than shards")
    prefix = f"{num_shards} shards, "
    found = {item for answer in answers for item in answer.starting_with(prefix).items()}
    assert len(found) == 7
    assert {value for _, value in found} == {alone[num_shards][0]}


def test_the_order_matters_for_these_numbers(alone: dict[int, tuple[str, str]]) -> None:
    # Otherwise the test above could not fail. Two and three shards have one order each: (0 + 1), 0 + (1 + 2).
    assert all(in_tree != from_left for num_shards, (in_tree, from_left) in alone.items() if num_shards > 2)


@pytest.mark.parametrize("prefix", ["ordered of", "ordered in", "ordered, ", "ordered partials"])
def test_ordered_takes_any_tensor(answers: list[ScenarioAnswers], prefix: str) -> None:
    assert wrong(answers, prefix) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "ValueError: No rank holds shard"),
        ("twice", "ValueError: Shard 1 is held twice: by rank 0 in (1, 2) and by rank 1 in (1, 2)"),
        ("no subtree", "ValueError: Rank 0 holds (0, 7), which is not a subtree"),
        ("no pair", "ValueError: Rank 0 holds '0', which is not a subtree"),
        ("shape", "ValueError: Rank 1 has shape (4,), rank 0 has (3,)"),
        ("dtype", "ValueError: Rank 1 has dtype torch.float64, rank 0 has torch.float32"),
        ("num_shards", "ValueError: Rank 1 has num_shards"),
        ("length of layout", "ValueError: The layout lists 1 ranks, and the group has"),
        ("other layout", ", and the layout has ["),
        ("layout", "ValueError: Shard 0 is held twice"),
        ("no num_shards", "TypeError: num_shards is missing"),
        ("nothing held", "holds no partial, so shape and dtype of the result are not known. Give out."),
        ("mixed", "the partial (1, 2) is [4] torch.float32 on cpu, and the result [3] torch.float32 on cpu"),
        ("out", "[3] torch.float32 on cpu, and the result [3, 1] torch.float32 on cpu"),
        ("no partial", "TypeError: the partial (0, 1) is a int, expected a torch.Tensor"),
        ("one tensor", "ValueError: One tensor per rank makes"),
        ("ring list", "TypeError: tensor is a list"),
        ("ring sparse", "ValueError: tensor has layout torch.sparse_coo"),
        ("ring expanded", "ValueError: tensor is an expanded tensor"),
        ("ring group", "TypeError: group is a str"),
        ("ordered list", "TypeError: tensor is a list"),
        ("ordered sparse", "ValueError: tensor has layout torch.sparse_coo"),
        ("ordered expanded", "ValueError: tensor is an expanded tensor"),
        ("ordered group", "TypeError: group is a str"),
    ],
)
def test_a_mistake_is_named_on_every_rank(answers: list[ScenarioAnswers], what: str, said: str) -> None:
    for answer in answers:
        assert said in answer[what]


def test_every_rank_is_told_of_what_differs(answers: list[ScenarioAnswers]) -> None:
    # Bytes were added as whatever the receiver had, and all ranks ended well.
    odd = len(answers) - 1
    names = [name for name in answers[0].starting_with("different ") if not name.startswith("different left")]
    assert len(names) == 21
    for name in names:
        messages = {answer[name] for answer in answers}
        assert len(messages) == 1
        message = messages.pop()
        assert "CollectiveMismatchError" in message
        assert f"rank {odd} calls " in message
    said = answers[0]["different dtype in ring"]
    assert "ring_all_reduce(float32 [4])" in said
    assert f"rank {odd} calls ring_all_reduce(int32 [4])" in said


def test_what_differs_is_left_as_it_was(answers: list[ScenarioAnswers]) -> None:
    assert wrong(answers, "different left alone") == []


@pytest.mark.parametrize("name", ["ring", "ordered"])
def test_the_group_works_after_differences(answers: list[ScenarioAnswers], name: str) -> None:
    assert wrong(answers, f"{name} after differences") == []


@pytest.mark.parametrize("name", ["ring", "ordered"])
def test_the_group_works_after_mistakes(answers: list[ScenarioAnswers], name: str) -> None:
    assert wrong(answers, f"{name} after mistakes") == []


def test_a_rank_outside_the_group_is_told(answers: list[ScenarioAnswers]) -> None:
    outside = [message for answer in answers for message in answer.get("not a member", [])]
    assert outside
    assert all("does not belong to this group" in message for message in outside)


@pytest.mark.parametrize("what", ["ring hook", "ordered hook", "ordered hook again", "ordered hook bits"])
def test_hooks_average_gradients_as_torch_does(answers: list[ScenarioAnswers], what: str) -> None:
    assert wrong(answers, what) == []


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
