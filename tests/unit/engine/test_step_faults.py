"""A step that fails, in any phase and on any worker, is as if it had not begun."""

import weakref
from collections.abc import Callable
from functools import cache
from threading import current_thread
from typing import Any

import pytest
import torch
from tests.support import faulty_runs as faults
from tests.support.faulty_runs import FAILING_STEP, NUM_SHARDS, Fault, Growing, Run, Running, differences
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.engine import comparison, step_engine
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import Column, CurrentStep, Rows, ShardColumn, StepPart
from lockstep.reduce.tensor_bits import sum_of_bits

ON_ONE: dict[str, tuple[Fault, str]] = {
    "prepare: a changed model": (faults.in_a_changed_model, "last.bias is no longer trained"),
    "compute: the first shard's loss": (faults.in_the_loss(1), "the loss function has failed"),
    "compute: the second shard's loss": (faults.in_the_loss(2), "the loss function has failed"),
    "reduce: the last backward": (faults.in_the_last_backward, "the backward has failed"),
    "agree: an infinite loss": (faults.with_a_loss_that_is_not_finite, "is inf at epoch 0, step 1"),
    "agree: a gradient that is not finite": (faults.with_a_gradient_that_is_not_finite, "not finite in norm.weight"),
    "agree: another learning rate": (faults.with_another_learning_rate, "lr is"),
    "agree: a written parameter": (faults.with_a_parameter_that_is_written, "last.bias was written on rank"),
}
"""Faults on one worker alone, and what its error says. An error on one is an error on all."""
ON_ALL: dict[str, tuple[Fault, str]] = {
    "commit: the optimizer": (faults.in_the_optimizer, "failed before its update"),
    "commit: a hook of the optimizer": (faults.in_a_hook_of_the_optimizer, "a hook has failed"),
}
"""Faults of the update, which is the same on all workers."""


def fail_once(run: Run, fault: Fault, *, is_armed: bool) -> tuple[str, list[str]]:
    """Take steps up to the one that fails, arm a fault and fail; return the error, and what has changed."""
    batches = list(run.loader.epoch(0))
    for batch in batches[:FAILING_STEP]:
        run.trainer.step(batch)
    run.draw()
    disarm = fault(run) if is_armed else faults.nothing
    before = run.everything()
    try:
        run.trainer.step(batches[FAILING_STEP])
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    changed = differences(before, run.everything())
    disarm()
    return said, changed


def fail_and_go_on(run: Run, fault: Fault, *, is_armed: bool) -> tuple[str, list[str], str]:
    """Fail once, and finish the run; return its digest too."""
    return *fail_once(run, fault, is_armed=is_armed), run.finish()


def check(answers: list[tuple[str, list[str], str]], message: str, expected: str) -> None:
    """Check the error of each worker, that nothing has changed, and the digest at the end."""
    for said, changed, digest in answers:
        assert message in said
        assert changed == []
        assert digest == expected


@cache
def undisturbed(model: type[nn.Module] = Running, max_grad_norm: float | None = None) -> str:
    """Return the digest at the end of a run on one worker in which nothing fails."""
    return run_ranks(1, lambda _world: Run(None, model, max_grad_norm=max_grad_norm).finish())[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ON_ONE)
def test_a_fault_on_one_worker_changes_nothing_on_any(name: str, rank: int) -> None:
    fault, message = ON_ONE[name]

    # Two workers with two shards each, or three, of which one has two. The third rank is of the latter.
    workers = 2 if rank < 2 else 3
    answers = run_ranks(workers, lambda world: fail_and_go_on(Run(world), fault, is_armed=world.rank == rank))
    check(answers, message, undisturbed())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("name", [*ON_ONE, *ON_ALL])
def test_a_fault_on_all_workers_changes_nothing(name: str, workers: int, max_grad_norm: float | None) -> None:
    fault, message = (ON_ONE | ON_ALL)[name]
    if name in {"agree: another learning rate", "agree: a written parameter"}:
        pytest.skip("no error where all set it; no rank has what all have written")

    def program(world: World) -> tuple[str, list[str], str]:
        return fail_and_go_on(Run(world, max_grad_norm=max_grad_norm), fault, is_armed=True)

    check(run_ranks(workers, program), message, undisturbed(max_grad_norm=max_grad_norm))


@pytest.mark.parametrize("name", ["reduce: the last backward", "agree: an infinite loss"])
def test_a_step_that_has_changed_the_shapes_of_buffers_is_undone_too(name: str) -> None:
    fault, message = ON_ONE[name]

    def program(world: World) -> tuple[str, list[str], str]:
        return fail_and_go_on(Run(world, Growing), fault, is_armed=world.rank == world.world_size - 1)

    for workers in (1, 2, 3):
        check(run_ranks(workers, program), message, undisturbed(Growing))


def test_the_first_step_can_fail() -> None:
    def program(world: World) -> str:
        run = Run(world)
        if world.rank == 1:
            faults.in_the_loss(2)(run)
        with pytest.raises((faults.InjectedError, ls.ReductionError)):
            run.trainer.step(next(run.loader.epoch(0)))
        return run.finish()

    assert run_ranks(2, program) == [undisturbed()] * 2


def test_the_error_on_the_other_workers_names_the_rank_and_the_cause() -> None:
    def program(world: World) -> str:
        return fail_once(Run(world), faults.in_the_loss(1), is_armed=world.rank == 1)[0]

    first, second, third = run_ranks(3, program)
    assert second == "InjectedError: the loss function has failed"
    for said in (first, third):
        assert said.startswith("ReductionError: Rank 1 raised an error in this step. No parameter was changed")
        assert "InjectedError: the loss function has failed" in said


def test_a_scaler_forgets_a_step_whose_optimizer_has_failed() -> None:
    def run_with_scaler(*, fails: bool) -> tuple[str, list[str], str]:
        run = Run(None, scaler=torch.amp.GradScaler("cpu", init_scale=4.0), max_grad_norm=0.5)
        return fail_and_go_on(run, faults.in_the_optimizer, is_armed=fails)

    said, changed, digest = run_ranks(1, lambda _world: run_with_scaler(fails=True))[0]
    assert (said, changed) == ("InjectedError: the optimizer has failed before its update", [])
    assert digest == run_ranks(1, lambda _world: run_with_scaler(fails=False))[0][2]


@pytest.mark.filterwarnings("ignore:Steps have changed scheduler_fails")
def test_a_scheduler_that_fails_in_a_skipped_step_changes_nothing() -> None:
    def program(_world: World) -> list[str]:
        run = Run(None, nonfinite="skip")
        batches = run.loader.epoch(0)
        run.trainer.step(next(batches))
        disarm = faults.with_a_loss_that_is_not_finite(run)
        run.optimizer.scheduler_fails = True
        before = run.everything()
        with pytest.warns(UserWarning, match="is skipped"), pytest.raises(faults.InjectedError):
            run.trainer.step(next(batches))
        disarm()
        changed = differences(before, run.everything())
        assert run.finish() == undisturbed()
        return changed

    assert run_ranks(1, program) == [[]]


# -- What cannot be undone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["optimizer", "scheduler", "data"])
def test_an_update_that_fails_in_the_middle_makes_the_trainer_unusable(what: str, tmp_path: Any) -> None:
    class ThroughData(torch.optim.SGD):
        """Writes through `.data`, which no version tells of, and then fails."""

        @torch.no_grad()
        def step(self, _closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(1.0)
                raise faults.InjectedError("in the middle")

    def program(_world: World) -> None:
        run = Run(None)
        run.trainer.save(tmp_path / "good.ckpt")
        if what == "data":
            optimizer = ThroughData(run.model.parameters(), lr=0.1)
            run.trainer = ls.Trainer(run.model, optimizer, loss=run.loss, num_shards=NUM_SHARDS)
        elif what == "optimizer":
            run.optimizer.fault = "after"
        else:
            run.optimizer.scheduler_fails = True
        batch = next(run.loader.epoch(0))
        with pytest.raises(faults.InjectedError):
            run.trainer.step(batch)
        for call in (lambda: run.trainer.step(batch), lambda: run.trainer.save(tmp_path), run.trainer.state_dict):
            with pytest.raises(ls.LockstepError, match=r"(had changed a part|had updated) .*trainer\.load\(path\)"):
                call()
        if what != "data":
            run.trainer.load(tmp_path / "good.ckpt")
            assert run.finish() == undisturbed()

    run_ranks(1, program)


def take_steps(run: Run, number: int) -> list[str]:
    """Take steps with the batches of the epoch, whatever they raise; return what that is."""
    said = []
    for batch in list(run.loader.epoch(0))[:number]:
        try:
            run.trainer.step(batch)
        except Exception as error:  # noqa: BLE001 - what it is, is what is asked
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("before", "has failed before its update. Nothing was changed by it there."),
        ("after", "has failed after its update. It had changed a part of the parameters or of the optimizer's state."),
        ("scheduler", "the scheduler has failed. The optimizer had updated the parameters when the scheduler failed."),
    ],
)
def test_an_update_that_fails_on_one_worker_alone_is_named_on_all_in_the_next_step(
    what: str, left: str, rank: int, workers: int, tmp_path: Any
) -> None:
    def program(world: World) -> tuple[list[str], str]:
        run = Run(world)
        run.trainer.save(tmp_path / "good.ckpt")
        if world.rank == rank and what == "scheduler":
            run.optimizer.scheduler_fails = True
        elif world.rank == rank:
            run.optimizer.fault = what
        said = take_steps(run, 3)
        run.trainer.load(tmp_path / "good.ckpt")
        return said, run.finish()

    answers = run_ranks(workers, program)
    others = ", ".join(str(other) for other in range(workers) if other != rank)
    for number, (said, digest) in enumerate(answers):
        assert said[0].startswith("InjectedError" if number == rank else "")
        for again in said[1:]:
            assert again.startswith(
                f"UnusableStateError: On rank {rank}, epoch 0, step 0 (counted from 0) failed with InjectedError: "
            )
            assert left in again
            assert f"It was finished on rank {others}. No further step can be taken. Load a checkpoint" in again
        assert said[1:] == answers[0][0][1:]
        assert digest == undisturbed()


def test_a_save_names_the_error_of_a_worker_whose_update_has_failed_in_the_middle() -> None:
    def program(world: World) -> str:
        run = Run(world)
        if world.rank == 1:
            run.optimizer.fault = "after"
        take_steps(run, 1)
        with pytest.raises(ls.LockstepError) as caught:
            run.save()
        return str(caught.value)

    for said in run_ranks(2, program):
        assert "failed with InjectedError: the optimizer has failed after its update" in said
        assert "Load a checkpoint" in said


def test_workers_that_have_loaded_different_checkpoints_are_refused() -> None:
    def program(world: World) -> str:
        run = Run(world)
        take_steps(run, 1)
        state = run.trainer.state_dict()
        if world.rank == 1:
            state["global_step"] = 5
            run.trainer.load_state_dict(state)
        return take_steps(run, 2)[1]

    for said in run_ranks(2, program):
        assert said.startswith("UnusableStateError: Rank 1 has taken 5 steps of this run and rank 0 1. Load the same")


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_that_fails_before_it_has_recorded_anything_changes_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an earlier step has recorded was put back: buffers went back by a step.
    def program(world: World) -> tuple[str, list[str], str]:
        run = Run(world)
        batches = list(run.loader.epoch(0))
        for batch in batches[:number]:
            run.trainer.step(batch)
        run.draw()
        before = run.everything()
        fails = world.rank == world.world_size - 1
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(run.trainer.internals.engine.runs.random, "save", faults.fail)
            with pytest.raises((faults.InjectedError, ls.ReductionError)) as caught:
                run.trainer.step(batches[number])
        return str(caught.value), differences(before, run.everything()), run.finish()

    for workers in (1, 2):
        check(run_ranks(workers, program), "something has failed", undisturbed())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_that_every_worker_has_written_needs_a_checkpoint(workers: int, tmp_path: Any) -> None:
    def program(world: World) -> tuple[str, list[str], str]:
        run = Run(world)
        batches = list(run.loader.epoch(0))
        run.trainer.step(batches[0])
        run.trainer.save(tmp_path / "good.ckpt")
        disarm = faults.with_a_parameter_that_is_written(run)
        with pytest.raises(ls.LossError) as caught:
            run.trainer.step(batches[1])
        disarm()
        with pytest.raises(ls.LockstepError) as again:
            run.trainer.step(batches[1])
        run.trainer.load(tmp_path / "good.ckpt")
        return str(caught.value), [str(again.value)], run.finish()

    for said, (again,), digest in run_ranks(workers, program):
        assert "Every rank has written last.bias, which cannot be put back: load a checkpoint on every rank" in said
        assert "had written to last.bias. " in again
        assert digest == undisturbed()


# -- A part of a step --------------------------------------------------------------------------------------------------


class Counted(StepPart):
    """Has a part in everything that a step does; notes what was called, and fails where it is told to."""

    def __init__(self, runs: ShardRuns) -> None:
        self.calls: list[str] = []
        self.fails_in = ""
        self._rank = Column(int, lambda _: 10 + runs.world.rank)
        self._of_failed = Column(int, lambda _: 20 + runs.world.rank, is_of_failed=True)
        self._shards = ShardColumn(lambda: {shard: 30 + shard for shard in runs.losses._losses})
        self.columns, self.shard_columns = (self._rank, self._of_failed), (self._shards,)
        self._first = next(runs.state.model.parameters())

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails_in == name:
            raise faults.InjectedError("the part has failed")

    def begin(self, step: CurrentStep) -> None:
        self._call("begin")

    def check(self, step: CurrentStep, rows: Rows) -> None:
        self._call(f"{list(rows[self._rank])} {list(rows[self._of_failed])} {list(rows.of_shards(self._shards))}")
        step.ask("asking", lambda: self.calls[0], lambda found: self._call(" ".join(found)))

    def change_gradients(self, step: CurrentStep) -> None:
        self._call("change")
        self._first.grad.mul_(0.5)

    def commit(self, step: CurrentStep) -> None:
        self._call("commit")

    def undo(self, step: CurrentStep) -> None:
        self._call("undo")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed()  # without the part: its result is kept
    monkeypatch.setattr(step_engine, "STEP_PARTS", (*step_engine.STEP_PARTS, Counted))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_part_of_ones_own_has_a_part_in_every_step_and_in_what_becomes_of_one_that_fails(workers: int) -> None:
    def program(world: World) -> tuple[list[str], str]:
        run = Run(world)
        part = run.trainer.internals.engine.part(Counted)
        batches = run.loader.epoch(0)
        run.trainer.step(next(batches))
        if world.rank == world.world_size - 1:
            faults.in_the_loss(1)(run)
        with pytest.raises(Exception, match="the loss function has failed"):
            run.trainer.step(next(batches))
        return part.calls, run.finish()

    answers = run_ranks(workers, program)
    ranks, of_failed = [10 + rank for rank in range(workers)], [20 + rank for rank in range(workers)]
    step = ["begin", f"{ranks} {of_failed} [30.0, 31.0, 32.0, 33.0]", "change", " ".join(["begin"] * workers), "commit"]
    for calls, digest in answers:
        assert calls == [*step, "begin", "undo", *step * 4]
        assert digest == answers[0][1] != undisturbed()


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("moment", ["begin", "change"])
def test_a_part_that_fails_fails_the_step_on_all_workers(moment: str) -> None:
    def program(world: World) -> tuple[str, list[str], list[str]]:
        def fail_in_part(run: Run) -> Any:
            part = run.trainer.internals.engine.part(Counted)
            part.calls.clear()
            part.fails_in = moment
            return lambda: setattr(part, "fails_in", "")

        run = Run(world)
        said, changed = fail_once(run, fail_in_part, is_armed=moment == "change" or world.rank == 1)
        return said, changed, run.trainer.internals.engine.part(Counted).calls

    for said, changed, calls in run_ranks(2, program):
        assert "the part has failed" in said
        assert changed == []
        assert calls[-1] == "undo"


# -- What a failing worker leaves behind, and what the others learn ----------------------------------------------------


Write = Callable[[torch.nn.Parameter], object]


def spoiling(spoil: Callable[[Tensor], Tensor]) -> Fault:
    def arm(run: Run) -> Callable[[], None]:
        run.spoil = spoil
        return lambda: setattr(run, "spoil", lambda loss: loss)

    return arm


def write_in_place(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def write_through_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(1.0)


def replace_memory(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.detach() + 1.0


def replace_shape(parameter: torch.nn.Parameter) -> None:
    parameter.data = torch.zeros(3, *parameter.shape)


@pytest.mark.parametrize("fails", [True, False], ids=["and fails", ""])
@pytest.mark.parametrize("write", [write_in_place, write_through_data, replace_memory, replace_shape])
@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (3, 1)])
def test_a_parameter_that_one_worker_has_written_is_put_back(
    write: Write, workers: int, rank: int, *, fails: bool
) -> None:
    def program(world: World) -> tuple[str, list[str], str]:
        run = Run(world)

        def spoil(loss: Tensor) -> Tensor:
            if world.rank == rank:
                write(run.model.last.bias)
                if fails:
                    raise faults.InjectedError("failed after a write")
            return loss

        return fail_and_go_on(run, spoiling(spoil), is_armed=True)

    expected = undisturbed()
    for number, (said, changed, digest) in enumerate(run_ranks(workers, program)):
        if fails:
            assert "failed after a write" in said, number
        elif write is not replace_shape:
            assert f"last.bias was written on rank {rank}" in said
        assert said != "nothing"
        assert changed == []
        assert digest == expected


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("write", [write_in_place, replace_memory, replace_shape])
def test_a_worker_that_is_alone_and_fails_after_a_write_needs_a_checkpoint(
    write: Write, num_shards: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "NUM_SHARDS", num_shards)
    run = Run(None)
    batches = list(run.loader.epoch(0))
    run.trainer.step(batches[0])
    run.trainer.save(tmp_path / "good.ckpt")

    def spoil(_loss: Tensor) -> Tensor:
        write(run.model.last.bias)
        raise faults.InjectedError("failed after a write")

    run.spoil = spoil
    with pytest.raises(faults.InjectedError):
        run.trainer.step(batches[1])
    run.spoil = lambda loss: loss
    with pytest.raises(ls.LockstepError, match=r"had written to last\.bias.*trainer\.load\(path\)"):
        run.trainer.step(batches[1])
    run.trainer.load(tmp_path / "good.ckpt")
    assert run.finish() == Run(None).finish()


@pytest.mark.parametrize("where", ["bucket", "table"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_reduction_error_of_one_worker_is_sent_to_the_others(rank: int, where: str) -> None:
    # It was taken for a consequence of another rank's, so no rank was named: each one's error pointed at the others.
    def program(world: World) -> tuple[str, list[str]]:
        run = Run(world)

        def spoil(loss: Tensor) -> Tensor:
            gradients: Any = run.trainer.internals.engine.runs.gradients
            if world.rank == rank and where == "table":
                gradients.sum_for_finite_check = fail
            elif world.rank == rank:  # in the backward, when the buckets of this step are there
                loss.register_hook(lambda _: setattr(gradients._reducer.buckets[0], "prepare", fail))
            return loss

        def fail(*_: Any) -> None:
            raise ls.ReductionError("a gradient does not fit")

        return fail_once(run, spoiling(spoil), is_armed=True)

    answers = run_ranks(2, program)
    assert answers[rank][0] == "ReductionError: a gradient does not fit"
    assert answers[1 - rank][0].startswith(f"ReductionError: Rank {rank} raised an error in this step. ")
    assert "ReductionError: a gradient does not fit" in answers[1 - rank][0]
    assert [changed for _, changed in answers] == [[], []]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_memory_that_runs_out_while_parameters_are_compared_is_an_error_on_all(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_full = sum_of_bits, [False] * 3

    def program(world: World) -> tuple[str, str]:
        run = Run(world)
        batches = list(run.loader.epoch(0))
        run.trainer.step(batches[0])
        before = run.model.last.bias.detach().clone()
        if world.rank == 1:
            write_in_place(run.model.last.bias)
        is_full[world.rank] = world.rank == rank
        with pytest.raises((torch.OutOfMemoryError, ls.LockstepError)) as caught:
            run.trainer.step(batches[1])
        is_full[world.rank] = False
        run.model.last.bias.data.copy_(before)
        return f"{caught.typename}: {caught.value}", run.finish()

    def read_parameters(tensors: Any) -> Tensor:
        found = list(tensors)
        current = int(current_thread().name.removeprefix("rank "))
        if len(found) == 1 and is_full[current]:
            raise torch.OutOfMemoryError("out of memory")
        return read(found)

    monkeypatch.setattr(comparison, "sum_of_bits", read_parameters)
    expected = undisturbed()
    for number, (said, digest) in enumerate(run_ranks(3, program)):
        assert said.startswith("OutOfMemoryError" if number == rank else f"PeerFailedError: Rank {rank} has failed in")
        assert "out of memory" in said
        assert digest == expected


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("can't allocate memory: 8 B")])
def test_a_worker_without_memory_lets_go_of_its_step_before_it_makes_the_calls_of_the_others(error: Exception) -> None:
    class Activations:
        pass

    held: list[weakref.ref[Activations]] = []
    found: list[bool] = []

    def program(world: World) -> str:
        run = Run(world)

        def spoil(loss: Tensor) -> Tensor:
            activations = Activations()
            held.append(weakref.ref(activations))
            raise error

        gradients: Any = run.trainer.internals.engine.runs.gradients
        fail = gradients.fail

        def fail_and_look(*arguments: Any) -> None:
            found.append(held[0]() is None)
            fail(*arguments)

        if world.rank == 1:
            gradients.fail = fail_and_look
        return fail_once(run, spoiling(spoil), is_armed=world.rank == 1)[0]

    answers = run_ranks(2, program)
    assert found == [True]
    assert str(error) in answers[0]
    assert answers[0].startswith("ReductionError: Rank 1 raised")
    assert "shard_optimizer=True keeps a part" in "".join(error.__notes__)


def test_an_error_that_cannot_be_sent_says_so() -> None:
    run = Run(None)
    batch = next(run.loader.epoch(0))
    gradients: Any = run.trainer.internals.engine.runs.gradients

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("device-side assert triggered")

    gradients.fail = fail
    run.spoil = fail
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        run.trainer.step(batch)
    assert caught.value.__notes__[-1] == (
        "The other workers could not be sent this error: RuntimeError: device-side assert triggered"
    )
