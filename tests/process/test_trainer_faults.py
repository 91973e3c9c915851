"""A step that fails on one of several real workers is undone on all of them, over shared memory and over Gloo."""

from functools import partial

import pytest
import torch.distributed as dist
from tests.process.ranks import call_on_ranks
from tests.support import faulty_runs as faults
from tests.support.faulty_runs import FAILING_STEP, Fault, Growing, Run, Running, differences
from torch import nn

import lockstep as ls
from lockstep.comm import World, current_world

FAULTS: dict[str, Fault] = {
    "prepare": faults.in_a_changed_model,
    "compute": faults.in_the_loss(1),
    "reduce": faults.in_the_last_backward,
    "agree": faults.with_a_loss_that_is_not_finite,
}
MODELS: dict[str, type[nn.Module]] = {"running": Running, "growing": Growing}
Answer = tuple[str, list[str], str]


def fail_and_finish(world: World | None, model: type[nn.Module], fault: Fault, *, is_armed: bool) -> Answer:
    """Fail in one step, take it again, and go on; return the error, what it has changed, and the last digest."""
    run = Run(world, model)
    batches = list(run.loader.epoch(0))
    for batch in batches[:FAILING_STEP]:
        run.trainer.step(batch)
    run.draw()
    disarm = fault(run) if is_armed else faults.nothing
    before = run.everything()
    said = ""
    try:
        run.trainer.step(batches[FAILING_STEP])
    except (ls.LockstepError, faults.InjectedError, ValueError) as error:
        said = type(error).__name__
    changed = differences(before, run.everything())
    disarm()
    return said, changed, run.finish()


def fail_in_all_ways(run: ls.Run) -> dict[str, Answer]:
    worlds = {"shm": current_world()}
    if run.world_size == 2:
        worlds["gloo"] = current_world(dist.new_group(backend="gloo"))
    return {
        f"{transport} {phase} on {rank} {name}": fail_and_finish(world, model, fault, is_armed=run.rank == rank)
        for transport, world in worlds.items()
        for phase, fault in FAULTS.items()
        for rank in range(run.world_size)
        for name, model in MODELS.items()
        if model is Running or phase in {"reduce", "agree"}
    }


@pytest.mark.parametrize("workers", [2, 3])
def test_a_fault_on_one_worker_changes_nothing_on_any(workers: int) -> None:
    undisturbed = {name: digest_alone(model) for name, model in MODELS.items()}
    for rank, answers in enumerate(call_on_ranks(workers, fail_in_all_ways)):
        for what, (said, changed, digest) in answers.items():
            *_, failing, name = what.split()
            assert said, (rank, what)
            assert (said != "ReductionError") == (rank == int(failing) or " agree " in what), (rank, what, said)
            assert changed == [], (rank, what)
            assert digest == undisturbed[name], (rank, what)


def digest_alone(model: type[nn.Module]) -> str:
    """Return the digest of a run on one worker in which nothing fails."""
    (digest,) = call_on_ranks(1, partial(finish_alone, model))
    return str(digest)


def finish_alone(model: type[nn.Module], _run: ls.Run) -> str:
    return Run(None, model).finish()
