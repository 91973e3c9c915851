"""Forward and backward of the shards of one worker."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch import Tensor, nn

from lockstep.data import ShardedBatch, Slice
from lockstep.devices.input_copies import InputCopies
from lockstep.engine.balance import Stopwatch
from lockstep.engine.buffers import ShardZeroBuffers
from lockstep.engine.losses import read_loss, scale_by_weight
from lockstep.engine.run_state import RunState
from lockstep.engine.side_effects import plain_attributes, warn_of_counters
from lockstep.engine.step_table import StepTable
from lockstep.engine.user_function import UserFunction, explained_errors
from lockstep.engine.zero_gradients import zero_over_parameters
from lockstep.processes.reproducibility import reseed_generators
from lockstep.reduce import ShardReducer
from lockstep.shards import ShardTask, derive_seed

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
"""`loss(model, batch)`: the mean loss of a slice (scalar), or the pair of it and its weight (say, tokens)."""


@final
class ShardRuns:
    """Runs shards, each from the same buffers and with a random state of its own.

    Args:
        state: The model, and the seed of the run.
        loss: Calls the loss function.
        gradients: Adds up what the backwards give.
        buffers: Keeps those of shard 0.
    """

    def __init__(self, state: RunState, loss: UserFunction, gradients: ShardReducer, buffers: ShardZeroBuffers) -> None:
        self._state = state
        self._loss = loss
        self._gradients = gradients
        self._buffers = buffers
        self._copies = InputCopies(state.device)

    def run(
        self,
        batch: ShardedBatch,
        tasks: Sequence[ShardTask],
        table: StepTable,
        stopwatch: Stopwatch,
        *,
        watches_attributes: bool,
    ) -> None:
        """Run the shards of this worker; the last one's gradients are left to `end_last` (its backward is collective).

        Args:
            batch: This worker's part of the batch.
            tasks: The shards, in order.
            table: Gets the losses.
            stopwatch: Measures them.
            watches_attributes: Whether to warn of plain attributes that a forward changes.
        """
        model = self._state.model
        slices = {part.shard: part for part in batch.slices}
        inputs = self._copy_inputs([slices[task.shard] for task in tasks if task.shard in slices])
        attributes = plain_attributes(model) if watches_attributes else {}
        for number, task in enumerate(tasks, start=1):
            if task.shard in slices:
                self._run_shard(batch, slices[task.shard], task, table, inputs)
            if number == 1 and attributes:
                warn_of_counters(attributes, plain_attributes(model))
            if number < len(tasks):  # the end of the last one waits for others
                self._gradients.end(task)
                self._buffers.end_shard(task.shard, is_last=False)
                stopwatch.lap(number)

    def end_last(self, tasks: Sequence[ShardTask]) -> None:
        """Take in the gradients of the last shard, and wait for those of all workers (collective)."""
        self._gradients.end(tasks[-1])
        self._buffers.end_shard(tasks[-1].shard, is_last=True)

    def _copy_inputs(self, parts: Sequence[Slice]) -> Iterator[Any]:
        """Yield each slice's data on the device, while the next slice's are copied there."""
        started = (self._copies.start(part.data) for part in parts)
        upcoming = next(started, None)
        while upcoming is not None:
            present, upcoming = upcoming, next(started, None)
            yield self._copies.finish(present)

    def _run_shard(
        self, batch: ShardedBatch, part: Slice, task: ShardTask, table: StepTable, inputs: Iterator[Any]
    ) -> None:
        """Run one shard's forward and backward.

        Losses are scaled by weight / samples of the global batch, at most 1 where weights count samples, so that half
        precision does not overflow.
        """
        seed_slice("shard", self._state.seed, batch, part)
        loss, weight = read_loss(self._loss(self._state.model, next(inputs)), part)
        if isinstance(weight, Tensor) or weight > 0:
            table.add_loss(part.shard, loss, weight)
            scaled = scale_by_weight(loss, weight, batch.num_samples)
        elif (zero := zero_over_parameters(loss)) is not None:
            scaled = zero
        else:
            return
        if self._state.scaler is not None:
            scaled = self._state.scaler.scale(scaled)
        self._gradients.mark(scaled, task)
        with explained_errors():
            scaled.backward()


def seed_slice(purpose: str, seed: int, batch: ShardedBatch, part: Slice) -> None:
    """Seed the global generators for one slice of one step of a run with `seed` (local)."""
    reseed_generators(derive_seed(purpose, seed, batch.cursor.epoch, batch.cursor.step, part.shard))
