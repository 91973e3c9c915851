"""Mistakes after which the ranks of a `DistributedDataParallel` no longer train the same model: one error on all ranks.

And scripts without a mistake, which are not warned of. All run on two ranks, one after the other.
"""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.process.ranks import RankPool, join_default_group
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep as ls
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
