"""The first steps of a run verify themselves: shards are computed once more, on another worker and in another order.

    before a step    worker 0              worker 1              worker 2
    first            shard 4 (worker 1's)  shard 8 (worker 2's)  shard 0 (worker 0's)
    then             shard 0, its own      shard 4, its own      shard 8, its own

The samples of both are loaded again, in this process. So each of these shards is computed by two workers, after another
shard and after none. Its own shard is computed twice more: as if numbers that the shards count up had counted far more,
and as if this were another process of another job (`processes/other_process.py`), so a worker alone sees most of it
too. What differs is told once, by rank 0: training is not wrong for it, but its bits depend on the number of workers.

Nothing is compared where the user's code cannot be called again: it raises, or makes collective calls, or uses up an
iterator. The very first step is left to the checks within it (`side_effects.py`, `parameters.py`), which know the name
of what was written; what they have told is not looked for.

`verify`, which the user calls, does so with all shards of a step on every worker, in two orders.
"""

import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, final

from torch import nn

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader, Slice
from lockstep.data.contents import slice_number
from lockstep.data.keyed import generators_of_training
from lockstep.engine.batches import gather_results, name_step
from lockstep.engine.optimizers import UpdateSpec
from lockstep.engine.shard_runs import RandomStates, ShardRuns
from lockstep.engine.side_effects import LeftState
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.errors import LossError
from lockstep.processes.other_process import DIFFERENCES, as_another_process
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import describe_options
from lockstep.reduce.tensor_bits import sum_of_bits

_SWITCH: Final = "verify_steps=0, in a config first_steps_verified: 0, does not look."
_PURPOSE: Final = "verifying the first steps"
_DEPENDS: Final = "The result depends on who runs which shard"
_REMEDY: Final = (
    "Keep state in buffers, take numbers of steps from place (loss(model, batch, place)), and draw random numbers from "
    "the global generators."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SeenShards:
    """What one worker has seen, by shard; empty of a worker that could not look."""

    trained: dict[int, int]
    """A number for the data that it trains on."""
    loaded: dict[int, int]
    """The same as it loads them again."""
    bits: dict[int, list[int]]
    """Numbers for the loss, and for the gradient of each parameter."""
    problem: str = ""


_NOTHING: Final = SeenShards(trained={}, loaded={}, bits={})


@final
class FirstSteps(StepPart):
    def __init__(self, runs: ShardRuns) -> None:
        self._runs = runs
        self._limit = runs.state.num_verified
        self._seen: SeenShards | None = None
        self._has_looked = Column(int, lambda _: int(self._seen is not None))
        self.columns = (self._has_looked,)

    def begin(self, step: CurrentStep) -> None:
        self._seen = self._look(step) if 0 < self._runs.state.findings.num_steps_begun <= self._limit else None

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if any(rows[self._has_looked]):  # a worker may have counted another number of steps, where one has failed

            def receive(found: list[SeenShards]) -> None:
                self._tell(step, found)

            step.ask(_PURPOSE, lambda: self._seen or _NOTHING, receive)

    def commit(self, step: CurrentStep) -> None:
        self._runs.state.findings.num_steps_begun += step.is_last

    def undo(self, _step: CurrentStep) -> None:
        self._seen = None

    def _tell(self, step: CurrentStep, found: Sequence[SeenShards]) -> None:
        names = _names(self._runs, [step.update])
        problem = next((each.problem for each in found if each.problem), "") or _find_problem(found, names)
        if not problem:
            return
        self._limit = 0
        if self._runs.world.rank == 0:
            warnings.warn(
                f"{_DEPENDS}, at {step.place}: {problem}. {_REMEDY} {_SWITCH} (LS518)",
                stacklevel=stacklevel_of_user(),
            )

    def _look(self, step: CurrentStep) -> SeenShards:
        """Compute shards again, and change nothing; what the user's code raises, the step raises too (local)."""
        state, batch = self._runs.state, step.batch
        left = LeftState(state.model, state.plan.losses)
        gradients = [(each, each.grad) for each in state.model.parameters()]
        has_told = any(each.has_told for each in state.watches.values())
        if not batch.slices or batch.load_shard is None or left.has_iterators or has_told:
            return _NOTHING
        look = partial(self._compute, batch, step.update, batch.load_shard)
        try:
            state.model.zero_grad(set_to_none=True)
            return left.put_back_after(look, otherwise=_NOTHING)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _compute(self, batch: ShardedBatch, update: UpdateSpec, load_shard: Callable[[int, int], Any]) -> SeenShards:
        def load(shard: int, epochs_later: int = 0) -> Slice:
            return Slice(shard=shard, num_samples=batch.lengths[shard], data=load_shard(shard, epochs_later))

        def is_other() -> bool:
            part = load(shard)
            return slice_number(part.data) != loaded[shard] or compute([part]) != {shard: bits[shard]}

        own, optimizer = batch.slices[0], self._runs.state.optimizer
        shard, other = own.shard, next_shard(batch)
        if other not in {part.shard for part in batch.slices}:
            load(other, 1)  # a data set that keeps what it has drawn gives that again, and other workers another value
        parts = {each: load(each) for each in (other, shard)}
        trained = {shard: slice_number(own.data)}
        loaded = {each: slice_number(part.data) for each, part in parts.items()}
        if trained[shard] != loaded[shard]:  # what is computed of them differs too
            return SeenShards(trained=trained, loaded=loaded, bits={})
        compute = partial(_compute_shards, self._runs, batch, updates=[update])
        options, problem = describe_options(optimizer), ""
        before = compute([load(shard)]) if len(batch.ranges) == 1 else {}
        left = LeftState(self._runs.state.model, self._runs.state.plan.losses)
        bits = compute(list(parts.values()))
        if slice_number(load(shard).data) != loaded[shard]:
            problem = f"the data set gives other data for the samples of shard {shard} after a forward"
        elif before.get(shard, bits[shard]) != bits[shard]:
            problem = f"shard {shard} has another loss, or gradient, when shard {other} is run before it"
        elif describe_options(optimizer) != options:
            problem = "the forward or the loss has changed the options of the optimizer"
        else:
            # Last: what is made when it is first needed was made in the process and at the time that there are.
            problem = _find_dependence(left, is_other, f"shard {shard}")
        return SeenShards(trained=trained, loaded=loaded, bits=bits, problem=problem)


def next_shard(batch: ShardedBatch) -> int:
    """Return the first shard of the next worker, or the last one of a worker alone."""
    following = batch.ranges[(batch.world.rank + 1) % len(batch.ranges)]
    is_there = len(batch.ranges) > 1 and following.start < len(batch.lengths)
    return following.start if is_there else batch.slices[-1].shard


def verify(
    runs: ShardRuns,
    loader: ShardedLoader,
    num_steps: int,
    looked_at: Callable[[], AbstractContextManager[None]],
    step: Callable[[ShardedBatch], object],
) -> None:
    """Check some steps (collective), and put everything back; `Trainer.verify` says how, and what it raises."""
    state = runs.state
    state.check_usable()
    random = RandomStates(generators_of_training(state.model, state.plan.losses))
    random.save()
    place = state.cursor.epoch, state.cursor.step
    batches = zip(loader.epoch(*place), loader.for_one_worker().epoch(*place), strict=True)
    try:
        with state.parts.kept():
            for mine, whole in islice(batches, num_steps):
                with looked_at():
                    _check_step(runs, mine, whole)
                step(mine)
            state.read_last_step()
    finally:
        state.unread_step = None  # what it would put back was put back
        state.note_scheduler()
        random.restore()


def _check_step(runs: ShardRuns, mine: ShardedBatch, whole: ShardedBatch) -> None:
    state = runs.state
    updates = state.plan.updates(state.global_step)

    def compute() -> SeenShards:
        trained = {part.shard: slice_number(part.data) for part in mine.slices}
        loaded = {part.shard: slice_number(part.data) for part in whole.slices}
        left = LeftState(state.model, state.plan.losses)
        forward = _compute_shards(runs, whole, whole.slices, updates)
        certain, possible = left.changes()
        backward = _compute_shards(runs, whole, whole.slices[::-1], updates)
        difference = _find_difference(backward, forward, _names(runs, updates))
        changed = [*certain, *possible]
        also = f"; the shards have changed {', '.join(changed[:3])}" if changed else ""
        problem = difference and f"{difference} when other shards are run before it{also}"
        return SeenShards(trained=trained, loaded=loaded, bits=forward, problem=problem)

    found = gather_results(runs.world, compute, "Trainer.verify")
    of_data = (replace(each, bits={}) for each in found)
    problem = _find_problem(list(of_data), ()) or next((each.problem for each in found if each.problem), "")
    problem = problem or _find_problem(found, _names(runs, updates))
    if problem:
        raise LossError(
            f"{_DEPENDS}, at {name_step(mine.cursor)}: {problem}. {_REMEDY} Everything that a trainer saves was put "
            "back. (LS518)"
        )


def _find_dependence(left: LeftState, is_other: Callable[[], bool], what: str) -> str:
    """Return on what a result depends that another worker has otherwise; `left` is the state before it was computed."""
    with suppress(Exception), left.far_ahead() as names:
        if names and is_other():
            return f"{what} has another result after many shards, by what {names[0]} has counted"
    with suppress(Exception):
        with as_another_process():
            is_dependent = is_other()
        if is_dependent:
            kinds = [kind for kind in DIFFERENCES if _is_other_with(kind, is_other)]
            return f"{what} has another result in a process with another {' or '.join(kinds or DIFFERENCES)}"
    return ""


def _is_other_with(difference: str, is_other: Callable[[], bool]) -> bool:
    with suppress(Exception), as_another_process({difference}):
        return is_other()
    return False


@final
class FirstEvaluation:
    """Calls a metric for slices, and each worker's first one once more: after all others, after another, elsewhere."""

    def __init__(self, model: nn.Module, metric: Any, calls: Callable[[ShardedBatch, Slice], Any]) -> None:
        self._model, self._metric, self._calls = model, metric, calls
        self._before: LeftState | None = None
        self._first: tuple[ShardedBatch, Slice, Any] | None = None

    def __call__(self, batch: ShardedBatch, part: Slice) -> Any:
        if self._first is not None:
            return self._calls(batch, part)
        self._before = LeftState(self._model, [self._metric])
        found = self._calls(batch, part)
        self._first = batch, part, found
        return found

    def verify(self, world: World) -> bool:
        """Compare what the workers get; return whether that was told (collective)."""
        found = gather_results(world, self._look, "Trainer.evaluate")
        problem = next((each.problem for each in found if each.problem), "") or _find_problem(found, ["the metric"])
        if problem and world.rank == 0:
            warnings.warn(
                f"The evaluation depends on who runs which shard: {problem}. A metric gets its sums from its slice "
                f"alone: let it return them, and remember nothing that it uses. {_SWITCH} (LS518)",
                stacklevel=stacklevel_of_user(),
            )
        return bool(problem)

    def _look(self) -> SeenShards:
        if self._first is None or self._before is None or self._before.has_iterators:
            return _NOTHING
        batch, part, found = self._first
        look = partial(self._compute, self._before, batch, part, _numbers_of(found))
        return LeftState(self._model, [self._metric]).put_back_after(look, otherwise=_NOTHING)

    def _compute(self, before: LeftState, batch: ShardedBatch, part: Slice, numbers: list[int]) -> SeenShards:
        def compute(each: Slice) -> list[int]:
            return _numbers_of(self._calls(batch, each))

        what, other, problem = f"shard {part.shard}", next_shard(batch), ""
        has_changed = compute(part) != numbers
        names = [name for each in before.changes() for name in each]
        before.put_back()
        data = batch.load_shard(other, 0) if batch.load_shard is not None else None
        theirs = compute(Slice(shard=other, num_samples=batch.lengths[other], data=data)) if data is not None else []
        if has_changed or compute(part) != numbers:
            problem = f"{what} has another value after others{f', by what {names[0]} keeps' if names else ''}"
        else:
            problem = _find_dependence(before, lambda: compute(part) != numbers, what)
        seen = {part.shard: numbers, **({other: theirs} if theirs else {})}
        return SeenShards(trained={part.shard: 0}, loaded={}, bits=seen, problem=problem)


def _numbers_of(found: Any) -> list[int]:
    values = found if isinstance(found, Mapping) else {"metric": found}
    numbers = [float(number) for name in sorted(values) for number in values[name]]
    return [zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))]


def _compute_shards(
    runs: ShardRuns, batch: ShardedBatch, parts: Sequence[Slice], updates: Sequence[UpdateSpec]
) -> dict[int, list[int]]:
    """Compute slices in this order, each from the step's first buffers; return what `_names` names (local)."""
    found: dict[int, list[int]] = {}
    for part in parts:
        numbers = found[part.shard] = []
        for update in updates:
            runs.choose(update)
            loss, *gradients = runs.compute_again(batch, part, has_gradients=True)
            numbers += [int(sum_of_bits([loss])), *map(int, gradients)]
    return found


def _names(runs: ShardRuns, updates: Sequence[UpdateSpec]) -> list[str]:
    trained = [name for name, each in runs.state.model.named_parameters() if each.requires_grad]
    names = ["the loss", *(f"the gradient of {name}" for name in trained)]
    return [f"{update.name}: {name}" if update.name else name for update in updates for name in names]


def _find_difference(found: Mapping[int, list[int]], expected: Mapping[int, list[int]], names: Sequence[str]) -> str:
    """Return in which numbers a shard differs, of those that are in both."""
    for shard in found.keys() & expected.keys():
        pairs = zip(names, expected[shard], found[shard], strict=False)
        if odd := [name for name, one, two in pairs if one != two]:
            return f"{odd[0]}{f' and {len(odd) - 1} more have' if len(odd) > 1 else ' has'} other bits in shard {shard}"
    return ""


def _find_problem(found: Sequence[SeenShards], names: Sequence[str]) -> str:
    """Return what one worker has of a shard that another has otherwise."""
    for rank, seen in enumerate(found):
        for other, theirs in enumerate(found):
            for shard, number in seen.trained.items():
                if theirs.loaded.get(shard, number) != number:
                    who = "" if other == rank else f" by rank {other}"
                    return (
                        f"the data set gives other data for the samples of shard {shard} of rank {rank} when they are "
                        f"loaded again{who}: it remembers something, or draws from a generator that is not seeded for "
                        "each sample"
                    )
            if difference := _find_difference(
                theirs.bits, {shard: seen.bits.get(shard, []) for shard in seen.trained}, names
            ):
                return f"{difference} on rank {other} than on rank {rank}"
    return ""
