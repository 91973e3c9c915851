"""What a worker leaves behind that fails in the middle of a step, and what the others learn of its error."""

import weakref
from collections.abc import Callable
from functools import cache
from threading import current_thread
from typing import Any

import pytest
import torch
from tests.support import faulty_runs as faults
from tests.support.faulty_runs import FAILING_STEP, Run, differences
from tests.support.threaded_ranks import run_ranks
from torch import Tensor

import lockstep as ls
from lockstep.comm import World
from lockstep.engine import comparison
from lockstep.reduce.tensor_bits import sum_of_bits

Write = Callable[[torch.nn.Parameter], object]


def write_in_place(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def write_through_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(1.0)


def replace_memory(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.detach() + 1.0


def replace_shape(parameter: torch.nn.Parameter) -> None:
    parameter.data = torch.zeros(3, *parameter.shape)


def fail_once(run: Run, spoil: Callable[[Tensor], Tensor]) -> tuple[str, list[str]]:
    """Take one step, and one that fails; return its error, and what it has changed."""
    batches = list(run.loader.epoch(0))
    for batch in batches[:FAILING_STEP]:
        run.trainer.step(batch)
    run.draw()
    before = run.everything()
    run.spoil = spoil
    try:
        run.trainer.step(batches[FAILING_STEP])
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    run.spoil = lambda loss: loss
    return said, differences(before, run.everything())


@cache
def undisturbed() -> str:
    return run_ranks(1, lambda _world: Run(None).finish())[0]


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

        said, changed = fail_once(run, spoil)
        return said, changed, run.finish()

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
            gradients: Any = run.trainer.engine.runs.gradients
            if world.rank == rank and where == "table":
                gradients.sum_for_finite_check = fail
            elif world.rank == rank:  # in the backward, when the buckets of this step are there
                loss.register_hook(lambda _: setattr(gradients._reducer.buckets[0], "prepare", fail))
            return loss

        def fail(*_: Any) -> None:
            raise ls.ReductionError("a gradient does not fit")

        return fail_once(run, spoil)

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

        gradients: Any = run.trainer.engine.runs.gradients
        fail = gradients.fail

        def fail_and_look(*arguments: Any) -> None:
            found.append(held[0]() is None)
            fail(*arguments)

        if world.rank == 1:
            gradients.fail = fail_and_look
        return fail_once(run, spoil if world.rank == 1 else lambda loss: loss)[0]

    answers = run_ranks(2, program)
    assert found == [True]
    assert str(error) in answers[0]
    assert answers[0].startswith("ReductionError: Rank 1 raised")


def test_an_error_that_cannot_be_sent_says_so() -> None:
    run = Run(None)
    batch = next(run.loader.epoch(0))
    gradients: Any = run.trainer.engine.runs.gradients

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("device-side assert triggered")

    gradients.fail = fail
    run.spoil = fail
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        run.trainer.step(batch)
    assert caught.value.__notes__[-1] == (
        "The other workers could not be sent this error: RuntimeError: device-side assert triggered"
    )
