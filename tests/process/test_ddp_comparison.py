"""Mistakes after which the ranks of a `DistributedDataParallel` no longer train the same model: one error on all ranks.

And scripts without a mistake, which are not warned of. All run on two ranks, one after the other.
"""

import copy
import gc
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import CPU, Rank, RankPool, Ranks, join_default_group
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep as ls
from lockstep.comm import broadcast_tensors
from lockstep.errors import LockstepError

Call = Callable[[], object]
NUM_STEPS = 6
ODD_STEP = 3


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int, step: int, number: int = 4) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(100 * step + rank))


class Script:
    """A training loop, whose parts a mistake replaces."""

    def __init__(self, rank: int, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        self.rank = rank
        self.step = 0
        self.model: Any = ls.DistributedDataParallel(net(), **options)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)

    @property
    def is_odd(self) -> bool:
        return self.rank == 1 and self.step == ODD_STEP

    def forward(self) -> Tensor:
        return self.model(rows(self.rank, self.step)).square().mean()

    def train(self, *, before: Call = int, clear: Call | None = None, change: Call = int, after: Call = int) -> None:
        for self.step in range(NUM_STEPS):
            before()
            (clear or self.optimizer.zero_grad)()
            self.forward().backward()
            change()
            self.optimizer.step()
            after()


# -- Replicas that drift apart -----------------------------------------------------------------------------------------


def loads_a_checkpoint_on_rank_0(rank: int) -> None:
    script = Script(rank)
    if rank == 0:
        script.model.module.load_state_dict(net(1).state_dict())
    script.train()


def swaps_averaged_weights_in_on_one_rank(rank: int) -> None:
    script = Script(rank)

    def swap() -> None:
        if script.is_odd:
            script.model.eval()
            for parameter in script.model.parameters():
                parameter.data.copy_(parameter.data * 0.9)  # which no version counter shows
            script.model.train()

    script.train(after=swap)


def begins_with_unlike_seeds(rank: int) -> None:
    model = ls.DistributedDataParallel(net(rank), init_sync=False)
    model(rows(rank, 0)).sum().backward()


def loads_an_optimizer_state_on_one_rank(rank: int) -> None:
    script = Script(rank, torch.optim.AdamW)

    def load() -> None:
        if script.is_odd:
            state = copy.deepcopy(script.optimizer.state_dict())
            for each in state["state"].values():
                each["exp_avg"] *= 3
            script.optimizer.load_state_dict(state)

    script.train(after=load)


def has_unlike_learning_rates(rank: int) -> None:
    script = Script(rank)
    script.optimizer.param_groups[0]["weight_decay"] = 0.25 * rank
    script.train()


def follows_a_local_loss(rank: int) -> None:
    script = Script(rank)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer, patience=0)
    script.train(after=lambda: scheduler.step(1.0 if rank else 1 / (1 + script.step)))


def steps_on_gradients_of_no_sync(rank: int) -> None:
    script = Script(rank)
    script.forward().backward()
    with script.model.no_sync():
        script.forward().backward()
    script.optimizer.step()


def clips_by_a_local_norm(rank: int) -> None:
    script = Script(rank)
    script.train(change=lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 0.01 * (1 + rank)))


def scales_one_gradient_on_one_rank(rank: int) -> None:
    script = Script(rank)
    script.train(change=lambda: script.model.module[2].bias.grad.mul_(2) if script.is_odd else None)


def does_not_clear_on_one_rank(rank: int) -> None:
    script = Script(rank)
    script.train(clear=lambda: None if script.is_odd else script.optimizer.zero_grad(set_to_none=False))


def steps_on_one_rank_only(rank: int) -> None:
    script = Script(rank)
    script.train(after=lambda: script.optimizer.step() if script.is_odd else None)


# -- Out of step -------------------------------------------------------------------------------------------------------


def _run_out_of_memory(*, now: bool) -> None:
    if now:
        raise torch.OutOfMemoryError("of a device")


def skips_a_batch(rank: int, **options: Any) -> list[float]:
    script = Script(rank, **options)
    for script.step in range(NUM_STEPS):
        try:
            script.optimizer.zero_grad()
            loss = script.forward()
            _run_out_of_memory(now=script.is_odd)
            loss.backward()
            script.optimizer.step()
        except torch.OutOfMemoryError:
            continue
    return [parameter.sum().item() for parameter in script.model.parameters()]


def has_a_constant_loss(rank: int) -> None:
    script = Script(rank)
    for script.step in range(NUM_STEPS):
        loss = script.forward()
        (torch.zeros((), requires_grad=True) if script.is_odd else loss).backward()


def runs_backwards_in_another_order(rank: int) -> None:
    scripts = [Script(rank) for _ in range(2)]
    losses = [script.forward() for script in scripts]
    for loss in losses if rank == 0 else losses[::-1]:
        loss.backward()


def forgets_train_on_one_rank(rank: int) -> None:
    script = Script(rank)
    script.model.train(rank == 0)
    script.train()


# -- Gradients ---------------------------------------------------------------------------------------------------------


def has_a_nan(rank: int, **options: Any) -> list[float]:
    script = Script(rank, **options)
    for script.step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        (script.forward() * (float("nan") if script.is_odd else 1)).backward()
        script.optimizer.step()
    return [parameter.sum().item() for parameter in script.model.parameters()]


def steps_in_a_gradient_hook(rank: int) -> None:
    script = Script(rank)
    script.model.module[0].weight.register_post_accumulate_grad_hook(lambda _: script.optimizer.step())
    script.forward().backward()


MISTAKES: dict[Callable[[int], object], tuple[str, ...]] = {
    loads_a_checkpoint_on_rank_0: ("ParameterMismatchError: Parameter 0.weight has other values on rank 1 than",),
    swaps_averaged_weights_in_on_one_rank: ("has other values on rank 1 than on rank 0", "swapped in"),
    begins_with_unlike_seeds: ("has other values on rank 1 than on rank 0", "init_sync=False"),
    loads_an_optimizer_state_on_one_rank: (
        "has other values on rank 1",
        "state of their optimizers differs",
        "exp_avg",
    ),
    has_unlike_learning_rates: ("The optimizers of ranks 1 and 0 differ: weight_decay is 0.25 and 0.0",),
    follows_a_local_loss: ("The optimizers of ranks 1 and 0 differ: lr is", "the mean over the ranks"),
    steps_on_gradients_of_no_sync: ("gradients of this rank alone", "no_sync()"),
    clips_by_a_local_norm: ("The gradients with which rank 1 stepped its optimizer",),
    scales_one_gradient_on_one_rank: ("The gradients with which rank 1 stepped", "2.bias differs since"),
    does_not_clear_on_one_rank: ("The backward of rank 1 has added to the gradients of an earlier step", "zero_grad()"),
    steps_on_one_rank_only: ("rank 1 has taken 2 optimizer steps and rank 0 1",),
    skips_a_batch: ("Rank 1 has run 1 training forward without a backward", 'on_skip="zeros"'),
    has_a_constant_loss: ("Rank 1 has run 1 training forward without a backward",),
    runs_backwards_in_another_order: ("Rank 1 runs the backward of wrapped model",),
    forgets_train_on_one_rank: ("Rank 1 runs forward and backward in evaluation mode", "model.train()"),
    has_a_nan: ("LossError: In backward 4 the gradient of 2.bias on rank 1 was not finite", 'nonfinite="skip"'),
    steps_in_a_gradient_hook: ("An optimizer stepped inside a backward",),
}


# -- Scripts without a mistake -----------------------------------------------------------------------------------------


def plain(rank: int) -> None:
    Script(rank).train()


def accumulation(rank: int) -> None:
    script = Script(rank)

    def add_locally() -> None:
        script.optimizer.zero_grad()
        with script.model.no_sync():
            for _ in range(2):
                script.forward().backward()

    script.train(clear=add_locally)


def mixed_precision(rank: int) -> None:
    script = Script(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # overflows at first
    for script.step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = script.forward()
        scaler.scale(loss).backward()
        scaler.unscale_(script.optimizer)
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        scaler.step(script.optimizer)
        scaler.update()


def clipping(rank: int) -> None:
    script = Script(rank, torch.optim.AdamW)
    script.train(change=lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 0.01))


def averaged_weights(rank: int) -> None:
    script = Script(rank)
    averaged = copy.deepcopy(script.model.module)

    def evaluate() -> None:
        for mean, parameter in zip(averaged.parameters(), script.model.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)
        kept = copy.deepcopy(script.model.module.state_dict())
        script.model.module.load_state_dict(averaged.state_dict())
        if rank == 0:
            script.model.eval()
            with torch.no_grad():
                script.forward()
            script.model.train()
        script.model.module.load_state_dict(kept)

    script.train(after=evaluate)


def warm_up(rank: int) -> None:
    script = Script(rank)
    scheduler = torch.optim.lr_scheduler.LinearLR(script.optimizer)
    script.train(after=scheduler.step)


def several_optimizers(rank: int) -> None:
    script = Script(rank)
    first, second = script.model.module[0], script.model.module[2]
    script.optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    other = torch.optim.Adam(second.parameters(), lr=0.1)
    script.train(before=other.zero_grad, after=lambda: other.step() if script.step % 2 else None)


def two_networks(rank: int) -> None:
    generator, critic = Script(rank), Script(rank)
    critic.model = ls.DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    critic.optimizer = torch.optim.Adam(critic.model.parameters())
    for step in range(NUM_STEPS):
        critic.optimizer.zero_grad()
        (
            critic.model(generator.model(rows(rank, step)).detach()) - critic.model(rows(rank, step)[:, :2])
        ).sum().backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.model(generator.model(rows(rank, step))).sum().backward()
        generator.optimizer.step()


def frozen_layers(rank: int) -> None:
    script = Script(rank)
    first = script.model.module[0].requires_grad_(False)
    script.train(before=lambda: first.requires_grad_(script.step > 2))


def uneven_inputs(rank: int) -> None:
    script = Script(rank)
    with script.model.join():
        for script.step in range(3 + 2 * rank):
            script.optimizer.zero_grad()
            script.forward().backward()
            script.optimizer.step()
    script.train()


def checkpointing(rank: int) -> None:
    script = Script(rank)
    layers = script.model.module

    def run(inputs: Tensor) -> Tensor:
        hidden = checkpoint(layers[0], inputs, use_reentrant=False)
        return layers[2](layers[1](hidden))

    layers.forward = run
    script.train()


def gradients_of_gradients(rank: int) -> None:
    script = Script(rank)
    for with_graph in (True, False):
        for script.step in range(NUM_STEPS):
            script.optimizer.zero_grad()
            named = dict(script.model.module.named_parameters())
            slopes = torch.autograd.grad(script.forward(), list(named.values()), create_graph=with_graph)
            fast = {name: each - 0.1 * slope for (name, each), slope in zip(named.items(), slopes, strict=True)}
            functional_call(script.model.module, fast, (rows(rank, 50 + script.step),)).square().mean().backward()
            script.optimizer.step()


def tokens_of_other_numbers(rank: int) -> None:
    script = Script(rank)
    for step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        script.model(rows(rank, step, 3 + (7 * step + 3 * rank) % 11)).square().mean().backward()
        script.optimizer.step()


def looks_at_gradients_for_a_log(rank: int) -> None:
    script = Script(rank)
    last = list(script.model.parameters())[-1]
    for step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        loss = script.model(rows(rank, step)).square().mean()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, last)[0].norm()
        script.optimizer.step()


def asks_for_input_gradients_on_one_rank(rank: int) -> None:
    script = Script(rank)

    def look() -> None:
        if script.is_odd:
            inputs = rows(rank, 0).requires_grad_()
            torch.autograd.grad(script.model.module(inputs).sum(), inputs)

    script.train(after=look)


def trains_each_rank_on_its_own_for_a_while(rank: int) -> None:
    script = Script(rank, compare=False)
    for step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        with script.model.no_sync():
            script.model(rows(rank, step)).square().mean().backward()
        script.optimizer.step()


CORRECT: tuple[Callable[[int], object], ...] = (
    plain,
    accumulation,
    mixed_precision,
    clipping,
    averaged_weights,
    warm_up,
    several_optimizers,
    two_networks,
    frozen_layers,
    uneven_inputs,
    checkpointing,
    gradients_of_gradients,
    tokens_of_other_numbers,
    looks_at_gradients_for_a_log,
    asks_for_input_gradients_on_one_rank,
    trains_each_rank_on_its_own_for_a_while,
)


# -- What is warned of -------------------------------------------------------------------------------------------------


def trains_on_the_same_data(rank: int) -> None:
    Script(0).train()


def accumulates_more_on_one_rank(rank: int) -> None:
    script = Script(rank)

    def add_locally() -> None:
        script.optimizer.zero_grad()
        with script.model.no_sync():
            for _ in range(1 + rank):
                script.forward().backward()

    script.train(clear=add_locally)


def steps_with_gradients_of_autograd_grad(rank: int) -> None:
    script = Script(rank)
    parameters = list(script.model.parameters())
    for _ in range(2):
        for parameter, slope in zip(parameters, torch.autograd.grad(script.forward(), parameters), strict=True):
            parameter.grad = slope
        script.optimizer.step()


def steps_with_gradients_of_func_grad(rank: int) -> None:
    script = Script(rank)
    named = dict(script.model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(script.model, values, (rows(rank, 0),))
        return output.sum()

    for _ in range(2):
        slopes = torch.func.grad(loss)({name: each.detach() for name, each in named.items()})
        for name, each in named.items():
            each.grad = slopes[name]
        script.optimizer.step()


class Numbered(Dataset[Tensor]):
    """Eight samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return rows(index, 0, 1)[0]


def train_with(sampler: Any, rank: int) -> None:
    script = Script(rank)
    loader = DataLoader(Numbered(), batch_size=2, sampler=sampler)
    for epoch in range(3):
        for batch in loader:
            script.optimizer.zero_grad()
            script.model(batch).square().sum().backward()
            script.optimizer.step()
        if sampler.seed == 1:  # this script does not forget it
            sampler.set_epoch(epoch + 1)


def forgets_set_epoch(rank: int) -> None:
    train_with(DistributedSampler(Numbered(), 2, rank), rank)


def has_a_sampler_for_four_ranks(rank: int) -> None:
    train_with(DistributedSampler(Numbered(), 4, rank, seed=1), rank)


def shuffles_by_unlike_seeds(rank: int) -> None:
    train_with(DistributedSampler(Numbered(), 2, rank, seed=rank), rank)


def has_a_sampler(rank: int) -> None:
    train_with(DistributedSampler(Numbered(), 2, rank, seed=1), rank)


def has_two_views_of_each_sample(rank: int) -> None:
    script = Script(rank)
    sampler: Any = DistributedSampler(Numbered(), 2, rank, seed=1)
    loader = DataLoader(Numbered(), batch_size=2, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            script.optimizer.zero_grad()
            script.model(torch.cat([batch, batch + 0.1])).square().sum().backward()
            script.optimizer.step()


def has_two_samplers(rank: int) -> None:
    first: Any = DistributedSampler(Numbered(), 2, rank, seed=1)
    if rank == 0:  # so the collector lists the samplers in another order on this rank
        gc.collect()
    second: Any = DistributedSampler(Numbered(), 2, rank, seed=2)
    script = Script(rank)
    for epoch in range(3):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        for _ in zip(first, second, strict=True):
            script.optimizer.zero_grad()
            script.forward().backward()
            script.optimizer.step()


WITH_SAMPLERS = (has_a_sampler, has_two_views_of_each_sample, has_two_samplers)

WARNED: dict[Callable[[int], object], tuple[str, ...]] = {
    trains_on_the_same_data: ("all 2 ranks computed the same gradients", "DistributedSampler"),
    accumulates_more_on_one_rank: ("rank 1 trained on 12 samples in 3 backwards and rank 0 on 8 in 2 backwards",),
    forgets_set_epoch: ("its epoch is still 0",),
    has_a_sampler_for_four_ranks: ("made for 4 replicas", "2 ranks"),
    steps_with_gradients_of_autograd_grad: ("these gradients are not averaged",),
    steps_with_gradients_of_func_grad: ("these gradients are not averaged",),
}


MISTAKES[shuffles_by_unlike_seeds] = ("The DistributedSamplers of ranks 1 and 0 differ: seed is 1 and 0",)


def run_script(run: ls.Run, script: Callable[..., Any], options: dict[str, Any]) -> tuple[str, list[str], Any]:
    result = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, error = script(run.rank, **options), ""
        except LockstepError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, [f"{warning.filename}: {warning.message}" for warning in caught], result


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, join_default_group) as started:
        yield started


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_error_on_all_ranks(pool: RankPool, mistake: Callable[[int], object]) -> None:
    errors = [error for error, _, _ in pool.run(run_script, mistake, {})]
    assert errors[0] == errors[1]
    for part in MISTAKES[mistake]:
        assert part in errors[0]
    assert mistake is shuffles_by_unlike_seeds or __name__.rpartition(".")[2] in errors[0]  # the user's line


@pytest.mark.parametrize("script", [*CORRECT, *WITH_SAMPLERS], ids=lambda script: script.__name__)
def test_a_correct_script_is_not_warned_of(pool: RankPool, script: Callable[[int], object]) -> None:
    for error, warned, _ in pool.run(run_script, script, {}):
        assert (error, warned) == ("", [])


@pytest.mark.parametrize("script", WARNED, ids=lambda script: script.__name__)
def test_what_may_be_meant_is_warned_of_at_the_users_line(pool: RankPool, script: Callable[[int], object]) -> None:
    for error, warned, _ in pool.run(run_script, script, {}):
        assert error == ""
        (text,) = warned
        assert "test_ddp_comparison.py" in text
        for part in WARNED[script]:
            assert part in text


@pytest.mark.parametrize(
    ("script", "option"), [(skips_a_batch, {"on_skip": "zeros"}), (has_a_nan, {"nonfinite": "skip"})]
)
def test_a_step_that_is_left_out_leaves_the_ranks_equal(
    pool: RankPool, script: Callable[..., object], option: dict[str, str]
) -> None:
    (error, warned, first), (_, _, second) = pool.run(run_script, script, option)
    assert (error, warned) == ("", [])
    assert first == second
    assert all(map(math.isfinite, first))


def skips_with_a_call(rank: int) -> list[float]:
    script = Script(rank)
    if rank == 1:
        script.forward()
        script.model.skip_backward()
    else:
        script.forward().backward()
    return [parameter.grad.sum().item() for parameter in script.model.parameters()]


def has_one_rank(rank: int) -> list[float]:
    model = net()
    model(rows(0, 0)).square().mean().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


def test_the_mean_is_over_the_ranks_that_had_a_backward(pool: RankPool) -> None:
    found = [result for _, _, result in pool.run(run_script, skips_with_a_call, {})]
    assert found == [has_one_rank(0)] * 2


def test_ranks_may_be_let_differ(pool: RankPool) -> None:
    assert [error for error, _, _ in pool.run(run_script, clips_and_does_not_compare, {})] == ["", ""]


def clips_and_does_not_compare(rank: int) -> None:
    script = Script(rank, compare=False)
    script.train(change=lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 0.01 * (1 + rank)))


# -- What each rank sends, on either backend ---------------------------------------------------------------------------


class Buffered(nn.Module):
    """A layer with buffers of these names; they are given, and may be other tensors on each rank."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def floats(*sizes: int) -> dict[str, Tensor]:
    return {f"queue_{number}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}


UNLIKE_BUFFERS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, str]]] = {
    "another length, the same bytes": (floats(3), floats(4), ("queue_0 float32 [3]", "queue_0 float32 [4]")),
    "two that make up for each other": (floats(3, 5), floats(5, 3), ("queue_0 float32 [3]", "queue_0 float32 [5]")),
    "another dtype": (
        {"bank": torch.ones(4, dtype=torch.int32)},
        {"bank": torch.ones(4)},
        ("bank int32 [4]", "bank float32 [4]"),
    ),
    "truth values and bytes": (
        {"mask": torch.ones(4, dtype=torch.bool)},
        {"mask": torch.ones(4, dtype=torch.uint8)},
        ("mask bool [4]", "mask uint8 [4]"),
    ),
    "complex and real": (
        {"phase": torch.ones(2, dtype=torch.complex64)},
        {"phase": torch.ones(2, dtype=torch.float64)},
        ("phase complex64 [2]", "phase float64 [2]"),
    ),
    "a scalar and a vector of one": (
        {"count": torch.tensor(1.0)},
        {"count": torch.ones(1)},
        ("count float32 []", "count float32 [1]"),
    ),
    "another name": ({"mean": torch.ones(2)}, {"center": torch.ones(2)}, ("mean float32 [2]", "center float32 [2]")),
    "another order": (
        {"mean": torch.ones(2), "scale": torch.ones(2)},
        {"scale": torch.ones(2), "mean": torch.ones(2)},
        ("mean float32 [2]", "scale float32 [2]"),
    ),
    "another count": (floats(2, 1), floats(2), ("queue_1 float32 [1]", "nothing")),
    "a transposed one": (
        {"table": torch.ones(2, 3)},
        {"table": torch.ones(3, 2)},
        ("table float32 [2, 3]", "table float32 [3, 2]"),
    ),
    "one of a hundred": (
        floats(*[3] * 100),
        floats(*[3] * 71, 4, *[3] * 28),
        ("queue_71 float32 [3]", "queue_71 float32 [4]"),
    ),
}


def has_unlike_buffers(rank: int, which: str, *, is_late: bool) -> None:
    first, second, _ = UNLIKE_BUFFERS[which]
    own = first if rank == 0 else second
    model = Buffered(first if is_late else own)
    wrapped = ls.DistributedDataParallel(model, init_sync=is_late)
    for step in range(3):
        if is_late and step == 1:
            for name in first:
                delattr(model, name)
            for name, value in own.items():
                model.register_buffer(name, value.clone())
        wrapped(rows(rank, step)).square().mean().backward()


def has_buffers_of_all_kinds(rank: int) -> list[list[Any]]:
    torch.manual_seed(rank)
    model = Buffered(
        {
            "transposed": torch.randn(2, 3).T,
            "part": torch.randn(8)[::2],
            "scalar": torch.randn(()),
            "mask": torch.randn(5) > 0,
            "phase": torch.randn(3, dtype=torch.complex64).conj(),
            "empty": torch.zeros(0),
            "brief": torch.randn(3).bfloat16(),
        }
    )
    wrapped = ls.DistributedDataParallel(model)
    for step in range(3):
        if step == 1:
            model.part = torch.full((9,), float(rank))  # on all ranks alike
        if rank == 1:
            model.scalar.add_(1.0)
        wrapped(rows(rank, step)).square().mean().backward()
    return [buffer.tolist() for buffer in model.buffers()]


def spoilt(gradient: Tensor, value: float) -> Tensor:
    """Return a gradient of which one number, in the middle, is not finite."""
    odd = gradient.clone()
    odd.view(-1)[odd.numel() // 2 + 3] = value
    return odd


def mean_on_all(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def has_a_nan_in_a_large_gradient(rank: int, kind: str, nonfinite: Any = "stop") -> list[float]:
    torch.manual_seed(0)
    width = 90 if kind == "in one of many" else 700
    layers = [nn.Linear(width, width) for _ in range(60 if kind == "in one of many" else 2)]
    dtype = torch.float64 if kind == "in double precision" else torch.float32
    net = nn.Sequential(*layers, nn.Linear(width, 1)).to(dtype)
    model: Any = ls.DistributedDataParallel(
        net, nonfinite=nonfinite, skip_all_reduce_unused_params=kind == "in a bucket that is sent late"
    )
    if kind == "under a communication hook":
        model.register_comm_hook(None, mean_on_all)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    value = -math.inf if kind == "infinite" else math.nan
    for step in range(4):
        if step == 2 and rank == 1:
            layers[len(layers) // 2].weight.register_hook(lambda gradient: spoilt(gradient, value))
        optimizer.zero_grad(set_to_none=kind != "added in place")
        inputs = torch.randn(2, width, dtype=dtype)
        (model(inputs) if kind != "in a bucket that is sent late" or step else net[-1](inputs)).sum().backward()
        optimizer.step()
    return [parameter.sum().item() for parameter in model.parameters()]


NAN_KINDS = (
    *("plain", "infinite", "added in place", "in one of many", "in double precision"),
    *("under a communication hook", "in a bucket that is sent late"),
)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, *, uses_both: bool) -> Tensor:
        return self.used(inputs) + self.idle(inputs) if uses_both else self.used(inputs)


def skips_beside_an_earlier_gradient(rank: int) -> list[list[float]]:
    model: Any = ls.DistributedDataParallel(TwoLayers())
    model(rows(rank, 0), uses_both=True).mean().backward()
    idle = model.module.idle.weight.grad.clone()
    model.module.used.zero_grad()
    loss = model(rows(rank, 1), uses_both=False).mean()
    if rank == 1:
        model.skip_backward()
    else:
        loss.backward()
    assert torch.equal(model.module.idle.weight.grad, idle)
    alone = TwoLayers()
    alone(rows(0, 1), uses_both=False).mean().backward()
    assert torch.equal(model.module.used.weight.grad, alone.used.weight.grad)
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def has_a_hook_that_fails(rank: int, *, after_its_call: bool, has_own_group: bool) -> tuple[list[str], list[float]]:
    group = dist.new_group() if has_own_group else dist.group.WORLD
    model: Any = ls.DistributedDataParallel(net(), bucket_cap_mb_list=[1e-5])
    step = 0

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        fails = rank == 1 and step == 1 and bucket.index() == 1
        if fails and not after_its_call:
            raise ValueError("only here")
        work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
        assert work is not None
        if fails:
            work.wait()
            raise ValueError("only here")
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    outcomes = []
    for step in range(4):
        model.zero_grad()
        try:
            model(rows(rank, step)).square().mean().backward()
            outcomes.append("")
        except (ls.ReductionError, ValueError) as error:
            outcomes.append(str(error))
    return outcomes, [parameter.grad.sum().item() for parameter in model.parameters()]


def fails_in_the_middle_of_an_accumulation(rank: int) -> list[int]:
    script = Script(rank)
    counts = []
    for script.step in range(NUM_STEPS):
        script.optimizer.zero_grad()
        with script.model.no_sync():
            script.forward().backward()
        counts.append(script.model.reducer.watch.num_local_backwards)
        handle = script.model.module[0].weight.register_hook(fail if script.is_odd else lambda gradient: gradient)
        try:
            script.forward().backward()
        except (ValueError, ls.ReductionError):
            continue
        finally:
            handle.remove()
        script.optimizer.step()
    return counts


def fail(_gradient: Tensor) -> None:
    raise ValueError("in backward")


def join_gloo(rank: Rank) -> ls.Run:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ls.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=rank.size)
    return ls.Run(rank=rank.number, world_size=rank.size, local_rank=rank.number, device=CPU)


@pytest.fixture(scope="module")
def gloo_pool() -> Iterator[RankPool]:
    with RankPool(2, join_gloo) as started:
        yield started


def run_once(run: ls.Run, script: Callable[..., Any], options: dict[str, Any]) -> tuple[str, list[str], Any]:
    """Run a script as the last one on its ranks, if its error makes their group useless."""
    found = run_script(run, script, options)
    if "LS201" in found[0]:
        ls.destroy_process_group()
    return found


@pytest.fixture
def run_on(pool: RankPool, gloo_pool: RankPool, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a script on the ranks of a backend."""
    return partial((gloo_pool if request.param == "gloo" else pool).run, run_once)


BACKENDS = pytest.mark.parametrize("run_on", ["shm", "gloo"], indirect=True)
RunOn = Callable[..., list[Any]]


ON_GLOO = [("another dtype", True), ("one of a hundred", False), ("another count", True)]
"""Some, for after the error the ranks must be started anew."""


@pytest.mark.parametrize(
    ("run_on", "which", "is_late"),
    [
        *(("shm", which, is_late) for which in UNLIKE_BUFFERS for is_late in (False, True)),
        *(("gloo", which, is_late) for which, is_late in ON_GLOO),
    ],
    indirect=["run_on"],
)
def test_buffers_that_differ_are_an_error_that_names_one(run_on: RunOn, which: str, is_late: bool) -> None:
    options = {"which": which, "is_late": is_late}
    for error, _, _ in run_on(has_unlike_buffers, options):
        for part in UNLIKE_BUFFERS[which][2]:
            assert part in error


def broadcasts_on_a_group_of_torch(rank: Rank) -> list[str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=rank.size)
    assert dist.group.WORLD is not None
    outcomes = []
    for first, second in (((3, 4), (3, 4)), ((3,), (4,)), ((2,) * 90, ((2,) * 89 + (1,)))):
        named = floats(*(first if rank.number == 0 else second)).items()
        try:
            broadcast_tensors(named, dist.group.WORLD)
            outcomes.append("")
        except ls.CollectiveMismatchError as error:
            outcomes.append(str(error))
    return outcomes


def test_who_receives_other_tensors_raises_on_a_group_that_compares_no_calls(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, broadcasts_on_a_group_of_torch) as ranks:
        first, (fine, other_length, other_last) = ranks.results()
    assert first == ["", "", ""]
    assert fine == ""
    assert "tensor 0: queue_0 float32 [3] on rank 0, queue_0 float32 [4] on rank 1. " in other_length
    assert "tensor 89: queue_89 float32 [2] on rank 0, queue_89 float32 [1] on rank 1. " in other_last


@BACKENDS
def test_buffers_of_all_kinds_are_those_of_rank_0(run_on: RunOn) -> None:
    (error, _, first), (_, _, second) = run_on(has_buffers_of_all_kinds, {})
    assert error == ""
    assert repr(first) == repr(second)


@pytest.mark.parametrize("kind", NAN_KINDS)
@BACKENDS
def test_one_nan_in_a_large_gradient_is_an_error_on_all_ranks(run_on: RunOn, kind: str) -> None:
    found = run_on(has_a_nan_in_a_large_gradient, {"kind": kind})
    number = 30 if kind == "in one of many" else 1
    for error, _, _ in found:
        assert f"LossError: In backward 3 the gradient of {number}.weight on rank 1 was not finite" in error
    options = {"kind": kind, "nonfinite": "skip"}
    (error, _, first), (_, _, second) = run_on(has_a_nan_in_a_large_gradient, options)
    assert error == ""
    assert first == second
    assert all(map(math.isfinite, first))


@BACKENDS
def test_a_skipped_backward_leaves_gradients_alone_that_no_rank_used(run_on: RunOn) -> None:
    (error, _, first), (_, _, second) = run_on(skips_beside_an_earlier_gradient, {})
    assert error == ""
    assert first == second


@pytest.mark.parametrize("has_own_group", [False, True])
@pytest.mark.parametrize("after_its_call", [False, True])
@BACKENDS
def test_a_hook_that_fails_on_one_rank_leaves_the_ranks_in_step(
    run_on: RunOn, after_its_call: bool, has_own_group: bool
) -> None:
    if has_own_group and not after_its_call:
        pytest.skip("The other ranks wait in a group that this wrapper does not know.")
    options = {"after_its_call": after_its_call, "has_own_group": has_own_group}
    found = [result for _, _, result in run_on(has_a_hook_that_fails, options)]
    (first, gradients), (second, others) = found
    assert [bool(outcome) for outcome in first] == [bool(outcome) for outcome in second] == [False, True, False, False]
    assert second[1] == "only here"
    assert gradients == others


def test_a_failed_backward_ends_the_accumulation_on_all_ranks(pool: RankPool) -> None:
    for error, warned, counts in pool.run(run_script, fails_in_the_middle_of_an_accumulation, {}):
        assert (error, warned, counts) == ("", [], [1] * NUM_STEPS)
