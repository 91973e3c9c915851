"""A worker is lost at an exchange that one of the others completes and another does not."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.faulty_runs import NUM_SHARDS, Growing, Run, Running
from tests.support.scripted_losses import Lost, ScriptedGenerations, ScriptedLosses
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.engine import recovery
from lockstep.engine.member import Member
from lockstep.engine.step_table import StepTable
from lockstep.engine.step_values import StepValues
from lockstep.errors import LossError, PeerFailedError

LOST = 2
"""Of the ranks 0 to 2."""
WHO_COMPLETES = pytest.mark.parametrize("completes", [(), (0,), (1,)], ids=["none", "rank 0", "rank 1"])


class Hooked(Running):
    """Has a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class Scripted(Run):
    """A run whose caller changes state between the calls: a scheduler of its own, weights swapped in for evaluation."""

    def __init__(self, world: World | None, model: type[nn.Module] = Running) -> None:
        super().__init__(world, model, on_worker_loss="continue")
        self.events: list[Any] = []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss, and another number."""
        noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002 - what user code does
        loss = self.spoil(nn.functional.mse_loss(model(batch[0]), batch[1]) * noise)
        return {"loss": loss, "double": (2 * loss.detach(), len(batch[1]))}

    def metric(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the mean error of a slice and its weight."""
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def train(self, folder: Path, arm: Callable[[str], None] = lambda _: None) -> list[Any]:
        """Train two epochs; call `arm` before each kind of call; return what must not depend on who was lost."""
        average: dict[str, Tensor] = {}
        for epoch in range(2):
            for batch in self.loader.epoch(epoch):
                arm("step")
                result = self.trainer.step(batch)
                self.events += [result.loss, result.values]
                for group in self.optimizer.param_groups:  # a scheduler of the caller's own
                    group["weight_decay"] = 0.01 * (1 + self.trainer.global_step)
                for name, value in self.model.named_parameters():
                    average[name] = value.detach() * 0.5 + average.get(name, value.detach()) * 0.5
                self.events.append(float(torch.rand(())))
            own = {name: value.detach().clone() for name, value in self.model.named_parameters()}
            self.swap(average)
            arm("evaluate")
            self.events.append(self.trainer.evaluate(self.loader, self.metric)["metric"].value)
            self.swap(own)
            self.events.append(float(torch.rand(())))
            arm("save")
            self.events.append(self.trainer.save(folder / "run.ckpt").name)
            arm("load")
            self.events.append(self.trainer.load(folder / "run.ckpt").cursor)
            with torch.no_grad():  # weights that are changed between two calls
                self.model.last.bias.mul_(0.5)
        return [*self.events, self.trainer.digest(), self.trainer.global_step]

    @torch.no_grad()
    def swap(self, values: dict[str, Tensor]) -> None:
        """Give the parameters other values."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(values[name])


@pytest.fixture
def script(completes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> ScriptedLosses:
    losses = ScriptedLosses(LOST, completes)
    monkeypatch.setattr(StepTable, "exchange", losses.scripted("table", StepTable.exchange))
    monkeypatch.setattr(StepValues, "exchange", losses.scripted("values", StepValues.exchange))
    monkeypatch.setattr(World, "gather_objects", losses.scripted("gather", World.gather_objects))
    return losses


def run_with_a_loss(
    script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch, program: Callable[[World, Any], Any]
) -> list[Any]:
    """Run a program on three ranks, one of which is lost; return what the others return."""

    def on_rank(world: World) -> Any:
        of_rank[world.rank] = generations = script.generations(world)
        monkeypatch.setattr(recovery, "current_generations", lambda: of_rank[rank_of_thread()])
        try:
            return program(world, generations)
        except Lost:
            return None

    of_rank: dict[int, Any] = {}
    return run_ranks(LOST + 1, on_rank, has_default_group=True)[:LOST]


def rank_of_thread() -> int:
    rank: int = torch.distributed.get_rank()
    return rank


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[type[nn.Module], list[Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    models: list[type[nn.Module]] = [Running, Growing, Hooked]
    return run_ranks(1, lambda _: {model: Scripted(None, model).train(folder) for model in models})[0]


@pytest.fixture(scope="module")
def finished() -> str:
    return run_ranks(1, lambda _: Scripted(None).finish())[0]


@WHO_COMPLETES
@pytest.mark.parametrize(
    ("call", "number", "exchange", "count", "model"),
    [
        pytest.param("step", 2, "table", 1, Running, id="the table"),
        pytest.param("step", 1, "table", 1, Running, id="the first table"),
        pytest.param("step", 10, "table", 1, Running, id="the last table"),
        pytest.param("step", 2, "values", 1, Running, id="further numbers of the loss"),
        pytest.param("step", 2, "gather", 1, Hooked, id="hooks on parameters"),
        pytest.param("step", 3, "gather", 3, Growing, id="buffers of another layout"),
        pytest.param("evaluate", 1, "gather", 2, Running, id="the end of an evaluation"),
        pytest.param("save", 2, "gather", 3, Running, id="the end of a save"),
        pytest.param("load", 1, "gather", 5, Running, id="the end of a load"),
        pytest.param("load", 2, "gather", 4, Running, id="in a load"),
        pytest.param("save", 1, "gather", 1, Running, id="in a save"),
    ],
)
def test_a_run_ends_with_the_bits_of_the_undisturbed_one(
    call: str,
    number: int,
    exchange: str,
    count: int,
    model: type[nn.Module],
    completes: tuple[int, ...],
    script: ScriptedLosses,
    undisturbed: dict[type[nn.Module], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    del completes

    def program(world: World, generations: Any) -> Any:
        run = Scripted(world, model)
        left = number

        def arm(kind: str) -> None:
            nonlocal left
            left -= kind == call
            if kind == call and left == 0:
                script.lose_at(exchange, count)

        result = run.train(tmp_path, arm)
        if generations.number == 0:
            generations.help_others()
        assert generations.number == 1, "nobody was lost"
        assert generations.reports == ["joined"]
        return result

    assert run_with_a_loss(script, monkeypatch, program) == [undisturbed[model]] * 2


@pytest.mark.parametrize("completes", [(0,), (1,)])
def test_a_step_that_fails_on_the_worker_ahead_fails_alike_on_the_one_behind(
    completes: tuple[int, ...], script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    del completes

    def program(world: World, _generations: Any) -> str:
        run = Scripted(world)
        batches = list(run.loader.epoch(0))
        run.trainer.step(batches[0])
        run.spoil = lambda loss: loss * float("inf")
        script.lose_at("table", 1)
        with pytest.raises(LossError, match="is inf") as caught:
            run.trainer.step(batches[1])
        run.spoil = lambda loss: loss
        run.finish()
        assert run.trainer.world.world_size == LOST
        return str(caught.value)

    first, second = run_with_a_loss(script, monkeypatch, program)
    assert first == second


@pytest.mark.parametrize("completes", [(0,), (1,)])
def test_an_evaluation_that_fails_on_the_worker_ahead_fails_on_the_one_behind(
    completes: tuple[int, ...], script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    del completes

    def program(world: World, _generations: Any) -> int:
        run = Scripted(world)

        def fail(_model: nn.Module, _batch: Any) -> Any:
            raise KeyError("no such column")

        script.lose_at("gather", 1)
        with pytest.raises((PeerFailedError, KeyError), match="no such column"):
            run.trainer.evaluate(run.loader, fail)
        run.finish()
        return run.trainer.global_step

    assert run_with_a_loss(script, monkeypatch, program) == [5, 5]


@pytest.mark.parametrize("completes", [(), (1,)])
def test_two_trainers_and_groups_of_the_callers_own_continue(
    completes: tuple[int, ...], finished: str, script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    del completes

    def program(world: World, generations: Any) -> Any:
        first, second = Scripted(world), Scripted(world)
        closed = Scripted(world)
        closed.trainer.close()
        seen: list[int] = []
        first.trainer.on_new_world(lambda present: seen.append(len(present.gather_objects(None))))
        batches = list(first.loader.epoch(0)), list(second.loader.epoch(0))
        first.trainer.step(batches[0][0])
        second.trainer.step(batches[1][0])
        script.lose_at("table", 1)
        first.trainer.step(batches[0][1])
        digest = first.trainer.digest()
        del first, batches  # freed, when another worker may still be in its last call
        second.finish()
        closed.trainer.evaluate(closed.loader, closed.metric)
        assert len(generations.member.living()) >= 1
        return digest, second.trainer.digest(), seen

    (first, second, seen), other = run_with_a_loss(script, monkeypatch, program)
    assert (first, second, seen) == other
    assert seen == [3, 2]
    assert second == finished
    assert NUM_SHARDS > LOST


def test_workers_join_and_leave_within_an_epoch_so_that_a_new_one_makes_the_calls_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others do at the end of an epoch, before they begin the next one, a new worker would leave out."""
    alone = World(rank=0, world_size=1, group=None)
    generations = ScriptedGenerations(alone, threading.Event(), LOST)
    generations.planned_number = 7
    monkeypatch.setattr(recovery, "current_generations", lambda: generations)
    changed: list[tuple[int, int]] = []
    run = Scripted(None)
    monkeypatch.setattr(
        Member, "change", lambda _member, number, _world: changed.append((number, run.trainer.cursor.step))
    )
    num_steps = 0
    for batch in run.loader.epoch(0):
        run.trainer.step(batch)
        num_steps += 1
    assert changed == [(7, step) for step in range(1, num_steps)]
    assert num_steps > 1
