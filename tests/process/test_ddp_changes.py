"""`DistributedDataParallel` with what scripts do between steps: wrap again, freeze, hold gradients, fail, compile.

Each test runs one scenario, on two ranks that see different inputs: a mean over them is 1.5.
"""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tests.process.ranks import RankPool
from tests.process.scenarios import Claims, Scenario, error_of, found_in, name_of, scenarios_in, wrong_in
from tests.process.wrapped import (
    MEANS_OF_TWO,
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep as ls
from lockstep.comm import current_world
from lockstep.reduce import BucketLimits, CommHook, GradBucket, HookReduction, TrainedModel, plan_buckets
from lockstep.reduce.buckets import allocate_buckets
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.status import StatusTrailer

# -- One parameter, several wrappers -----------------------------------------------------------------------------------

WIDTH = 130
"""Layers of so many columns have gradients that are scaled on the way into their bucket; small ones are not."""
ONE_LAYER_MB = 0.05


class Sum(nn.Module):
    """Layers whose outputs are added up, so that the gradient of each is that of the others."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([layer(inputs).sum() for layer in self.layers]).sum()


def wide() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def a_parameter_that_several_wrappers_reduce_gets_the_mean_once(rank: int) -> Claims:
    inputs = torch.full((1, WIDTH), float(rank + 1))

    def train(*models: nn.Module) -> set[float]:
        seen: set[float] = set()
        for _ in range(4):
            for model in models:
                model.zero_grad()
            torch.stack([model(inputs) for model in models]).sum().backward()
            for model in models:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    seen |= set(parameter.grad.unique().tolist())
        return seen

    model = ls.DistributedDataParallel(Sum([wide() for _ in range(4)]), bucket_cap_mb=ONE_LAYER_MB)
    train(model)
    model = ls.DistributedDataParallel(model.module, bucket_cap_mb=ONE_LAYER_MB)
    yield "wrapped again", train(model), {1.5}
    inner = ls.DistributedDataParallel(Sum([wide() for _ in range(4)]), bucket_cap_mb=ONE_LAYER_MB)
    outer = ls.DistributedDataParallel(inner, bucket_cap_mb=ONE_LAYER_MB)
    yield "wrapped twice", train(outer), {1.5}
    outer.reducer.close()
    train(inner)
    place = inner.reducer.buckets[0].slots[0]
    yield "no longer than there are two", place.parameter.grad is place.place, True

    encoder = wide()
    models = [ls.DistributedDataParallel(Sum([wide(), encoder, wide()]), bucket_cap_mb=ONE_LAYER_MB) for _ in range(2)]
    yield "a layer of two models has two gradients", train(*models), {1.5, 3.0}


# -- Frozen for a while ------------------------------------------------------------------------------------------------


def gradients_are_reduced_after_a_while_in_which_the_model_was_frozen(rank: int) -> Claims:
    one = ones(rank)
    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()

    def attack() -> None:
        inputs = one.clone().requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)

    def generate() -> None:
        model(one.clone().requires_grad_()).sum().backward()

    layouts = []
    for name, parameters, use in (
        ("generator", list(net.parameters()), generate),
        ("attack", list(net.parameters()), attack),
        ("attack on a half", [net.first.weight], attack),
        ("generator again", list(net.parameters()), generate),
    ):
        for parameter in parameters:
            parameter.requires_grad_(False)
        use()
        for parameter in parameters:
            parameter.requires_grad_(True)
        step(model, one)
        yield f"after the {name}", gradients_of_two(net), MEANS_OF_TWO
        layouts.append(model.reducer.buckets)
    yield "planned once", all(layout is layouts[0] for layout in layouts), True

    # What is seen in a backward that fails is looked at anew in the next one, too.
    net.first.requires_grad_(False)
    handle = net.second.weight.register_hook(fail_in_backward)
    with pytest.raises(ValueError, match="in backward"):
        model(one).sum().backward()
    handle.remove()
    net.first.requires_grad_(True)
    step(model, one)
    yield "after the failure", gradients_of_two(net), MEANS_OF_TWO

    net.double()
    attack_inputs = one.double().requires_grad_()
    torch.autograd.grad(model(attack_inputs).sum(), attack_inputs)
    net.float()
    step(model, one)
    yield "after the cast", gradients_of_two(net), MEANS_OF_TWO

    net.first.requires_grad_(False)
    model(one).sum().backward()
    yield "kept while frozen", gradient(net.first.weight), MEANS_OF_TWO[0]


# -- Changed on one rank -----------------------------------------------------------------------------------------------


def a_change_on_one_rank_is_an_error_on_all_that_speaks_of_the_change(rank: int) -> Claims:
    def error_of_changed(change: Callable[[Two], object]) -> str:
        net = Two()
        model = ls.DistributedDataParallel(net)
        model(ones(rank)).sum().backward()
        if rank == 1:
            change(net)
        return error_of(model(ones(rank)).sum().backward)

    found = error_of_changed(lambda net: setattr(net, "second", nn.Linear(3, 1, bias=False)))
    for said in ("ParameterMismatchError", "second.weight was replaced, unfrozen or changed after wrapping on rank 1"):
        yield "replaced", found_in(found, said), said
    found = error_of_changed(lambda net: net.first.requires_grad_(False))
    for said in ("ParameterMismatchError", "Rank 1 has 1 trainable", "make the same change on every rank"):
        yield "frozen", found_in(found, said), said
    yield "the remedy", "before wrapping it" in found, False


# -- Buffers after a step ----------------------------------------------------------------------------------------------


def _do_nothing(_gradient: Tensor) -> None:
    """Stand for a hook that fails, on a rank where none does."""


def after_a_step_all_ranks_have_the_statistics_of_one(rank: int) -> Claims:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    inputs = torch.tensor([[0.0], [2.0 * (rank + 1)]]).expand(2, 3)  # its mean is rank + 1

    def statistics() -> float:
        assert norm.running_mean is not None
        return norm.running_mean[0].item()

    model = ls.DistributedDataParallel(nn.Sequential(norm, nn.Linear(3, 1)))
    model(inputs).sum().backward()
    yield "step", statistics(), 1.0
    with model.no_sync():
        model(inputs).sum().backward()
    yield "no_sync", statistics(), rank + 1.0
    handle = model.module[1].weight.register_hook(fail_in_backward if rank == 1 else _do_nothing)
    failed = error_of(model(inputs).sum().backward).partition(":")[0]
    yield "failed on one rank", failed, "ValueError" if rank == 1 else "ReductionError"
    handle.remove()
    model(inputs).sum().backward()
    yield "after that", statistics(), 1.0
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(inputs).sum().backward()
    yield "hook", statistics(), 1.0
    with model.join():
        for _ in range(1 + rank):  # rank 1 goes on alone, and its statistics are taken
            model(inputs).sum().backward()
        model.eval()
    yield "join", statistics(), 2.0
    model.train()
    module = model.module
    del model
    module(inputs).sum().backward()
    yield "module alone", statistics(), 1.0


# -- A first backward that fails ---------------------------------------------------------------------------------------


def a_first_backward_may_fail(rank: int) -> Claims:
    for failing in ((0, 1), (0,), (1,)):
        net = Two()
        model = ls.DistributedDataParallel(net, bucket_cap_mb=0.00001)
        handle = net.first.weight.register_hook(fail_in_backward if rank in failing else _do_nothing)
        said = "in backward" if rank in failing else "The backward of 1 of 2 ranks ended in an exception"
        yield f"failing on {failing}", found_in(error_of(model(ones(rank)).sum().backward), said), said
        handle.remove()
        for _ in range(3):
            step(model, ones(rank))
            yield f"after failing on {failing}", gradients_of_two(net), MEANS_OF_TWO
        planned = sorted(slot.name for bucket in model.reducer.buckets for slot in bucket.slots)
        yield f"planned after failing on {failing}", planned, ["first.weight", "second.weight"]


# -- Gradients that somebody else holds --------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], list[Any]]] = {
    "detach": lambda held: [held.detach()],
    "view": lambda held: [held.view(-1)],
    "data": lambda held: [held.data],
    "numpy": lambda held: [held.numpy()],
    "both": lambda held: [held.detach(), held],
}


def a_view_of_a_gradient_keeps_its_values(rank: int) -> Claims:
    for name, view in VIEWS.items():
        layer = linear()
        model = ls.DistributedDataParallel(layer)
        held = []
        for scale in (1, 10, 100):
            step(model, scale * ones(rank))
            assert layer.weight.grad is not None
            held.append(view(layer.weight.grad))
        values = [each[0].reshape(-1).tolist() for each in held]
        yield f"held by {name}", values, [[1.5] * 3, [15.0] * 3, [150.0] * 3]


def where_nobody_holds_a_gradient_it_stays_in_its_place(rank: int) -> Claims:
    net = Two()
    model = ls.DistributedDataParallel(net)
    places = []
    for number in range(4):
        model.zero_grad(set_to_none=number < 2)
        model(ones(rank)).sum().backward()
        assert net.second.weight.grad is not None
        places.append(net.second.weight.grad.data_ptr())
    yield "places from the second on, in the order of arrival", len(set(places[1:])), 1
    # One gradient of a bucket is cleared, and one is added to: who views that sees it, as in torch.
    kept: Any = net.first.weight.grad
    viewed = kept.view(-1)
    net.second.weight.grad = None
    model(ones(rank)).sum().backward()
    yield "added to", kept is net.first.weight.grad, True
    yield "viewed", (viewed.tolist(), gradient(net.second.weight)), ([3.0] * 9, [[4.5] * 3])


def the_data_of_a_gradient_may_be_replaced(rank: int) -> Claims:
    for as_view in (True, False):
        net = Two()
        model = ls.DistributedDataParallel(net, gradient_as_bucket_view=as_view)
        for clears in (True, True, False):
            if clears:
                model.zero_grad()
            model(ones(rank)).sum().backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad.data = parameter.grad.data * 2
        yield f"{as_view=}", gradient(net.second.weight), [[27.0] * 3]  # 2 * (2 * 4.5 + 4.5)


def gradients_that_lie_in_the_users_memory_stay_there(rank: int) -> Claims:
    net = Two()
    model = ls.DistributedDataParallel(net)
    memory = torch.zeros(12)
    net.first.weight.grad, net.second.weight.grad = memory[:9].view(3, 3), memory[9:].view(1, 3)
    for _ in range(3):
        memory.zero_()
        with model.no_sync():
            model(ones(rank)).sum().backward()
        model(ones(rank)).sum().backward()
        yield "accumulated", memory.tolist(), [3.0] * 9 + [9.0] * 3
    net.first.requires_grad_(False)
    memory.zero_()
    model(ones(rank)).sum().backward()
    net.first.requires_grad_(True)
    model(ones(rank)).sum().backward()
    yield "unfrozen", memory.tolist(), [1.5] * 9 + [9.0] * 3


# -- Batches of different sizes, or not --------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.cell = nn.RNN(3, 2, batch_first=batch_first)

    def forward(self, inputs: Any) -> Tensor:
        outputs, _ = self.cell(inputs)
        return (outputs if isinstance(outputs, Tensor) else outputs.data).mean()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, inputs: Tensor, gate: Tensor) -> Tensor:
        return self.layer(inputs) * gate.mean()


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, inputs, inputs)[0]


def trained_on(module: nn.Module, train: Callable[[nn.Module], None]) -> list[str]:
    """Return what is warned of in two steps."""
    model = ls.DistributedDataParallel(module)
    with all_warnings() as warned:
        for _ in range(2):
            train(model)
    return warned


def on(*shape: int) -> Callable[[nn.Module], None]:
    return lambda model: model(torch.ones(shape)).mean().backward()


def on_packed(longest: int, number: int) -> Callable[[nn.Module], None]:
    packed = nn.utils.rnn.pack_sequence([torch.ones(longest, 3)] * number)
    return lambda model: model(packed).backward()


def equal_batches_are_not_warned_of(rank: int) -> Claims:
    def look_first(model: nn.Module) -> None:
        model(torch.ones(2 + rank, 3))
        on(4, 3)(model)

    def gate(model: nn.Module) -> None:
        model(torch.ones(4, 3), torch.ones(5 + rank)).sum().backward()

    yield "time first", trained_on(Recurrent(), on(5 + rank, 4, 3)), []
    yield "attention", trained_on(Attention(), on(5 + rank, 4, 4)), []
    yield "packed, times differ", trained_on(Recurrent(), on_packed(5 + rank, 2)), []
    yield "without backward", trained_on(linear(), look_first), []
    yield "tensors differ", trained_on(Gated(), gate), []


def uneven_batches_are_warned_of_at_the_users_line(rank: int) -> Claims:
    def accumulate(model: Any) -> None:
        with model.no_sync():
            on(2 + 3 * rank, 3)(model)
        on(4, 3)(model)

    def two_forwards(model: nn.Module) -> None:
        (model(torch.ones(2, 3)).mean() + model(torch.ones(3 + rank, 3)).mean()).backward()

    for name, warned, numbers in (
        ("plain", trained_on(linear(), on(4 + rank, 3)), "5 samples and rank 0 on 4"),
        ("batch first", trained_on(Recurrent(batch_first=True), on(4 + rank, 5, 3)), "5 samples and rank 0 on 4"),
        ("packed", trained_on(Recurrent(), on_packed(5, 4 + rank)), "5 samples and rank 0 on 4"),
        ("two forwards", trained_on(linear(), two_forwards), "6 samples and rank 0 on 5"),
        ("in no_sync", trained_on(linear(), accumulate), "9 samples and rank 0 on 6"),
    ):
        (said,) = warned
        for part in (
            f"{Path(__file__).name}: In one step rank 1 trained on {numbers}",
            'warnings.filterwarnings("ignore", message="In one step rank")',
        ):
            yield name, found_in(said, part), part


# -- Calls that meet others --------------------------------------------------------------------------------------------


def a_call_of_ours_that_meets_another_says_what_it_is_for(rank: int) -> Claims:
    model = ls.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    inputs = torch.randn(4, 3)
    loss = model(inputs).sum()
    # On rank 0 a forward for a figure to log, with eval() forgotten.
    found = error_of(loss.backward if rank == 1 else lambda: model(inputs))
    for said in (
        "for the buffers of a wrapped model before a forward in training (call train() on every rank;",
        "for the buffers of a wrapped model after its backward",
    ):
        yield "message", found_in(found, said), said


# -- What else scripts do ----------------------------------------------------------------------------------------------


def reference_counts_alone_free_a_wrapped_model(rank: int) -> Claims:
    gc.disable()  # which would free what reference counts do not, some day
    try:
        for _ in range(2):
            normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            model = ls.DistributedDataParallel(normed)
            model(torch.ones(2, 3)).sum().backward()
            held = [weakref.ref(normed), weakref.ref(model), weakref.ref(model.reducer.buckets[0])]
            del normed, model
            yield "what is left", [each() for each in held], [None] * 3
    finally:
        gc.enable()


def buffers_that_are_not_broadcast_may_differ(rank: int) -> Claims:
    net = Two()
    net.register_buffer("mine", torch.zeros(rank + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ls.DistributedDataParallel(net, broadcast_buffers=False)
    step(model, ones(rank))
    net.first.requires_grad_(False)
    step(model, ones(rank))
    yield "gradients", gradient(net.second.weight), [[4.5] * 3]


def a_parameter_may_be_resized_before_gradients_are_accumulated(rank: int) -> Claims:
    layer = linear()
    model = ls.DistributedDataParallel(layer)
    model(ones(rank)).sum().backward()
    model.zero_grad()
    layer.weight.data = torch.ones(1, 4)
    inputs = torch.full((1, 4), float(rank + 1))
    with model.no_sync():
        model(inputs).sum().backward()
    model(inputs).sum().backward()
    yield "gradient", gradient(layer.weight), [[3.0] * 4]


def a_group_may_be_one_that_torch_does_not_know(rank: int) -> Claims:
    store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, 2)
    gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    layer = linear()
    ls.DistributedDataParallel(layer, process_group=group)(ones(rank)).sum().backward()
    yield "gradient", gradient(layer.weight), [[1.5] * 3]


def logging_data_says_what_torchs_says(rank: int) -> Claims:
    for options, is_static in (({}, None), ({"static_graph": True}, 1), ({"find_unused_parameters": True}, None)):
        unused = Two()
        model = ls.DistributedDataParallel(unused, **options)
        unused.second.requires_grad_(True)
        unused.first(ones(rank)).sum().backward()
        logged = model._get_ddp_logging_data()
        yield f"{options}", (logged.get("static_graph"), logged.get("unused_parameter_size")), (is_static, 12)


def two_threads_send_each_bucket_once(_rank: int) -> Claims:
    """As two threads of the engine, one per device, that fill a bucket at the same moment."""
    both_are_in = threading.Barrier(2)
    sent: list[int] = []

    def hook(_state: object, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        sent.append(bucket.index())
        with suppress(threading.BrokenBarrierError):
            both_are_in.wait(0.2)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    world, net = current_world(), Two()
    assert world.group is not None
    model = TrainedModel(net)
    plan = plan_buckets([each.spec for each in model.trained], BucketLimits(sizes_bytes=(1,)), only_gradients=True)
    bucket_set = allocate_buckets(plan, model.trained, world.group, as_view=True)
    reduction = HookReduction(CommHook(function=hook, state=None), world)
    schedule = BucketSchedule(world, reduction, purpose="a test")
    schedule.use(bucket_set, StatusTrailer(bucket_set.trailer))
    for bucket in bucket_set.buckets:
        bucket.num_pending = 0
    threads = [threading.Thread(target=schedule.send_full) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield "sent", sent, [0, 1]


def compiled_autograd_is_an_error(rank: int) -> Claims:
    model = ls.DistributedDataParallel(linear())
    with torch._dynamo.config.patch(compiled_autograd=True):
        errors = [error_of(lambda: model(ones(rank)))]
    loss = model(ones(rank)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        errors.append(error_of(loss.backward))
    for error in errors:
        for said in ("ReductionError: Compiled autograd is on", "torch._dynamo.config.compiled_autograd = False"):
            yield "error", found_in(error, said), said
    step(model, ones(rank))
    yield "without it", gradient(model.module.weight), [[1.5] * 3]


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pair: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pair, scenario) == []
