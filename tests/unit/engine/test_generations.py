"""A run goes on with other workers: its state stays, and the engine is made anew."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.support import faulty_runs as faults
from tests.support.faulty_runs import NUM_SHARDS, Growing, Run, Running
from tests.support.threaded_ranks import run_ranks
from torch import nn

import lockstep as ls
from lockstep.comm import World
from lockstep.engine.arguments import check_arguments
from lockstep.recording.file_format import StepPhase
from lockstep.torch_private.autograd import post_accumulate_grad_hooks

SWITCH = 2
"""The step before which the workers change."""


def alone(model: type[nn.Module]) -> str:
    return run_ranks(1, lambda _world: Run(None, model).finish())[0]


def subworld(world: World, size: int) -> World:
    """Return the world of the first `size` ranks (each of them calls)."""
    if size == world.world_size:
        return world
    group: Any = world.group
    return World(rank=world.rank, world_size=size, group=group.make_subgroup(range(size)))


def continue_with(trainer: ls.Trainer, world: World) -> None:
    """Let a trainer continue with workers of the test's choice (collective for these)."""
    present = trainer.internals
    present.engine.close()
    present._replace_engine(world, check_arguments(present._arguments, world))


@pytest.mark.parametrize("model", [Running, Growing])
@pytest.mark.parametrize("after", [1, 3])
def test_a_run_goes_on_with_fewer_or_more_workers_to_the_same_digest(model: type[nn.Module], after: int) -> None:
    def program(world: World) -> str:
        before = 2
        if world.rank < before:
            run = Run(subworld(world, before), model)
            for batch in list(run.loader.epoch(0))[:SWITCH]:
                run.trainer.step(batch)
            state = [run.trainer.state_dict(), run.model.norm.weight.clone()]
        else:
            state, run = [], None
        # Who joins gets the state from rank 0, as from a checkpoint.
        state = world.gather_objects(state)[0]
        if world.rank >= after:
            if run is not None:
                run.trainer.close()
            return ""
        present = subworld(world, after)
        if run is None:
            run = Run(None, model)
            if model is Growing:
                run.model.seen = state[0]["model"]["seen"].clone()
            run.trainer.load_state_dict(state[0])
        continue_with(run.trainer, present)
        assert run.trainer.world == present
        return run.finish()

    answers = run_ranks(3, program)
    assert answers[:after] == [alone(model)] * after


def test_an_engine_that_is_closed_holds_nothing_of_the_model_or_the_group() -> None:
    num_threads = threading.active_count()

    def program(world: World) -> None:
        run = Run(world)
        run.finish()
        parameters = list(run.model.parameters())
        assert any(map(post_accumulate_grad_hooks, parameters))
        reducer = weakref.ref(run.trainer.internals.engine.runs.gradients)
        bucket = weakref.ref(run.trainer.internals.engine.runs.gradients._reducer.buckets[0])
        run.trainer.close()
        assert run.trainer.internals.engine.phase is StepPhase.CLOSED
        assert bucket() is None
        assert not any(map(post_accumulate_grad_hooks, parameters))
        assert all(parameter.grad is None for parameter in parameters)
        run.optimizer.step()  # it is its owner's again
        with pytest.raises(ValueError, match="was closed"):
            run.trainer.step(next(run.loader.epoch(1)))
        del run
        gc.collect()
        assert reducer() is None

    run_ranks(2, program)
    assert threading.active_count() <= num_threads


def test_a_step_within_a_step_is_refused_and_changes_nothing() -> None:
    def program(world: World) -> str:
        run = Run(world)
        batches = list(run.loader.epoch(0))

        def spoil(loss: torch.Tensor) -> torch.Tensor:
            run.trainer.step(batches[0])
            return loss

        run.spoil = spoil
        with pytest.raises(ValueError, match="in the COMPUTE phase of a step"):
            run.trainer.step(batches[0])
        run.spoil = lambda loss: loss
        return run.finish()

    assert run_ranks(1, program) == [alone(Running)]


def test_a_reduction_that_fails_changes_nothing_and_the_step_can_be_taken_with_the_workers_that_are_left() -> None:
    def program(world: World) -> str:
        run = Run(world)
        batches = list(run.loader.epoch(0))
        run.trainer.step(batches[0])
        before = run.everything()
        group: Any = world.group
        if world.rank == 1:
            faults.in_the_loss(2)(run)
            gradients: Any = run.trainer.internals.engine.runs.gradients
            gradients.fail = lambda *_given: group.abort()  # as if killed
        with pytest.raises(RuntimeError, match=r"the loss function has failed|abort"):
            run.trainer.step(batches[1])
        if world.rank == 1:
            return ""
        assert faults.differences(before, run.everything()) == []
        continue_with(run.trainer, World(rank=0, world_size=1, group=None))
        return run.finish()

    assert run_ranks(2, program)[0] == alone(Running)


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_engine_of_workers_that_are_gone_is_freed_at_once() -> None:
    # A cycle kept it, and with it a group with its threads and descriptors, until Python looked for cycles: that may
    # take hundreds of steps. On Gloo a worker had 26 threads more after as many losses.
    run = Run(None)
    run.trainer.step(next(run.loader.epoch(0)))
    engine = weakref.ref(run.trainer.internals.engine)
    continue_with(run.trainer, World(rank=0, world_size=1, group=None))
    assert engine() is None


def test_the_deterministic_switches_are_given_back() -> None:
    def look() -> Any:
        return (
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    before = look()
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = True
    try:
        wanted = look()
        run = Run(None)
        assert look() != wanted
        run.trainer.close()
        assert look() == wanted
        with pytest.raises(ValueError, match="num_shards"):
            ls.Trainer(run.model, run.optimizer, loss=run.loss, num_shards=0)
        assert look() == wanted
        # Of two trainers the first one to be closed took the switches from the other, and the last one set them.
        first, second = Run(None), Run(None)
        held = look()
        first.trainer.close()
        assert look() == held
        second.trainer.close()
        assert look() == wanted
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[3]


def test_more_workers_than_shards_are_refused() -> None:
    def program(world: World) -> None:
        run = Run(None)
        with pytest.raises(ValueError, match=f"{NUM_SHARDS + 1} workers cannot share {NUM_SHARDS} shards"):
            continue_with(run.trainer, world)

    run_ranks(NUM_SHARDS + 1, program)
