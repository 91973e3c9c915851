"""`DistributedDataParallel` against torch's, and where torch's is silently wrong, against the truth.

Scenarios run on two ranks that see different inputs, each when a test first looks at one of its answers.
"""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.process.ranks import RankPool, call_on_ranks, join_default_group
from tests.process.scenarios import Answers, ScenarioAnswers, answers_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.checkpoint.file import state_digest
from lockstep.errors import GroupError, ParameterMismatchError, ReductionError

SMALL_BUCKETS_MB = 0.0005


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


class Branches(nn.Module):
    """Parameters that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        return self.always(inputs) + self.sometimes(inputs) if both else self.always(inputs)


def inputs_of(rank: int, step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, generator=generator)


def linear(bias: bool = False, size: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, 1, bias=bias)


def train_steps(wrap: Callable[[nn.Module], nn.Module], rank: int, channels_last: bool) -> str:
    torch.manual_seed(0)
    net = ConvNet()
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        images = inputs_of(rank, step, 4, 1, 6, 6)
        nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
        optimizer.step()
    # torch's buffers differ between ranks after the last step; rank 0's are the ones it keeps.
    return state_digest(net.state_dict()) if rank == 0 else state_digest(dict(net.named_parameters()))


def parity(rank: int, answers: Answers) -> None:
    for name, channels_last in (("plain", False), ("channels_last", True)):
        answers[f"torch {name}"] = train_steps(TorchDDP, rank, channels_last)
        answers[f"ours {name}"] = train_steps(ls.DistributedDataParallel, rank, channels_last)

        def in_small_buckets(module: nn.Module) -> nn.Module:
            return ls.DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)

        answers[f"ours {name}, small buckets"] = train_steps(in_small_buckets, rank, channels_last)


def partly_frozen(rank: int) -> nn.Module:
    layer = nn.Linear(2, 2 if rank else 3)
    layer.bias = nn.Parameter(torch.zeros(3))
    layer.weight.requires_grad_(False)
    return layer


def with_buffer_of(size: int) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("running_mean", torch.zeros(size))
    return layer


def construction(rank: int, answers: Answers) -> None:
    torch.manual_seed(rank)
    net = ConvNet()
    net.features[1].running_mean.fill_(rank + 1.0)
    ls.DistributedDataParallel(net)
    answers["after construction"] = state_digest(net.state_dict())
    for name, model in {
        "shape": nn.Linear(3, 2 + rank),
        "dtype": nn.Linear(3, 2).to(torch.float64 if rank else torch.float32),
        "count": nn.Linear(3, 2, bias=rank == 0),
        "order": nn.ModuleDict({key: nn.Linear(2, 2) for key in ("ab" if rank else "ba")}),
        "frozen": partly_frozen(rank),
        "buffer": with_buffer_of(2 + rank),
    }.items():
        try:
            ls.DistributedDataParallel(model)
        except ParameterMismatchError as error:
            answers[f"mismatch {name}"] = str(error)


def gradients(rank: int, answers: Answers) -> None:
    one = torch.full((1, 3), float(rank + 1))

    model = ls.DistributedDataParallel(linear())
    model(one).sum().backward()
    assert model.module.weight.grad is not None
    answers["mean"] = model.module.weight.grad.tolist()
    storage = model.module.weight.grad.untyped_storage().data_ptr()
    model.zero_grad(set_to_none=True)
    model(one).sum().backward()
    answers["same memory again"] = model.module.weight.grad.untyped_storage().data_ptr() == storage

    model = ls.DistributedDataParallel(linear())
    with model.no_sync():
        model(one).sum().backward()
        answers["under no_sync"] = model.module.weight.grad.tolist()
    model(one).sum().backward()
    answers["after no_sync"] = model.module.weight.grad.tolist()

    model = ls.DistributedDataParallel(linear())
    model.module(one).sum().backward()
    answers["through .module"] = model.module.weight.grad.tolist()

    model = ls.DistributedDataParallel(linear())
    first, second = model(one), model(10 * one)
    first.sum().backward()
    second.sum().backward()
    answers["two forwards, two backwards"] = model.module.weight.grad.tolist()

    model = ls.DistributedDataParallel(linear())
    output = model(one).sum()
    output.backward(retain_graph=True)
    output.backward()
    answers["backward twice"] = model.module.weight.grad.tolist()

    model = ls.DistributedDataParallel(linear().to(torch.bfloat16))
    model(one.bfloat16()).sum().backward()
    answers["bfloat16"] = model.module.weight.grad.tolist()

    mixed = nn.Sequential(linear(size=3).to(torch.float64), linear(size=1))
    mixed[0].register_forward_hook(lambda _module, _inputs, output: output.float())
    with torch.no_grad():
        mixed[1].weight.fill_(2.0)
    model = ls.DistributedDataParallel(mixed)
    model(one.double()).sum().backward()
    answers["mixed dtypes"] = mixed[0].weight.grad.tolist()


def absence(rank: int, answers: Answers) -> None:
    one = torch.full((1, 3), float(rank + 1))
    net = Branches()
    model = ls.DistributedDataParallel(net)
    model(one, both=rank == 1).sum().backward()
    answers["used on one rank"] = net.sometimes.weight.grad.tolist()
    answers["used on no rank"] = net.never.weight.grad
    net.never.weight.grad = torch.full((1, 3), 0.1)
    model(one, both=False).sum().backward()
    answers["kept as it was"] = net.never.weight.grad.tolist()
    answers["averaged before, absent now"] = net.sometimes.weight.grad.tolist()
    with model.no_sync():
        model(one, both=True).sum().backward()
    model.zero_grad()
    model(one, both=False).sum().backward()
    answers["accumulated, cleared, absent"] = net.sometimes.weight.grad


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            again = number % 2 == 1
            inputs = checkpoint(layer, inputs, use_reentrant=self.reentrant) if again else layer(inputs)
        return inputs.square().mean()


def checkpointing(rank: int, answers: Answers) -> None:
    for reentrant in (True, False):
        model = ls.DistributedDataParallel(Checkpointed(reentrant=reentrant), bucket_cap_mb=SMALL_BUCKETS_MB)
        model(inputs_of(rank, 0, 5, 8)).backward()
        answers[f"checkpointed, reentrant={reentrant}"] = [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]
    expected = []
    for other in (0, 1):
        truth = Checkpointed(reentrant=False)
        truth(inputs_of(other, 0, 5, 8)).backward()
        expected.append([parameter.grad for parameter in truth.parameters()])
    answers["checkpointed, truth"] = [(a + b) / 2 for a, b in zip(*expected, strict=True) if a is not None]


def interruptions(rank: int, answers: Answers) -> None:
    one = torch.full((1, 3), float(rank + 1))
    net = nn.Sequential(linear(size=3), linear(size=1))
    model = ls.DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)

    def fail(_gradient: Tensor) -> None:
        raise ValueError("in backward")

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        model(one).sum().backward()
    handle.remove()
    model.zero_grad()
    with torch.no_grad():
        net[1].weight.fill_(1.0)
    model(one).sum().backward()
    answers["after an exception in backward"] = net[0].weight.grad.tolist()

    # An exception before any gradient came, then a graph that was built before it: no forward tells of the new start.
    model = ls.DistributedDataParallel(linear())
    first, second = model(one).sum(), model(one).sum()
    handle = first.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        first.backward()
    handle.remove()
    second.backward()
    answers["after an exception, an older graph"] = model.module.weight.grad.tolist()

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, rows: Tensor) -> Tensor:
            return nn.functional.embedding(rows, self.table, sparse=True)

    lookup = ls.DistributedDataParallel(Lookup())
    with pytest.raises(ReductionError, match="sparse=False"):
        lookup(torch.tensor([rank])).sum().backward()


def overlap(rank: int, answers: Answers) -> None:
    """Note how many buckets are under way when the first layer's gradient, the last to come, is computed."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = ls.DistributedDataParallel(net, bucket_cap_mb=0.01)
    schedule = model.reducer.schedule
    model(inputs_of(rank, 0, 2, 64)).sum().backward()  # the first one shows what a backward of this model does
    net[0].weight.register_hook(lambda _gradient: answers.__setitem__("sent before the end", schedule.num_buckets_sent))
    model(inputs_of(rank, 0, 2, 64)).sum().backward()
    answers["sent in all"] = schedule.num_buckets_sent


def copies(rank: int, answers: Answers) -> None:
    """Copy, pickle and wrap again the inner module, as averages of weights and checkpoints do."""
    one = torch.full((1, 3), float(rank + 1))
    net = linear()
    model = ls.DistributedDataParallel(net)
    average = copy.deepcopy(model.module)
    stream = io.BytesIO()
    torch.save(model.module, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for name, twin in {"deep copy": average, "loaded": loaded}.items():
        twin(one).sum().backward()
        answers[f"gradient of a {name}"] = twin.weight.grad.tolist()
    model(one).sum().backward()
    answers["gradient of the original"] = net.weight.grad.tolist()
    del model  # as by a function that returns `model.module`
    net.zero_grad()
    net(one).sum().backward()
    answers["wrapper gone"] = net.weight.grad.tolist()
    net.zero_grad()
    again = ls.DistributedDataParallel(net)
    again(one).sum().backward()
    answers["wrapped again"] = net.weight.grad.tolist()


def alone(rank: int, answers: Answers) -> None:
    model = ls.DistributedDataParallel(ConvNet())
    model.eval()
    if rank == 0:  # torch hangs here: it broadcasts buffers in evaluation too
        answers["evaluated alone"] = list(model(inputs_of(0, 0, 2, 1, 6, 6)).shape)
    model.train()
    model.module.features[1].running_mean.fill_(float(rank))
    model(inputs_of(rank, 0, 2, 1, 6, 6))
    answers["keys"] = next(iter(model.state_dict()))


SCENARIOS = (
    parity,
    construction,
    gradients,
    absence,
    checkpointing,
    interruptions,
    overlap,
    copies,
    alone,
)


@pytest.fixture(scope="module")
def answers() -> Iterator[list[ScenarioAnswers]]:
    with RankPool(2, join_default_group) as pool:
        yield answers_of(pool, SCENARIOS)


@pytest.mark.parametrize("layout", ["plain", "channels_last"])
@pytest.mark.parametrize("buckets", ["", ", small buckets"])
def test_training_has_the_bits_of_torchs(answers: list[ScenarioAnswers], layout: str, buckets: str) -> None:
    for found in answers:
        assert found[f"ours {layout}{buckets}"] == found[f"torch {layout}"]


def test_construction_takes_parameters_and_buffers_of_rank_0(answers: list[ScenarioAnswers]) -> None:
    assert answers[0]["after construction"] == answers[1]["after construction"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "rank 1 has weight (3x3, torch.float32, strides [3, 1]), rank 0 has weight (2x3"),
        ("dtype", "rank 1 has weight (2x3, torch.float64"),
        ("count", "Rank 1 has 1 trainable parameters but rank 0 has 2"),
        ("order", "is trainable parameter 0: rank 1 has a.weight"),
        ("frozen", "is frozen parameter 0: rank 1 has weight (2x2"),
        ("buffer", "is buffer 0: rank 1 has running_mean (3, torch.float32), rank 0 has running_mean (2"),
    ],
)
def test_models_that_differ_are_an_error_on_every_rank(answers: list[ScenarioAnswers], what: str, said: str) -> None:
    for found in answers:
        assert said in found[f"mismatch {what}"]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        # Rank r feeds r + 1, so one backward gives (1 + 2) / 2.
        ("mean", 1.5),
        ("after no_sync", 3.0),
        ("through .module", 1.5),
        ("two forwards, two backwards", 16.5),
        ("backward twice", 3.0),
        ("bfloat16", 1.5),
        ("mixed dtypes", 3.0),
        ("used on one rank", 1.0),
        ("averaged before, absent now", 1.0),
        ("after an exception in backward", 1.5),
        ("after an exception, an older graph", 1.5),
        ("gradient of the original", 1.5),
        ("wrapper gone", 1.5),
        ("wrapped again", 1.5),
    ],
)
def test_gradient_is_the_mean_over_ranks(answers: list[ScenarioAnswers], what: str, expected: float) -> None:
    for found in answers:
        assert found[what] == [[expected] * 3]


def test_no_sync_keeps_gradients_local(answers: list[ScenarioAnswers]) -> None:
    assert [found["under no_sync"] for found in answers] == [[[1.0] * 3], [[2.0] * 3]]


@pytest.mark.parametrize("what", ["gradient of a deep copy", "gradient of a loaded"])
def test_copies_are_on_their_own(answers: list[ScenarioAnswers], what: str) -> None:
    assert [found[what] for found in answers] == [[[1.0] * 3], [[2.0] * 3]]


def test_gradients_live_in_the_bucket(answers: list[ScenarioAnswers]) -> None:
    assert all(found["same memory again"] for found in answers)


def test_a_gradient_that_nobody_had_is_left_untouched(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["used on no rank"] is None
        assert found["accumulated, cleared, absent"] is None
        assert found["kept as it was"] == torch.full((1, 3), 0.1).tolist()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(answers: list[ScenarioAnswers], reentrant: bool) -> None:
    for found in answers:
        mine = found[f"checkpointed, reentrant={reentrant}"]
        truth = found["checkpointed, truth"]
        assert len(mine) == len(truth) == 8
        for gradient, expected in zip(mine, truth, strict=True):
            torch.testing.assert_close(gradient, expected)


def test_buckets_travel_while_backward_goes_on(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["sent in all"] == 5
        assert 1 <= found["sent before the end"] < 5


def test_one_rank_may_evaluate_alone(answers: list[ScenarioAnswers]) -> None:
    assert answers[0]["evaluated alone"] == [2, 10]
    assert answers[0]["keys"].startswith("module.")


def test_three_ranks_average_over_three() -> None:
    def work(run: ls.Run) -> list[list[float]]:
        model = ls.DistributedDataParallel(linear())
        model(torch.full((1, 3), float(run.rank))).sum().backward()
        gradient: list[list[float]] = model.module.weight.grad.tolist()
        return gradient

    for found in call_on_ranks(3, work):
        assert found == [pytest.approx([1.0] * 3)]


def test_without_a_group_the_remedy_is_named() -> None:
    with pytest.raises(GroupError, match=r"ls.init_process_group\(\) first"):
        ls.DistributedDataParallel(linear())
