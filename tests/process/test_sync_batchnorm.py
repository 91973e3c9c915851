"""`SyncBatchNorm` on real ranks against BatchNorm on the whole batch.

One launch plays every scene in every group. Each rank compares for itself: all ranks know all batches by their seed.
"""

import copy
import hashlib
import pickle
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, Ranks
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.errors import GroupError, ReductionError
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

Answers = dict[str, Any]
CHANNELS = 3
BACKENDS = [("shm", 2), ("gloo", 3), ("shm", 3)]
PARTS = {"even": (4, 4, 4), "uneven": (5, 2, 1), "first empty": (0, 3, 4), "one left": (6, 0, 0)}
"""Samples per rank."""
EXACT = 1e-10
SINGLE = 2e-5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scene is played."""

    number: int
    size: int


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


def message_of(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- scenes ---------------------------------------------------------------------------------------------------------


def parity(rank: Place, answers: Answers) -> None:
    tails: list[tuple[int, ...]] = [(), (5,), (4, 3), (2, 3, 2)]
    for name, sizes in PARTS.items():
        for tail in tails:
            parts = batches(sizes[: rank.size], tail)
            answers[f"float64 {name} {tail}"] = compare(rank.number, parts)
            single = batches(sizes[: rank.size], tail, torch.float32)
            answers[f"float32 {name} {tail}"] = compare(rank.number, single)
    parts = batches(PARTS["uneven"][: rank.size], (4, 3))
    answers["float64 channels_last"] = compare(rank.number, parts, torch.channels_last)
    for name, options in {
        "cumulative": {"momentum": None},
        "no running": {"track_running_stats": False},
        "not affine": {"affine": False},
        "no bias": {"bias": False},
        "neither": {"affine": False, "track_running_stats": False},
        "eps": {"eps": 0.5, "momentum": 0.9},
    }.items():
        answers[f"float64 {name}"] = compare(rank.number, parts, **options)
    parts = batches(PARTS["uneven"][: rank.size], (2, 3, 2))
    answers["float64 channels_last_3d"] = compare(rank.number, parts, torch.channels_last_3d)


@torch.no_grad()
def large_means(rank: Place, answers: Answers) -> None:
    # Channels innermost: there torch's kernel has a mean that is wrong by half a deviation and more.
    for name, tail, layout in (("2-D", (), None), ("4-D", (40, 50), torch.channels_last)):
        size = 20 if tail else 40_000
        parts = [random(number, size, CHANNELS, *tail).add(1e4).float() for number in range(rank.size)]
        mine = parts[rank.number] if layout is None else parts[rank.number].to(memory_format=layout)
        layer = SyncBatchNorm(CHANNELS, momentum=1.0)
        whole = torch.cat(parts).double()
        truth = Whole(CHANNELS, momentum=1.0, dtype=torch.float64)
        expected = truth(whole)[rank.number * size :][:size]
        answers[f"output {name}"] = float((layer(mine) - expected).abs().max())
        answers[f"mean {name}"] = float((layer.running_mean - truth.running_mean).abs().max())
        answers[f"var {name}"] = float((layer.running_var / truth.running_var - 1).abs().max())


def low_precision(rank: Place, answers: Answers) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        parts = batches(PARTS["uneven"][: rank.size], (4, 3), dtype)
        ours, truth = randomized(SyncBatchNorm(CHANNELS)), randomized(Whole(CHANNELS))
        slopes = slopes_of(parts)
        start = sum(len(part) for part in parts[: rank.number])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output, gradient = probe(ours, parts[rank.number], slopes[rank.number])
        expected = probe(truth, torch.cat(parts).float(), torch.cat(slopes).float())
        own = slice(start, start + len(output))
        answers[f"{dtype} dtypes"] = [output.dtype, gradient.dtype, ours.weight.grad.dtype] == [
            dtype,
            dtype,
            torch.float32,
        ]
        answers[f"{dtype} error"] = max(distance(output, expected[0][own]), distance(gradient, expected[1][own]))
        answers[f"{dtype} mean"] = distance(ours.running_mean, truth.running_mean)
        cast = SyncBatchNorm(CHANNELS).to(dtype)
        answers[f"{dtype} all cast"] = cast(parts[rank.number]).dtype == dtype


def state(rank: Place, answers: Answers) -> None:
    parts = batches(PARTS["uneven"][: rank.size], (7, 5), torch.float32)
    layer = SyncBatchNorm(CHANNELS)
    with torch.no_grad():
        layer(parts[rank.number])
    whole = Whole(CHANNELS)
    whole(torch.cat(parts))
    answers["statistics under no_grad"] = distance(layer.running_mean, whole.running_mean)
    held = b"".join(buffer.numpy().tobytes() for buffer in layer.buffers())
    answers["running digest"] = hashlib.sha256(held).hexdigest()

    alone = layer.eval()
    plain = nn.BatchNorm2d(CHANNELS).eval()
    plain.load_state_dict(layer.state_dict())
    if rank.number == 0:  # nobody else calls
        answers["eval bits"] = torch.equal(alone(parts[0]), plain(parts[0]))


def numbers_of_calls(rank: Place, answers: Answers) -> None:
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        probe(SyncBatchNorm(CHANNELS), torch.randn(2, CHANNELS), torch.ones(2, CHANNELS))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    answers["calls"] = calls


def too_few_values(rank: Place, answers: Answers) -> None:
    layer = SyncBatchNorm(CHANNELS)
    answers["all empty"] = message_of(lambda: layer(torch.zeros(0, CHANNELS, 4)))
    answers["one in the world"] = message_of(lambda: layer(torch.zeros(int(rank.number == 0), CHANNELS)))
    answers["no batch counted"] = int(layer.num_batches_tracked) == 0
    answers["one each"] = message_of(lambda: layer(torch.zeros(1, CHANNELS)))


def unequal_needs(rank: Place, answers: Answers) -> None:
    parts = batches(PARTS["even"][: rank.size], ())
    layer = randomized(SyncBatchNorm(CHANNELS, dtype=torch.float64))
    leaf = parts[rank.number].clone().requires_grad_(rank.number == 0)
    layer(leaf).square().sum().backward()
    truth = randomized(Whole(CHANNELS, dtype=torch.float64))
    whole = torch.cat(parts).requires_grad_()
    truth(whole).square().sum().backward()
    answers["first layer"] = distance(summed(layer.weight.grad), truth.weight.grad)
    if rank.number == 0:
        answers["input of rank 0"] = distance(leaf.grad, whole.grad[: len(leaf)])

    with torch.set_grad_enabled(rank.number == 0):
        output = layer(parts[rank.number])
    if rank.number == 0:
        try:
            output.sum().backward()
        except ReductionError as error:
            answers["no_grad elsewhere"] = str(error)


def differentiated_twice(rank: Place, answers: Answers) -> None:
    parts = batches(PARTS["even"][: rank.size], ())
    layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    leaf = parts[rank.number].requires_grad_()
    sources = (leaf, layer.weight, layer.bias)
    # The gradient of the sum needs no gradient itself, and yet its gradients depend on the inputs.
    outputs = [layer(leaf).sum() + layer(leaf).square().sum() for _ in range(2)]
    once = torch.autograd.grad(outputs[0], sources, create_graph=True)
    truth = torch.autograd.grad(outputs[1], sources)
    answers["graph of gradients"] = max(distance(found, expected) for found, expected in zip(once, truth, strict=True))
    for name, gradient in zip(("input", "weight", "bias"), once, strict=True):
        answers[f"twice, {name}"] = message_of(gradient.sum().backward)


def replicated(rank: Place, answers: Answers) -> None:
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), SyncBatchNorm(CHANNELS))
    inputs = torch.randn(4, CHANNELS)
    answers["replicated"] = message_of(lambda: ls.DataParallel(net, ["cpu", "cpu"])(inputs))
    answers["one part of a replicated"] = message_of(lambda: ls.DataParallel(net, ["cpu", "cpu"])(inputs[:1]))
    answers["replicated criterion"] = message_of(
        lambda: ls.DataParallelCriterion(nn.Sequential(net))(list(inputs.chunk(2)))
    )
    for name, ready in {
        "one replica": ls.DataParallel(net, ["cpu"]),
        "evaluating": ls.DataParallel(net.eval(), ["cpu", "cpu"]),
    }.items():
        answers[name] = message_of(partial(ready.train(name == "one replica"), inputs))


def checkpointed(rank: Place, answers: Answers) -> None:
    parts = batches(PARTS["uneven"][: rank.size], (4,))

    def gradient(reentrant: bool | None) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv1d(CHANNELS, 4, 1), SyncBatchNorm(4), nn.Tanh(), nn.Conv1d(4, 4, 1), SyncBatchNorm(4), nn.Tanh()
        ).double()
        leaf = parts[rank.number].clone().requires_grad_()
        output = net(leaf) if reentrant is None else checkpoint(net, leaf, use_reentrant=reentrant)
        (output**3).sum().backward()
        return torch.cat([leaf.grad.flatten(), *(parameter.grad.flatten() for parameter in net.parameters())])

    truth = gradient(None)
    for reentrant in (True, False):
        answers[f"checkpoint, reentrant={reentrant}"] = distance(gradient(reentrant), truth)


def wrapped(rank: Place, answers: Answers) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6, 2))
    net = net.double()
    truth = copy.deepcopy(net)
    parts = batches(PARTS["uneven"][: rank.size], (4, 5))
    num_samples = sum(len(part) for part in parts)
    model = ls.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
    # The mean over ranks of sums that are scaled by world / samples is the mean over all samples.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wrapper's, that batches are uneven
        (model(parts[rank.number]).square().sum() * rank.size / num_samples).backward()
    (truth(torch.cat(parts)).square().sum() / num_samples).backward()
    for (name, found), expected in zip(net.named_parameters(), truth.parameters(), strict=True):
        answers[f"ddp {name}"] = distance(found.grad, expected.grad)


def groups(rank: Place, answers: Answers) -> None:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([number]) for number in range(rank.size)][rank.number]
    parts = [random(number, 4, CHANNELS).float() for number in range(rank.size)]
    inputs = parts[rank.number]
    layer, plain = SyncBatchNorm(CHANNELS, process_group=alone), nn.BatchNorm1d(CHANNELS)
    slopes = torch.arange(12.0).view(4, 3)
    pairs = zip(probe(layer, inputs, slopes), probe(plain, inputs, slopes), strict=True)
    same_statistics = torch.equal(layer.running_var, plain.running_var)
    answers["group of one"] = same_statistics and all(torch.equal(found, expected) for found, expected in pairs)

    layer = SyncBatchNorm(CHANNELS, process_group=pair)
    if rank.number > 1:
        try:
            layer(inputs)
        except GroupError as error:
            answers["outside"] = str(error)
        return
    expected_output = Whole(CHANNELS)(torch.cat(parts[:2]))[rank.number * 4 :][:4]
    answers["pair"] = distance(layer(inputs), expected_output)
    answers["copy of a pair"] = distance(copy.deepcopy(layer)(inputs), expected_output)
    answers["shared group"] = copy.deepcopy(nn.Sequential(layer, layer))[1].process_group is pair


def mistakes(rank: Place, answers: Answers) -> None:
    layer = SyncBatchNorm(CHANNELS)
    answers["other channels"] = message_of(lambda: layer(torch.zeros(4, 5)))
    answers["one dimension"] = message_of(lambda: layer(torch.zeros(4)))
    answers["no channels"] = message_of(lambda: layer(torch.zeros(4, 0)))
    layer.process_group = "world"
    answers["no group"] = message_of(lambda: layer(torch.zeros(4, CHANNELS)))


SCENES = (
    parity,
    large_means,
    low_precision,
    state,
    numbers_of_calls,
    too_few_values,
    unequal_needs,
    differentiated_twice,
    checkpointed,
    replicated,
    wrapped,
    groups,
    mistakes,
)


def every_scene(place: Place, backend: str, store: dist.Store) -> Answers:
    early = SyncBatchNorm(CHANNELS)  # before there is a group
    dist.init_process_group(backend, store=store, rank=place.number, world_size=place.size)
    answers: Answers = {}
    inputs = torch.full((1, CHANNELS), float(place.number))
    for name, layer in {"early": early, "pickled": pickle.loads(pickle.dumps(early))}.items():
        answers[f"built {name}"] = layer(inputs).sum().item()
    for scene in SCENES:
        scene(place, answers)
    dist.barrier()
    dist.destroy_process_group()
    return answers


def every_group(rank: Rank) -> list[Answers]:
    """Return the answers of each group; none for a group that this rank is not in."""
    warnings.simplefilter("error")
    store = rank.store()
    return [
        every_scene(Place(rank.number, size), backend, dist.PrefixStore(f"{backend} {size}", store))
        for backend, size in BACKENDS
        if rank.number < size
    ]


# --- what is expected -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers_of_groups(tmp_path_factory: pytest.TempPathFactory) -> list[list[Answers]]:
    """What each rank found in each group: one launch, for what takes long is what each rank has to load."""
    with Ranks(tmp_path_factory.mktemp("ranks"), max(size for _, size in BACKENDS), every_group) as ranks:
        found = [iter(answers) for answers in ranks.results()]
    return [[next(answers) for answers in found[:size]] for _, size in BACKENDS]


@pytest.fixture(params=range(len(BACKENDS)), ids=lambda index: "-".join(map(str, BACKENDS[index])))
def answers(request: pytest.FixtureRequest, answers_of_groups: list[list[Answers]]) -> list[Answers]:
    return answers_of_groups[request.param]


def above(answers: list[Answers], prefix: str, limit: float) -> dict[str, float]:
    """Return the answers that begin with `prefix` and are not below `limit`, of any rank."""
    chosen = [(name, found) for answer in answers for name, found in answer.items() if name.startswith(prefix)]
    assert chosen
    return {name: found for name, found in chosen if not found < limit}


@pytest.mark.parametrize(("prefix", "limit"), [("float64", EXACT), ("float32", SINGLE)])
def test_all_ranks_together_are_one_batch(answers: list[Answers], prefix: str, limit: float) -> None:
    assert above(answers, prefix, limit) == {}


def test_a_large_mean_does_not_swallow_the_deviation(answers: list[Answers]) -> None:
    # float32 itself has steps of 0.001 near 1e4: neither input, mean nor output can be closer.
    assert above(answers, "output", 0.004) == {}
    assert above(answers, "mean", 0.001) == {}
    assert above(answers, "var", 1e-5) == {}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_low_precision_has_statistics_in_float32(answers: list[Answers], dtype: torch.dtype, limit: float) -> None:
    assert all(answer[f"{dtype} dtypes"] and answer[f"{dtype} all cast"] for answer in answers)
    assert above(answers, f"{dtype} error", limit) == {}
    assert above(answers, f"{dtype} mean", 1e-6) == {}


def test_statistics_are_those_of_all_without_gradients_too(answers: list[Answers]) -> None:
    assert above(answers, "statistics under no_grad", SINGLE) == {}


def test_running_statistics_have_the_same_bits_on_every_rank(answers: list[Answers]) -> None:
    assert len({answer["running digest"] for answer in answers}) == 1


def test_one_rank_may_evaluate_alone(answers: list[Answers]) -> None:
    assert answers[0]["eval bits"]


def test_one_collective_in_forward_and_one_in_backward(answers: list[Answers]) -> None:
    assert [answer["calls"] for answer in answers] == [["all_gather", "all_reduce"]] * len(answers)


@pytest.mark.parametrize(("what", "number"), [("all empty", 0), ("one in the world", 1)])
def test_too_few_values_are_an_error_on_every_rank(answers: list[Answers], what: str, number: int) -> None:
    said = f"ValueError: Expected more than 1 value per channel when training, got {number} on all"
    for answer in answers:
        assert answer[what].startswith(said)
        assert answer["no batch counted"]


def test_one_value_on_each_rank_is_enough(answers: list[Answers]) -> None:
    assert {answer["one each"] for answer in answers} == {"no error"}


def test_ranks_may_differ_in_what_needs_a_gradient(answers: list[Answers]) -> None:
    assert above(answers, "first layer", EXACT) == {}
    assert above(answers, "input of rank 0", EXACT) == {}


def test_a_rank_without_backward_is_named(answers: list[Answers]) -> None:
    missing = ", ".join(str(rank) for rank in range(1, len(answers)))
    said = f"rank 0 needs all {len(answers)} ranks, and rank(s) {missing} ran the forward without recording it"
    assert said in answers[0]["no_grad elsewhere"]


def test_a_graph_of_gradients_may_be_made_and_not_be_used(answers: list[Answers]) -> None:
    # create_graph=True alone was an error once, and a wrapper or an optimizer may set it without need.
    assert above(answers, "graph of gradients", EXACT) == {}
    for answer in answers:
        for name in ("input", "weight", "bias"):
            assert answer[f"twice, {name}"].startswith("RuntimeError: SyncBatchNorm cannot be differentiated twice.")


def test_replicas_of_one_process_do_not_synchronise(answers: list[Answers]) -> None:
    # Replicas called the other ranks in any order, and each had the statistics of whichever it met.
    for rank, answer in enumerate(answers):
        said = f"ValueError: Rank {rank} of {len(answers)} replicates a module with a SyncBatchNorm in training mode."
        assert answer["replicated"].startswith(said)
        assert answer["one part of a replicated"].startswith(said)
        assert answer["replicated criterion"].startswith(said)
        assert answer["one replica"] == answer["evaluating"] == "no error"


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(answers: list[Answers], reentrant: bool) -> None:
    assert above(answers, f"checkpoint, reentrant={reentrant}", EXACT) == {}


def test_under_ddp_gradients_are_those_of_the_whole_batch(answers: list[Answers]) -> None:
    assert above(answers, "ddp", EXACT) == {}


def test_a_group_of_one_rank_is_batchnorm_bit_for_bit(answers: list[Answers]) -> None:
    assert all(answer["group of one"] for answer in answers)


def test_a_layer_keeps_to_its_group(answers: list[Answers]) -> None:
    assert above(answers, "pair", SINGLE) == {}
    assert above(answers, "copy of a pair", SINGLE) == {}
    assert all(answer["shared group"] for answer in answers[:2])
    assert all("does not belong to this group" in answer["outside"] for answer in answers[2:])


@pytest.mark.parametrize("which", ["early", "pickled"])
def test_the_default_group_is_looked_up_in_forward(answers: list[Answers], which: str) -> None:
    # One sample on each rank, which is normalised by the others'.
    found = [answer[f"built {which}"] for answer in answers]
    ranks = torch.arange(float(len(answers))).view(-1, 1).expand(-1, CHANNELS)
    expected = nn.BatchNorm1d(CHANNELS)(ranks).sum(1)
    assert found == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "other channels",
            "ValueError: The input has 5 channels (size [4, 5]), and this SyncBatchNorm 3. Build the layer with",
        ),
        ("one dimension", "ValueError: expected at least 2D input"),
        ("no channels", "ValueError: SyncBatchNorm number of input channels should be non-zero"),
        ("no group", "TypeError: group is a str"),
    ],
)
def test_a_mistake_is_named(answers: list[Answers], what: str, said: str) -> None:
    for answer in answers:
        assert answer[what].startswith(said)
