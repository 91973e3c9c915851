"""What the ranks of a wrapper find when they differ; ranks are threads, and a script is a few lines."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep as ls
from lockstep.comm import World
from lockstep.errors import LockstepError, ParameterMismatchError
from lockstep.parallel.comparison import by_hand

NUM_STEPS = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.fixture(autouse=True)
def no_waits_but_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads take turns."""
    monkeypatch.setattr(by_hand, "_WAIT_SECONDS", 0.0)


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
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")

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


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (writes_on_one_rank, ["0.weight has other values on rank 1", "written on one rank"]),
        (has_another_rate, ["lr is 0.2 and 0.1"]),
        (steps_twice_on_one_rank, ["rank 1 has taken 2 optimizer steps and rank 0 1"]),
        (evaluates_on_one_rank, ["Rank 1 runs forward and backward in evaluation mode"]),
        (freezes_a_layer_on_one_rank, ["layer 1 (Tanh) was in evaluation mode on rank 1 and in training mode"]),
        (computes_in_bfloat16_on_one_rank, ["autocast was on, with torch.bfloat16 on rank 1 and off on rank 0"]),
        (skips_a_backward, ["Rank 1 has run 1 training forward without a backward", "skip_backward()"]),
        (steps_on_local_gradients, ["with gradients of this rank alone"]),
        (holds_a_copy, ["The SGD that steps at", "parameters of a copy of the model", "after 3 backwards"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_difference_is_one_error_on_all_ranks(script: Callable[[Loop], object], parts: list[str]) -> None:
    first, second = run(script)
    assert first == second
    for part in parts:
        assert part in first


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


@pytest.mark.parametrize(
    "script",
    [
        trains_plainly,
        averages_weights_on_all_ranks,
        trains_two_models_with_one_optimizer,
        replaces_its_optimizer,
        averages_with_our_ring,
    ],
)
def test_a_correct_script_gets_no_message(script: Callable[[Loop], object]) -> None:
    assert not any(run(script))


def writes_under_our_ring(loop: Loop) -> None:
    loop.model.register_comm_hook(None, ls.ring_hook)
    writes_on_one_rank(loop)


def test_our_hooks_leave_the_comparison_on() -> None:
    assert all("0.weight has other values" in text for text in run(writes_under_our_ring))


def test_ranks_may_be_let_differ() -> None:
    assert not any(run(writes_on_one_rank, compare=False))


def test_a_model_may_be_wrapped_after_one_that_was_not_compared() -> None:
    # The second wrapper once waited for what the first, which compares no values, had never written to the store.
    assert not any(run(trains_two_models_with_one_optimizer, init_sync=False))


@pytest.mark.parametrize(
    ("on_rank_1", "value", "default"),
    [
        ({"nonfinite": "skip"}, "nonfinite='skip'", "nonfinite='stop'"),
        ({"on_skip": "zeros"}, "on_skip='zeros'", "on_skip='error'"),
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
