"""What all workers conclude from the table of a step: it holds the same numbers on all, so they all do the same."""

import math
from collections.abc import Callable, Sequence
from typing import final

from lockstep.comm import World, calls_for
from lockstep.data import OTHER_DATA, ShardedBatch
from lockstep.engine.batches import name_step
from lockstep.engine.step_table import Failure, StepSums
from lockstep.errors import LossError, ReductionError, UnusableStateError, describe_exception


def check_progress(sums: StepSums, world: World, failed_step: str) -> None:
    """Check that all workers have taken the same steps (collective where they have not, which all workers see).

    An update that fails on one worker fails when the others may have made theirs, so it is found in the next step.
    `failed_step` says how that of this worker has failed; else it is empty. The error has the same text on all workers.
    """
    counts = [status.num_steps for status in sums.statuses]
    if len(set(counts)) == 1 and all(status.failure is not Failure.UNUSABLE for status in sums.statuses):
        return
    with calls_for("comparing the steps that the workers have taken"):
        found = world.gather_objects(failed_step)
    texts = [f"On rank {rank}, {text}" for rank, text in enumerate(found) if text]
    if not texts:
        odd = next((rank for rank, count in enumerate(counts) if count != counts[0]), 0)
        raise UnusableStateError(
            f"Rank {odd} has taken {counts[odd]} steps of this run and rank 0 {counts[0]}. Load the same checkpoint on "
            "every rank: trainer.load(path). This step has changed nothing. (LS524)"
        )
    done = [str(rank) for rank, count in enumerate(counts) if count == max(counts) and count > min(counts)]
    finished = f" It was finished on rank {', '.join(done)}." if done else ""
    raise UnusableStateError(
        f"{' '.join(texts)}{finished} No further step can be taken. Load a checkpoint on every rank: "
        "trainer.load(path). (LS524)"
    )


def raise_failure(sums: StepSums, world: World, error: Exception | None) -> None:
    """Raise what a worker has raised in this step, if any has (collective then, which all workers see).

    Nothing is raised where this worker's reduction has failed and no worker has an error of its own (`error`).
    """
    if all(status.failure is Failure.NONE for status in sums.statuses):
        return
    with calls_for("sending an error to the other ranks"):
        found = world.gather_objects(None if error is None else describe_exception(error))
    cause = next(((rank, text) for rank, text in enumerate(found) if text is not None), None)
    if cause is not None:
        rank, text = cause
        raise ReductionError(
            f"Rank {rank} raised an error in this step. No parameter was changed on any rank. The error: {text} (LS523)"
        )
    if sums.statuses[world.rank].failure is Failure.NONE:
        ranks = [rank for rank, status in enumerate(sums.statuses) if status.failure is not Failure.NONE]
        raise ReductionError(
            f"The gradients of this step could not be reduced on rank {', '.join(map(str, ranks))}, whose error says "
            "why. No parameter was changed on any rank. (LS523)"
        )


def check_places(sums: StepSums) -> None:
    odd = next((rank for rank, place in enumerate(sums.places) if place != sums.places[0]), None)
    if odd is None:
        return
    (epoch, step, _), (other_epoch, other_step, _) = sums.places[0], sums.places[odd]
    if (epoch, step) == (other_epoch, other_step):
        what = (
            f"of another loader or of other data (rank 0 is at epoch {epoch:.0f}, step {step:.0f}, and so is "
            f"rank {odd})"
        )
        remedy = f"Make the loader with the same arguments on every rank. If it is: {OTHER_DATA}"
    else:
        remedy = "Make the loader with the same arguments on every rank, and skip no batch on one of them alone."
        what = f"epoch {other_epoch:.0f}, step {other_step:.0f}, and rank 0's epoch {epoch:.0f}, step {step:.0f}"
    raise ValueError(
        f"The workers train on different batches: rank {odd}'s is {what}. {remedy} No parameter was changed. (LS512)"
    )


def check_written(sums: StepSums, names: Sequence[str], lost: Sequence[str], batch: ShardedBatch) -> None:
    """Check that no worker's shards have written parameters; `lost` are those that every worker has written."""
    rank, number = next(((rank, each.written) for rank, each in enumerate(sums.statuses) if each.written), (0, 0))
    if number:
        left = "It was put back on every rank. No parameter was changed."
        if lost:
            left = (
                f"Every rank has written {', '.join(lost[:3])}, which cannot be put back: load a checkpoint on every "
                "rank, trainer.load(path), or start again."
            )
        raise LossError(
            f"Parameter {names[number - 1]} was written on rank {rank} while the shards of "
            f"{name_step(batch.cursor)} ran, by a forward, the loss function or a hook. Each worker runs other "
            "shards, so the weights would depend on the number of workers. Keep an average of the weights in "
            f"buffers, or update it between two steps; do without max_norm in an embedding. {left} (LS518)"
        )


def find_bad_loss(sums: StepSums, batch: ShardedBatch) -> str:
    """Return which loss is not finite, in words; empty if none is. `LossError` if no loss has a weight."""
    for shard, (loss, weight) in enumerate(zip(sums.losses, sums.weights, strict=True)):
        if not (math.isfinite(loss) and math.isfinite(weight)):
            rank = next(rank for rank, shards in enumerate(batch.ranges) if shard in shards)
            return (
                f"The loss of shard {shard}, run by rank {rank}, is {loss / weight if weight else loss} at "
                f"{name_step(batch.cursor)}: the model has diverged, or a sample is not finite. Try a smaller "
                'learning rate, or max_grad_norm; nonfinite="skip" leaves such steps out.'
            )
    if not any(weight > 0 for weight in sums.weights):
        raise LossError(
            f"The summed weight of the losses is {sums.weight} at {name_step(batch.cursor)}, expected more than "
            "zero: no shard had anything to learn from. (LS507)"
        )
    return ""


@final
class NestedBackwardCheck:
    """Checks whether a backward runs another one inside, on which the order of addition depends.

    [Note: a backward inside a backward] in `lockstep.reduce.shard_reducer`.
    `allow_in_place` is called in each step, with whether no backward has done that so far.
    """

    def __init__(self, allow_in_place: Callable[[bool], None]) -> None:
        self._allow_in_place = allow_in_place
        self._has_inner = False
        self._known: set[str] = set()

    def is_known(self, update: str) -> bool:
        """Whether the backwards of this update were seen in an earlier step."""
        return update in self._known

    def check(self, sums: StepSums, batch: ShardedBatch, update: str) -> None:
        """Read from the table whether a backward has run another inside; raise if that is new after the first step."""
        rank = next((rank for rank, each in enumerate(sums.statuses) if each.has_nested_backward), None)
        is_late = rank is not None and not self._has_inner and update in self._known
        self._known.add(update)
        self._has_inner |= rank is not None
        self._allow_in_place(not self._has_inner)
        if is_late:
            raise LossError(
                f"The backward of a loss on rank {rank} has run another backward inside, as a reentrant checkpoint "
                f"does, at {name_step(batch.cursor)}; in no step before has one. Depending on the number of workers, "
                "gradients may have been added in another order. Use torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False). From now on it is expected: this step may be taken again. No parameter was "
                "changed. (LS522)"
            )
