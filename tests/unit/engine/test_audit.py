"""What an audit looks at in each step: equal on any number of workers, and other where a bit is."""

import warnings
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.audit_facts import condense, find_differing
from lockstep.comm import World
from lockstep.data import Slice
from lockstep.engine.audit import numbers_of_samples, windows_of
from lockstep.errors import ReductionError
from lockstep.events import StepAudited
from lockstep.runs.audit_log import Difference, find_difference
from lockstep.sharding.pieces import Piece

ALONE = World(rank=0, world_size=1, group=None)
NUM_SHARDS = 4
AT = 2
"""The step before which, or in which, something is altered."""


class Audited:
    """A short training; `alter(self, batch)` is called before its step `AT`."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(0)
        self.world = world
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.trainer = ls.Trainer(
            self.model, self.optimizer, loss=self.loss, num_shards=NUM_SHARDS, world=world, verify_steps=0
        )

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def train(self, alter: Callable[["Audited", Any], None] = lambda _self, _batch: None) -> list[StepAudited]:
        inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        loader = self.trainer.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
        assert self.trainer.internals.audited() == []
        found: list[StepAudited] = []
        for number, batch in enumerate(loader.epoch(0), start=1):
            if number == AT:
                alter(self, batch)
            self.trainer.step(batch)
            found += self.trainer.internals.audited()
        return found


def flip(tensor: Tensor, element: int, bit: int) -> None:
    tensor.detach().view(-1).view(torch.int32)[element] ^= 1 << bit


def first_difference(logged: list[StepAudited], again: list[StepAudited]) -> Difference | None:
    pairs = zip(logged, again, strict=True)
    found = (
        find_difference({**one.facts, "step": one.global_step}, other.facts, NUM_SHARDS, other.places)
        for one, other in pairs
    )
    return next((each for each in found if each is not None), None)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_facts_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    expected = Audited(ALONE).train()
    assert [each.global_step for each in expected] == [1, 2, 3, 4]
    for found in run_ranks(workers, lambda world: Audited(world).train()):
        assert first_difference(expected, found) is None
        assert {each.workers for each in found} == {workers}


class Overflowing(nn.Module):
    """Has NaN in its gradient, although its losses are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs * 100).float().sqrt().nan_to_num(0.0) * 300


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_skipped_step_has_equal_facts_on_any_number_of_workers(precision: Any) -> None:
    # The bits of NaN in a gradient depend on the order of its parts, and what no optimizer uses is not added up at all.
    def train(world: World) -> list[StepAudited]:
        torch.manual_seed(0)
        model = Overflowing() if precision == "float16" else nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
        trainer = ls.Trainer(
            model,
            torch.optim.AdamW(model.parameters()),
            loss=Audited.loss,
            num_shards=NUM_SHARDS,
            world=world,
            nonfinite="skip",
            precision=precision,
        )
        inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        if precision == "float32":
            inputs[5], inputs[17, 2] = float("nan"), float("inf")
        loader = trainer.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=13)
        trainer.internals.audited()
        for batch in loader.epoch(0):
            trainer.step(batch)
        return trainer.internals.audited()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = train(ALONE)
        assert any(not each.places["gradient"] for each in expected)
        for found in run_ranks(2, train):
            assert first_difference(expected, found) is None


class Tokens(UserDict[str, Tensor]):
    """As a tokenizer returns them: torch's walk over nested values does not enter it."""


@pytest.mark.parametrize("place", range(5))
def test_a_bit_of_any_sample_counts(place: int) -> None:
    def number(*, is_altered: bool) -> float:
        tensors = [torch.linspace(0.1, 1.0, 1000) for _ in range(5)]
        if is_altered:
            flip(tensors[place], 7, 0)
        held = SimpleNamespace(values=[tensors[2]], inner=SimpleNamespace(array=tensors[3].numpy()))
        data = {"array": tensors[0].numpy(), "tokens": Tokens(x=tensors[1]), "held": held, "last": (tensors[4], "a")}
        return numbers_of_samples([Slice(shard=1, data=data, num_samples=3)])[1]

    assert number(is_altered=True) != number(is_altered=False) == number(is_altered=False)


def alter_sample(_training: Audited, batch: Any) -> None:
    flip(batch.slices[2].data[0], 5, 0)


def alter_gradient(training: Audited, _batch: Any) -> None:
    handles: list[Any] = []

    def hook(gradient: Tensor) -> Tensor:
        handles[0].remove()
        other = gradient.clone()
        flip(other, 3, 0)
        return other

    handles.append(training.model[3].weight.register_hook(hook))


def alter_rate(training: Audited, _batch: Any) -> None:
    training.optimizer.param_groups[0]["lr"] *= 2


ALTERED: dict[str, tuple[Callable[[Audited, Any], None], str, tuple[str, ...]]] = {
    "a sample": (alter_sample, "samples", ("shard 2",)),
    "a parameter": (lambda training, _: flip(training.model[0].weight.data, 7, 1), "state", ("0.weight",)),
    "a buffer": (lambda training, _: flip(training.model[1].running_var, 1, 30), "state", ("1.running_var",)),
    "a gradient": (alter_gradient, "gradient", ("3.weight",)),
    "the learning rate": (alter_rate, "options", ()),
}


@pytest.mark.parametrize("what", ALTERED)
def test_a_bit_that_is_altered_is_found_with_its_step_and_place(what: str) -> None:
    alter, fact, where = ALTERED[what]
    found = first_difference(Audited(ALONE).train(alter), Audited(ALONE).train())
    assert found == Difference(global_step=AT, fact=fact, where=where)
    assert str(found).startswith(f"step {AT}: ")


def alter_applied_gradient(training: Audited, _batch: Any) -> None:
    gradient = training.model[3].weight

    def hook(*_: Any) -> None:
        handle.remove()
        flip(gradient.grad, 3, 0)

    handle = training.optimizer.register_step_pre_hook(hook)


@pytest.mark.parametrize("alter", [ALTERED["a parameter"][0], alter_applied_gradient])
def test_a_bit_of_one_worker_alone_is_an_error_on_all(alter: Callable[[Audited, Any], None]) -> None:
    def program(world: World) -> str:
        def alter_one(training: Audited, batch: Any) -> None:
            if world.rank == 1:
                alter(training, batch)

        training = Audited(world)
        with pytest.raises(ReductionError) as raised:
            training.train(alter_one)
        return str(raised.value)

    messages = run_ranks(2, program)
    assert all("other bits on rank 1 than on rank 0" in text for text in messages)


def test_nothing_is_looked_at_where_nobody_asks() -> None:
    training = Audited(ALONE)
    assert training.trainer.internals.engine.runs.state.audited is None


def test_windows_cover_a_large_model_in_turn() -> None:
    tensors = {"a": torch.zeros(100_000), "b": torch.zeros(3, 7), "c": torch.zeros(70_000, dtype=torch.float64)}
    windows = windows_of(tensors)
    sizes = [sum((each.stop - each.start) * tensors[each.name].element_size() for each in some) for some in windows]
    assert max(sizes) <= 1 << 18
    covered = [(each.name, place) for some in windows for each in some for place in (each.start, each.stop - 1)]
    assert len(set(covered)) == len(covered)
    assert sum(each.stop - each.start for some in windows for each in some) == sum(map(torch.numel, tensors.values()))
    assert windows_of({"b": tensors["b"]}) == [[Piece("b", 0, 21)]]
    assert windows_of({}) == [[]]


@pytest.mark.parametrize("count", [1, 12, 18, 19, 81])
def test_marks_name_the_one_number_that_differs(count: int) -> None:
    numbers = [float(7 * place) for place in range(count)]
    for odd in {0, count // 2, count - 1}:
        others = [*numbers[:odd], 1e9, *numbers[odd + 1 :]]
        texts = [condense(each, 18) for each in (numbers, others)]
        assert find_differing(texts[0], texts[1], count, 18) == [odd]
        assert find_differing(texts[0], texts[0], count, 18) == []
