"""`DistributedDataParallel` with what scripts do between steps: wrap again, freeze, hold gradients, fail, compile.

Scenarios run on two ranks that see different inputs (rank r feeds r + 1, so a mean over the ranks is 1.5), each when a
test first looks at one of its answers.
"""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tests.process.ranks import RankPool, join_default_group
from tests.process.scenarios import Answers, ScenarioAnswers, answers_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep as ls
from lockstep.comm import current_world
from lockstep.errors import LockstepError
from lockstep.reduce import BucketLimits, CommHook, GradBucket, HookReduction, TrainedModel, plan_buckets
from lockstep.reduce.buckets import allocate_buckets
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.status import StatusTrailer


def ones(rank: int) -> Tensor:
    return torch.full((1, 3), float(rank + 1))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


def gradient(parameter: Tensor) -> Any:
    return None if parameter.grad is None else parameter.grad.tolist()


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


def shared(rank: int, answers: Answers) -> None:
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
    answers["wrapped again"] = train(model)
    inner = ls.DistributedDataParallel(Sum([wide() for _ in range(4)]), bucket_cap_mb=ONE_LAYER_MB)
    outer = ls.DistributedDataParallel(inner, bucket_cap_mb=ONE_LAYER_MB)
    answers["wrapped twice"] = train(outer)
    outer.reducer.close()
    train(inner)
    place = inner.reducer.buckets[0].slots[0]
    answers["alone again"] = place.parameter.grad is place.place

    encoder = wide()
    models = [ls.DistributedDataParallel(Sum([wide(), encoder, wide()]), bucket_cap_mb=ONE_LAYER_MB) for _ in range(2)]
    answers["layer of two models"] = train(*models)


def test_a_parameter_that_several_wrappers_reduce_gets_the_mean_once(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["wrapped again"] == {1.5}
        assert found["wrapped twice"] == {1.5}
        assert found["layer of two models"] == {1.5, 3.0}  # the shared one has two gradients


def test_a_parameter_is_shared_no_longer_than_there_are_two(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["alone again"]


# -- Frozen for a while ------------------------------------------------------------------------------------------------


def freezing(rank: int, answers: Answers) -> None:
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
        model.zero_grad()
        model(one).sum().backward()
        answers[f"after the {name}"] = gradient(net.first.weight), gradient(net.second.weight)
        layouts.append(model.reducer.buckets)
    answers["planned once"] = all(layout is layouts[0] for layout in layouts)

    # What is seen in a backward that fails is looked at anew in the next one, too.
    net.first.requires_grad_(False)
    handle = net.second.weight.register_hook(_fail)
    with pytest.raises(ValueError, match="in backward"):
        model(one).sum().backward()
    handle.remove()
    net.first.requires_grad_(True)
    model.zero_grad()
    model(one).sum().backward()
    answers["after the failure"] = gradient(net.first.weight), gradient(net.second.weight)

    net.double()
    attack_inputs = one.double().requires_grad_()
    torch.autograd.grad(model(attack_inputs).sum(), attack_inputs)
    net.float()
    model.zero_grad()
    model(one).sum().backward()
    answers["after the cast"] = gradient(net.first.weight), gradient(net.second.weight)

    net.first.requires_grad_(False)
    model(one).sum().backward()
    answers["kept while frozen"] = gradient(net.first.weight)


def _do_nothing(_gradient: Tensor) -> None:
    """Stand for a hook that fails, on a rank where none does."""


def _fail(_gradient: Tensor) -> None:
    raise ValueError("in backward")


@pytest.mark.parametrize("what", ["generator", "attack", "attack on a half", "generator again", "failure", "cast"])
def test_gradients_are_reduced_after_a_while_in_which_the_model_was_frozen(
    answers: list[ScenarioAnswers], what: str
) -> None:
    for found in answers:
        assert found[f"after the {what}"] == ([[1.5] * 3] * 3, [[4.5] * 3])


def test_freezing_for_a_backward_that_reduces_nothing_makes_no_new_plan(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["planned once"]


def test_a_frozen_parameter_keeps_the_gradient_that_it_has(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["kept while frozen"] == [[1.5] * 3] * 3


# -- Changed on one rank -----------------------------------------------------------------------------------------------


def one_rank(rank: int, answers: Answers) -> None:
    one = ones(rank)
    net = Two()
    model = ls.DistributedDataParallel(net)
    model(one).sum().backward()
    if rank == 1:
        net.second = nn.Linear(3, 1, bias=False)
    answers["replaced on one rank"] = error_of(model(one).sum().backward)
    net = Two()
    model = ls.DistributedDataParallel(net)
    if rank == 1:
        net.first.requires_grad_(False)
    answers["frozen on one rank"] = error_of(model(one).sum().backward)


def test_a_layer_replaced_on_one_rank_is_an_error_on_all(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["replaced on one rank"].startswith("ParameterMismatchError")
        assert (
            "second.weight was replaced, unfrozen or changed after wrapping on rank 1"
            in (found["replaced on one rank"])
        )


def test_the_remedy_for_a_model_that_is_wrapped_speaks_of_the_change(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert "make the same change on every rank" in found["frozen on one rank"]
        assert "before wrapping it" not in found["frozen on one rank"]


# -- Buffers after a step ----------------------------------------------------------------------------------------------


def buffers(rank: int, answers: Answers) -> None:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    inputs = torch.tensor([[0.0], [2.0 * (rank + 1)]]).expand(2, 3)  # its mean is rank + 1

    def statistics() -> float:
        assert norm.running_mean is not None
        return norm.running_mean[0].item()

    model = ls.DistributedDataParallel(nn.Sequential(norm, nn.Linear(3, 1)))
    model(inputs).sum().backward()
    answers["statistics, step"] = statistics()
    with model.no_sync():
        model(inputs).sum().backward()
    answers["statistics, no_sync"] = statistics()
    handle = model.module[1].weight.register_hook(_fail if rank == 1 else _do_nothing)
    answers["statistics, failed"] = ""
    try:
        model(inputs).sum().backward()
    except (ValueError, LockstepError) as error:
        answers["statistics, failed"] = type(error).__name__
    handle.remove()
    model(inputs).sum().backward()
    answers["statistics, after that"] = statistics()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(inputs).sum().backward()
    answers["statistics, hook"] = statistics()
    with model.join():
        for _ in range(1 + rank):  # rank 1 goes on alone, and its statistics are taken
            model(inputs).sum().backward()
        model.eval()
    answers["statistics, join"] = statistics()
    model.train()
    module = model.module
    del model
    module(inputs).sum().backward()
    answers["statistics, module alone"] = statistics()


def test_after_a_step_all_ranks_have_the_statistics_of_one(answers: list[ScenarioAnswers]) -> None:
    assert [found["statistics, no_sync"] for found in answers] == [1.0, 2.0]
    assert [found["statistics, failed"] for found in answers] == ["ReductionError", "ValueError"]
    for found in answers:
        for when in ("step", "after that", "hook", "module alone"):
            assert found[f"statistics, {when}"] == 1.0
        assert found["statistics, join"] == 2.0


# -- A first backward that fails ---------------------------------------------------------------------------------------


def first_failures(rank: int, answers: Answers) -> None:
    one = ones(rank)
    for name, failing in (("both ranks", (0, 1)), ("rank 0", (0,)), ("rank 1", (1,))):
        net = Two()
        model = ls.DistributedDataParallel(net, bucket_cap_mb=0.00001)
        handle = net.first.weight.register_hook(_fail if rank in failing else _do_nothing)
        if rank in failing:
            with pytest.raises(ValueError, match="in backward"):
                model(one).sum().backward()
            answers[f"failed on {name}"] = ""
        else:
            answers[f"failed on {name}"] = error_of(model(one).sum().backward)
        handle.remove()
        seen = []
        for _ in range(3):
            model.zero_grad()
            model(one).sum().backward()
            seen.append(gradient(net.second.weight))
        answers[f"after failing on {name}"] = (
            seen,
            sorted(slot.name for bucket in model.reducer.buckets for slot in bucket.slots),
        )


@pytest.mark.parametrize("name", ["both ranks", "rank 0", "rank 1"])
def test_a_first_backward_may_fail(answers: list[ScenarioAnswers], name: str) -> None:
    said = [found[f"failed on {name}"] for found in answers]
    assert sum("ended in an exception" in each for each in said) == (0 if name == "both ranks" else 1)
    for found in answers:
        assert found[f"after failing on {name}"] == ([[[4.5] * 3]] * 3, ["first.weight", "second.weight"])


# -- Gradients that somebody else holds --------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], list[Any]]] = {
    "detach": lambda held: [held.detach()],
    "view": lambda held: [held.view(-1)],
    "data": lambda held: [held.data],
    "numpy": lambda held: [held.numpy()],
    "both": lambda held: [held.detach(), held],
}


def holding(rank: int, answers: Answers) -> None:
    for name, view in VIEWS.items():
        layer = linear()
        model = ls.DistributedDataParallel(layer)
        held = []
        for scale in (1, 10, 100):
            model.zero_grad()
            model(scale * ones(rank)).sum().backward()
            assert layer.weight.grad is not None
            held.append(view(layer.weight.grad))
        answers[f"held by {name}"] = [each[0].reshape(-1).tolist() for each in held]

    net = Two()
    model = ls.DistributedDataParallel(net)
    places = []
    for step in range(4):
        model.zero_grad(set_to_none=step < 2)
        model(ones(rank)).sum().backward()
        assert net.second.weight.grad is not None
        places.append(net.second.weight.grad.data_ptr())
    answers["one place"] = len(set(places[1:])) == 1  # from the second on, in the order of arrival

    for as_view in (True, False):
        replaced = Two()
        model_of_replaced = ls.DistributedDataParallel(replaced, gradient_as_bucket_view=as_view)
        for clears in (True, True, False):
            if clears:
                model_of_replaced.zero_grad()
            model_of_replaced(ones(rank)).sum().backward()
            for parameter in replaced.parameters():
                assert parameter.grad is not None
                parameter.grad.data = parameter.grad.data * 2
        answers[f"data replaced, {as_view}"] = gradient(replaced.second.weight)

    # One gradient of a bucket is cleared, and one is added to: who views that sees it, as in torch.
    kept, viewed = net.first.weight.grad, net.first.weight.grad.view(-1)
    net.second.weight.grad = None
    model(ones(rank)).sum().backward()
    answers["added to"] = kept is net.first.weight.grad, viewed.tolist(), gradient(net.second.weight)


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_of_a_gradient_keeps_its_values(answers: list[ScenarioAnswers], name: str) -> None:
    for found in answers:
        assert found[f"held by {name}"] == [[1.5] * 3, [15.0] * 3, [150.0] * 3]


def test_where_nobody_holds_a_gradient_it_stays_in_its_place(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["one place"]


def test_the_data_of_a_gradient_may_be_replaced(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        for as_view in (True, False):  # 2 * (2 * 4.5 + 4.5)
            assert found[f"data replaced, {as_view}"] == [[27.0] * 3]


def test_a_view_of_a_gradient_that_was_not_cleared_sees_what_is_added(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["added to"] == (True, [3.0] * 9, [[4.5] * 3])


# -- Gradients in memory of the user's ---------------------------------------------------------------------------------


def flat(rank: int, answers: Answers) -> None:
    net = Two()
    model = ls.DistributedDataParallel(net)
    memory = torch.zeros(12)
    net.first.weight.grad, net.second.weight.grad = memory[:9].view(3, 3), memory[9:].view(1, 3)
    seen = []
    for _ in range(3):
        memory.zero_()
        with model.no_sync():
            model(ones(rank)).sum().backward()
        model(ones(rank)).sum().backward()
        seen.append(memory.tolist())
    answers["flat"] = seen
    net.first.requires_grad_(False)
    memory.zero_()
    model(ones(rank)).sum().backward()
    net.first.requires_grad_(True)
    model(ones(rank)).sum().backward()
    answers["flat, unfrozen"] = memory.tolist()


def test_gradients_that_lie_in_the_users_memory_stay_there(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["flat"] == [[3.0] * 9 + [9.0] * 3] * 3
        assert found["flat, unfrozen"] == [1.5] * 9 + [9.0] * 3


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


def batches(rank: int, answers: Answers) -> None:
    def said(module: nn.Module, train: Callable[[nn.Module], None]) -> list[str]:
        model = ls.DistributedDataParallel(module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                train(model)
        return [f"{warning.filename}: {warning.message}" for warning in caught]

    def of(*shape: int) -> Callable[[nn.Module], None]:
        return lambda model: model(torch.ones(shape)).mean().backward()

    def look_first(model: nn.Module) -> None:
        model(torch.ones(2 + rank, 3))
        of(4, 3)(model)

    def accumulate(model: Any) -> None:
        with model.no_sync():
            of(2 + 3 * rank, 3)(model)
        of(4, 3)(model)

    def two_forwards(model: nn.Module) -> None:
        (model(torch.ones(2, 3)).mean() + model(torch.ones(3 + rank, 3)).mean()).backward()

    def pack(longest: int, number: int) -> Callable[[nn.Module], None]:
        packed = nn.utils.rnn.pack_sequence([torch.ones(longest, 3)] * number)
        return lambda model: model(packed).backward()

    def gate(model: nn.Module) -> None:
        model(torch.ones(4, 3), torch.ones(5 + rank)).sum().backward()

    answers["batches"] = {
        "time first": said(Recurrent(), of(5 + rank, 4, 3)),
        "attention": said(_Attention(), of(5 + rank, 4, 4)),
        "packed, times differ": said(Recurrent(), pack(5 + rank, 2)),
        "without backward": said(linear(), look_first),
        "tensors differ": said(Gated(), gate),
    }
    answers["uneven batches"] = {
        "plain": said(linear(), of(4 + rank, 3)),
        "batch first": said(Recurrent(batch_first=True), of(4 + rank, 5, 3)),
        "packed": said(Recurrent(), pack(5, 4 + rank)),
        "two forwards": said(linear(), two_forwards),
        "in no_sync": said(linear(), accumulate),
    }


class _Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, inputs, inputs)[0]


def test_equal_batches_are_not_warned_of(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert [name for name, said in found["batches"].items() if said] == []


def test_uneven_batches_are_warned_of_at_the_users_line(answers: list[ScenarioAnswers]) -> None:
    for name, found in answers[0]["uneven batches"].items():
        (said,) = found
        sizes = {"two forwards": "6 samples and rank 0 on 5", "in no_sync": "9 samples and rank 0 on 6"}
        numbers = sizes.get(name, "5 samples and rank 0 on 4")
        assert f"test_ddp_changes.py: In one step rank 1 trained on {numbers}" in said
        assert 'warnings.filterwarnings("ignore", message="In one step rank")' in said
    assert all(len(said) == 1 for said in answers[1]["uneven batches"].values())


# -- Calls that meet others --------------------------------------------------------------------------------------------


def meetings(rank: int, answers: Answers) -> None:
    model = ls.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    inputs = torch.randn(4, 3)
    loss = model(inputs).sum()
    if rank == 0:  # a forward for a figure to log, with eval() forgotten
        answers["forward meets backward"] = error_of(lambda: model(inputs))
    else:
        answers["forward meets backward"] = error_of(loss.backward)


def test_a_call_of_ours_that_meets_another_says_what_it_is_for(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        said = found["forward meets backward"]
        assert "for the buffers of a wrapped model before a forward in training (call train() on every rank;" in said
        assert "for the buffers of a wrapped model after its backward" in said


# -- What else scripts do ----------------------------------------------------------------------------------------------


def copies(rank: int, answers: Answers) -> None:
    net = Two()
    model = ls.DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("second.weight", net.get_parameter("second.weight"))],
        param_to_hook_all_reduce=net.first.weight,
    )
    twin = copy.deepcopy(model)
    twin(ones(rank)).sum().backward()
    answers["copy with delayed"] = gradient(twin.module.second.weight)

    gone = []
    gc.disable()  # which would free what reference counts do not, some day
    try:
        for _ in range(2):
            normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            model = ls.DistributedDataParallel(normed)
            model(torch.ones(2, 3)).sum().backward()
            held = [weakref.ref(normed), weakref.ref(model), weakref.ref(model.reducer.buckets[0])]
            del normed, model
            gone += [each() is None for each in held]
    finally:
        gc.enable()
    answers["gone"] = gone


def odd_models(rank: int, answers: Answers) -> None:
    net = Two()
    net.register_buffer("mine", torch.zeros(rank + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ls.DistributedDataParallel(net, broadcast_buffers=False)
    model(ones(rank)).sum().backward()
    net.first.requires_grad_(False)
    model.zero_grad()
    model(ones(rank)).sum().backward()
    answers["own buffers"] = gradient(net.second.weight)

    layer = linear()
    model = ls.DistributedDataParallel(layer)
    model(ones(rank)).sum().backward()
    model.zero_grad()
    layer.weight.data = torch.ones(1, 4)
    inputs = torch.full((1, 4), float(rank + 1))
    with model.no_sync():
        model(inputs).sum().backward()
    model(inputs).sum().backward()
    answers["resized"] = gradient(layer.weight)

    store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, 2)
    gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    layer = linear()
    model = ls.DistributedDataParallel(layer, process_group=group)
    model(ones(rank)).sum().backward()
    answers["group by hand"] = gradient(layer.weight)

    logged = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        unused = Two()
        model = ls.DistributedDataParallel(unused, **options)
        unused.second.requires_grad_(True)
        unused.first(ones(rank)).sum().backward()
        logged.append(model._get_ddp_logging_data())
    answers["logged"] = [(each.get("static_graph"), each.get("unused_parameter_size")) for each in logged]


def two_threads(_rank: int, answers: Answers) -> None:
    """Let two threads of the engine, one per device, fill a bucket at the same moment."""
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
    answers["sent by two threads"] = sent


def test_a_copy_reduces_delayed_parameters_too(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["copy with delayed"] == [[4.5] * 3]


def test_reference_counts_alone_free_a_wrapped_model(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["gone"] == [True] * 6


def test_buffers_that_are_not_broadcast_may_differ(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["own buffers"] == [[4.5] * 3]


def test_a_group_may_be_one_that_torch_does_not_know(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["group by hand"] == [[1.5] * 3]


def test_a_parameter_may_be_resized_before_gradients_are_accumulated(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["resized"] == [[3.0] * 4]


def test_logging_data_says_what_torchs_says(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["logged"] == [(None, 12), (1, 12), (None, 12)]


def test_two_threads_send_each_bucket_once(answers: list[ScenarioAnswers]) -> None:
    for found in answers:
        assert found["sent by two threads"] == [0, 1]


# -- Compiled autograd -------------------------------------------------------------------------------------------------


def compiled_backward(rank: int, answers: Answers) -> None:
    model = ls.DistributedDataParallel(linear())
    with torch._dynamo.config.patch(compiled_autograd=True):
        answers["compiled autograd, forward"] = error_of(lambda: model(ones(rank)))
    loss = model(ones(rank)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        answers["compiled autograd, backward"] = error_of(loss.backward)
    model.zero_grad()
    model(ones(rank)).sum().backward()
    answers["without it"] = gradient(model.module.weight)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_compiled_autograd_is_an_error(answers: list[ScenarioAnswers], where: str) -> None:
    for found in answers:
        said = found[f"compiled autograd, {where}"]
        assert said.startswith("ReductionError: Compiled autograd is on")
        assert "torch._dynamo.config.compiled_autograd = False" in said
        assert found["without it"] == [[1.5] * 3]


SCENARIOS = (
    shared,
    freezing,
    one_rank,
    buffers,
    first_failures,
    holding,
    flat,
    batches,
    copies,
    odd_models,
    two_threads,
    compiled_backward,
    meetings,
)


@pytest.fixture(scope="module")
def answers() -> Iterator[list[ScenarioAnswers]]:
    with RankPool(2, join_default_group) as pool:
        yield answers_of(pool, SCENARIOS)
