"""Whether the bits of a run depend on who runs which shard: what `Trainer.verify` does.

For each step every worker computes all shards, in the order of their numbers and in the opposite one, from the same
parameters, buffers and random states. The losses and gradients of a shard must have the same bits whatever was run
before it, and on every worker. Then the step is taken. At the end everything is put back.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader
from lockstep.data.contents import slice_number
from lockstep.engine.batches import gather_results, name_step
from lockstep.engine.buffer_snapshot import BufferSnapshot, buffer_parts
from lockstep.engine.own_generators import OwnGenerators
from lockstep.engine.random_states import RandomStates
from lockstep.engine.reached_networks import ReachedNetworks, find_networks
from lockstep.engine.run_state import RunState
from lockstep.engine.side_effects import LeftState
from lockstep.errors import LossError

ShardHashes = dict[int, dict[str, str]]
"""For every shard a hash of its loss and of each gradient, by name."""


class ShardComputer(Protocol):
    """What the check asks of an engine."""

    world: World

    def number_shards(self, batch: ShardedBatch, order: Sequence[int]) -> ShardHashes:
        """Compute shards in an order; return a hash of each loss and gradient."""


def verify(
    state: RunState,
    engine: ShardComputer,
    loader: ShardedLoader,
    num_steps: int,
    step: Callable[[ShardedBatch], object],
) -> None:
    """Check some steps (collective); `Trainer.verify` says what it raises."""
    networks = ReachedNetworks(find_networks(state.plan.losses, state.model), state.model)
    random = RandomStates()
    random.own = OwnGenerators(state.model, state.plan.losses)
    random.save()
    saved, restore_progress = copy.deepcopy(state.to_dict()), state.record_progress()
    ending = state.is_ending, state.end_reason, state.end_reason_after_step
    begin = state.cursor
    batches = zip(
        loader.epoch(begin.epoch, begin.step), loader.for_one_worker().epoch(begin.epoch, begin.step), strict=True
    )
    with BufferSnapshot(buffer_parts(networks.with_model(state.model))).kept():
        try:
            for mine, whole in islice(batches, num_steps):
                _check_step(state, engine, mine, whole)
                step(mine)
        finally:
            with state.restored_from(saved, has_callbacks=False):  # the steps have called none
                pass
            state.is_ending, state.end_reason, state.end_reason_after_step = ending
            restore_progress()
            random.restore()


def _check_step(state: RunState, engine: ShardComputer, mine: ShardedBatch, whole: ShardedBatch) -> None:
    """Compare the bits of every shard of one step (collective)."""

    def compute() -> tuple[str, ShardHashes]:
        data = {part.shard: slice_number(part.data) for part in whole.slices}
        odd = next((part.shard for part in mine.slices if slice_number(part.data) != data[part.shard]), None)
        if odd is not None:
            return (
                f"The data set gives other data for the samples of shard {odd} when they are loaded again: it "
                "remembers something, or draws from a generator that is not seeded for each sample"
            ), {}
        shards = [part.shard for part in whole.slices]
        before = LeftState(state.model, state.plan.losses)
        forward = engine.number_shards(whole, shards)
        changes = before.changes()
        difference = _find_difference(engine.number_shards(whole, shards[::-1]), forward)
        changed = [*changes.certain, *changes.possible]
        left = f"; the shards have changed {', '.join(changed[:3])}" if changed else ""
        return difference and f"{difference} when other shards are run before it{left}", forward

    found = gather_results(engine.world, compute, "Trainer.verify")
    problem = next((text for text, _ in found if text), "")
    for rank, (_, numbers) in enumerate(found):
        if not problem and (difference := _find_difference(numbers, found[0][1])):
            problem = f"{difference} on rank {rank} than on rank 0"
    if problem:
        raise LossError(
            f"The result depends on who runs which shard, at {name_step(mine.cursor)}: {problem}. Keep state in "
            "buffers, take numbers of steps from place (loss(model, batch, place)), and draw random numbers from the "
            "global generators. Everything that a trainer saves was put back. (LS518)"
        )


def _find_difference(found: ShardHashes, expected: ShardHashes) -> str:
    for shard, numbers in expected.items():
        names = [name for name, number in numbers.items() if found[shard].get(name) != number]
        if names:
            more = f" and {len(names) - 1} more have" if len(names) > 1 else " has"
            return f"{names[0]}{more} other bits in shard {shard}"
    return ""
