"""`DistributedDataParallel` where torch's is silently wrong, hangs, or fails: the truth, or one error on every rank.

Each test runs one scenario, on two ranks that see different inputs: a mean over them is 1.5.
"""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tests.process.ranks import RankPool
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
from tests.process.wrapped import (
    MEANS_OF_TWO,
    SMALL_BUCKETS_MB,
    Two,
    all_warnings,
    fail_in_backward,
    gradient,
    gradients_of_two,
    linear,
    ones,
    step,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.errors import LockstepError, ParameterMismatchError, ReductionError

# -- A model that changes ----------------------------------------------------------------------------------------------


def the_plan_follows_the_model(rank: int) -> Claims:
    one = ones(rank)
    first, second = MEANS_OF_TWO

    net = Two()
    model = ls.DistributedDataParallel(net)
    step(model, one)
    net.first.requires_grad_(False)
    step(model, one)
    yield "frozen", gradients_of_two(net), (None, second)
    net.first.requires_grad_(True)
    for when in ("unfrozen", "unfrozen, next step"):
        step(model, one)
        yield when, gradients_of_two(net), (first, second)

    net = Two()
    net.first.requires_grad_(False)
    model = ls.DistributedDataParallel(net)
    net.first.requires_grad_(True)
    net.second.requires_grad_(False)
    step(model, one)
    yield "others unfrozen", gradients_of_two(net), (first, None)

    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()
    net.double()
    model(one.double()).sum().backward()
    yield "cast", (gradient(net.second.weight), net.second.weight.grad.dtype), ([[9.0] * 3], torch.float64)
    net.float()
    model(one).sum().backward()
    yield "cast back", (gradient(net.second.weight), net.second.weight.grad.dtype), ([[13.5] * 3], torch.float32)

    net = Two()
    model = ls.DistributedDataParallel(net)
    net.second = nn.Linear(3, 1, bias=False)
    nn.init.constant_(net.second.weight, 2.0)
    step(model, one)
    yield "replaced", gradients_of_two(net), ([[3.0] * 3] * 3, second)

    net = Two()
    model = ls.DistributedDataParallel(net)
    net.register_parameter("gain", nn.Parameter(torch.ones(1)))
    net.register_forward_hook(lambda module, _inputs, output: output * module.gain)
    with model.no_sync():
        model(one).sum().backward()
    model(one).sum().backward()
    yield "added", gradient(net.gain), [27.0]


def new_parameters_of_different_values_are_an_error_on_all(rank: int) -> Claims:
    net = Two()
    model = ls.DistributedDataParallel(net)
    torch.manual_seed(rank)
    net.second = nn.Linear(3, 1, bias=False)
    said = "ParameterMismatchError: Parameter second.weight was added, unfrozen or changed after wrapping"
    yield "error", found_in(error_of(lambda: model(ones(rank)).sum().backward()), said), said


# -- What synchronises -------------------------------------------------------------------------------------------------


def no_sync_around_forward_or_backward_means_no_synchronisation(rank: int) -> Claims:
    one = ones(rank)
    model = ls.DistributedDataParallel(linear())
    output = model(one)
    with model.no_sync():
        output.sum().backward()
    yield "backward alone", gradient(model.module.weight), one.tolist()

    model = ls.DistributedDataParallel(linear())
    with model.no_sync():
        output = model(one)
    output.sum().backward()
    yield "forward alone", gradient(model.module.weight), one.tolist()

    for first_is_inside in (True, False):
        model = ls.DistributedDataParallel(linear())
        outside = None if first_is_inside else model(one)
        with model.no_sync():
            inside = model(one)
        (inside + (model(one) if outside is None else outside)).sum().backward()
        yield f"one forward of two, {first_is_inside=}", gradient(model.module.weight), [[3.0] * 3]

    model = ls.DistributedDataParallel(linear(), static_graph=True)
    with model.no_sync():
        model(one).sum().backward()
    model(one).sum().backward()
    yield "static graph", gradient(model.module.weight), [[3.0] * 3]


def local_gradients_of_autograd_grad_are_warned_of_once(rank: int) -> Claims:
    model = ls.DistributedDataParallel(linear())
    with all_warnings() as warned:
        for _ in range(6):  # in fewer, they may be put back
            (slope,) = torch.autograd.grad(model(ones(rank)).sum(), list(model.parameters()))
            with torch.no_grad():
                model.module.weight -= slope
    (said,) = warned
    yield "the warning", found_in(said, "are not averaged"), "are not averaged"
    model = ls.DistributedDataParallel(linear())
    with all_warnings() as warned:
        inputs = ones(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.square().sum() / 2 + model(ones(rank)).sum()).backward()
    yield "a penalty", warned, []


def a_gradient_that_somebody_holds_keeps_its_values(rank: int) -> Claims:
    model = ls.DistributedDataParallel(linear())
    model(ones(rank)).sum().backward(create_graph=True)
    yield "create_graph", gradient(model.module.weight), [[1.5] * 3]
    for as_view in (True, False):
        layer = linear()
        model = ls.DistributedDataParallel(layer, gradient_as_bucket_view=as_view)
        step(model, ones(rank))
        held: Any = layer.weight.grad
        yield "is a view", held._is_view(), as_view
        step(model, 10 * ones(rank))
        yield "held and new", (held.tolist(), gradient(layer.weight)), ([[1.5] * 3], [[15.0] * 3])


def buckets_travel_in_the_order_in_which_gradients_arrive(rank: int) -> Claims:
    # Registered in another order than used, and called around the wrapper: the first gradient of the second backward
    # finds the plan made anew.
    net = Two()
    model = ls.DistributedDataParallel(nn.ModuleList([net.second, net.first]), bucket_cap_mb=0.00001)
    first = weakref.ref(model.reducer.buckets[0].message)
    gc.disable()  # which would free what reference counts do not, some day
    for _ in range(3):
        model.zero_grad()
        net(ones(rank)).sum().backward()
    yield "first buckets are gone", first(), None
    gc.enable()
    yield "gradients", gradients_of_two(net), MEANS_OF_TWO
    planned = [slot.name for bucket in model.reducer.buckets for slot in bucket.slots]
    yield "planned anew", planned, ["0.weight", "1.weight"]


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


def checkpointing_gives_the_same_gradients(rank: int) -> Claims:
    def gradients_of(module: nn.Module) -> list[Tensor]:
        return [each.grad for each in module.parameters() if each.grad is not None]

    batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(number)) for number in (0, 1)]
    expected = []
    for batch in batches:
        truth = Reused(reentrant=False)
        truth(batch).backward()
        expected.append(gradients_of(truth))
    for reentrant in (True, False):
        model = ls.DistributedDataParallel(Reused(reentrant=reentrant), bucket_cap_mb=SMALL_BUCKETS_MB)
        for _ in range(3):
            step(model, batches[rank])
        found = gradients_of(model)
        yield "number of gradients", len(found), 4
        for mine, *of_ranks in zip(found, *expected, strict=True):
            torch.testing.assert_close(mine, sum(of_ranks) / 2)


# -- Uneven inputs -----------------------------------------------------------------------------------------------------


def uneven_batches_are_warned_of_once_with_both_sizes(rank: int) -> Claims:
    model = ls.DistributedDataParallel(linear())
    with all_warnings() as warned:
        for _ in range(2):
            model(torch.full((4, 3), 1.0 + rank)).mean().backward()
    yield "even batches", warned, []
    with all_warnings() as warned:
        for _ in range(2):
            model(torch.full((4 + 3 * rank, 3), 1.0 + rank)).mean().backward()
        with torch.no_grad():
            model(torch.ones(1 + rank, 3))
    weighted = ls.DistributedDataParallel(linear())
    with all_warnings() as of_weighted:  # as the warning says to write
        for _ in range(3):
            ls.mean_over_ranks(weighted(torch.full((4 + 3 * rank, 3), 1.0 + rank)).sum(), 4 + 3 * rank).backward()
    yield "a mean over ranks", of_weighted, []
    (said,) = warned
    for part in ("rank 1 trained on 7 samples and rank 0 on 4", "ls.Trainer"):
        yield "uneven batches", found_in(said, part), part


def ranks_with_more_inputs_go_on_alone(rank: int) -> Claims:
    for by_initial, alone in ((True, [2.0, 3.0]), (False, [4.0, 6.0])):
        net = nn.Sequential(linear(), nn.BatchNorm1d(1, affine=False))
        net[1].eval()
        model = ls.DistributedDataParallel(net)
        found = []
        with all_warnings() as warned, model.join(by_initial):
            for number in range(1 + 2 * rank):  # rank 1 has two more
                step(model, ones(rank) * (number + 1))
                held = net[0].weight.grad
                found.append(round(held[0, 0].item(), 4))
        yield "gradients", found, [1.5, *(alone if rank == 1 else [])]
        yield "kept while the other rank went on", held is net[0].weight.grad, True
        yield "its value", round(held[0, 0].item(), 4), found[-1]
        yield "warned of", warned, []

    def train(layer: nn.Linear, num_steps: int, **options: bool) -> None:
        model = ls.DistributedDataParallel(layer)
        with model.join(**options):
            for _ in range(num_steps):
                step(model, ones(rank))
                with torch.no_grad():
                    layer.weight -= layer.weight.grad

    with pytest.raises(RuntimeError, match="exhausted"):
        train(linear(), 1 + rank, throw_on_early_termination=True)
    layer = linear()
    train(layer, 3 * rank)
    first, second = everyone(layer.weight.tolist())
    yield "final models", first, second


# -- Communication hooks -----------------------------------------------------------------------------------------------


def hooks_average(rank: int) -> Claims:
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
            step(model, ones(rank))
        yield name, [[round(value, 2) for value in row] for row in gradient(net.second.weight)], [[4.5] * 3]


class OneOfThree(nn.Module):
    """A layer for each of two ranks, and one for none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        self.rank = rank

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[self.rank](inputs)


def under_a_hook_unused_parameters_are_known(rank: int) -> Claims:
    net = OneOfThree(rank)
    model = ls.DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(ones(rank)).sum().backward()
    yield "gradients", [gradient(layer.weight) for layer in net.layers], [[[0.5] * 3], [[1.0] * 3], None]


def a_hook_sees_gradients_only(rank: int) -> Claims:
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
    yield "buckets", seen, [(0, 3, 1, False), (1, 9, 1, True)]
    yield "gradients", gradient(net.second.weight), [[3.0 * (rank + 1)] * 3]


def a_hook_that_is_none_is_refused(rank: int) -> Claims:
    def wrong_name(_state: object, buckets: Any) -> None: ...

    def no_future(_state: object, bucket: dist.GradBucket):
        assert bucket.is_last()

    def a_list(_state: object, bucket: dist.GradBucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future()

    model = ls.DistributedDataParallel(linear())
    with pytest.raises(ValueError, match="must be called `bucket`"):
        model.register_comm_hook(None, wrong_name)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for hook, said in (
        (no_future, "must return a torch.futures.Future object, but got NoneType"),
        (a_list, "holds list, expected one tensor"),
    ):
        model = ls.DistributedDataParallel(linear())
        model.register_comm_hook(None, hook)
        yield "error", found_in(error_of(partial(step, model, ones(rank))), said), said


# -- Other kinds of models ---------------------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs * self.turn) * self.gain).abs().square().sum()


def gradients_of_other_kinds_are_torchs(rank: int) -> Claims:
    found = []
    for wrap in (ls.DistributedDataParallel, TorchDDP):
        turning = Complex()
        wrapped = wrap(turning)  # kept: torch's does nothing any more when nobody holds it
        wrapped(torch.tensor([1.0 + 1.0j, 2.0j]) * (rank + 1)).backward()
        table = nn.EmbeddingBag(6, 2, sparse=True, mode="sum")
        nn.init.ones_(table.weight)
        model = wrap(nn.Sequential(table, nn.Linear(2, 1)))
        nn.init.ones_(model.module[1].weight)
        for number in range(2):
            step(model, torch.tensor([[rank, number + 2]]))
        sparse: Any = table.weight.grad
        yield "is sparse", sparse.is_sparse, True
        found.append([gradient(turning.turn), gradient(turning.gain), sparse.to_dense().tolist()])
    ours, torchs = found
    yield "complex and sparse", ours, torchs
    yield "on each rank", *everyone(ours)


def ignored_and_delayed_parameters(rank: int) -> Claims:
    first, second = MEANS_OF_TWO
    ignoring = Two()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["first.weight"])
    step(ls.DistributedDataParallel(ignoring), ones(rank))
    yield "ignored", gradients_of_two(ignoring), ([[rank + 1.0] * 3] * 3, second)

    delaying = Two()
    model = ls.DistributedDataParallel(
        delaying,
        delay_all_reduce_named_params=[("second.weight", delaying.get_parameter("second.weight"))],
        param_to_hook_all_reduce=delaying.first.weight,
    )
    twin = copy.deepcopy(model)
    for _ in range(2):
        step(model, ones(rank))
    yield "delayed", gradients_of_two(delaying), (first, second)
    step(twin, ones(rank))
    yield "of a copy", gradients_of_two(twin.module), (first, second)


def mixed_precision_leaves_parameters_and_gradients_in_theirs(rank: int) -> Claims:
    net = Two()
    seen: list[torch.dtype] = []
    net.second.register_forward_hook(lambda module, _inputs, _output: seen.append(module.weight.dtype))
    low = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model = ls.DistributedDataParallel(net, mixed_precision=low)
    for _ in range(2):
        step(model, ones(rank))
    yield "gradients", gradients_of_two(net), MEANS_OF_TWO
    yield "dtypes", (net.second.weight.grad.dtype, seen[0]), (torch.float32, torch.bfloat16)


def copies_of_the_wrapper_synchronise(rank: int) -> Claims:
    model = ls.DistributedDataParallel(Two())
    model(ones(rank)).sum().backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twice = ls.DistributedDataParallel(ls.DistributedDataParallel(Two()))
    twins = {
        "copied": copy.deepcopy(model),
        "loaded": torch.load(stream, weights_only=False),
        "wrapped twice": twice,
    }
    for name, twin in twins.items():
        step(twin, ones(rank))
        net = twin.module.module if twin is twice else twin.module
        yield name, gradients_of_two(net), MEANS_OF_TWO
    yield "is torch's", isinstance(model, nn.parallel.DistributedDataParallel), True


# -- The compiler ------------------------------------------------------------------------------------------------------


def the_module_is_compiled_and_nothing_else(rank: int) -> Claims:
    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = wrap(net)
        for number in range(3):
            model.zero_grad()
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + rank))
            model(inputs).square().mean().backward()
        return [parameter.grad.flatten().tolist() for parameter in net.parameters()]

    expected = gradients(ls.DistributedDataParallel)
    for name, wrap in (
        ("before wrapping", lambda net: ls.DistributedDataParallel(torch.compile(net, backend="eager"))),
        ("after wrapping", lambda net: torch.compile(ls.DistributedDataParallel(net), backend="eager")),
    ):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        yield name, gradients(wrap), expected
        yield f"graphs, {name}", counters["stats"]["unique_graphs"], 1


# -- Means over tokens -------------------------------------------------------------------------------------------------

NUM_TOKENS = ((1, 4), (7, 0))
"""Of each of two backwards, by rank."""


def tokens(rank: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + part)
    return torch.randn(NUM_TOKENS[rank][part], 3, dtype=torch.float64, generator=generator)


def loss_over_all(*parts: int) -> tuple[float, Tensor]:
    """Return the mean over the tokens of both ranks in one process, and its gradient."""
    plain = linear().double()
    loss = plain(torch.cat([tokens(rank, part) for rank in (0, 1) for part in parts])).square().mean()
    loss.backward()
    assert plain.weight.grad is not None
    return loss.item(), plain.weight.grad


def a_mean_over_ranks_has_the_gradient_of_that_over_all_tokens(rank: int) -> Claims:
    check = partial(torch.testing.assert_close, rtol=1e-12, atol=0)
    for wrap in (ls.DistributedDataParallel, TorchDDP):
        model = wrap(linear().double())
        mine = ls.mean_over_ranks(model(tokens(rank, 0)).square().sum(), NUM_TOKENS[rank][0])
        mine.backward()
        loss, expected = loss_over_all(0)
        check(model.module.weight.grad, expected)
        check(sum(everyone(mine.item())) / 2, loss)
        model.zero_grad()
        all_of_step = torch.tensor(sum(NUM_TOKENS[rank]))
        with model.no_sync():
            ls.mean_over_ranks(model(tokens(rank, 0)).square().sum(), all_of_step).backward()
        ls.mean_over_ranks(model(tokens(rank, 1)).square().sum(), all_of_step).backward()
        check(model.module.weight.grad, loss_over_all(0, 1)[1])
    said = "The count of all ranks is 0"
    yield "of nothing", found_in(error_of(lambda: ls.mean_over_ranks(torch.zeros(()), 0)), said), said


# -- A group that is destroyed -----------------------------------------------------------------------------------------


def without_the_group_a_module_trains_alone_and_its_wrapper_says_so(rank: int) -> Claims:
    one = ones(rank)
    net, other = Two(), Two()
    ls.DistributedDataParallel(net)
    kept = ls.DistributedDataParallel(other)
    net(one).sum().backward()
    normed = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = ls.DistributedDataParallel(normed)
    handle = normed[0].weight.register_hook(fail_in_backward)
    with pytest.raises(ValueError, match="in backward"):
        wrapped(one.repeat(2, 1)).sum().backward()
    handle.remove()
    dist.destroy_process_group()
    # Its buffers, and the rest of a backward that had failed, were sent over a group that was not there.
    yield "the module", error_of(lambda: wrapped.module(one.repeat(2, 1)).sum().backward()), "no error"
    step(net, one)
    yield "gradients", gradient(net.second.weight), (3 * one).tolist()
    yield "the wrapper", found_in(error_of(lambda: kept(one)), "was destroyed"), "was destroyed"


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pair: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pair, scenario) == []


def test_the_errors_are_of_the_tree() -> None:
    assert issubclass(ParameterMismatchError, LockstepError)
    assert issubclass(ReductionError, RuntimeError)
