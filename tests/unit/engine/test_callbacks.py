"""Callbacks: named moments, state that is saved and resumed, decisions that hold on all workers."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.faulty_runs import InjectedError, Run, Running, by_value
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.engine.state_parts import WorkerPart
from lockstep.errors import CheckpointError, ParameterMismatchError

STEPS = 5
"""Of an epoch."""


class Diary(ls.Callback):
    """Notes each moment, and counts steps in a state."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.num_steps = 0

    def on_start(self, trainer: ls.Trainer) -> None:
        self.moments.append(f"start {trainer.cursor.epoch}.{trainer.cursor.step}")

    def on_step(self, trainer: ls.Trainer, result: ls.StepResult) -> None:
        self.num_steps += 1
        self.moments.append(f"step {result.cursor.step} of {trainer.global_step}")

    def on_epoch(self, trainer: ls.Trainer, epoch: int) -> None:
        self.moments.append(f"epoch {epoch}")

    def on_evaluate(self, trainer: ls.Trainer, values: Mapping[str, float]) -> None:
        self.moments.append(f"evaluate {', '.join(values)}")

    def on_save(self, trainer: ls.Trainer, path: Path) -> None:
        self.moments.append(f"save {path.name}")

    def on_end(self, trainer: ls.Trainer) -> None:
        self.moments.append("end")

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]


class WronglyAnnotated(ls.Callback):
    """Refused by type checkers, which know with what each moment is called, as editors do."""

    def on_step(self, trainer: ls.StepResult, result: ls.StepResult) -> None: ...  # type: ignore[override]

    def on_save(self, trainer: ls.Trainer, path: str) -> None: ...  # type: ignore[override]

    def on_workers_changed(self, trainer: ls.Trainer, continued: str) -> None: ...  # type: ignore[override]


def error_of(model: nn.Module, batch: Any) -> tuple[Any, int]:
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def mean_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Loop(Run):
    """A loop of one's own, with callbacks."""

    def train(self, epochs: int = 2, folder: Path | None = None, stop_after: int = 99) -> "Loop":
        """Train; leave after a step, saving, or when a callback ends the training."""
        trainer = self.trainer
        for epoch in range(trainer.cursor.epoch, epochs):
            for batch in self.loader.epoch(epoch, trainer.cursor.step):
                trainer.step(batch)
                if trainer.is_ending:
                    return self
                if folder is not None and trainer.global_step == stop_after:
                    trainer.save(folder / "middle.ckpt")
                    return self
            trainer.evaluate(self.loader, error_of, name="test")
            if trainer.is_ending:
                break
        return self


def test_moments_come_in_order(tmp_path: Path) -> None:
    diary = Diary()
    loop = Loop(None, callbacks=[diary]).train(epochs=1)
    loop.trainer.save(tmp_path / "a.ckpt")
    loop.trainer.close()
    loop.trainer.close()
    steps = [f"step {step} of {step + 1}" for step in range(STEPS)]
    assert diary.moments == ["start 0.0", *steps, "epoch 0", "evaluate test_metric", "save a.ckpt", "end"]


def everything() -> list[ls.Callback]:
    """Return callbacks that change the result."""
    callbacks: list[ls.Callback] = [ls.EMA(0.5), ls.SWA(0), ls.Freeze(["first.*", "norm.*"], until_epoch=1), Diary()]
    return [*callbacks, ls.EarlyStopping("test_metric", patience=9, mode="min")]


def outcome(loop: Loop, callbacks: list[Any]) -> tuple[Any, ...]:
    ema, swa, _, diary, stopping = callbacks
    averaged = loop.trainer.evaluate(loop.loader, error_of, weights=ema)["metric"].value
    return loop.trainer.digest(), ema.digest(), swa.digest(), diary.num_steps, stopping.best, averaged


@pytest.fixture(scope="module")
def alone() -> tuple[Any, ...]:
    def train(_world: World) -> tuple[Any, ...]:
        callbacks = everything()
        return outcome(Loop(None, callbacks=callbacks).train(), callbacks)

    return run_ranks(1, train)[0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_callbacks_have_the_same_state_on_any_number_of_workers(num_ranks: int, alone: tuple[Any, ...]) -> None:
    def train(world: World) -> tuple[Any, ...]:
        callbacks = everything()
        return outcome(Loop(world, callbacks=callbacks).train(), callbacks)

    assert run_ranks(num_ranks, train) == [alone] * num_ranks
    assert len(set(alone[:3])) == 3, "the averages are the weights themselves"


@pytest.mark.parametrize("stop_after", [2, STEPS, STEPS + 3])
def test_state_is_resumed_in_the_middle_of_an_epoch(stop_after: int, tmp_path: Path, alone: tuple[Any, ...]) -> None:
    def first(world: World) -> None:
        Loop(world, callbacks=everything()).train(folder=tmp_path, stop_after=stop_after)

    def second(world: World) -> tuple[Any, ...]:
        callbacks = everything()
        loop = Loop(world, callbacks=callbacks)
        loop.trainer.load(tmp_path / "middle.ckpt")
        if loop.trainer.cursor.step == 0:
            loop.trainer.evaluate(loop.loader, error_of, name="test")
        return outcome(loop.train(), callbacks)

    run_ranks(2, first)
    assert run_ranks(3, second) == [alone] * 3


def test_the_exponential_average_is_that_of_the_formula() -> None:
    ema = ls.EMA(0.9)
    run = Run(None, callbacks=[ema])
    expected = {name: value.clone() for name, value in run.model.state_dict().items() if value.is_floating_point()}
    for batch in run.loader.epoch(0):
        run.trainer.step(batch)
        expected = {name: 0.9 * value + 0.1 * run.model.state_dict()[name] for name, value in expected.items()}
    assert set(ema.tensors) == set(run.model.state_dict())
    for name, value in expected.items():
        torch.testing.assert_close(ema.tensors[name], value)
    before = run.trainer.digest()
    run.trainer.evaluate(run.loader, error_of, weights=ema)
    assert run.trainer.digest() == before


class Normed(nn.Module):
    """Has a power iteration, a queue of unit vectors with a pointer, running statistics, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.old = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.phase = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.queue: Tensor
        self.pointer: Tensor
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, 6), dim=1))
        self.register_buffer("pointer", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.old(self.first(inputs)))
        if self.training:
            row = int(self.pointer)
            self.queue[row] = nn.functional.normalize(hidden.detach()[0], dim=0)
            self.pointer.copy_(torch.tensor([(row + 1.0) % 8]))
        outputs: Tensor = self.last(hidden * self.phase.real)
        return outputs


@pytest.mark.parametrize("make", [lambda: ls.EMA(0.7), lambda: ls.SWA(0)], ids=["EMA", "SWA"])
def test_only_weights_and_running_statistics_are_averaged(make: Callable[[], Any]) -> None:
    # All floating-point buffers were: vectors of a power iteration lost their length, and a pointer was a half.
    average = make()
    loop = Loop(None, Normed, callbacks=[average]).train()
    now = loop.model.state_dict()
    newest = {name for name, value in average.tensors.items() if torch.equal(value, now[name])}
    vectors = {f"first.parametrizations.weight.0.{name}" for name in ("_u", "_v")} | {"old.weight_u", "old.weight_v"}
    assert vectors | {"queue", "pointer", "norm.num_batches_tracked"} == newest
    copy = Normed()
    average.copy_to(copy)
    assert torch.equal(copy.queue, loop.model.queue)
    assert torch.equal(copy.pointer, loop.model.pointer)
    assert not torch.equal(copy.phase, loop.model.phase)
    for layer in (copy.eval().first, copy.old):
        copy(torch.ones(2, 5))
        assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1, rel=0.1)


def test_a_step_that_is_skipped_or_fails_leaves_the_average_alone() -> None:
    ema = ls.EMA(0.9)
    run = Run(None, callbacks=[ema], nonfinite="skip")
    batches = list(run.loader.epoch(0))
    run.trainer.step(batches[0])
    before = ema.digest()
    run.spoil = lambda loss: loss * float("inf")
    with pytest.warns(UserWarning, match="skipped"):
        run.trainer.step(batches[1])
    assert ema.digest() == before

    def fail(_loss: Any) -> Any:
        raise RuntimeError("injected")

    run.spoil = fail
    with pytest.raises(RuntimeError, match="injected"):
        run.trainer.step(batches[2])
    assert ema.digest() == before


@pytest.mark.parametrize("steps", [1, 4, STEPS, STEPS + 1, 2 * STEPS])
def test_max_steps_is_exact(steps: int, tmp_path: Path) -> None:
    loop = Loop(None, callbacks=[ls.MaxSteps(steps)]).train()
    assert loop.trainer.global_step == steps
    assert loop.trainer.end_reason == f"max_steps is {steps}"
    if steps > 1:
        Loop(None, callbacks=[ls.MaxSteps(99)]).train(folder=tmp_path, stop_after=steps - 1)
        resumed = Loop(None, callbacks=[ls.MaxSteps(steps)])
        resumed.trainer.load(tmp_path / "middle.ckpt")
        assert resumed.train().trainer.global_step == steps


def test_all_workers_end_after_the_step_in_which_the_clock_of_one_is_over() -> None:
    def train(world: World) -> tuple[int, bool, str]:
        seconds = iter(range(100))
        callbacks = [ls.MaxTime(3.5, clock=lambda: next(seconds))] if world.rank == 1 else [ls.MaxTime(1e9)]
        loop = Loop(world, callbacks=callbacks).train()
        loop.trainer.evaluate(loop.loader, error_of)
        return loop.trainer.global_step, loop.trainer.is_ending, loop.trainer.end_reason

    first, *others = run_ranks(3, train)
    assert others == [first] * 2
    assert first[1:] == (True, "max_time, 3.5 s, is over")
    assert first[0] < STEPS


@pytest.mark.parametrize("after_next_step", [False, True])
def test_a_request_to_stop_waits_for_the_step_with_which_a_callback_ends_the_training(after_next_step: bool) -> None:
    # A loop that stopped where the callback had asked for the end saved nothing of that, and its next run went on.
    class Once(ls.Callback):
        def on_step(self, trainer: Any, result: Any) -> None:
            if trainer.world.rank == 1 and trainer.global_step == 1:
                trainer.request_stop()
            if trainer.world.rank == 1 and trainer.global_step == 2:
                trainer.request_end("enough", after_next_step=after_next_step)

    def train(world: World) -> list[tuple[bool, bool]]:
        loop = Loop(world, callbacks=[Once()])
        return [
            (loop.trainer.step(batch).should_stop, loop.trainer.is_ending)
            for batch in itertools.islice(loop.loader.epoch(0), 3)
        ]

    assert run_ranks(2, train) == [[(False, False), (False, False), (True, True)]] * 2


def test_time_goes_on_when_a_run_is_resumed_and_begins_anew_in_a_trainer_of_another_model() -> None:
    now = [0.0]
    timer, later = (ls.MaxTime(10, clock=lambda: now[0]) for _ in range(2))
    timer.on_start(Run(None).trainer)
    now[0] = 4.0
    later.load_state_dict(timer.state_dict())
    resumed = Run(None).trainer
    for _ in range(2):
        later.on_start(resumed)
    now[0] = 6.0
    assert later.elapsed() == 6.0
    later.on_start(Run(None).trainer)
    assert later.elapsed() == 0.0


class Ending:
    """What `EarlyStopping` needs of a trainer."""

    reason = ""
    is_ending = False
    model = nn.Identity()

    def request_end(self, reason: str) -> None:
        self.reason = reason


def test_early_stopping_waits_for_its_patience() -> None:
    stopping, trainer = ls.EarlyStopping("accuracy", patience=2, min_delta=0.1), Ending()
    for value in [0.5, 0.55, 0.65, 0.6]:  # 0.55 is better by too little
        stopping.on_evaluate(trainer, {"accuracy": value})
    assert (stopping.best, stopping.num_bad, trainer.reason) == (0.65, 1, "")
    stopping.on_evaluate(trainer, {"accuracy": float("nan")})
    assert trainer.reason == "accuracy was best with 0.65, and not better in 2 evaluations since"
    resumed, again = ls.EarlyStopping("accuracy", patience=2), Ending()
    resumed.load_state_dict(stopping.state_dict())
    resumed.on_start(again)
    assert again.reason == trainer.reason
    other = ls.EarlyStopping("loss", patience=2)  # of which 0.65 was no value
    other.load_state_dict(stopping.state_dict())
    assert (other.best, other.num_bad) == (None, 0)


def test_early_stopping_ends_the_training_on_all_workers() -> None:
    def train(world: World) -> tuple[int, str]:
        loop = Loop(world, callbacks=[ls.EarlyStopping("test_metric", mode="max", patience=1)])
        loop.train(epochs=9)
        return loop.trainer.cursor.epoch, loop.trainer.end_reason

    first, second = run_ranks(2, train)
    assert first == second
    assert first[0] < 9
    assert "not better in 1 evaluations" in first[1]


def test_a_metric_that_is_never_measured_is_an_error_of_the_next_epoch() -> None:
    loop = Loop(None, callbacks=[ls.EarlyStopping("test_los", mode="min")])
    with pytest.raises(ValueError, match="'test_los', but evaluations have given test_metric"):
        loop.train()


def test_a_metric_that_stagnates_lowers_the_rate_on_all_workers_alike() -> None:
    def train(world: World) -> tuple[float, str]:
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plateau = ls.ReduceLROnPlateau(optimizer, "metric", mode="max", patience=0, factor=0.5)
        trainer = ls.Trainer(
            model, optimizer, loss=mean_error, num_shards=4, world=world, callbacks=[plateau], verify_steps=0
        )
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
        loader = ls.ShardedLoader(data, batch_size=8, num_shards=4, world=lambda: world)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                trainer.step(batch)
            trainer.evaluate(loader, lambda *_: (1.0 + world.rank, 1))  # one number for all shards
        return optimizer.param_groups[0]["lr"], trainer.digest()

    found = run_ranks(2, train)
    assert found[0] == found[1]
    assert found[0][0] == 0.125


def test_a_plateau_and_a_scheduler_are_refused_together() -> None:
    loop = Loop(None)
    plateau = ls.ReduceLROnPlateau(loop.optimizer, "test_metric", mode="min")
    trainer = ls.Trainer(
        loop.model, loop.optimizer, loss=loop.loss, num_shards=4, scheduler=loop.scheduler, callbacks=[plateau]
    )
    with pytest.raises(ValueError, match="the scheduler FaultyScheduler would both set the learning rate"):
        trainer.step(next(iter(loop.loader.epoch(0))))
    with pytest.raises(ValueError, match="made for another optimizer"):
        Loop(None, callbacks=[plateau]).train()


def test_unfreezing_on_one_worker_alone_is_refused_on_all() -> None:
    def train(world: World) -> None:
        callbacks = [ls.Freeze("first.*", until_epoch=1 + world.rank)]
        with pytest.raises(ParameterMismatchError):
            Loop(world, callbacks=callbacks).train()

    run_ranks(2, train)


def test_a_second_trainer_freezes_parameters_of_its_own_model() -> None:
    # It froze those of the first one's model once more, and trained all of its own from the first step on.
    freeze = ls.Freeze("first.*", until_epoch=1)
    for _ in range(2):
        loop = Loop(None, callbacks=[freeze])
        before = loop.model.first.weight.clone()
        assert torch.equal(loop.train(epochs=1).model.first.weight, before)
        assert not torch.equal(loop.train(epochs=2).model.first.weight, before)


def stateful() -> list[ls.Callback]:
    return [ls.EMA(0.5), ls.SWA(0), ls.EarlyStopping("test_metric", mode="min", patience=9)]


def states(callbacks: Sequence[ls.Callback]) -> dict[str, Any]:
    return {type(each).__name__: by_value(each.state_dict()) for each in callbacks}


def test_callbacks_begin_anew_in_a_trainer_of_another_model() -> None:
    # Half of SWA's mean were epochs of the first model, and EarlyStopping had the best value of the first run.
    used, alone = stateful(), stateful()
    Loop(None, callbacks=used).train(epochs=3)
    Loop(None, callbacks=used).train()
    Loop(None, callbacks=alone).train()
    assert states(used) == states(alone)


def test_callbacks_go_on_in_a_trainer_that_is_made_again_for_the_same_model() -> None:
    used = stateful()
    loop = Loop(None, callbacks=used).train(epochs=1)
    before = copy.deepcopy(used)
    again = ls.Trainer(loop.model, loop.optimizer, loss=loop.loss, num_shards=4, callbacks=used)
    again.step(next(iter(loop.loader.epoch(0))))
    stopping = used[2]
    assert isinstance(stopping, ls.EarlyStopping)
    assert stopping.best is not None
    assert states(used[1:]) == states(before[1:])  # EMA has gone on


def test_callbacks_that_were_used_take_the_state_of_a_checkpoint(tmp_path: Path) -> None:
    used, resumed = stateful(), stateful()
    Loop(None, callbacks=stateful()).train(epochs=1, folder=tmp_path, stop_after=STEPS - 1)
    Loop(None, callbacks=used).train()
    for callbacks in (used, resumed):
        loop = Loop(None, callbacks=callbacks)
        loop.trainer.load(tmp_path / "middle.ckpt")
        loop.train()
    assert states(used) == states(resumed)


def begun(swa: ls.SWA) -> ls.SWA:
    """Return an average that a run has begun, and ended before its first epoch."""
    Loop(None, callbacks=[swa]).train(epochs=1)
    return swa


class Evaluating(ls.Callback):
    def on_step(self, trainer: Any, result: Any) -> None:
        trainer.evaluate(None, error_of)


class Mistyped(ls.Callback):
    def on_epoch_end(self, trainer: Any) -> None:
        pass


class Fewer(ls.Callback):
    def on_epoch(self, trainer: Any) -> None:  # type: ignore[override]
        pass


def test_collective_calls_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"collective call of the trainer .* in on_step"):
        Loop(None, callbacks=[Evaluating()]).train()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Run(None, callbacks=[Mistyped()]), ValueError, "method on_epoch_end, .* Did you mean on_epoch?"),
        (
            lambda: Run(None, callbacks=[Fewer()]),
            ValueError,
            r"calls on_epoch\(trainer, epoch\). Write: def on_epoch\(s",
        ),
        (lambda: Run(None, callbacks=[Diary]), TypeError, "holds the class Diary, expected an object"),
        (lambda: Run(None, callbacks=[print]), TypeError, "holds a builtin_function_or_method"),
        (lambda: ls.EMA(1.0), ValueError, "decay of the EMA is 1.0"),
        (lambda: ls.SWA(-1), ValueError, "start_epoch of SWA is -1"),
        (lambda: ls.EMA().copy_to(Running()), ValueError, "EMA has averaged nothing yet"),
        (lambda: begun(ls.SWA(9)).copy_to(Running()), ValueError, "SWA has averaged nothing yet"),
        (lambda: ls.EarlyStopping(patience=0), ValueError, "patience is 0"),
        (lambda: ls.EarlyStopping(min_delta=-1), ValueError, "min_delta is -1"),
        (lambda: ls.EarlyStopping("dice"), ValueError, "cannot be concluded from its name"),
        (lambda: ls.EarlyStopping(mode="low"), ValueError, "mode is 'low'"),
        (lambda: ls.MaxSteps(0), ValueError, "max_steps is 0"),
        (lambda: ls.MaxTime(0), ValueError, "max_time is 0"),
        (lambda: ls.Freeze("x", until_epoch=0), ValueError, "until_epoch is 0"),
        (lambda: Loop(None, callbacks=[ls.Freeze("back.*", until_epoch=1)]).train(), ValueError, "no trained param"),
        (lambda: Loop(None, callbacks=[ls.Freeze("*", until_epoch=1)]).train(), ValueError, "every parameter"),
    ],
)
def test_mistakes_are_refused(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_states_of_other_callbacks_are_refused(tmp_path: Path) -> None:
    with_average = Run(None, callbacks=[ls.EMA()])
    with_average.trainer.step(next(with_average.loader.epoch(0)))
    path = with_average.trainer.save(tmp_path / "ema.ckpt")
    with pytest.raises(CheckpointError, match="callback EMA, which this run does not have"):
        Run(None).trainer.load(path)
    plain = Run(None).trainer.save(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="has a callback Diary, of which the state holds nothing"):
        Run(None, callbacks=[Diary()]).trainer.load(plain)
    with pytest.raises(CheckpointError, match=r"shape \[6, 5\]"):
        with_average.trainer.evaluate(with_average.loader, error_of, weights=other_average())


def test_an_average_that_nobody_keeps_is_not_evaluated_as_the_model() -> None:
    run = Run(None)
    run.trainer.step(next(run.loader.epoch(0)))
    for average in (ls.EMA(), ls.SWA(0)):
        with pytest.raises(ValueError, match="has averaged nothing and is not among the trainer's callbacks"):
            run.trainer.evaluate(run.loader, error_of, weights=average)
    with pytest.raises(TypeError, match="weights is 'ema', expected an average of the weights"):
        run.trainer.evaluate(run.loader, error_of, weights="ema")
    loaded = ls.EMA(0.5)
    loaded.load_state_dict({"tensors": dict(Run(None).trainer.model.named_parameters())})
    assert run.trainer.evaluate(run.loader, error_of, weights=loaded) != run.trainer.evaluate(run.loader, error_of)


def test_one_callback_that_is_not_in_a_list_is_told() -> None:
    with pytest.raises(TypeError, match=r"callbacks is .*EMA.*, expected a list: callbacks=\[...\]"):
        Run(None, callbacks=ls.EMA())


def other_average() -> ls.EMA:
    ema = ls.EMA()
    ema.tensors = {"last.weight": torch.zeros(6, 5)}
    return ema


def test_anything_with_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    run, extra = Run(None), nn.Linear(2, 2)
    path = run.trainer.save(tmp_path / "a.ckpt", extra={"head": extra})
    other = nn.Linear(2, 2)
    Run(None).trainer.load(path, extra={"head": other})
    assert torch.equal(other.weight, extra.weight)
    with pytest.raises(CheckpointError, match="extra state of head, and load was given none"):
        Run(None).trainer.load(path)
    with pytest.raises(TypeError, match=r"extra\['n'\] is a int"):
        run.trainer.save(tmp_path / "b.ckpt", extra={"n": 3})  # type: ignore[dict-item]
    wrong = nn.Linear(3, 3)
    before = wrong.weight.clone()
    digest = (failing := Run(None, Running)).trainer.digest()
    with pytest.raises(CheckpointError, match="does not fit"):
        failing.trainer.load(path, extra={"head": wrong})
    assert failing.trainer.digest() == digest
    assert torch.equal(wrong.weight, before)


def test_statistics_of_batchnorm_are_those_of_torch_for_averaged_weights() -> None:
    swa = ls.SWA(0)
    loop = Loop(None, callbacks=[swa]).train()
    before = loop.trainer.digest()
    plain = Running()
    plain.load_state_dict(loop.model.state_dict() | swa.tensors)
    loop.trainer.update_batchnorm(loop.loader, swa)
    slices = [part.data for batch in loop.loader.epoch(0) for part in batch.slices]
    torch.optim.swa_utils.update_bn(slices, plain)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(swa.tensors[name], plain.state_dict()[name])
    assert loop.trainer.digest() == before


def test_statistics_of_batchnorm_have_the_same_bits_on_any_number_of_workers() -> None:
    def train(world: World | None) -> tuple[str, str]:
        swa = ls.SWA(0)
        loop = Loop(world, callbacks=[swa]).train()
        averaged = swa.digest()
        loop.trainer.update_batchnorm(loop.loader, swa)
        new = swa.digest()
        assert new != averaged
        resumed = ls.SWA(0)
        resumed.load_state_dict(swa.state_dict())
        for average in (swa, resumed):
            average.on_epoch(loop.trainer, 2)  # goes on from the averages, not from the new statistics
        assert swa.digest() == resumed.digest()
        return new, swa.digest()

    alone = run_ranks(1, lambda _: train(None))
    assert run_ranks(2, train) == alone * 2
    assert run_ranks(3, train) == alone * 3


class Twice(Running):
    """Has its BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.norm


def test_statistics_of_a_batchnorm_with_two_names_are_used() -> None:
    swa = ls.SWA(0)
    loop = Loop(None, Twice, callbacks=[swa]).train()
    loop.trainer.update_batchnorm(loop.loader, swa)
    swa.copy_to(plain := Twice())
    assert torch.equal(plain.norm.running_mean, swa.tensors["norm.running_mean"])
    assert torch.equal(swa.tensors["again.running_mean"], swa.tensors["norm.running_mean"])


def test_an_average_follows_weights_whose_memory_was_replaced() -> None:
    average = ls.EMA(0.0)
    loop = Loop(None, callbacks=[average])
    for batch in loop.loader.epoch(0):
        loop.trainer.step(batch)
        assert torch.equal(average.tensors["last.weight"], loop.model.last.weight)
        loop.model.last.weight.data = loop.model.last.weight.detach().clone()


def test_an_average_follows_the_trainer_that_it_is_given_to() -> None:
    # In a second trainer it went on towards the weights of the first one's model, which nobody trained any more.
    average = ls.EMA(0.0)
    for _ in range(2):
        loop = Loop(None, callbacks=[average]).train()
        assert torch.equal(average.tensors["last.weight"], loop.model.last.weight)
        loop.model.last.weight.data.zero_()


def test_verify_leaves_callbacks_and_a_decided_end_as_they_are() -> None:
    now = [0.0]
    callbacks = [ls.MaxSteps(2), timer := ls.MaxTime(9, clock=lambda: now[0])]
    loop = Loop(None, callbacks=callbacks)
    for batch in loop.loader.epoch(0):
        loop.trainer.step(batch)
        loop.trainer.verify(loop.loader, steps=1)
        now[0] += 1.0
        assert timer.elapsed() == now[0]
        if loop.trainer.is_ending:
            break
    assert (loop.trainer.global_step, loop.trainer.end_reason) == (2, "max_steps is 2")


class FailingAtTheEnd(ls.Callback):
    def on_end(self, trainer: Any) -> None:
        raise InjectedError("the last file could not be written")


def test_a_trainer_is_closed_though_a_callback_fails_at_its_end() -> None:
    loop = Loop(None, callbacks=[FailingAtTheEnd()])
    batches = loop.loader.epoch(0)
    loop.trainer.step(next(batches))
    with pytest.raises(InjectedError):
        loop.trainer.close()
    with pytest.raises(ValueError, match="was closed"):
        loop.trainer.step(next(batches))


class Doubling(ls.Callback):
    """Evaluates and saves once more, when there was an evaluation or a checkpoint."""

    def __init__(self, loop: Callable[[], Loop]) -> None:
        self.loop = loop
        self.calls: list[str] = []

    def on_evaluate(self, trainer: Any, values: Any) -> None:
        self.calls.append("evaluate")
        trainer.evaluate(self.loop().loader, error_of)

    def on_save(self, trainer: Any, path: Any) -> None:
        self.calls.append(path.name)
        trainer.save(path.with_name("copy.ckpt"))


def test_what_a_callback_does_in_a_moment_is_no_other_moment(tmp_path: Path) -> None:
    def train(world: World) -> list[str]:
        doubling = Doubling(lambda: loop)
        loop = Loop(world, callbacks=[doubling])
        for _ in range(2):
            loop.trainer.evaluate(loop.loader, error_of)
        loop.trainer.save(tmp_path / "one.ckpt")
        return doubling.calls

    assert run_ranks(2, train) == [["evaluate", "evaluate", "one.ckpt"]] * 2
    assert (tmp_path / "copy.ckpt").exists()


def test_a_new_worker_starts_callbacks_by_itself_where_the_others_have_started_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `join` of one trainer takes the states of all. The first step of another one made a call that the others did not
    # make, which ended the run.
    old = Loop(None, callbacks=[Diary()])
    old.trainer.step(next(iter(old.loader.epoch(0))))
    new = Loop(None, callbacks=[diary := Diary()])
    new.trainer.internals.take_state(old.trainer.internals.state_for_new_worker())
    with monkeypatch.context() as patch:
        patch.setattr(
            new.trainer.internals.moments, "_agree", lambda: pytest.fail("a call that the others do not make")
        )
        new.trainer.step(next(iter(new.loader.epoch(0, 1))))
    assert diary.moments == ["start 0.1", "step 1 of 2"]


def test_the_loop_of_a_second_trainer_gets_its_state_on_a_new_worker() -> None:
    # It was left out, for the state had come with the first trainer's `join`.
    sent, taken = WorkerPart(), WorkerPart()
    old, new = Diary(), Diary()
    old.num_steps = 7
    sent.use_loop(old)
    taken.load_for_worker(sent.save_for_worker())
    taken.use_loop(new)
    assert new.num_steps == 7
