"""What the ranks of a wrapper find when they differ; ranks are threads, and a script is a few lines."""

import gc
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep as ls
from lockstep.comm import World
from lockstep.errors import LockstepError, LossError, ParameterMismatchError, ReductionError
from lockstep.parallel.comparison import values
from lockstep.parallel.comparison.check import Check, Lines, Scope

NUM_STEPS = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.fixture(autouse=True)
def no_waits_but_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads take turns."""
    monkeypatch.setattr(values, "_WAIT_SECONDS", 0.0)


class Loop:
    """A training loop on one rank."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.module = net()
        self.model: Any = ls.DistributedDataParallel(self.module, **options)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(rows(self.rank, self.step)).square().mean().backward()

    def train(self, change: Callable[[], object] = int) -> None:
        for self.step in range(NUM_STEPS):
            self.backward()
            self.optimizer.step()
            change()


def run(script: Callable[[Loop], object], **options: Any) -> list[str]:
    """Run a script on two ranks; return the error of each, or what it was warned of."""
    with warnings.catch_warnings(record=True, action="always") as warned:

        def on_rank(world: World) -> str:
            loop = Loop(world.rank, **options)
            try:
                script(loop)
            except LockstepError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                loop.model._sync.close()
            return ""

        errors = run_ranks(2, on_rank, has_default_group=True)
    return errors if any(errors) else [str(each.message) for each in warned]


def writes_on_one_rank(loop: Loop) -> None:
    def write() -> None:
        if loop.rank == 1 and loop.step == 2:
            with torch.no_grad():
                loop.module[0].weight.mul_(0.5)

    loop.train(write)


def has_another_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.1 * (1 + loop.rank)
    loop.train()


def steps_twice_on_one_rank(loop: Loop) -> None:
    loop.train(lambda: loop.optimizer.step() if loop.rank == 1 and loop.step == 2 else None)


def evaluates_on_one_rank(loop: Loop) -> None:
    loop.model.train(loop.rank == 0)
    loop.train()


def freezes_a_layer_on_one_rank(loop: Loop) -> None:
    loop.module[1].train(loop.rank == 0)
    loop.train()


def computes_in_bfloat16_on_one_rank(loop: Loop) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=loop.rank == 1):
        loop.train()


def skips_a_backward(loop: Loop) -> None:
    for loop.step in range(NUM_STEPS):
        loss = loop.model(rows(loop.rank, loop.step)).square().mean()
        if loop.rank == 1 and loop.step == 1:
            continue
        loss.backward()


def steps_on_local_gradients(loop: Loop) -> None:
    with loop.model.no_sync():
        loop.backward()
    loop.optimizer.step()


def holds_a_copy(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    for loop.step in range(NUM_STEPS):
        loop.model(rows(loop.rank, loop.step)).square().mean().backward()
        loop.optimizer.step()


def writes_without_an_optimizer(loop: Loop) -> None:
    loop.optimizer = SimpleNamespace(zero_grad=loop.model.zero_grad)
    gc.collect()
    for loop.step in range(2 * NUM_STEPS):
        loop.backward()
        with torch.no_grad():
            for each in loop.module.parameters():
                each.sub_(0.1 * each.grad * (2 if loop.rank == 1 and loop.step == 2 else 1))


def writes_to_a_frozen_layer(loop: Loop) -> None:
    loop.module[0].requires_grad_(False)
    writes_on_one_rank(loop)


def loads_before_its_first_step(loop: Loop) -> None:
    with torch.no_grad():
        loop.module[2].bias.add_(loop.rank)
    loop.train()


def trains_plainly(loop: Loop) -> None:
    loop.train()


def averages_weights_on_all_ranks(loop: Loop) -> None:
    def average() -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.9)

    loop.train(average)


def trains_two_models_with_one_optimizer(loop: Loop) -> None:
    other: Any = ls.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.Adam([*loop.model.parameters(), *other.parameters()])
    for loop.step in range(NUM_STEPS):
        optimizer.zero_grad()
        other(loop.model(rows(loop.rank, loop.step))).square().mean().backward()
        optimizer.step()
    other._sync.close()


def replaces_its_optimizer(loop: Loop) -> None:
    for _ in range(2):
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01)
        loop.train()


def averages_with_our_ring(loop: Loop) -> None:
    loop.model.register_comm_hook(None, ls.ring_hook)
    loop.train()


def has_another_dropout(world: World) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1 + 0.4 * world.rank))
    ls.DistributedDataParallel(module)._sync.close()


def test_layers_that_were_made_with_other_options_are_a_warning_on_all_ranks() -> None:
    with pytest.warns(UserWarning, match=r"Layer 1 .* Dropout\(p=0.5.*\) on rank 1 and Dropout\(p=0.1") as warned:
        run_ranks(2, has_another_dropout, has_default_group=True)
    assert len(warned) == 2


class Scaled(nn.Module):
    """Has numbers and a tensor that are no parameters."""

    def __init__(self, rank: int, of_rank: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = 2.0 if rank and of_rank == "scale" else 1.0
        self.shift = torch.full((2,), float(rank) if of_rank == "shift" else 0.0)
        self.rank = rank
        self.began = 1.5 * rank  # which no method reads

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.scale + self.shift + 0 * self.rank


@pytest.mark.parametrize("of_rank", ["scale", "shift", "nothing"])
def test_numbers_and_tensors_of_the_forward_that_differ_are_a_warning(of_rank: str) -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        run_ranks(
            2,
            lambda world: ls.DistributedDataParallel(Scaled(world.rank, of_rank))._sync.close(),
            has_default_group=True,
        )
    found = [str(each.message) for each in warned]
    assert [text.startswith(f"Attribute {of_rank} of the wrapped model is") for text in found] == [True] * len(found)
    assert len(found) == (0 if of_rank == "nothing" else 2)


def accumulates(loop: Loop, change: Callable[[], object]) -> None:
    for loop.step in range(2 * NUM_STEPS):
        if loop.step % 2 == 0:
            loop.optimizer.zero_grad()
            with loop.model.no_sync():
                loop.model(rows(loop.rank, loop.step)).square().mean().backward()
            change()
        else:
            loop.model(rows(loop.rank, loop.step)).square().mean().backward()
            loop.optimizer.step()


def test_gradients_that_are_clipped_before_they_are_averaged_are_a_warning() -> None:
    found = run(lambda loop: accumulates(loop, lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)))
    assert len(found) == 2
    assert all(re.match("Gradients were clipped, .* on rank 1 and by .* on rank 0.*LS311", text) for text in found)


def test_gradients_may_be_multiplied_alike_before_they_are_averaged() -> None:
    def halve(loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5)

    assert not any(run(lambda loop: accumulates(loop, lambda: halve(loop))))


def writes_under_our_ring(loop: Loop) -> None:
    loop.model.register_comm_hook(None, ls.ring_hook)
    writes_on_one_rank(loop)


def test_a_model_may_be_wrapped_after_one_that_was_not_compared() -> None:
    # The second wrapper once waited for what the first, which compares no values, had never written to the store.
    assert not any(run(trains_two_models_with_one_optimizer, init_sync=False))


@pytest.mark.parametrize(
    ("on_rank_1", "value", "default"),
    [
        ({"nonfinite": "skip"}, "nonfinite='skip'", "nonfinite='stop'"),
        ({"on_skip": "zeros"}, "on_skip='zeros'", "on_skip='stop'"),
        ({"compare": False}, "compare=False", "compare=True"),
        ({"broadcast_buffers": False}, "broadcast_buffers=False", "broadcast_buffers=True"),
        ({"bucket_cap_mb": 1}, "bucket_cap_mb=1.0", "bucket_cap_mb=25.0"),
        ({"static_graph": True}, "static_graph=True", "static_graph=False"),
        ({"find_unused_parameters": True}, "find_unused_parameters=True", "find_unused_parameters=False"),
        (
            {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
            "param_dtype=torch.bfloat16",
            "param_dtype=None",
        ),
    ],
)
def test_every_rank_is_told_of_an_argument_that_differs(on_rank_1: dict[str, Any], value: str, default: str) -> None:
    def wrap(world: World) -> str:
        with pytest.raises(ParameterMismatchError) as caught:
            ls.DistributedDataParallel(net(), **(on_rank_1 if world.rank else {}))
        return str(caught.value)

    with warnings.catch_warnings(action="ignore"):
        texts = run_ranks(2, wrap, has_default_group=True)
    assert all(f"rank 1 has {value}, rank 0 has {default}." in text for text in texts)


def alternates_between_one_forward_and_two(loop: Loop) -> None:
    for loop.step in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        losses = [loop.model(rows(loop.rank, loop.step)[loop.rank :]).mean() for _ in range(1 + loop.step % 2)]
        sum(losses, torch.zeros(())).backward()
        loop.optimizer.step()


def test_uneven_batches_are_told_of_where_steps_have_one_forward_or_two() -> None:
    texts = run(alternates_between_one_forward_and_two)
    assert all("rank 0 trained on 8 samples and rank 1 on 6" in text for text in texts)
    assert len(texts) == 2


def has_a_delayed_nan(world: World, *, nonfinite: Any, alone: bool) -> str:
    module = net()
    delayed = module.get_parameter("2.weight")
    model: Any = ls.DistributedDataParallel(
        module,
        nonfinite=nonfinite,
        delay_all_reduce_named_params=[("2.weight", delayed)],
        param_to_hook_all_reduce=module.get_parameter("0.weight"),
    )
    optimizer = torch.optim.SGD([delayed] if alone else module.parameters(), lr=0.1)
    if world.rank == 1:
        delayed.register_hook(lambda gradient: gradient * float("nan"))
    model(rows(world.rank, 0)).square().mean().backward()
    try:
        optimizer.step()
    except LossError as error:
        return str(error)
    finally:
        model._sync.close()
    return f"all are finite: {all(bool(each.isfinite().all()) for each in module.parameters())}"


@pytest.mark.parametrize("alone", [False, True])
def test_a_delayed_gradient_that_is_not_finite_is_told_at_the_step(alone: bool) -> None:
    # Delayed gradients are in no bucket, and so nobody looked at them.
    first, second = run_ranks(2, partial(has_a_delayed_nan, nonfinite="stop", alone=alone), has_default_group=True)
    assert first == second
    assert "gradient of 2.weight, which delay_all_reduce_named_params holds back, was not finite" in first
    skipped = run_ranks(2, partial(has_a_delayed_nan, nonfinite="skip", alone=alone), has_default_group=True)
    assert skipped == ["all are finite: True"] * 2


def skips_on_all_ranks_and_then_steps_twice_on_one(loop: Loop) -> None:
    loop.train()
    with pytest.raises(ReductionError, match="All ranks took part in a reduction with nothing"):
        loop.model.skip_backward()
    for _ in range(1 + loop.rank):
        loop.optimizer.step()
    loop.backward()


# -- Methods that move the weights and put them back -------------------------------------------------------------------


def noise(parameter: Tensor, seed: int) -> Tensor:
    return 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


class Moved:
    """Weights that are elsewhere for a while; what was there is put back from a copy."""

    def __init__(self, loop: Loop, *, in_place: bool = True) -> None:
        self.parameters = list(loop.model.parameters())
        self.in_place = in_place

    def move(self, steps: list[Tensor]) -> None:
        self.kept = [each.detach().clone() for each in self.parameters]
        self._write([each + step for each, step in zip(self.kept, steps, strict=True)])

    def put_back(self) -> None:
        self._write(self.kept)

    def _write(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for each, value in zip(self.parameters, values, strict=True):
                if self.in_place:
                    each.copy_(value)
                else:
                    each.data = value.clone()  # which no version counter shows


def looks_for_sharpness(loop: Loop, *, in_place: bool = True) -> None:
    """SAM: the first backward is local, and so is the move."""
    moved = Moved(loop, in_place=in_place)
    for loop.step in range(2 * NUM_STEPS):
        with loop.model.no_sync():
            loop.backward()
        moved.move([0.05 * each.grad / each.grad.norm() for each in moved.parameters])
        loop.backward()
        moved.put_back()
        loop.optimizer.step()


def looks_for_sharpness_by_data(loop: Loop) -> None:
    looks_for_sharpness(loop, in_place=False)


def adds_noise_by_rank(loop: Loop) -> None:
    moved = Moved(loop)
    for loop.step in range(2 * NUM_STEPS):
        moved.move([noise(each, 10 * loop.step + loop.rank) for each in moved.parameters])
        loop.backward()
        moved.put_back()
        loop.optimizer.step()


def adds_noise_and_accumulates(loop: Loop) -> None:
    moved = Moved(loop)
    for loop.step in range(3 * NUM_STEPS):
        moved.move([noise(each, 10 * loop.step + loop.rank) for each in moved.parameters])
        (loop.model(rows(loop.rank, loop.step)).square().mean() / 5).backward()
        moved.put_back()
        if loop.step % 5 == 4:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def looks_ahead(loop: Loop) -> None:
    slow = [each.detach().clone() for each in loop.model.parameters()]

    def pull() -> None:
        if loop.step % 2:
            with torch.no_grad():
                for each, kept in zip(loop.model.parameters(), slow, strict=True):
                    each.copy_(kept.add_(each - kept, alpha=0.5))

    loop.train(pull)


def validates_an_average_on_one_rank(loop: Loop) -> None:
    moved = Moved(loop)

    def validate() -> None:
        if loop.rank == 0:
            moved.move([-0.5 * each.detach() for each in moved.parameters])
            loop.model.eval()
            with torch.no_grad():
                loop.module(rows(0, 0))
            moved.put_back()
            loop.model.train()

    loop.train(validate)


def moves_against_a_local_gradient(loop: Loop) -> None:
    """Adversarial weights: the direction is of `autograd.grad`, in several small moves."""
    moved = Moved(loop)
    for loop.step in range(NUM_STEPS):
        total = [torch.zeros_like(each) for each in moved.parameters]
        for _ in range(2):
            loss = loop.model(rows(loop.rank, loop.step)).square().mean()
            found = torch.autograd.grad(loss, moved.parameters)
            total = [each + 0.01 * step for each, step in zip(total, found, strict=True)]
            moved.move(total)
            loop.optimizer.zero_grad()
            loop.model(rows(loop.rank, loop.step)).square().mean().backward()
            moved.put_back()
        loop.optimizer.step()


def estimates_by_perturbation(loop: Loop) -> None:
    """A part of the gradient is of two forwards with moved weights, each rank in a direction of its own."""
    moved = Moved(loop)
    for loop.step in range(NUM_STEPS):
        losses = []
        for sign in (1, -1):
            moved.move([sign * noise(each, 10 * loop.step + loop.rank) for each in moved.parameters])
            with torch.no_grad():
                losses.append(float(loop.model(rows(loop.rank, loop.step)).square().mean()))
            moved.put_back()
        loop.optimizer.zero_grad()
        (loop.model(rows(loop.rank, loop.step)).square().mean() * (1 + losses[0] - losses[1])).backward()
        loop.optimizer.step()


def looks_for_sharpness_and_writes_on_one_rank(loop: Loop) -> None:
    plain = loop.optimizer.step

    def step() -> None:
        plain()
        if loop.rank == 1 and loop.step == NUM_STEPS:
            with torch.no_grad():
                loop.module[2].weight.mul_(0.5)

    loop.optimizer.step = step
    looks_for_sharpness(loop)


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (writes_without_an_optimizer, ["0.weight has other values on rank 1"]),
        (writes_to_a_frozen_layer, ["0.weight has other values on rank 1"]),
        (loads_before_its_first_step, ["2.bias has other values on rank 1"]),
        (writes_on_one_rank, ["0.weight has other values on rank 1", "written on one rank"]),
        (has_another_rate, ["lr is 0.2 and 0.1"]),
        (steps_twice_on_one_rank, ["rank 1 has taken 2 optimizer steps and rank 0 1"]),
        (evaluates_on_one_rank, ["Rank 1 runs forward and backward in evaluation mode"]),
        (freezes_a_layer_on_one_rank, ["layer 1 (Tanh) was in evaluation mode on rank 1 and in training mode"]),
        (computes_in_bfloat16_on_one_rank, ["autocast was on, with torch.bfloat16 on rank 1 and off on rank 0"]),
        (skips_a_backward, ["Rank 1 has run 1 training forward without a backward", "skip_backward()"]),
        (steps_on_local_gradients, ["with gradients of this rank alone"]),
        (holds_a_copy, ["The SGD that steps at", "parameters of a copy of the model", "after 3 backwards"]),
        (writes_under_our_ring, ["0.weight has other values on rank 1"]),
        (looks_for_sharpness_and_writes_on_one_rank, ["2.weight has other values on rank 1"]),
        # The error was raised in the middle of the checks; those after it kept what they had counted: 3 steps and 2.
        (skips_on_all_ranks_and_then_steps_twice_on_one, ["rank 1 has taken 2 optimizer steps and rank 0 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_difference_is_one_error_on_all_ranks(script: Callable[[Loop], object], parts: list[str]) -> None:
    first, second = run(script)
    assert first == second
    for part in parts:
        assert part in first
    assert any(switch in first for switch in ("compare=False", 'on_skip="zeros"'))


@pytest.mark.parametrize("script", [evaluates_on_one_rank, freezes_a_layer_on_one_rank, writes_on_one_rank])
def test_the_switch_that_an_alarm_names_ends_it(script: Callable[[Loop], object]) -> None:
    assert not any(run(script, compare=False))


@pytest.mark.parametrize(
    "script",
    [
        trains_plainly,
        averages_weights_on_all_ranks,
        trains_two_models_with_one_optimizer,
        replaces_its_optimizer,
        averages_with_our_ring,
        looks_for_sharpness,
        looks_for_sharpness_by_data,
        adds_noise_by_rank,
        adds_noise_and_accumulates,
        looks_ahead,
        validates_an_average_on_one_rank,
        moves_against_a_local_gradient,
        estimates_by_perturbation,
    ],
)
def test_a_correct_script_and_weights_that_are_moved_and_put_back_get_no_message(
    script: Callable[[Loop], object],
) -> None:
    assert not any(run(script))


def moves_by_adding_and_subtracting(loop: Loop) -> None:
    for loop.step in range(NUM_STEPS):
        steps = [noise(each, 10 * loop.step + loop.rank) for each in loop.model.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for each, step in zip(loop.model.parameters(), steps, strict=True):
                    each.add_(step, alpha=sign)
            if sign == 1:
                loop.backward()
        loop.optimizer.step()


def test_weights_that_are_put_back_with_another_rounding_are_a_warning() -> None:
    texts = run(moves_by_adding_and_subtracting)
    assert len(texts) == 2
    assert all("differ by their rounding" in text and "copy_()" in text for text in texts)


# -- A check of one's own ----------------------------------------------------------------------------------------------


class OwnCheck(Check):
    """Notes at which moments it was called; its number is that of the rank from a step on."""

    scope = Scope.RUN

    def __init__(self, loop: Loop) -> None:
        self.called: set[str] = set()
        self._loop = loop

    def number(self) -> int:
        self.called.add("number")
        return self._loop.rank if self._loop.step == 3 else 0

    def record(self) -> int:
        self.called.add("record")
        return self._loop.rank

    def judge(self, found: Sequence[int], lines: Sequence[Lines]) -> LockstepError | None:
        self.called.add("judge")
        is_of_all = found == [0, 1] and all(str(each.forward) and str(each.step) for each in lines)
        return ReductionError(f"Ranks have {found}.") if is_of_all else None


MOMENTS = {name for name, value in vars(Check).items() if callable(value) and not name.startswith("_")}


def note_calls(name: str) -> None:
    def call(self: OwnCheck, *arguments: Any) -> Any:
        self.called.add(name)
        return getattr(Check, name)(self, *arguments)

    setattr(OwnCheck, name, call)


for moment in MOMENTS - vars(OwnCheck).keys():
    note_calls(moment)


@pytest.mark.parametrize("compare", [True, False])
def test_a_check_is_called_at_every_moment_and_its_finding_raised_on_all_ranks(*, compare: bool) -> None:
    checks: list[OwnCheck] = []

    def train_with_an_own_check(loop: Loop) -> None:
        checks.append(OwnCheck(loop))
        comparison = loop.model._sync.comparison
        comparison.checks.append(checks[-1])
        comparison.set_joining(is_joining=True)  # as at any other time, it is compared no more and then again
        comparison.set_joining(is_joining=False)
        inputs = rows(loop.rank, 0).requires_grad_()
        torch.autograd.grad(loop.model(inputs).sum(), inputs)  # a backward that accumulates nothing
        loop.module[2].bias.requires_grad_(False)
        loop.train()

    texts = run(train_with_an_own_check, compare=compare)
    if compare:
        assert texts == ["ReductionError: Ranks have [0, 1]."] * 2
        assert all(each.called == MOMENTS for each in checks)
    else:
        assert not any(texts)
        assert all(each.called == MOMENTS - {"number", "record", "judge"} for each in checks)
