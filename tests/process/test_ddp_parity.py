"""`DistributedDataParallel` against torch's, and where torch's is silently wrong, against the truth.

Each test runs one scenario, on two ranks that see different inputs.
"""

import copy
import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.process.ranks import RankPool, call_on_ranks
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
from tests.process.wrapped import SMALL_BUCKETS_MB, fail_in_backward, gradient, linear, ones, step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls
from lockstep.checkpoint.file import state_digest
from lockstep.errors import GroupError, ReductionError

MEAN = [[1.5] * 3]
TWICE = [[3.0] * 3]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


def inputs_of(rank: int, number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * number + rank))


def train_steps(wrap: Callable[[nn.Module], nn.Module], rank: int, channels_last: bool) -> str:
    torch.manual_seed(0)
    net = ConvNet()
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(5):
        optimizer.zero_grad()
        images = inputs_of(rank, number, 4, 1, 6, 6)
        nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
        optimizer.step()
    # torch's buffers differ between ranks after the last step; rank 0's are the ones it keeps.
    return state_digest(net.state_dict()) if rank == 0 else state_digest(dict(net.named_parameters()))


def training_has_the_bits_of_torchs(rank: int) -> Claims:
    for channels_last in (False, True):
        expected = train_steps(TorchDDP, rank, channels_last)
        for options in ({}, {"bucket_cap_mb": SMALL_BUCKETS_MB}):
            wrap = partial(ls.DistributedDataParallel, **options)
            yield f"{channels_last=}, {options}", train_steps(wrap, rank, channels_last), expected


def construction_takes_parameters_and_buffers_of_rank_0(rank: int) -> Claims:
    torch.manual_seed(rank)
    net = ConvNet()
    net.features[1].running_mean.fill_(rank + 1.0)
    ls.DistributedDataParallel(net)
    yield "digests", len(set(everyone(state_digest(net.state_dict())))), 1


def partly_frozen(rank: int) -> nn.Module:
    layer = nn.Linear(2, 2 if rank else 3)
    layer.bias = nn.Parameter(torch.zeros(3))
    layer.weight.requires_grad_(False)
    return layer


def with_buffer_of(size: int) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("running_mean", torch.zeros(size))
    return layer


def models_that_differ_are_an_error_on_every_rank(rank: int) -> Claims:
    shapes = "rank 1 has weight (3x3, torch.float32, strides [3, 1]), rank 0 has weight (2x3"
    buffers = "is buffer 0: rank 1 has running_mean (3, torch.float32), rank 0 has running_mean (2"
    models = {
        shapes: nn.Linear(3, 2 + rank),
        "rank 1 has weight (2x3, torch.float64": nn.Linear(3, 2).to(torch.float64 if rank else torch.float32),
        "Rank 1 has 1 trainable parameters but rank 0 has 2": nn.Linear(3, 2, bias=rank == 0),
        "is trainable parameter 0: rank 1 has a.weight": nn.ModuleDict(
            {key: nn.Linear(2, 2) for key in ("ab" if rank else "ba")}
        ),
        "is frozen parameter 0: rank 1 has weight (2x2": partly_frozen(rank),
        buffers: with_buffer_of(2 + rank),
    }
    for said, model in models.items():
        message = error_of(partial(ls.DistributedDataParallel, model))
        yield "class", found_in(message, "ParameterMismatchError: "), "ParameterMismatchError: "
        yield "message", found_in(message, said), said


def gradients_are_means_over_the_ranks(rank: int) -> Claims:
    one = ones(rank)
    net = linear()
    model = ls.DistributedDataParallel(net)
    step(model, one)
    yield "one step", gradient(net.weight), MEAN
    assert net.weight.grad is not None
    storage = net.weight.grad.untyped_storage().data_ptr()
    step(model, one)
    yield "lives in the bucket", net.weight.grad.untyped_storage().data_ptr(), storage

    net = linear()
    model = ls.DistributedDataParallel(net)
    with model.no_sync():
        model(one).sum().backward()
        yield "in no_sync", gradient(net.weight), one.tolist()
    model(one).sum().backward()
    yield "after no_sync", gradient(net.weight), TWICE

    model = ls.DistributedDataParallel(linear())
    model.module(one).sum().backward()
    yield "through .module", gradient(model.module.weight), MEAN

    model = ls.DistributedDataParallel(linear())
    first, second = model(one), model(10 * one)
    first.sum().backward()
    second.sum().backward()
    yield "two forwards, two backwards", gradient(model.module.weight), [[16.5] * 3]

    model = ls.DistributedDataParallel(linear())
    output = model(one).sum()
    output.backward(retain_graph=True)
    output.backward()
    yield "backward twice", gradient(model.module.weight), TWICE

    model = ls.DistributedDataParallel(linear().to(torch.bfloat16))
    model(one.bfloat16()).sum().backward()
    yield "bfloat16", gradient(model.module.weight), MEAN

    mixed = nn.Sequential(linear().to(torch.float64), linear(size=1))
    mixed[0].register_forward_hook(lambda _module, _inputs, output: output.float())
    nn.init.constant_(mixed[1].weight, 2.0)
    ls.DistributedDataParallel(mixed)(one.double()).sum().backward()
    yield "mixed dtypes", gradient(mixed[0].weight), TWICE


class Branches(nn.Module):
    """Parameters that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        return self.always(inputs) + self.sometimes(inputs) if both else self.always(inputs)


def a_gradient_that_nobody_had_is_left_untouched(rank: int) -> Claims:
    one = ones(rank)
    net = Branches()
    model = ls.DistributedDataParallel(net)
    model(one, both=rank == 1).sum().backward()
    yield "used on one rank", gradient(net.sometimes.weight), [[1.0] * 3]
    yield "used on no rank", net.never.weight.grad, None
    tenth = torch.full((1, 3), 0.1)
    net.never.weight.grad = tenth.clone()
    model(one, both=False).sum().backward()
    yield "kept as it was", net.never.weight.grad, tenth
    yield "averaged before, absent now", gradient(net.sometimes.weight), [[1.0] * 3]
    with model.no_sync():
        model(one, both=True).sum().backward()
    model.zero_grad()
    model(one, both=False).sum().backward()
    yield "accumulated, cleared, absent", net.sometimes.weight.grad, None


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.table, sparse=True)


def an_exception_in_a_backward_of_all_ranks_leaves_no_trace(rank: int) -> Claims:
    one = ones(rank)
    net = nn.Sequential(linear(), linear(size=1))
    nn.init.ones_(net[1].weight)
    model = ls.DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)
    handle = net[0].weight.register_hook(fail_in_backward)
    with pytest.raises(ValueError, match="in backward"):
        model(one).sum().backward()
    handle.remove()
    step(model, one)
    yield "the next backward", gradient(net[0].weight), MEAN

    # An exception before any gradient came, then a graph that was built before it: no forward tells of the new start.
    model = ls.DistributedDataParallel(linear())
    first, second = model(one).sum(), model(one).sum()
    handle = first.register_hook(fail_in_backward)
    with pytest.raises(ValueError, match="in backward"):
        first.backward()
    handle.remove()
    second.backward()
    yield "an older graph", gradient(model.module.weight), MEAN

    lookup = ls.DistributedDataParallel(Lookup())
    with pytest.raises(ReductionError, match="sparse=False"):
        lookup(torch.tensor([rank])).sum().backward()


def buckets_travel_while_backward_goes_on(rank: int) -> Claims:
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = ls.DistributedDataParallel(net, bucket_cap_mb=0.01)
    schedule = model.reducer.schedule
    model(inputs_of(rank, 0, 2, 64)).sum().backward()  # the first one shows what a backward of this model does
    sent = []
    net[0].weight.register_hook(lambda _gradient: sent.append(schedule.num_buckets_sent))
    model(inputs_of(rank, 0, 2, 64)).sum().backward()
    yield "before the last gradient", 1 <= sent[0] < 5, True
    yield "in all", schedule.num_buckets_sent, 5


def copies_of_the_module_are_on_their_own(rank: int) -> Claims:
    """As averages of weights and checkpoints copy, pickle and wrap it again."""
    one = ones(rank)
    net = linear()
    model = ls.DistributedDataParallel(net)
    stream = io.BytesIO()
    torch.save(model.module, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model.module), torch.load(stream, weights_only=False)):
        twin(one).sum().backward()
        yield "of a copy", gradient(twin.weight), one.tolist()
    model(one).sum().backward()
    yield "of the original", gradient(net.weight), MEAN
    del model  # as by a function that returns `model.module`
    step(net, one)
    yield "without the wrapper", gradient(net.weight), MEAN
    step(ls.DistributedDataParallel(net), one)
    yield "wrapped again", gradient(net.weight), MEAN


def one_rank_may_evaluate_alone(rank: int) -> Claims:
    model = ls.DistributedDataParallel(ConvNet())
    model.eval()
    if rank == 0:  # torch hangs here: it broadcasts buffers in evaluation too
        yield "shape", model(inputs_of(0, 0, 2, 1, 6, 6)).shape, torch.Size([2, 10])
    model.train()
    model(inputs_of(rank, 0, 2, 1, 6, 6))
    yield "keys of the state", found_in(next(iter(model.state_dict())), "module."), "module."


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pair: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pair, scenario) == []


def test_three_ranks_average_over_three() -> None:
    def work(run: ls.Run) -> list[list[float]]:
        model = ls.DistributedDataParallel(linear())
        model(torch.full((1, 3), float(run.rank))).sum().backward()
        return gradient(model.module.weight)

    for found in call_on_ranks(3, work):
        assert found == [pytest.approx([1.0] * 3)]


def test_without_a_group_the_remedy_is_named() -> None:
    with pytest.raises(GroupError, match=r"ls.init_process_group\(\) first"):
        ls.DistributedDataParallel(linear())
