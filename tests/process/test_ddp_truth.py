"""`DistributedDataParallel` where torch's is silently wrong, hangs, or fails: the truth, or one error on every rank.

Scenarios run on two ranks that see different inputs (rank r feeds r + 1, so a mean over the ranks is 1.5), each when a
test first looks at one of its answers.
"""

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tests.process.ranks import RankPool, join_default_group
from tests.process.scenarios import Answers, ScenarioAnswers, answers_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.errors import LockstepError, ParameterMismatchError, ReductionError

SMALL_BUCKETS_MB = 0.0005


def ones(rank: int) -> Tensor:
    return torch.full((1, 3), float(rank + 1))


def linear(*, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=bias)


def step(model: nn.Module, rank: int) -> None:
    model(ones(rank)).sum().backward()


def gradient(parameter: Tensor) -> Any:
    return None if parameter.grad is None else parameter.grad.tolist()


@contextmanager
def noting_warnings(answers: Answers, name: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    answers[name] = [str(warning.message) for warning in caught]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Two(nn.Module):
    """Two layers in a row, whose weights are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


# -- A model that changes ----------------------------------------------------------------------------------------------


def changes(rank: int, answers: Answers) -> None:
    one = ones(rank)

    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()
    net.first.requires_grad_(False)
    model.zero_grad()
    model(one).sum().backward()
    answers["frozen"] = gradient(net.first.weight), gradient(net.second.weight)
    net.first.requires_grad_(True)
    model.zero_grad()
    model(one).sum().backward()
    answers["unfrozen"] = gradient(net.first.weight), gradient(net.second.weight)
    model.zero_grad()
    model(one).sum().backward()
    answers["unfrozen, next step"] = gradient(net.first.weight), gradient(net.second.weight)

    net = Two()
    net.first.requires_grad_(False)
    model = ls.DistributedDataParallel(net)
    net.first.requires_grad_(True)
    net.second.requires_grad_(False)
    model(one).sum().backward()
    answers["others unfrozen"] = gradient(net.first.weight), gradient(net.second.weight)

    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()
    net.double()
    model(one.double()).sum().backward()
    answers["cast"] = gradient(net.second.weight), str(net.second.weight.grad.dtype)
    net.float()
    model(one).sum().backward()
    answers["cast back"] = gradient(net.second.weight), str(net.second.weight.grad.dtype)

    net = Two()
    model = ls.DistributedDataParallel(net)
    net.second = nn.Linear(3, 1, bias=False)
    nn.init.constant_(net.second.weight, 2.0)
    model(one).sum().backward()
    answers["replaced"] = gradient(net.first.weight), gradient(net.second.weight)

    net = Two()
    model = ls.DistributedDataParallel(net)
    net.register_parameter("gain", nn.Parameter(torch.ones(1)))
    net.register_forward_hook(lambda module, _inputs, output: output * module.gain)
    with model.no_sync():
        model(one).sum().backward()
    model(one).sum().backward()
    answers["added"] = gradient(net.gain)


def changes_on_one_rank(rank: int, answers: Answers) -> None:
    one = ones(rank)
    net = Two()
    model = ls.DistributedDataParallel(net)
    if rank == 1:
        net.first.requires_grad_(False)
    answers["changed on one rank"] = error_of(lambda: model(one).sum().backward())

    net = Two()
    model = ls.DistributedDataParallel(net)
    torch.manual_seed(rank)
    net.second = nn.Linear(3, 1, bias=False)
    answers["replaced by different values"] = error_of(lambda: model(one).sum().backward())


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("frozen", (None, [[4.5] * 3])),
        ("unfrozen", ([[1.5] * 3] * 3, [[4.5] * 3])),
        ("unfrozen, next step", ([[1.5] * 3] * 3, [[4.5] * 3])),
        ("others unfrozen", ([[1.5] * 3] * 3, None)),
        ("cast", ([[9.0] * 3], "torch.float64")),
        ("cast back", ([[13.5] * 3], "torch.float32")),
        ("replaced", ([[3.0] * 3] * 3, [[4.5] * 3])),
        ("added", [27.0]),
    ],
)
def test_the_plan_follows_the_model(answers: list[ScenarioAnswers], what: str, expected: Any) -> None:
    for found in answers:
        assert found[what] == expected


def test_a_change_on_one_rank_is_an_error_on_all(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["changed on one rank"].startswith("ParameterMismatchError")
        assert "Rank 1 has 1 trainable parameters but rank 0 has 2" in found["changed on one rank"]


def test_new_parameters_of_different_values_are_an_error_on_all(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        said = found["replaced by different values"]
        assert "Parameter second.weight was added, unfrozen or changed after wrapping" in said


# -- A backward that fails ---------------------------------------------------------------------------------------------


def failures(rank: int, answers: Answers) -> None:
    one = ones(rank)
    net = Two()
    model = ls.DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)
    model(one).sum().backward()

    def fail(_gradient: Tensor) -> None:
        if rank == 1:
            raise ValueError("in backward")

    handle = net.first.weight.register_hook(fail)
    if rank == 1:
        with pytest.raises(ValueError, match="in backward"):
            model(one).sum().backward()
        answers["failed on one rank"] = ""
    else:
        answers["failed on one rank"] = error_of(lambda: model(one).sum().backward())
    handle.remove()
    model.zero_grad()
    model(one).sum().backward()
    answers["after that"] = gradient(net.second.weight)


def test_a_backward_that_fails_on_one_rank_is_an_error_on_all_and_they_stay_in_step(
    answers: list[ScenarioAnswers],
) -> None:
    assert "The backward of 1 of 2 ranks ended in an exception" in answers[0]["failed on one rank"]
    for found in answers:
        assert found["after that"] == [[4.5] * 3]


# -- What synchronises -------------------------------------------------------------------------------------------------


def synchronising(rank: int, answers: Answers) -> None:
    one = ones(rank)
    model = ls.DistributedDataParallel(linear())
    output = model(one)
    with model.no_sync():
        output.sum().backward()
    answers["backward alone in no_sync"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear())
    with model.no_sync():
        output = model(one)
    output.sum().backward()
    answers["forward alone in no_sync"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear())
    with model.no_sync():
        inside = model(one)
    (inside + model(one)).sum().backward()
    answers["one forward of two in no_sync"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear())
    outside = model(one)
    with model.no_sync():
        inside = model(one)
    (inside + outside).sum().backward()
    answers["the other of two in no_sync"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear(), static_graph=True)
    with model.no_sync():
        model(one).sum().backward()
    model(one).sum().backward()
    answers["static graph, no_sync first"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear())
    model(one).sum().backward(create_graph=True)
    answers["create_graph"] = gradient(model.module.weight)

    model = ls.DistributedDataParallel(linear())
    with noting_warnings(answers, "warned of autograd.grad"):
        for _ in range(6):  # in fewer, they may be put back
            (slope,) = torch.autograd.grad(model(one).sum(), list(model.parameters()))
            with torch.no_grad():
                model.module.weight -= slope
    model = ls.DistributedDataParallel(linear())
    with noting_warnings(answers, "warned of a penalty"):
        inputs = one.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.square().sum() / 2 + model(one).sum()).backward()

    for number, as_view in enumerate((True, False)):
        model = ls.DistributedDataParallel(linear(), gradient_as_bucket_view=as_view)
        model(one).sum().backward()
        held = model.module.weight.grad
        answers[f"is a view {number}"] = held._is_view()
        model.zero_grad()
        model(10 * one).sum().backward()
        answers[f"held and new {number}"] = held.tolist(), gradient(model.module.weight)


def orders(rank: int, answers: Answers) -> None:
    # Registered in another order than used, and called around the wrapper: the first gradient of the second backward
    # finds the plan made anew.
    net = Two()
    swapped = nn.ModuleList([net.second, net.first])
    model = ls.DistributedDataParallel(swapped, bucket_cap_mb=0.00001)
    first = weakref.ref(model.reducer.buckets[0].message)
    gc.disable()  # which would free what reference counts do not, some day
    for _ in range(3):
        model.zero_grad()
        net(ones(rank)).sum().backward()
    answers["first buckets are gone"] = first() is None
    gc.enable()
    answers["used in another order"] = gradient(net.second.weight)
    answers["planned anew"] = [slot.name for bucket in model.reducer.buckets for slot in bucket.slots]


@pytest.mark.parametrize("what", ["backward alone in no_sync", "forward alone in no_sync"])
def test_no_sync_around_forward_or_backward_means_no_synchronisation(answers: list[ScenarioAnswers], what: str) -> None:
    assert [found[what] for found in answers] == [[[1.0] * 3], [[2.0] * 3]]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("one forward of two in no_sync", 3.0),
        ("the other of two in no_sync", 3.0),
        ("static graph, no_sync first", 3.0),
        ("create_graph", 1.5),
    ],
)
def test_gradient_is_the_mean(answers: list[ScenarioAnswers], what: str, expected: float) -> None:
    for found in answers:
        assert found[what] == [[expected] * 3]


def test_buckets_travel_in_the_order_in_which_gradients_arrive(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["used in another order"] == [[4.5] * 3]
        assert found["planned anew"] == ["0.weight", "1.weight"]
        assert found["first buckets are gone"]


def test_local_gradients_of_autograd_grad_are_warned_of_once(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        (said,) = found["warned of autograd.grad"]
        assert "are not averaged" in said
        assert found["warned of a penalty"] == []


def test_a_gradient_that_somebody_holds_keeps_its_values(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["is a view 0"]
        assert not found["is a view 1"]
        for number in range(2):
            assert found[f"held and new {number}"] == ([[1.5] * 3], [[15.0] * 3])


# -- Checkpointing -----------------------------------------------------------------------------------------------------


class Reused(nn.Module):
    """A layer that is used outside a checkpoint and twice inside, beside one that is never used."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last, self.unused = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.reentrant).tanh()
        return self.last(self.layer(hidden)).square().mean()


def checkpoints(rank: int, answers: Answers) -> None:
    def inputs_of(number: int) -> Tensor:
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))

    expected = []
    for other in (0, 1):
        truth = Reused(reentrant=False)
        truth(inputs_of(other)).backward()
        expected.append([each.grad for each in truth.parameters() if each.grad is not None])
    answers["reused, truth"] = [(a + b) / 2 for a, b in zip(*expected, strict=True)]
    for reentrant in (True, False):
        model = ls.DistributedDataParallel(Reused(reentrant=reentrant), bucket_cap_mb=SMALL_BUCKETS_MB)
        for _ in range(3):
            model.zero_grad()
            model(inputs_of(rank)).backward()
        answers[f"reused, reentrant={reentrant}"] = [
            each.grad.clone() for each in model.parameters() if each.grad is not None
        ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_may_be_checkpointed_twice_and_used_besides(answers: list[ScenarioAnswers], reentrant: bool) -> None:
    for found in answers:
        assert len(found["reused, truth"]) == 4
        for mine, expected in zip(found[f"reused, reentrant={reentrant}"], found["reused, truth"], strict=True):
            torch.testing.assert_close(mine, expected)


# -- Uneven inputs -----------------------------------------------------------------------------------------------------


def uneven(rank: int, answers: Answers) -> None:
    model = ls.DistributedDataParallel(linear())
    with noting_warnings(answers, "warned of even batches"):
        for _ in range(2):
            model(torch.full((4, 3), 1.0 + rank)).mean().backward()
    with noting_warnings(answers, "warned of uneven batches"):
        for _ in range(2):
            model(torch.full((4 + 3 * rank, 3), 1.0 + rank)).mean().backward()
        with torch.no_grad():
            model(torch.ones(1 + rank, 3))

    for by_initial in (True, False):
        net = nn.Sequential(linear(), nn.BatchNorm1d(1, affine=False))
        net[1].eval()
        model = ls.DistributedDataParallel(net)
        sums = []
        with noting_warnings(answers, f"warned of joined {by_initial}"), model.join(by_initial):
            for step in range(1 + 2 * rank):  # rank 1 has two more
                model.zero_grad()
                model(ones(rank) * (step + 1)).sum().backward()
                sums.append(net[0].weight.grad[0, 0].item())
                held = net[0].weight.grad
        answers[f"kept after join {by_initial}"] = held is net[0].weight.grad, round(held[0, 0].item(), 4)
        answers[f"joined {by_initial}"] = [round(each, 4) for each in sums]

    def train(layer: nn.Linear, num_steps: int, **options: bool) -> None:
        model = ls.DistributedDataParallel(layer)
        with model.join(**options):
            for _ in range(num_steps):
                model.zero_grad()
                model(ones(rank)).sum().backward()
                with torch.no_grad():
                    layer.weight -= layer.weight.grad

    with pytest.raises(RuntimeError, match="exhausted"):
        train(linear(), 1 + rank, throw_on_early_termination=True)
    layer = linear()
    train(layer, 3 * rank)
    answers["final model"] = layer.weight.tolist()


def test_uneven_batches_are_warned_of_once_with_both_sizes(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        (said,) = found["warned of uneven batches"]
        assert "rank 1 trained on 7 samples and rank 0 on 4" in said
        assert "ls.Trainer" in said
    assert all(found["warned of even batches"] == [] for found in answers)


def test_ranks_with_more_inputs_go_on_alone(answers: list[ScenarioAnswers]) -> None:
    assert answers[0]["joined True"] == answers[0]["joined False"] == [1.5]
    assert answers[1]["joined True"] == [1.5, 2.0, 3.0]
    assert answers[1]["joined False"] == [1.5, 4.0, 6.0]
    for by_initial in (True, False):  # while the other rank went on
        assert answers[0][f"kept after join {by_initial}"] == (True, 1.5)
    assert answers[0]["final model"] == answers[1]["final model"]
    assert answers[0]["warned of joined True"] == []


# -- Communication hooks -----------------------------------------------------------------------------------------------


def hooks(rank: int, answers: Answers) -> None:
    group = dist.group.WORLD
    assert group is not None
    power = powerSGD_hook.PowerSGDState(process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    shipped: list[tuple[str, Any, Any]] = [
        ("allreduce", group, default_hooks.allreduce_hook),
        ("fp16", group, default_hooks.fp16_compress_hook),
        ("bf16", group, default_hooks.bf16_compress_hook),
        ("PowerSGD", power, powerSGD_hook.powerSGD_hook),
        ("ring", group, ls.ring_hook),
        ("ordered", group, ls.ordered_hook),
    ]
    for name, state, hook in shipped:
        net = Two()
        model = ls.DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)
        model.register_comm_hook(state, hook)
        for _ in range(4):
            model.zero_grad()
            model(ones(rank)).sum().backward()
        answers[f"hook {name}"] = [[round(value, 2) for value in row] for row in gradient(net.second.weight)]


def hooks_of_ones_own(rank: int, answers: Answers) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.a(inputs) if rank == 0 else self.b(inputs)

    either = Either()
    model = ls.DistributedDataParallel(either)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(ones(rank)).sum().backward()
    answers["hook, unused"] = [gradient(layer.weight) for layer in (either.a, either.b, either.c)]

    seen: list[Any] = []

    def look(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append((bucket.index(), bucket.buffer().numel(), len(bucket.parameters()), bucket.is_last()))
        shapes = [tuple(each.shape) for each in bucket.gradients()]
        assert shapes == [tuple(each.shape) for each in bucket.parameters()]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    net = Two()
    model = ls.DistributedDataParallel(net, bucket_cap_mb=0.00001)
    model.register_comm_hook(None, look)
    model(ones(rank)).sum().backward()
    answers["buckets that a hook sees"] = seen
    answers["hook without communication"] = gradient(net.second.weight)


def hooks_that_are_none(rank: int, answers: Answers) -> None:
    def wrong_name(_state: object, buckets: Any) -> None: ...

    def no_future(_state: object, bucket: dist.GradBucket):
        assert bucket.is_last()

    def a_list(_state: object, bucket: dist.GradBucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future()

    model = ls.DistributedDataParallel(linear())
    with pytest.raises(ValueError, match="bucket") as refused:
        model.register_comm_hook(None, wrong_name)
    answers["hook refused, name"] = str(refused.value)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="once") as again:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    answers["hook refused, twice"] = str(again.value)
    for name, hook in (("future", no_future), ("list", a_list)):
        model = ls.DistributedDataParallel(linear())
        model.register_comm_hook(None, hook)
        answers[f"hook refused, {name}"] = error_of(partial(step, model, rank))


@pytest.mark.parametrize("name", ["allreduce", "fp16", "bf16", "PowerSGD", "ring", "ordered"])
def test_hooks_average(answers: list[ScenarioAnswers], name: str) -> None:
    for found in answers:
        assert found[f"hook {name}"] == [[4.5] * 3]


def test_under_a_hook_unused_parameters_are_known(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["hook, unused"] == [[[0.5] * 3], [[1.0] * 3], None]


def test_a_hook_sees_gradients_only(answers: list[ScenarioAnswers]) -> None:
    for rank, found in enumerate(answers):
        assert found["buckets that a hook sees"] == [(0, 3, 1, False), (1, 9, 1, True)]
        assert found["hook without communication"] == [[3.0 * (rank + 1)] * 3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("name", "must be called `bucket`"),
        ("twice", "can only be called once"),
        ("future", "must return a torch.futures.Future object, but got NoneType"),
        ("list", "holds list, expected one tensor"),
    ],
)
def test_a_hook_that_is_none_is_refused(answers: list[ScenarioAnswers], name: str, said: str) -> None:
    for found in answers:
        assert said in found[f"hook refused, {name}"]


# -- Other kinds of models ---------------------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs * self.turn) * self.gain).abs().square().sum()


def kinds(rank: int, answers: Answers) -> None:
    one = ones(rank)
    for name, wrap in (("ours", ls.DistributedDataParallel), ("torch's", TorchDDP)):
        turning = Complex()
        wrapped = wrap(turning)  # kept: torch's does nothing any more when nobody holds it
        wrapped(torch.tensor([1.0 + 1.0j, 2.0j]) * (rank + 1)).backward()
        answers[f"complex, {name}"] = gradient(turning.turn), gradient(turning.gain)

        table = nn.EmbeddingBag(6, 2, sparse=True, mode="sum")
        nn.init.ones_(table.weight)
        model = wrap(nn.Sequential(table, nn.Linear(2, 1)))
        nn.init.ones_(model.module[1].weight)
        for step in range(2):
            model.zero_grad()
            model(torch.tensor([[rank, step + 2]])).sum().backward()
        answers[f"sparse, {name}"] = table.weight.grad.is_sparse, table.weight.grad.to_dense().tolist()

    ignoring = Two()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["first.weight"])
    ls.DistributedDataParallel(ignoring)(one).sum().backward()
    answers["ignored"] = gradient(ignoring.first.weight), gradient(ignoring.second.weight)

    delaying = Two()
    model = ls.DistributedDataParallel(
        delaying,
        delay_all_reduce_named_params=[("second.weight", delaying.get_parameter("second.weight"))],
        param_to_hook_all_reduce=delaying.first.weight,
    )
    for _ in range(2):
        model.zero_grad()
        model(one).sum().backward()
    answers["delayed"] = gradient(delaying.first.weight), gradient(delaying.second.weight)

    precise = Two()
    seen: list[torch.dtype] = []
    precise.second.register_forward_hook(lambda module, _inputs, _output: seen.append(module.weight.dtype))
    low = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model = ls.DistributedDataParallel(precise, mixed_precision=low)
    for _ in range(2):
        model.zero_grad()
        model(one).sum().backward()
    answers["mixed precision"] = gradient(precise.second.weight), str(precise.second.weight.grad.dtype), seen[0]

    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for name, twin in (("copied", copy.deepcopy(model)), ("loaded", torch.load(stream, weights_only=False))):
        twin.zero_grad()
        twin(one).sum().backward()
        answers[name] = gradient(twin.module.second.weight)
    answers["is torch's"] = isinstance(model, nn.parallel.DistributedDataParallel)
    twice = ls.DistributedDataParallel(ls.DistributedDataParallel(Two()))
    twice(one).sum().backward()
    answers["wrapped twice"] = gradient(twice.module.module.second.weight)


@pytest.mark.parametrize("what", ["complex", "sparse"])
def test_gradients_of_other_kinds_are_torchs(answers: list[ScenarioAnswers], what: str) -> None:
    for found in answers:
        assert found[f"{what}, ours"] == found[f"{what}, torch's"]
    assert answers[0][f"{what}, ours"] == answers[1][f"{what}, ours"]


def test_ignored_and_delayed_parameters(answers: list[ScenarioAnswers]) -> None:
    for rank, found in enumerate(answers):
        assert found["ignored"] == ([[rank + 1.0] * 3] * 3, [[4.5] * 3])
        assert found["delayed"] == ([[1.5] * 3] * 3, [[4.5] * 3])


def test_mixed_precision_leaves_parameters_and_gradients_in_theirs(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["mixed precision"] == ([[4.5] * 3], "torch.float32", torch.bfloat16)


@pytest.mark.parametrize("what", ["copied", "loaded", "wrapped twice"])
def test_copies_of_the_wrapper_synchronise(answers: list[ScenarioAnswers], what: str) -> None:
    for found in answers:
        assert found[what] == [[4.5] * 3]
        assert found["is torch's"]


# -- The compiler ------------------------------------------------------------------------------------------------------


def compiled(rank: int, answers: Answers) -> None:
    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = wrap(net)
        for step in range(3):
            model.zero_grad()
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().mean().backward()
        return [parameter.grad.flatten().tolist() for parameter in net.parameters()]

    answers["not compiled"] = gradients(ls.DistributedDataParallel)
    for name, wrap in (
        ("before wrapping", lambda net: ls.DistributedDataParallel(torch.compile(net, backend="eager"))),
        ("after wrapping", lambda net: torch.compile(ls.DistributedDataParallel(net), backend="eager")),
    ):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        answers[f"compiled {name}"] = gradients(wrap), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_the_module_is_compiled_and_nothing_else(answers: list[ScenarioAnswers], when: str) -> None:
    for found in answers:
        values, num_graphs = found[f"compiled {when}"]
        assert values == found["not compiled"]
        assert num_graphs == 1


# -- A group that is destroyed -----------------------------------------------------------------------------------------


# -- Means over tokens -------------------------------------------------------------------------------------------------

NUM_TOKENS = ((1, 4), (7, 0))
"""Of each of two backwards, by rank."""


def tokens(rank: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + part)
    return torch.randn(NUM_TOKENS[rank][part], 3, dtype=torch.float64, generator=generator)


def means(rank: int, answers: Answers) -> None:
    for name, wrap in {"ours": ls.DistributedDataParallel, "torch's": TorchDDP}.items():
        model = wrap(linear().double())
        loss = ls.mean_over_ranks(model(tokens(rank, 0)).square().sum(), NUM_TOKENS[rank][0])
        loss.backward()
        answers[f"mean, {name}"] = model.module.weight.grad.tolist()
        answers["mean loss"] = loss.item()
        model.zero_grad()
        all_of_step = torch.tensor(sum(NUM_TOKENS[rank]))
        with model.no_sync():
            ls.mean_over_ranks(model(tokens(rank, 0)).square().sum(), all_of_step).backward()
        ls.mean_over_ranks(model(tokens(rank, 1)).square().sum(), all_of_step).backward()
        answers[f"accumulated mean, {name}"] = model.module.weight.grad.tolist()
    answers["mean of nothing"] = error_of(lambda: ls.mean_over_ranks(torch.zeros(()), 0))


@pytest.mark.parametrize("name", ["ours", "torch's"])
def test_a_mean_over_ranks_has_the_gradient_of_that_over_all_tokens(name: str, answers: list[ScenarioAnswers]) -> None:
    for parts, key in (((0,), "mean"), ((0, 1), "accumulated mean")):
        plain = linear().double()
        loss = plain(torch.cat([tokens(rank, part) for rank in (0, 1) for part in parts])).square().mean()
        loss.backward()
        for found in answers:
            torch.testing.assert_close(
                torch.tensor(found[f"{key}, {name}"], dtype=torch.float64), plain.weight.grad, rtol=1e-12, atol=0
            )
        if parts == (0,):
            assert sum(found["mean loss"] for found in answers) / 2 == pytest.approx(loss.item(), rel=1e-12)


def test_of_nothing_there_is_no_mean(answers: list[ScenarioAnswers]) -> None:
    assert all("The count of all ranks is 0" in found["mean of nothing"] for found in answers)


def _fail(_gradient: Tensor) -> None:
    raise ValueError("in backward")


def destroyed(rank: int, answers: Answers) -> None:
    one = ones(rank)
    net, other = Two(), Two()
    ls.DistributedDataParallel(net)
    kept = ls.DistributedDataParallel(other)
    net(one).sum().backward()
    normed = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = ls.DistributedDataParallel(normed)
    handle = normed[0].weight.register_hook(_fail)
    with pytest.raises(ValueError, match="in backward"):
        wrapped(one.repeat(2, 1)).sum().backward()
    handle.remove()
    dist.destroy_process_group()
    answers["module after the group"] = error_of(lambda: wrapped.module(one.repeat(2, 1)).sum().backward())
    net.zero_grad()
    net(one).sum().backward()
    answers["after the group"] = gradient(net.second.weight)
    answers["wrapper after the group"] = error_of(lambda: kept(one))
    assert kept is not None


def test_without_the_group_a_module_trains_alone_and_its_wrapper_says_so(answers: list[ScenarioAnswers]) -> None:
    assert [found["after the group"] for found in answers] == [[[3.0] * 3], [[6.0] * 3]]
    for found in answers:
        assert "was destroyed" in found["wrapper after the group"]
        # Its buffers, and the rest of a backward that had failed, were sent over a group that was not there.
        assert found["module after the group"] == "no error"


SCENARIOS = (
    changes,
    changes_on_one_rank,
    failures,
    synchronising,
    orders,
    checkpoints,
    uneven,
    hooks,
    hooks_of_ones_own,
    hooks_that_are_none,
    kinds,
    compiled,
    means,
    destroyed,
)


@pytest.fixture(scope="module")
def answers() -> Iterator[list[ScenarioAnswers]]:
    with RankPool(2, join_default_group) as pool:
        yield answers_of(pool, SCENARIOS)


def test_the_errors_are_of_the_tree() -> None:
    assert issubclass(ParameterMismatchError, LockstepError)
    assert issubclass(ReductionError, RuntimeError)
