"""Check that all workers train the same: by numbers in each step, and bit by bit where the user asks for it (`verify`).

Of the two numbers per worker and step, sent in the step table, one is of the optimizer's options: a learning rate that
is set on one rank alone gives that rank other weights. The other is of the parameters' bits. Reading them all takes as
long as a part of an update, so it is done only where something has written to them since the last update: weights that
were loaded, or a forward that changes them. Each parameter counts its writes (`_version`), and the optimizer's are the
same on every worker.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import final

import torch
from torch import Tensor

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader, Slice
from lockstep.data.contents import slice_number
from lockstep.data.keyed import generators_of_training
from lockstep.engine.batches import gather_results, name_step
from lockstep.engine.networks import TRAINED_MODELS
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import RandomStates, ShardRuns
from lockstep.engine.side_effects import LeftState
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.errors import LossError, ParameterMismatchError
from lockstep.reduce.model import Description, describe_differences, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import byte_view, version_of

_PURPOSE = "comparing what the workers train"
ShardHashes = dict[int, dict[str, str]]
"""For every shard a hash of its loss and of each gradient, by name."""
ShardNumbering = Callable[[ShardedBatch, Sequence[int]], ShardHashes]
"""Computes shards in an order, and changes nothing."""


@final
class WorkerComparison(StepPart):
    def __init__(self, runs: ShardRuns) -> None:
        self._buffers = runs.buffers
        self._state = runs.state
        self._optimizer = runs.state.optimizer
        self._is_alone = runs.world.world_size == 1
        self._num_writes = -1
        self._named: dict[str, Tensor] = {}
        self._num_trained = (0, 0)
        self._of_networks: object = None
        self._at_begin: list[tuple[Tensor, int]] = []
        self._begun: dict[str, Tensor] = {}
        self._number_at_begin: Tensor | int = 0
        self._options = Column(float, lambda _: self.options_number())
        self._values = Column(float, lambda _: self.values_number())
        self.columns = self._options, self._values

    def begin(self, _step: CurrentStep) -> None:
        self._begun = {} if self._is_alone else self._state.parts.compared_at_begin()
        is_same = _have_versions(self._begun.values(), self._at_begin)
        self._number_at_begin = 0 if is_same else sum_of_bits(self._begun.values())

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if len(set(rows[self._options])) > 1:
            send = partial(describe_options, self._optimizer)
            step.ask(_PURPOSE, send, partial(_compare_options, step.place), may_raise=True)
        if len(set(rows[self._values])) > 1:
            step.ask(_PURPOSE, self._number_each, partial(self._compare_each, step.place), may_raise=True)

    def commit(self, _step: CurrentStep) -> None:
        """Note that the parameters are equal on all workers, until something writes to them (local)."""
        if not self._is_alone:
            self._num_writes = self._count_writes()
            self._at_begin = [(each, version_of(each)) for each in self._state.parts.compared_at_begin().values()]

    def undo(self, _step: CurrentStep) -> None:
        self._num_writes, self._at_begin = -1, []

    def options_number(self) -> int:
        return 0 if self._is_alone else zlib.crc32(repr(describe_options(self._optimizer)).encode())

    def values_number(self) -> Tensor | int:
        """Return a number that is the same for the same parameters, or 0 if only updates have written them (local)."""
        if self._is_alone or self._num_writes == self._count_writes():
            return self._number_at_begin
        return sum_of_bits(self._compared().values()) ^ self._number_at_begin

    def _number_each(self) -> dict[str, int]:
        begun = {name: self._buffers.before.copy_of(each) for name, each in self._begun.items()}
        found = {**self._compared(), **begun}
        return {name: int(sum_of_bits([each])) for name, each in found.items() if each.numel()}

    def _compare_each(self, place: str, found: list[dict[str, int]]) -> None:
        first = found[0]
        for rank, numbers in enumerate(found):
            odd = next((name for name in first if numbers.get(name) != first[name]), None)
            if odd is not None:
                what = "Buffer" if odd in self._begun else "Parameter"
                raise ParameterMismatchError(
                    f"{what} {odd} has other values on rank {rank} than on rank 0 at {place}. Something other than "
                    "the optimizer has written to it on one rank (weights that were loaded after the trainer was made, "
                    "say, or the model's forward), or an update has failed there. Load weights on every rank, or "
                    "before making the trainer, which sends rank 0's to all. Nothing was changed by this step. (LS515)"
                )

    def _compared(self) -> dict[str, Tensor]:
        """Return the parameters: the same ones, unless the loss has other networks, or one a trainer of its own."""
        of_networks = self._state.networks.parameters
        if self._num_trained != TRAINED_MODELS.num_changes or self._of_networks is not of_networks:
            self._num_trained, self._of_networks = TRAINED_MODELS.num_changes, of_networks
            self._named = self._state.parts.compared()
        return self._named

    def _count_writes(self) -> int:
        return sum(map(version_of, self._compared().values()))


def _have_versions(tensors: Iterable[Tensor], expected: Sequence[tuple[Tensor, int]]) -> bool:
    found = list(tensors)
    return len(found) == len(expected) and all(
        each is before and version_of(each) == count for each, (before, count) in zip(found, expected, strict=True)
    )


def _compare_options(place: str, found: list[Description]) -> None:
    for rank, options in enumerate(found):
        if options != found[0]:
            raise ValueError(
                f"The optimizers of ranks {rank} and 0 differ at {place}: {describe_differences(options, found[0])}. "
                "Set options, and step a scheduler, alike on every rank. Nothing was changed by this step. (LS515)"
            )


def verify(
    state: RunState,
    world: World,
    loader: ShardedLoader,
    num_steps: int,
    number: ShardNumbering,
    step: Callable[[ShardedBatch], object],
) -> None:
    """Check some steps (collective), and put everything back; `Trainer.verify` says how, and what it raises."""
    state.check_usable()
    random = RandomStates(generators_of_training(state.model, state.plan.losses))
    random.save()
    begin = state.cursor
    batches = zip(
        loader.epoch(begin.epoch, begin.step), loader.for_one_worker().epoch(begin.epoch, begin.step), strict=True
    )
    try:
        with state.parts.kept():
            for mine, whole in islice(batches, num_steps):
                _check_step(state, world, mine, whole, number)
                step(mine)
            state.read_last_step()
    finally:
        state.unread_step = None  # what it would put back was put back
        state.note_scheduler()
        random.restore()


def _check_step(state: RunState, world: World, mine: ShardedBatch, whole: ShardedBatch, number: ShardNumbering) -> None:

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
        forward = number(whole, shards)
        certain, possible = before.changes()
        difference = _find_difference(number(whole, shards[::-1]), forward)
        changed = [*certain, *possible]
        left = f"; the shards have changed {', '.join(changed[:3])}" if changed else ""
        return difference and f"{difference} when other shards are run before it{left}", forward

    found = gather_results(world, compute, "Trainer.verify")
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


def number_shards(runs: ShardRuns, batch: ShardedBatch, order: Sequence[int]) -> ShardHashes:
    """Compute shards in an order, each from the step's first buffers; change nothing. `batch` has all these (local)."""
    slices = {part.shard: part for part in batch.slices}
    runs.random.save()
    runs.buffers.record()
    try:
        with runs.hooks.taken_off():
            found: ShardHashes = {}
            for shard in order:
                with runs.buffers.of_step_begin():
                    found[shard] = _number_shard(runs, batch, slices[shard])
            return found
    finally:
        runs.buffers.put_back()
        runs.random.restore()
        runs.state.model.zero_grad(set_to_none=True)


def _number_shard(runs: ShardRuns, batch: ShardedBatch, part: Slice) -> dict[str, str]:
    numbers: dict[str, str] = {}
    model = runs.state.model
    for update in runs.state.plan.updates(runs.state.global_step):
        prefix = f"{update.name}: " if update.name else ""
        model.zero_grad(set_to_none=True)
        runs.choose(update)
        loss = runs.compute(batch, part)
        numbers[f"{prefix}the loss"] = _hash_bits(loss)
        for name, each in model.named_parameters():
            if each.grad is not None:
                numbers[f"{prefix}the gradient of {name}"] = _hash_bits(each.grad)
    return numbers


def _hash_bits(tensor: Tensor) -> str:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return hashlib.sha256(byte_view(dense).numpy().data).hexdigest()
