"""What is said where ranks differ, from what they exchange: values in, words out."""

import logging
import threading
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import World
from lockstep.errors import ReductionError
from lockstep.parallel.comparison import ending
from lockstep.parallel.comparison.batches import SameDataWarning, UnevenBatchWarning
from lockstep.parallel.comparison.ending import EndOfScript
from lockstep.parallel.comparison.forwards import TrainingForwards
from lockstep.parallel.comparison.optimizers import OptimizerSteps
from lockstep.parallel.comparison.outside import IdleOptimizers, OutsideValue, find_outside_difference
from lockstep.parallel.comparison.wrap_order import find_other_order
from lockstep.reduce import GroupStatus


def head(bits: int, *, width: int = 3) -> OutsideValue:
    return OutsideValue("weight of a Linear", (width, 3), bits, float(bits))


def test_a_parameter_outside_is_named_with_both_values() -> None:
    text = find_outside_difference([(head(1), head(7)), (head(1), head(8))])
    assert "weight of a Linear adds up to 8.0 on rank 1 and to 7.0 on rank 0" in text


@pytest.mark.parametrize("others", [(head(1),), (), (head(2, width=4),)])
def test_parts_of_a_model_that_are_equal_or_of_other_shapes_are_not_warned_of(others: tuple[OutsideValue, ...]) -> None:
    assert find_outside_difference([(head(1),), others]) == ""


def names(*held: str) -> dict[int, frozenset[str]]:
    return {number: frozenset(each.split()) for number, each in enumerate(held, start=1)}


def test_models_that_have_changed_places_are_found_by_their_names() -> None:
    text = find_other_order([names("module encoder", "module decoder"), names("module decoder", "module encoder")])
    assert text.startswith("Wrapped model 1 on rank 1 is called 'decoder', which is wrapped model 2 on rank 0")


@pytest.mark.parametrize(
    "other",
    [
        names("module encoder", "module decoder"),
        names("encoder best", "decoder"),
        names("best", "decoder"),
        names("", ""),
        names("decoder"),
    ],
)
def test_other_names_alone_are_no_other_order(other: dict[int, frozenset[str]]) -> None:
    assert find_other_order([names("module encoder", "module decoder"), other]) == ""


def status(sizes: tuple[int, int], backwards: tuple[int, int]) -> GroupStatus:
    return GroupStatus(failed=(), changed=(), batch_sizes=sizes, nums_backwards=backwards)


def test_a_rank_that_accumulates_more_now_and_then_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    warning = UnevenBatchWarning()
    for sizes, backwards in [((8, 4), (2, 1)), ((4, 4), (1, 1)), ((8, 4), (2, 1))]:
        warning.look_at(status(sizes, backwards))
    (said,) = recwarn.list
    assert "rank 0 trained on 8 samples in 2 backwards and rank 1 on 4 in 1 backward" in str(said.message)


def step_idly(idle: IdleOptimizers, model: nn.Module, optimizer: torch.optim.Optimizer, num_reductions: int) -> None:
    trained = dict(model.named_parameters())
    for each in trained.values():
        each.grad = torch.zeros_like(each)
    others = [each for group in optimizer.param_groups for each in group["params"]]
    idle.look_at(optimizer, others, trained, num_reductions)


def test_an_optimizer_of_a_copy_is_refused_in_its_third_step() -> None:
    idle, model, optimizer = IdleOptimizers(), nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    for num_reductions in (1, 2, 2):  # twice after one reduction, which counts once
        step_idly(idle, model, optimizer, num_reductions)
    with pytest.raises(ReductionError, match="model's parameter weight"):
        step_idly(idle, model, optimizer, 3)


def test_an_optimizer_of_other_parameters_is_not_refused() -> None:
    idle, model = IdleOptimizers(), nn.Linear(2, 2)
    idle.note_owned(model.parameters())  # another optimizer steps them
    for num_reductions in range(1, 6):
        step_idly(idle, model, torch.optim.SGD(nn.Linear(2, 2).parameters()), num_reductions)
        step_idly(IdleOptimizers(), model, torch.optim.SGD(nn.Linear(2, 5).parameters()), num_reductions)


class NoReducer:
    """Stands for a reducer that has completed some reductions."""

    num_reductions = 7


def end_of(rank: int, store: dist.Store, num_backwards: int, monkeypatch: pytest.MonkeyPatch) -> EndOfScript:
    monkeypatch.setattr(ending, "group_store", lambda _group: store)
    ending._common_deadline.cache_clear()
    group: Any = object()
    world = World(rank=rank, world_size=2, group=group)
    reducer: Any = weakref.ref(NoReducer)
    end = EndOfScript(world, "a model", 1, TrainingForwards(), OptimizerSteps(), reducer)
    end.close()  # not at the end of this process
    for _ in range(num_backwards):
        end.note_begun()
    return end


def test_a_rank_that_ends_reads_that_another_one_waits_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    ahead, behind = end_of(0, store, 7, monkeypatch), end_of(1, store, 7, monkeypatch)
    with caplog.at_level(logging.WARNING, "lockstep"):
        thread = threading.Thread(target=behind._tell)
        thread.start()
        ahead.post_wait()  # in backward 8
        thread.join(20)
    (said,) = caplog.messages
    assert "The script of rank 1 has ended after 7 backwards of a model, and rank 0 has begun backward 8" in said


def test_ranks_that_end_together_read_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    ends = [end_of(rank, store, 3, monkeypatch) for rank in range(2)]
    threads = [threading.Thread(target=end._tell) for end in ends]
    with caplog.at_level(logging.WARNING, "lockstep"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert not caplog.messages


def test_a_rank_that_has_wrapped_many_models_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_WAIT_SECONDS", 0.0)
    ends = [end_of(0, dist.HashStore(), 3, monkeypatch) for _ in range(2)]
    for end in ends:
        end_of_other = end._store
        assert end_of_other is not None
        end_of_other.set("1", "3 0 runs line")
    ends[0]._tell()
    monkeypatch.setattr(ending, "_WAIT_SECONDS", 1e6)
    ends[1]._tell()  # its time is over since the first one's was


def test_equal_gradients_of_unlike_inputs_are_not_the_same_data() -> None:
    def look(inputs: tuple[int, int]) -> None:
        warning = SameDataWarning()
        status: Any = SimpleNamespace(empty=(), inputs=inputs, gradients=(5, 5))
        for _ in range(3):
            warning.look_at(status)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look((1, 2))
    with pytest.warns(UserWarning, match="all 2 ranks computed the same gradients"):
        look((1, 1))
