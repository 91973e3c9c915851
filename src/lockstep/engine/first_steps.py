"""The first steps of a run verify themselves: shards are computed once more, on another worker and in another order.

    before a step    worker 0              worker 1              worker 2
    first            shard 4 (worker 1's)  shard 8 (worker 2's)  shard 0 (worker 0's)
    then             shard 0, its own      shard 4, its own      shard 8, its own

The samples of both are loaded again, in this process. So each of these shards is computed by two workers, after another
shard and after none. What differs is told once, by rank 0: training is not wrong for it, but its bits depend on the
number of workers. A worker alone computes its first shard twice.

Nothing is compared where the user's code cannot be called again: it raises, or makes collective calls, or uses up an
iterator. The very first step is left to the checks within it (`side_effects.py`, `parameters.py`), which know the name
of what was written; what they have told is not looked for.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor

from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.data import ShardedBatch, Slice
from lockstep.data.contents import slice_number
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.side_effects import LeftState
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.errors import GroupError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import describe_options
from lockstep.reduce.tensor_bits import sum_of_bits

_PURPOSE: Final = "verifying the first steps"


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
        can_differ = runs.arguments.deterministic and runs.state.num_shards > 1
        self._limit = runs.arguments.verify_steps if can_differ else 0
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
        names = ["the loss"]
        names += [
            f"the gradient of {name}" for name, each in self._runs.state.model.named_parameters() if each.requires_grad
        ]
        problem = next((each.problem for each in found if each.problem), "") or _find_problem(found, names)
        if not problem:
            return
        self._limit = 0
        if self._runs.world.rank == 0:
            warnings.warn(
                f"The result depends on who runs which shard, at {step.place}: {problem}. Keep state in buffers, take "
                "numbers of steps from place (loss(model, batch, place)), and draw random numbers from the global "
                "generators. verify_steps=0, in a config first_steps_verified: 0, does not look. (LS518)",
                stacklevel=stacklevel_of_user(),
            )

    def _look(self, step: CurrentStep) -> SeenShards:
        """Compute shards again, and change nothing; what the user's code raises, the step raises too (local)."""
        state, batch = self._runs.state, step.batch
        self._runs.choose(step.update)
        left = LeftState(state.model, state.plan.losses)
        gradients = [(each, each.grad) for each in state.model.parameters()]
        has_told = any(each.has_told for each in state.watches.values())
        if not batch.slices or batch.load_again is None or left.has_iterators or has_told:
            return _NOTHING
        try:
            state.model.zero_grad(set_to_none=True)
            with OPEN_GROUPS.refused(), warnings.catch_warnings(action="ignore"):
                return self._compute(batch, batch.load_again)
        except GroupError:
            raise
        except Exception:  # noqa: BLE001 - of the user's code, or memory has run out
            return _NOTHING
        finally:
            left.put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _compute(self, batch: ShardedBatch, load_again: Callable[[Sequence[int]], Any]) -> SeenShards:
        def load(shard: int) -> Slice:
            first, length = sum(batch.lengths[:shard]), batch.lengths[shard]
            return Slice(shard=shard, num_samples=length, data=load_again(range(first, first + length)))

        def compute(part: Slice) -> list[int]:
            return [_number(each) for each in self._runs.compute_again(batch, part, has_gradients=True)]

        own, optimizer = batch.slices[0], self._runs.state.optimizer
        shard, other = own.shard, self._other_shard(batch)
        parts = {each: load(each) for each in (other, shard)}
        trained = {shard: slice_number(own.data)}
        loaded = {each: slice_number(part.data) for each, part in parts.items()}
        if trained[shard] != loaded[shard]:  # what is computed of them differs too
            return SeenShards(trained=trained, loaded=loaded, bits={})
        options, problem = describe_options(optimizer), ""
        before = compute(load(shard)) if len(batch.ranges) == 1 else []
        bits = {each: compute(part) for each, part in parts.items()}
        if slice_number(load(shard).data) != loaded[shard]:
            problem = f"the samples of shard {shard} are others when they are loaded again, after a forward"
        elif before and before != bits[shard]:
            problem = f"shard {shard} has another loss, or gradient, when shard {other} is run before it"
        elif describe_options(optimizer) != options:
            problem = "the forward or the loss has changed the options of the optimizer"
        return SeenShards(trained=trained, loaded=loaded, bits=bits, problem=problem)

    def _other_shard(self, batch: ShardedBatch) -> int:
        """Return the first shard of the next worker, or the last one of a worker alone."""
        following = batch.ranges[(self._runs.world.rank + 1) % len(batch.ranges)]
        is_there = len(batch.ranges) > 1 and following.start < len(batch.lengths)
        return following.start if is_there else batch.slices[-1].shard


def _number(tensor: Tensor) -> int:
    return int(tensor) if not tensor.is_floating_point() else int(sum_of_bits([tensor]))


def _find_problem(found: Sequence[SeenShards], names: Sequence[str]) -> str:
    for rank, seen in enumerate(found):
        for shard, number in seen.trained.items():
            for other, theirs in enumerate(found):
                if theirs.loaded.get(shard, number) != number:
                    who = "" if other == rank else f" by rank {other}"
                    return f"the samples of shard {shard} of rank {rank} are other data when they are loaded again{who}"
                pairs = zip(names, seen.bits.get(shard, ()), theirs.bits.get(shard, ()), strict=False)
                odd = next((name for name, one, two in pairs if one != two), "")
                if odd:
                    return f"{odd} has other bits in shard {shard} on rank {other} than on rank {rank}"
    return ""
