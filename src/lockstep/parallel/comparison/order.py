"""The models that a rank has wrapped over a group: in the same order on all ranks, and as many backwards of each?

    for name in {"encoder", "decoder"}:        # a set of strings has another order in each process
        models[name] = ls.DistributedDataParallel(nets[name])

The first model on rank 0 is paired with the first one on rank 1. If both have the same shapes, they would get each
other's parameters and gradients. Two things show it:

- *values*, when a model is wrapped: the ranks have wrapped models with the same values by now, in another order.
- *names*, in the first backwards: a model is an attribute or has a key in a dictionary, and its name on one rank is
  that of another model on rank 0, and the other way round. For models of equal values, or of others on each rank.

A rank that has skipped a batch before its forward, or had fewer batches in an epoch, makes the same calls as the others
in the same order, with other batches, until its script ends. Then the others wait for a backward that never comes:

    rank 0                                     the group's store                rank 1
    ------                                     -----------------                ------
    1 waits in backward 8 for a moment   ->    "8, waits, line"
                                               "7, ended, line"           <-    2 its script ends (`atexit`)
                                                                          ->    3 reads that; logs both numbers; exits
    4 gets the error of a rank that is gone

A rank whose script ends waits until the others have ended too or one waits for it: for a moment that is long enough for
one more backward of theirs, by the longest time between two backwards here, and for at most `_LONGEST_WAIT_SECONDS`,
however many models it has wrapped.

[Note: a wait and its number] The thread that tells of a wait may run between any two lines of the backward. A wait ends
before its reduction is counted, and the thread reads the number first. So a wait that it finds is of that number, and
never of the one after: a rank whose script has ended by then would be taken for one that has skipped a batch.

A process may wrap thousands of models, one after the other. So there is one object, one key in the store and one thread
for all models of a group, and of those that are gone only the last are known.
"""

import gc
import json
import logging
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store

from lockstep.comm import World, group_store
from lockstep.errors import LockstepError, ParameterMismatchError, ReductionError
from lockstep.parallel.comparison.check import SWITCH, Check, Lines, Reduced, others_than_first
from lockstep.parallel.comparison.forwards import TrainingForwards
from lockstep.parallel.comparison.optimizers import OptimizerSteps
from lockstep.processes.forking import call_at_exit_here
from lockstep.reduce import RankStatus, Reducer, TrainedModel
from lockstep.reduce.tensor_bits import glance_at_bits

_LOGGER = logging.getLogger("lockstep")
NamesByModel = Mapping[int, frozenset[str]]
"""Under which names a rank holds each model that it has wrapped, by number."""
_REMEDY = (
    "Wrap models in the same order on every rank: keep them in a list or a dictionary that is filled in a fixed order, "
    f"and do not loop over a set. {SWITCH}"
)
_FIRST_REDUCTION: Final = 1
_LAST_REDUCTION: Final = 5
"""Names are compared in the reductions after the first and before the last of these."""
_NUM_LAST: Final = 8
"""So many models that were wrapped last are looked at, and so many are known that are gone."""
_LONG_SECONDS: Final = 0.25
"""After a wait of so long in a backward the other ranks are told of it, again and again."""
_JOIN_SECONDS: Final = 5.0
_LONGEST_WAIT_SECONDS: Final = 10.0
_SHORTEST_WAIT_SECONDS: Final = 2.0
"""A rank that waits says so after half a second at most."""
_PAUSE_SECONDS: Final = 0.05


@final
class WrappedModel:
    """One model: which it is, from 1 on, under which names the rank holds it, and how far it has come."""

    def __init__(self, number: int, values: int) -> None:
        self.number = number
        self.values = values
        """A number for its parameters when it was wrapped; 0 if that was not compared."""
        self.names: frozenset[str] = frozenset()
        self.title = ""
        self.num_begun = 0
        self.longest_pause = 0.0
        self.forwards = TrainingForwards()
        self.optimizers = OptimizerSteps()
        self.reducer: Callable[[], Reducer | None] = lambda: None
        self._last_begun = 0.0

    @property
    def was_used(self) -> bool:
        return self.num_begun > 0 or self.forwards.num_unused > 0

    def begin_reduction(self) -> None:
        now = time.monotonic()
        if self.num_begun > 1:  # the first backwards may compile
            self.longest_pause = max(self.longest_pause, now - self._last_begun)
        self._last_begun = now
        self.num_begun += 1


@final
class WrappedModels:
    """Those of one rank over one group, from the first until its script ends; without the models themselves."""

    def __init__(self, world: World) -> None:
        store = None if world.group is None else group_store(world.group)
        self._store: Store | None = None if store is None else dist.PrefixStore("lockstep/end", store)
        self._rank, self._world_size = world.rank, world.world_size
        self._number = 0
        self._models: list[WrappedModel] = []
        self._posted = ""
        self._waits: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listens = False

    @property
    def num_wrapped(self) -> int:
        return self._number

    def add(self) -> int:
        """Return which model the next one is, from 1 on."""
        self._number += 1
        gone = [each for each in self._models if each.reducer() is None]
        kept = [each for each in gone if each.was_used][-_NUM_LAST:]
        self._models = [each for each in self._models if each not in gone or each in kept]
        self._models.append(WrappedModel(self._number, 0))
        return self._number

    def model(self, number: int) -> WrappedModel:
        return next(each for each in self._models if each.number == number)

    def last(self) -> list[WrappedModel]:
        return self._models[-_NUM_LAST:]

    def watch(self) -> None:
        """Tell the other ranks when this one waits long in a backward, and when the script ends."""
        if self._store is None:
            return
        if not self._listens:
            self._listens = True
            call_at_exit_here(self._end)
        with self._lock:
            if self._waits is None:
                self._waits = threading.Thread(target=self._post_waits, name="lockstep long waits", daemon=True)
                self._waits.start()

    def forget(self, model: WrappedModel) -> None:
        if model in self._models:
            self._models.remove(model)

    # -- While it runs -------------------------------------------------------------------------------------------------

    def _post_waits(self) -> None:
        try:
            while not self._ended.wait(_LONG_SECONDS):
                with self._lock:
                    waiting = self._find_waiting()
                    if waiting is None:
                        self._waits = None
                        return
                if waiting:
                    self.post("waits", waiting)
        except dist.DistError:
            return  # the store has ended, and with it the group

    def _find_waiting(self) -> dict[int, int] | None:
        """Return the reductions in which this rank waits long, by model; None where there is no model any more."""
        alive = [(each, reducer) for each in self._models if (reducer := each.reducer()) is not None]
        found = {}
        for model, reducer in alive:
            number = reducer.num_reductions + 1
            if reducer.times.seconds_waiting > _LONG_SECONDS:  # after the number: [Note: a wait and its number]
                found[model.number] = number
        return found if alive else None

    def post(self, state: str, begun: Mapping[int, int]) -> None:
        """Let the others know how far this rank is; `begun` has the models that are further than they have counted."""
        assert self._store is not None
        models = {
            each.number: (begun.get(each.number, each.num_begun), each.optimizers.num_steps, str(each.forwards.line))
            for each in self._models
        }
        text = json.dumps([state, models])
        if text != self._posted:  # a rank that waits calls this again and again
            self._store.set(f"{self._rank}", text)
        self._posted = text

    # -- At the end of the script --------------------------------------------------------------------------------------

    def _end(self) -> None:
        # A thread that is in the store while the interpreter ends aborts the process.
        self._ended.set()
        thread = self._waits
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        self.compare_ends()

    def compare_ends(self) -> None:
        """Wait until the others have ended too, or one waits for this rank, and log what that means."""
        self._models = [each for each in self._models if each.was_used]
        if not self._models or self._store is None:
            return
        # A script that has failed has its message already.
        has_failed = getattr(sys, "last_value", None) is not None
        try:
            self.post("failed" if has_failed else "ended", {})
            text = self._wait_for_others(0.0 if has_failed else self.wait_seconds, has_failed=has_failed)
            if text and self._store.add("told", 1) == 1:  # one rank says it
                _LOGGER.warning("%s", text)
        except dist.DistError:
            return  # the store has ended with the rank that holds it

    @property
    def wait_seconds(self) -> float:
        longest = max(each.longest_pause for each in self._models)
        return min(_SHORTEST_WAIT_SECONDS + 3 * longest, _LONGEST_WAIT_SECONDS)

    def _wait_for_others(self, seconds: float, *, has_failed: bool) -> str:
        assert self._store is not None
        deadline = time.monotonic() + seconds
        waited_for = set(range(self._world_size)) - {self._rank}
        is_first = self._store.add(f"exits of {self._rank}", 1) == 1
        while waited_for and is_first:
            for rank in sorted(waited_for):
                if not self._store.check([f"{rank}"]):
                    continue  # it has told nothing yet
                state, models = json.loads(self._store.get(f"{rank}"))
                if state in {"failed", "ended"}:
                    waited_for.discard(rank)
                if state == "failed":  # it has shown why
                    continue
                for model in self._models:
                    there = models.get(f"{model.number}")
                    text = "" if there is None else self._compare_end(model, rank, state, there, has_failed=has_failed)
                    if text:
                        return text
            if waited_for and time.monotonic() > deadline:
                return ""
            time.sleep(_PAUSE_SECONDS if waited_for else 0)
        return ""

    def _compare_end(
        self, model: WrappedModel, rank: int, state: str, there: tuple[int, int, str], *, has_failed: bool
    ) -> str:
        num_begun, num_steps, line = there
        if num_begun > model.num_begun and not has_failed:
            return self._describe_missing(model, (self._rank, model.num_begun), (rank, num_begun), line)
        if state == "ended" and num_begun < model.num_begun:
            return self._describe_missing(model, (rank, num_begun), (self._rank, model.num_begun), line)
        if state == "ended" and num_steps < model.optimizers.num_steps:
            return (
                f"After the last of {model.num_begun} backwards of {model.title}, rank {self._rank} has taken "
                f"{model.optimizers.num_steps} optimizer steps and rank {rank} {num_steps}, so their parameters "
                f"differ. The last step was at {model.optimizers.line}. Step the optimizer on every rank or on none. "
                "(LS321)"
            )
        return ""

    def _describe_missing(self, model: WrappedModel, behind: tuple[int, int], ahead: tuple[int, int], line: str) -> str:
        """Return what has happened, in words; `line` is where the other rank's last forward was."""
        (rank, num_begun), (other, num_expected) = behind, ahead
        own = model.forwards.line
        here, there = (own, line) if rank == self._rank else (line, own)
        return (
            f"The script of rank {rank} has ended after {num_begun} backwards of {model.title}, and rank {other} has "
            f"begun backward {num_expected}, in which it needs rank {rank}. The last forwards were at {here} on rank "
            f"{rank} and at {there} on rank {other}. Rank {rank} has skipped a batch before its forward, or had fewer "
            "batches in an epoch, or a loss that does not depend on the parameters, or ran its last backward under "
            "no_sync(), or called sys.exit(); since then it was behind the others. Call "
            "model.skip_backward() where a batch is left out, give every rank as many batches "
            "(ls.DistributedSampler), or train within model.join(). (LS318)"
        )


_BY_GROUP: Final["weakref.WeakKeyDictionary[ProcessGroup, WrappedModels]"] = weakref.WeakKeyDictionary()
"""Wrappers have only the group in common."""


def models_over(world: World) -> WrappedModels:
    assert world.group is not None
    found = _BY_GROUP.get(world.group)
    if found is None:
        found = _BY_GROUP[world.group] = WrappedModels(world)
    return found


def compare_values(model: TrainedModel, world: World, number: int) -> None:
    """Compare the models that were wrapped so far, before this one gets rank 0's values (collective)."""
    wrapped = models_over(world)
    plain = [each for _, each in model.parameters() if type(each.detach()) is Tensor]
    wrapped.model(number).values = glance_at_bits(*plain) or 1
    if number == 1:
        return
    # A model that was wrapped with init_sync=False or compare=False has none.
    by_number = {each.number: each.values for each in wrapped.last()}
    numbers = range(max(1, number - _NUM_LAST + 1), number + 1)
    own = [by_number.get(each, 0) for each in numbers]
    first, *others = world.gather_objects(own)
    for rank, found in enumerate(others, start=1):
        if found != first and sorted(found) == sorted(first):
            pairs = enumerate(zip(found, first, strict=True))
            index = next(index for index, (here, there) in pairs if here != there)
            raise ParameterMismatchError(
                f"Wrapped model {numbers[index]} on rank {rank} is wrapped model "
                f"{numbers[first.index(found[index])]} on rank 0: the models that were wrapped have the same "
                f"parameters on both, in another order, and would get each other's gradients. {_REMEDY} (LS304)"
            )


@final
class ModelOrder(Check):
    def __init__(self, model: TrainedModel, wrapped: WrappedModels, number: int, *, compares_names: bool) -> None:
        self.wrapper: Callable[[], nn.Module | None] = lambda: None
        self._model = model
        self._wrapped = wrapped
        self._entry = wrapped.model(number)
        self._entry.title = self._title = _describe_model(model, number)
        self._title_number = zlib.crc32(self._title.encode())
        self._looks_for_names = compares_names
        self._num_reductions = 0
        self._number = self._title_number

    def fill_in(self, status: RankStatus) -> RankStatus:
        self._entry.begin_reduction()
        if self._looks_for_names:
            self._look_for_names()
        return status

    def number(self) -> int:
        return self._number

    def record(self) -> tuple[str, NamesByModel]:
        return self._title, {each.number: each.names for each in self._wrapped.last()}

    def judge(self, found: Sequence[tuple[str, NamesByModel]], lines: Sequence[Lines]) -> LockstepError | None:
        other_order = find_other_order([names for _, names in found])
        if other_order:
            text = f"{other_order} The last forward was at {lines[0].forward} on rank 0. (LS304)"
            return ReductionError(text)
        first = found[0][0]
        for rank, (title, _) in others_than_first(found):
            if title != first:
                return ReductionError(
                    f"Rank {rank} runs the backward of {title}, and rank 0 that of {first}: they would have got each "
                    f"other's gradients. The forward was at {lines[rank].forward} on rank {rank}, at "
                    f"{lines[0].forward} on rank 0. Make wrapped models in the same order on every rank, and run their "
                    "backwards in the same order. (LS304)",
                )
        return None

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is not None:
            self._num_reductions = reduction.number

    def _look_for_names(self) -> None:
        if self._num_reductions == _FIRST_REDUCTION and self._wrapped.num_wrapped > 1:  # it takes some milliseconds
            held = [each for each in (self._model.module, self.wrapper()) if each is not None]
            self._entry.names = frozenset(_names_of(held))
        self._number = self._title_number
        if _FIRST_REDUCTION <= self._num_reductions < _LAST_REDUCTION:
            self._number = hash((self._title_number, zlib.crc32(repr(sorted(self._entry.names)).encode())))
        self._looks_for_names = self._num_reductions < _LAST_REDUCTION


def find_other_order(ranks: Sequence[NamesByModel]) -> str:
    """Return in words how the names show that models were wrapped in another order; empty if they do not (pure)."""
    first, *others = map(_without_common, ranks)
    for rank, found in enumerate(others, start=1):
        both = sorted(found.keys() & first.keys())
        moved = [number for number in both if found[number] and not found[number] & first[number]]
        for number in moved:
            for other in moved:
                names = found[number] & first[other]
                if other != number and names and found[other] & first[number]:
                    return (
                        f"Wrapped model {number} on rank {rank} is called {min(names)!r}, which is wrapped model "
                        f"{other} on rank 0: they would get each other's gradients. {_REMEDY}"
                    )
    return ""


def _without_common(names: NamesByModel) -> NamesByModel:
    """Return the names without those that several models have, as the `module` of every wrapper."""
    counts = Counter(name for held in names.values() for name in held)
    return {number: frozenset(name for name in held if counts[name] == 1) for number, held in names.items()}


def _names_of(held: Sequence[object]) -> Iterator[str]:
    """Yield the attributes and keys under which any of these is held."""
    for holder in gc.get_referrers(*held):  # one look at all objects of the process
        items: dict[Any, Any] = holder if type(holder) is dict else getattr(holder, "__dict__", {})
        if "__builtins__" not in items:
            yield from (
                key for key, value in list(items.items()) if type(key) is str and any(value is one for one in held)
            )


def _describe_model(model: TrainedModel, number: int) -> str:
    first = model.trained[0].spec
    shape = "x".join(map(str, first.shape)) or "scalar"
    return (
        f"wrapped model {number} ({type(model.module).__name__} with {len(model.trained)} trained parameters, "
        f"{first.name} of {shape} the first)"
    )
