"""`SyncBatchNorm` on real ranks against BatchNorm on the whole batch.

Each test runs one scenario. Each rank compares for itself: all ranks know all batches by their seed.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, RankPool, Ranks
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.checkpoint.file import state_digest
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

CHANNELS = 3
PARTS = {"even": (4, 4, 4), "uneven": (5, 2, 1), "first empty": (0, 3, 4), "one left": (6, 0, 0)}
"""Samples per rank."""
EXACT = 1e-10
SINGLE = 2e-5


# --- what every rank computes ---------------------------------------------------------------------------------------


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batches(sizes: tuple[int, ...], tail: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the batch of every rank, alike on all; ranks differ in mean and deviation."""
    noise = [random(rank, size, CHANNELS, *tail) for rank, size in enumerate(sizes)]
    return [(values * (rank + 1) + 3 * rank).to(dtype) for rank, values in enumerate(noise)]


def slopes_of(parts: list[Tensor]) -> list[Tensor]:
    """Return what the outputs are multiplied with: not the inputs' multiples, to which BatchNorm has no gradient."""
    return [random(100 + rank, *part.shape).to(part.dtype) for rank, part in enumerate(parts)]


def randomized(layer: _BatchNorm) -> Any:
    """Give a layer weights that are not all alike."""
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = random(seed, *parameter.shape).to(parameter.dtype)
    return layer


class Whole(_BatchNorm):
    """BatchNorm for any number of dimensions: the truth."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        pass


def probe(layer: nn.Module, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and gradient of the input for a loss with any gradient."""
    leaf = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(leaf)
    (output * slopes + output**3).sum().backward()
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def summed(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total


@torch.no_grad()
def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a part of the largest number expected; 0 for empty tensors."""
    assert found.shape == expected.shape
    if found.numel() == 0:
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3))


def compare(rank: int, parts: list[Tensor], layout: torch.memory_format | None = None, **options: Any) -> float:
    """Return how far three steps on all ranks are from three steps on the whole batch, at worst."""
    dtype = parts[0].dtype
    ours = randomized(SyncBatchNorm(CHANNELS, dtype=dtype, **options))
    truth = randomized(Whole(CHANNELS, dtype=torch.float64, **options))
    slopes = slopes_of(parts)
    errors = []
    for step in range(3):
        inputs = [part * (step + 1) for part in parts]
        mine = inputs[rank] if layout is None else inputs[rank].to(memory_format=layout)
        output, gradient = probe(ours, mine, slopes[rank])
        whole_output, whole_gradient = probe(truth, torch.cat(inputs).double(), torch.cat(slopes).double())
        start = sum(len(part) for part in parts[:rank])
        own = slice(start, start + len(mine))
        errors += [distance(output, whole_output[own]), distance(gradient, whole_gradient[own])]
        if layout is not None:
            assert output.is_contiguous(memory_format=layout)
            assert gradient.is_contiguous(memory_format=layout)
    for parameter, expected in zip(ours.parameters(), truth.parameters(), strict=True):
        errors.append(distance(summed(parameter.grad), expected.grad))
    for found, expected in zip(ours.buffers(), truth.buffers(), strict=True):
        errors.append(distance(found, expected))
    return max(errors)


def at_most(found: float, limit: float) -> float:
    """Return the limit if a number is not above it, else the number: a claim that shows it."""
    return max(found, limit)  # in this order NaN stays NaN


# --- scenarios --------------------------------------------------------------------------------------------------------


def all_ranks_together_are_one_batch(rank: int) -> Claims:
    world_size = dist.get_world_size()
    tails: list[tuple[int, ...]] = [(), (5,), (4, 3), (2, 3, 2)]
    for name, sizes in PARTS.items():
        for tail in tails:
            for dtype, limit in ((torch.float64, EXACT), (torch.float32, SINGLE)):
                parts = batches(sizes[:world_size], tail, dtype)
                yield f"{dtype} {name} {tail}", at_most(compare(rank, parts), limit), limit
    parts = batches(PARTS["uneven"][:world_size], (4, 3))
    yield "channels_last", at_most(compare(rank, parts, torch.channels_last), EXACT), EXACT
    for options in (
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False},
        {"bias": False},
        {"affine": False, "track_running_stats": False},
        {"eps": 0.5, "momentum": 0.9},
    ):
        yield f"{options}", at_most(compare(rank, parts, **options), EXACT), EXACT
    parts = batches(PARTS["uneven"][:world_size], (2, 3, 2))
    yield "channels_last_3d", at_most(compare(rank, parts, torch.channels_last_3d), EXACT), EXACT


@torch.no_grad()
def a_large_mean_does_not_swallow_the_deviation(rank: int) -> Claims:
    # Channels innermost: there torch's kernel has a mean that is wrong by half a deviation and more.
    for name, tail, layout in (("2-D", (), None), ("4-D", (40, 50), torch.channels_last)):
        size = 20 if tail else 40_000
        parts = [random(number, size, CHANNELS, *tail).add(1e4).float() for number in range(dist.get_world_size())]
        mine = parts[rank] if layout is None else parts[rank].to(memory_format=layout)
        layer = SyncBatchNorm(CHANNELS, momentum=1.0)
        truth = Whole(CHANNELS, momentum=1.0, dtype=torch.float64)
        expected = truth(torch.cat(parts).double())[rank * size :][:size]
        # float32 itself has steps of 0.001 near 1e4: neither input, mean nor output can be closer.
        yield f"output {name}", at_most(float((layer(mine) - expected).abs().max()), 0.004), 0.004
        yield f"mean {name}", at_most(float((layer.running_mean - truth.running_mean).abs().max()), 0.001), 0.001
        yield f"var {name}", at_most(float((layer.running_var / truth.running_var - 1).abs().max()), 1e-5), 1e-5


def low_precision_has_statistics_in_float32(rank: int) -> Claims:
    for dtype, limit in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        parts = batches(PARTS["uneven"][: dist.get_world_size()], (4, 3), dtype)
        ours, truth = randomized(SyncBatchNorm(CHANNELS)), randomized(Whole(CHANNELS))
        slopes = slopes_of(parts)
        start = sum(len(part) for part in parts[:rank])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output, gradient = probe(ours, parts[rank], slopes[rank])
        expected = probe(truth, torch.cat(parts).float(), torch.cat(slopes).float())
        own = slice(start, start + len(output))
        dtypes = (output.dtype, gradient.dtype, ours.weight.grad.dtype)
        yield f"{dtype}, dtypes", dtypes, (dtype, dtype, torch.float32)
        error = max(distance(output, expected[0][own]), distance(gradient, expected[1][own]))
        yield f"{dtype}, error", at_most(error, limit), limit
        yield f"{dtype}, mean", at_most(distance(ours.running_mean, truth.running_mean), 1e-6), 1e-6
        yield f"{dtype}, all cast", SyncBatchNorm(CHANNELS).to(dtype)(parts[rank]).dtype, dtype


def statistics_are_those_of_all_without_gradients_too(rank: int) -> Claims:
    parts = batches(PARTS["uneven"][: dist.get_world_size()], (7, 5), torch.float32)
    layer = SyncBatchNorm(CHANNELS)
    with torch.no_grad():
        layer(parts[rank])
    whole = Whole(CHANNELS)
    whole(torch.cat(parts))
    yield "mean", at_most(distance(layer.running_mean, whole.running_mean), SINGLE), SINGLE
    yield "the same bits on every rank", len(set(everyone(state_digest(layer.state_dict())))), 1

    alone = layer.eval()
    plain = nn.BatchNorm2d(CHANNELS).eval()
    plain.load_state_dict(layer.state_dict())
    if rank == 0:  # nobody else calls
        yield "one rank may evaluate alone", alone(parts[0]), plain(parts[0])


def one_collective_in_forward_and_one_in_backward(rank: int) -> Claims:
    calls: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(function.__name__)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted(dist.all_gather))
        patch.setattr(dist, "all_reduce", counted(dist.all_reduce))
        probe(SyncBatchNorm(CHANNELS), torch.randn(2, CHANNELS), torch.ones(2, CHANNELS))
    yield "calls", calls, ["all_gather", "all_reduce"]


def too_few_values_are_an_error_on_every_rank(rank: int) -> Claims:
    layer = SyncBatchNorm(CHANNELS)
    for number, inputs in enumerate((torch.zeros(0, CHANNELS, 4), torch.zeros(int(rank == 0), CHANNELS))):
        said = f"ValueError: Expected more than 1 value per channel when training, got {number} on all"
        yield f"{number} in the world", found_in(error_of(partial(layer, inputs)), said), said
    yield "batches that count", int(layer.num_batches_tracked), 0
    yield "one on each rank", error_of(lambda: layer(torch.zeros(1, CHANNELS))), "no error"


def ranks_may_differ_in_what_needs_a_gradient(rank: int) -> Claims:
    world_size = dist.get_world_size()
    parts = batches(PARTS["even"][:world_size], ())
    layer = randomized(SyncBatchNorm(CHANNELS, dtype=torch.float64))
    leaf = parts[rank].clone().requires_grad_(rank == 0)
    layer(leaf).square().sum().backward()
    truth = randomized(Whole(CHANNELS, dtype=torch.float64))
    whole = torch.cat(parts).requires_grad_()
    truth(whole).square().sum().backward()
    yield "first layer", at_most(distance(summed(layer.weight.grad), truth.weight.grad), EXACT), EXACT
    if rank == 0:
        yield "input of rank 0", at_most(distance(leaf.grad, whole.grad[: len(leaf)]), EXACT), EXACT

    with torch.set_grad_enabled(rank == 0):
        output = layer(parts[rank])
    if rank == 0:
        missing = ", ".join(str(other) for other in range(1, world_size))
        said = f"rank 0 needs all {world_size} ranks, and rank(s) {missing} ran the forward without recording it"
        yield "a rank without backward", found_in(error_of(output.sum().backward), said), said


def a_graph_of_gradients_may_be_made_and_not_be_used(rank: int) -> Claims:
    # create_graph=True alone was an error once, and a wrapper or an optimizer may set it without need.
    parts = batches(PARTS["even"][: dist.get_world_size()], ())
    layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    leaf = parts[rank].requires_grad_()
    sources = (leaf, layer.weight, layer.bias)
    # The gradient of the sum needs no gradient itself, and yet its gradients depend on the inputs.
    outputs = [layer(leaf).sum() + layer(leaf).square().sum() for _ in range(2)]
    once = torch.autograd.grad(outputs[0], sources, create_graph=True)
    truth = torch.autograd.grad(outputs[1], sources)
    for found, expected in zip(once, truth, strict=True):
        yield "gradient", at_most(distance(found, expected), EXACT), EXACT
    for gradient in once:
        with pytest.raises(RuntimeError, match="SyncBatchNorm cannot be differentiated twice"):
            gradient.sum().backward()


def replicas_of_one_process_do_not_synchronise(rank: int) -> Claims:
    # Replicas called the other ranks in any order, and each had the statistics of whichever it met.
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), SyncBatchNorm(CHANNELS))
    inputs = torch.randn(4, CHANNELS)
    said = (
        f"ValueError: Rank {rank} of {dist.get_world_size()} replicates a module with a SyncBatchNorm in training mode."
    )
    for call in (
        lambda: ls.DataParallel(net, ["cpu", "cpu"])(inputs),
        lambda: ls.DataParallel(net, ["cpu", "cpu"])(inputs[:1]),
        lambda: ls.DataParallelCriterion(nn.Sequential(net))(list(inputs.chunk(2))),
    ):
        yield "replicated", found_in(error_of(call), said), said
    yield "one replica", error_of(lambda: ls.DataParallel(net, ["cpu"])(inputs)), "no error"
    evaluating = ls.DataParallel(net, ["cpu", "cpu"]).eval()
    yield "evaluating", error_of(lambda: evaluating(inputs)), "no error"


def checkpointing_gives_the_same_gradients(rank: int) -> Claims:
    parts = batches(PARTS["uneven"][: dist.get_world_size()], (4,))

    def gradient(reentrant: bool | None) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv1d(CHANNELS, 4, 1), SyncBatchNorm(4), nn.Tanh(), nn.Conv1d(4, 4, 1), SyncBatchNorm(4), nn.Tanh()
        ).double()
        leaf = parts[rank].clone().requires_grad_()
        output = net(leaf) if reentrant is None else checkpoint(net, leaf, use_reentrant=reentrant)
        (output**3).sum().backward()
        return torch.cat([leaf.grad.flatten(), *(parameter.grad.flatten() for parameter in net.parameters())])

    truth = gradient(None)
    for reentrant in (True, False):
        yield f"{reentrant=}", at_most(distance(gradient(reentrant), truth), EXACT), EXACT


def under_ddp_gradients_are_those_of_the_whole_batch(rank: int) -> Claims:
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6, 2))
    net = net.double()
    truth = copy.deepcopy(net)
    parts = batches(PARTS["uneven"][:world_size], (4, 5))
    num_samples = sum(len(part) for part in parts)
    model = ls.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
    # The mean over ranks of sums that are scaled by world / samples is the mean over all samples.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wrapper's, that batches are uneven
        (model(parts[rank]).square().sum() * world_size / num_samples).backward()
    (truth(torch.cat(parts)).square().sum() / num_samples).backward()
    for (name, found), expected in zip(net.named_parameters(), truth.parameters(), strict=True):
        yield name, at_most(distance(found.grad, expected.grad), EXACT), EXACT


def a_layer_keeps_to_its_group(rank: int) -> Claims:
    world_size = dist.get_world_size()
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([number]) for number in range(world_size)][rank]
    parts = [random(number, 4, CHANNELS).float() for number in range(world_size)]
    inputs = parts[rank]
    layer, plain = SyncBatchNorm(CHANNELS, process_group=alone), nn.BatchNorm1d(CHANNELS)
    slopes = torch.arange(12.0).view(4, 3)
    yield "a group of one is BatchNorm, bit for bit", probe(layer, inputs, slopes), probe(plain, inputs, slopes)
    yield "its statistics", layer.running_var, plain.running_var

    layer = SyncBatchNorm(CHANNELS, process_group=pair)
    if rank > 1:
        said = "does not belong to this group"
        yield "outside", found_in(error_of(partial(layer, inputs)), said), said
        return
    expected = Whole(CHANNELS)(torch.cat(parts[:2]))[rank * 4 :][:4]
    yield "a pair", at_most(distance(layer(inputs), expected), SINGLE), SINGLE
    yield "a copy", at_most(distance(copy.deepcopy(layer)(inputs), expected), SINGLE), SINGLE
    yield "shares the group", copy.deepcopy(nn.Sequential(layer, layer))[1].process_group is pair, True


def the_default_group_is_looked_up_in_forward(rank: int) -> Claims:
    world_size = dist.get_world_size()
    store = dist.PrefixStore("later", dist.distributed_c10d._get_default_store())
    backend = dist.get_backend()
    dist.destroy_process_group()
    early = SyncBatchNorm(CHANNELS)  # before there is a group
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    # One sample on each rank, which is normalised by the others'.
    ranks = torch.arange(float(world_size)).view(-1, 1).expand(-1, CHANNELS)
    expected = nn.BatchNorm1d(CHANNELS)(ranks)[rank : rank + 1]
    for layer in (early, pickle.loads(pickle.dumps(early))):
        yield "output", at_most(distance(layer(ranks[rank : rank + 1]), expected), SINGLE), SINGLE


def a_mistake_is_named(rank: int) -> Claims:
    layer = SyncBatchNorm(CHANNELS)
    for inputs, said in (
        (
            torch.zeros(4, 5),
            "ValueError: The input has 5 channels (size [4, 5]), and this SyncBatchNorm 3. Build the layer with",
        ),
        (torch.zeros(4), "ValueError: expected at least 2D input"),
        (torch.zeros(4, 0), "ValueError: SyncBatchNorm number of input channels should be non-zero"),
    ):
        yield "inputs", found_in(error_of(partial(layer, inputs)), said), said
    layer.process_group = "world"
    yield (
        "group",
        found_in(error_of(lambda: layer(torch.zeros(4, CHANNELS))), "TypeError: group is a str"),
        "TypeError: group is a str",
    )


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(worlds: RankPool, scenario: Scenario) -> None:
    assert wrong_in(worlds, scenario) == []


def abandoned(rank: Rank) -> list[str]:
    rank.join()
    net = SyncBatchNorm.convert_sync_batchnorm(nn.ModuleDict({"norm": nn.BatchNorm1d(CHANNELS)}))
    output = net["norm"](torch.randn(4, CHANNELS))
    if rank.number == 1:
        return []
    alone = SyncBatchNorm(CHANNELS)
    return [notes_of(output.sum().backward), notes_of(partial(alone, torch.randn(4, CHANNELS)))]


def notes_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return "".join(getattr(error, "__notes__", []))
    return "no error"


def test_who_waits_in_vain_is_told_for_which_layer(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, abandoned) as ranks:
        backward, forward = ranks.result(0)
    assert backward.startswith("This was the backward of SyncBatchNorm 'norm' on rank 0.")
    assert forward.startswith("This was the forward of a SyncBatchNorm of 3 channels on rank 0.")
