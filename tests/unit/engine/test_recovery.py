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

import lockstep as ls
from lockstep.comm import World
from lockstep.comm.generations import LostWorker
from lockstep.data import Cursor
from lockstep.engine import present
from lockstep.engine.member import Member
from lockstep.engine.present import Continued
from lockstep.engine.step_table import StepTable
from lockstep.errors import CheckpointError, LossError, PeerFailedError

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
    monkeypatch.setattr(World, "gather_objects", losses.scripted("gather", World.gather_objects))
    return losses


def run_with_a_loss(
    script: ScriptedLosses,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[World, Any], Any],
    num_ranks: int = LOST + 1,
) -> list[Any]:
    """Run a program on three ranks, one of which is lost; return what the others return."""

    def on_rank(world: World) -> Any:
        of_rank[world.rank] = generations = script.generations(world)
        monkeypatch.setattr(present, "current_generations", lambda: of_rank[rank_of_thread()])
        try:
            return program(world, generations)
        except Lost:
            return None

    of_rank: dict[int, Any] = {}
    return run_ranks(num_ranks, on_rank, has_default_group=True)[:LOST]


def armed(script: ScriptedLosses, call: str, number: int, exchange: str, count: int) -> Callable[[str], None]:
    """Return what lets the rank be lost in the number-th call of a kind, at its count-th exchange."""
    left = number

    def arm(kind: str) -> None:
        nonlocal left
        left -= kind == call
        if kind == call and left == 0:
            script.lose_at(exchange, count)

    return arm


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
        pytest.param("step", 1, "gather", 1, Running, id="further numbers of the loss"),
        pytest.param("step", 2, "gather", 1, Hooked, id="hooks on parameters"),
        pytest.param("step", 3, "gather", 1, Growing, id="buffers of another layout"),
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
    script: ScriptedLosses,
    undisturbed: dict[type[nn.Module], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def program(world: World, generations: Any) -> Any:
        result = Scripted(world, model).train(tmp_path, armed(script, call, number, exchange, count))
        if generations.number == 0:
            generations.help_others()
        assert generations.number == 1, "nobody was lost"
        assert generations.reports == ["joined"]
        return result

    assert run_with_a_loss(script, monkeypatch, program) == [undisturbed[model]] * 2


def train_with_callbacks(world: World | None, arm: Callable[[str], None] = lambda _: None) -> list[Any]:
    """Train two epochs with callbacks that change the result; call `arm` before each kind of call."""
    callbacks: list[Any] = [ls.EMA(0.5), ls.SWA(0), ls.Freeze("first.*", until_epoch=1), ls.MaxSteps(8)]
    run = Run(world, callbacks=callbacks, on_worker_loss="continue")
    for epoch in range(2):
        for batch in run.loader.epoch(epoch):
            arm("epoch" if batch.cursor.step + 1 == batch.num_steps else "step")
            run.trainer.step(batch)
            if run.trainer.is_ending:
                break
    arm("evaluate")
    value = run.trainer.evaluate(run.loader, Scripted.metric.__get__(run), weights=callbacks[0])["metric"].value
    return [run.trainer.digest(), callbacks[0].digest(), callbacks[1].digest(), run.trainer.global_step, value]


@pytest.fixture(scope="module")
def with_callbacks() -> list[Any]:
    return run_ranks(1, lambda _: train_with_callbacks(None))[0]


@WHO_COMPLETES
@pytest.mark.parametrize(
    ("call", "number", "exchange", "count"),
    [
        pytest.param("step", 1, "gather", 3, id="agreeing at the start"),
        pytest.param("step", 2, "table", 1, id="a step"),
        pytest.param("epoch", 1, "table", 1, id="the last step of an epoch"),
        pytest.param("epoch", 1, "gather", 2, id="agreeing at the end of an epoch"),
        pytest.param("epoch", 1, "gather", 4, id="unfreezing"),
        pytest.param("evaluate", 1, "gather", 1, id="evaluating averaged weights"),
    ],
)
def test_callbacks_end_with_the_states_of_the_undisturbed_run(
    call: str,
    number: int,
    exchange: str,
    count: int,
    with_callbacks: list[Any],
    script: ScriptedLosses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(world: World, generations: Any) -> list[Any]:
        result = train_with_callbacks(world, armed(script, call, number, exchange, count))
        if generations.number == 0:
            generations.help_others()
        assert generations.number == 1, "nobody was lost"
        return result

    assert run_with_a_loss(script, monkeypatch, program) == [with_callbacks] * 2


@pytest.mark.parametrize("completes", [(0,), (1,)])
def test_a_step_that_fails_on_the_worker_ahead_fails_alike_on_the_one_behind(
    script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    finished: str, script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(world: World, generations: Any) -> Any:
        first, second = Scripted(world), Scripted(world)
        closed = Scripted(world)
        closed.trainer.close()
        seen: list[int] = []
        # Only the trainer in whose call a worker was lost told of it.
        second.trainer.internals.on_continued = lambda continued, _world: seen.append(10 + continued.world_size)
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
        assert len(generations.member.trainers) >= 1
        return digest, second.trainer.digest(), seen

    (first, second, seen), other = run_with_a_loss(script, monkeypatch, program)
    assert (first, second, seen) == other
    assert seen == [3, 2, 12]
    assert second == finished
    assert NUM_SHARDS > LOST


def test_workers_join_and_leave_before_a_step_of_any_epoch_of_the_first_trainer_that_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others do after the step before, such as an evaluation or a save, a new worker need not do."""
    alone = World(rank=0, world_size=1, group=None)
    generations = ScriptedGenerations(alone, threading.Event(), LOST)
    generations.planned_number = 7
    monkeypatch.setattr(present, "current_generations", lambda: generations)
    begun: list[tuple[int, bool, int]] = []
    number_of_steps = [0]
    second, first = Scripted(None), Scripted(None)
    monkeypatch.setattr(
        Member,
        "begin_step",
        lambda _member, number, _world: begun.append((number, number_of_steps[0] % 2 == 1, first.trainer.cursor.epoch)),
    )
    for epoch in range(2):
        for batch, other in zip(first.loader.epoch(epoch), second.loader.epoch(epoch), strict=True):
            for run, part in ((first, batch), (second, other)):
                run.trainer.step(part)
                number_of_steps[0] += 1
        first.trainer.evaluate(first.loader, first.metric)
    of_first = [(number, epoch) for number, is_second, epoch in begun if not is_second]
    assert {number for number, is_second, _ in begun if is_second} == {0}
    assert of_first[0] == (0, 0)  # nobody knows of the plan before a step
    assert {number for number, _ in of_first[1:]} == {7}
    assert [epoch for _, epoch in of_first].count(1) == len(first.loader)


@pytest.mark.parametrize("closes", [True, False])
def test_workers_join_before_a_step_of_the_trainer_that_steps_when_the_first_one_does_no_more(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A first trainer that was only kept, for its weights, once let nobody join until the end of the run.
    generations = ScriptedGenerations(World(rank=0, world_size=1, group=None), threading.Event(), LOST)
    generations.planned_number = 7
    monkeypatch.setattr(present, "current_generations", lambda: generations)
    begun: list[int] = []
    monkeypatch.setattr(Member, "begin_step", lambda _member, number, _world: begun.append(number))
    first, second = Scripted(None), Scripted(None)
    for batch in first.loader.epoch(0):
        first.trainer.step(batch)
    if closes:
        first.trainer.close()
    begun.clear()
    for epoch in range(2):
        for batch in second.loader.epoch(epoch):
            second.trainer.step(batch)
    num_steps = len(second.loader)
    # In its first epoch the loop may still come back to the first one, as that of trainers that take turns does.
    num_before = 1 if closes else num_steps + 1
    assert begun == [0] * num_before + [7] * (2 * num_steps - num_before)


@pytest.mark.parametrize("completes", [()])
def test_others_are_met_before_a_step_although_no_call_has_failed(
    finished: str, script: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is lost that the others do not need: one that was to join."""

    def program(world: World, generations: Any) -> Any:
        run = Scripted(world)
        batches = iter(run.loader.epoch(0))
        run.trainer.step(next(batches))
        script.note_loss()
        called = len(generations.reports)
        run.trainer.step(next(batches))
        assert generations.reports[called:].count("joined") == 1
        return run.finish()

    assert run_with_a_loss(script, monkeypatch, program, num_ranks=LOST) == [finished] * LOST


class Arriving(ScriptedGenerations):
    """A generation that rank 1 joins, and no other one after it."""

    has_next = True

    def __init__(self, world: World) -> None:
        super().__init__(world, threading.Event(), LOST)
        self.is_joiner = world.rank == 1

    def wait_to_join(self) -> bool:
        assert self.number == 0, "it waits for another generation"
        return True


class Stub:
    """A trainer, as far as one is asked when a worker joins."""

    def state_for_new_worker(self) -> dict[str, int]:
        return {"steps": 5}

    def own_places(self) -> dict[str, Tensor]:
        return {}

    def take_state(self, found: Any) -> None: ...

    def settle(self, world: World) -> None: ...

    def adopt(self, world: World, *, is_repeated: bool) -> None: ...

    def report_change(self, *_arguments: Any, **_options: Any) -> None: ...


@pytest.mark.parametrize(
    ("is_kept", "said"),
    [
        # A script that makes one trainer after the other: the new worker waited for another generation without a word,
        # and the others waited for it in their next step.
        (False, "has made a trainer that the others do not have"),
        # One that joins with its first trainer and then makes the second: that call met a step and ended the run.
        (True, "a trainer that this new worker has not made. Make all trainers before"),
    ],
)
def test_a_new_worker_with_other_trainers_than_the_others_says_so(is_kept: bool, said: str) -> None:
    def program(world: World) -> None:
        member, first, second = Member(Arriving(world)), Stub(), Stub()
        member.add(first if is_kept or world.rank == 1 else Stub())
        if world.rank == 0:
            member.add(second)
            member.help_others()
            return
        with pytest.raises(CheckpointError, match=said):
            member.join()

    run_ranks(2, program)


# -- What is said of a loss --------------------------------------------------------------------------------------------


def continued(*, world_size: int, repeats_step: bool) -> Continued:
    return Continued(
        generation=1,
        lost=(LostWorker(rank=0, pid=41, reason="killed by SIGKILL"), LostWorker(rank=2, pid=43, reason="gone")),
        world_size=world_size,
        shards=(range(3), range(3, 4))[:world_size],
        cursor=Cursor(1, 4),
        repeats_step=repeats_step,
        seconds=0.05,
    )


def test_one_line_says_who_was_lost_what_is_repeated_and_who_runs_what() -> None:
    assert str(continued(world_size=2, repeats_step=True)) == (
        "Rank 0 (pid 41) killed by SIGKILL; rank 2 (pid 43) gone. 2 workers continue with epoch 2, step 5, which is "
        "repeated, after 0.05 s. Shards: rank 0: 0 to 2, rank 1: 3. No sample is lost, and no bit of the result "
        "changes. (LS604)"
    )


def test_a_loss_between_two_steps_repeats_none() -> None:
    assert "1 worker continues before epoch 2, step 5, after 0.05 s." in str(
        continued(world_size=1, repeats_step=False)
    )
