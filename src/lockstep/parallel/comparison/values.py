"""The values of the parameters, and of the gradients with which an optimizer steps, as numbers for all ranks.

[Note: what lasts] Weights may be elsewhere while a backward runs, on each rank in another place, and be put back before
the optimizer steps: sharpness-aware minimization, noise on weights, averages swapped in for an evaluation. So what is
compared is what an optimizer's step has left. The backward after that sends it; what was written since is seen a step
later. Only where nobody has an optimizer of the parameters are they read in the backward.

To read all parameters takes as long as a part of an update. So it is done only where there is a reason:

    after the first steps after wrapping, then every 64th         all parameters
    something but an optimizer has written (version counters)     all parameters
    after train() or eval(), where averaged weights come and go   all parameters
    in every fourth                                               a part of eight parameters, others each time

The part is for what no counter shows: `parameter.data.copy_(...)`, and an optimizer whose state differs.

A reduction leaves the same gradients on all ranks. If nobody writes to them before the optimizer steps, nothing has to
be read. Who writes to them all, as clipping does, writes to the few that are looked at here. In every fourth
step, buckets that are small and a part of others are read in any case: that shows a write to one gradient alone, and
one through `.data`.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, group_store
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.errors import LockstepError, ReductionError
from lockstep.parallel.comparison.check import (
    SWITCH,
    Check,
    Lines,
    Reduced,
    Scope,
    others_than_first,
    warn_once,
)
from lockstep.processes.user_line import user_line
from lockstep.reduce import Reducer
from lockstep.reduce.tensor_bits import glance_at_bits, sum_of_bits
from lockstep.torch_private.modules import version_of

_NUM_FIRST: Final = 4
_NUM_BETWEEN: Final = 64
_NUM_BETWEEN_PARTS: Final = 4
_NUM_KEPT: Final = 16
"""So many times all values are kept where weights are moved: they may be moved again before a difference is seen."""
_WINDOW: Final = 8
_WINDOW_ELEMENTS: Final = 1 << 11
"""So many elements of a parameter, or of a bucket, are read in a step where there is no reason to read more."""
_ROUNDING: Final = 256
"""Times the precision of their dtype: values that differ by less were rounded otherwise."""
_NUM_SEEN: Final = 8
"""Gradients that are looked at in each step, others each time."""
_SMALL_BYTES: Final = 1 << 14
"""Buckets up to this size together are read in each step, of others a part."""
_WAIT_SECONDS: Final = 4.0
"""The other ranks have just taken part in the same all-reduce, if there was one."""
_PAUSE_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is known of one parameter's values."""

    bits: int
    """The sum of its bits, which decides."""
    total: float
    """The sum of its numbers, which is shown."""
    slope: float
    """Their sum with weights that grow from -1 to 1."""
    rounding: float
    """By how much the sums may differ where the numbers were rounded otherwise."""


Values = Mapping[str, Value]
"""By name; empty where this rank does not know what lasts."""


@final
class ReplicaValues:
    """`awaits_step` returns whether an optimizer that has not stepped yet holds the parameters; it takes long."""

    def __init__(
        self,
        list_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        awaits_step: Callable[[], bool],
        *,
        may_read: bool,
    ) -> None:
        self.were_moved = False
        """Whether something but the optimizers has ever written to the parameters."""
        self._list_parameters = list_parameters
        self._awaits_step = awaits_step
        self._may_read = may_read
        self._num_asked = self._num_read = 0
        self._has_steps = self._is_read = self._is_over = False
        self._waits: bool | None = None
        self._number = 0
        self._wants_all = False
        self._all: Values | None = None
        self._places: Sequence[tuple[nn.Parameter, int | None]] = ()
        self._seen = 0
        self.look()

    def look(self) -> None:
        self._named = [(name, each) for name, each in self._list_parameters() if type(each.detach()) is Tensor]
        self._parameters = [each for _, each in self._named]
        self._num_writes = self._count_writes()
        self._is_due = True

    def stop(self) -> None:
        """Compare them no more (local; on all ranks)."""
        self._is_over = True
        self._number = 0

    def begin_update(self) -> None:
        if not self._is_read and self.was_written():
            self._is_due = self.were_moved = True

    def end_update(self, *, reads: bool = True) -> None:
        """Read what an optimizer's step has left, if it is the first one since a reduction (local)."""
        self._has_steps = True
        self._num_writes = self._count_writes()
        if reads and not self._is_read and not self._is_over:
            self._is_read = True
            self._read(was_written=self._is_due)

    def expect_writes(self) -> None:
        self._is_due = True

    def was_written(self) -> bool:
        """Return whether something but the optimizers has written to the parameters since the last update."""
        return self._num_writes != self._count_writes()

    def number(self) -> int:
        """Return a number for the values, as far as they were looked at this time (local)."""
        self._num_asked += 1
        self._is_read = False
        if self._has_steps or self._is_over:
            return self._number
        if self._num_asked == 1:
            return 0  # an optimizer takes its first step after this; whether there is one takes long to find out
        if self._waits is None:
            self._waits = self._awaits_step()
        elif self._num_asked > _NUM_BETWEEN:
            self._waits = False  # it holds them and never steps
        if self._waits:
            return 0
        before, self._num_writes = self._num_writes, self._count_writes()
        self._read(was_written=self._num_writes != before)
        return self._number

    def describe(self) -> Values:
        """Return the values by name; nothing where they are not what lasts (local). See [Note: what lasts]."""
        if self._all is not None:
            return self._all
        if self._is_over or not (self._has_steps or self._waits is False):
            return {}
        if self._has_steps and self._has_moved():
            self.were_moved = True
            return {}
        return self._sum_up()

    def compare(self, found: Sequence[Values]) -> None:
        """Read all of what the next step leaves, if a rank did not know its values (local; `found` is of all ranks)."""
        self._wants_all = not all(found)

    def _read(self, *, was_written: bool) -> None:
        turn, self._num_read = self._num_read, self._num_read + 1
        is_due = self._is_due or turn < _NUM_FIRST or turn % _NUM_BETWEEN == 0
        self._is_due = False
        is_wanted, self._wants_all = self._wants_all, False
        self._all = self._sum_up() if is_wanted or (self.were_moved and turn < _NUM_KEPT) else None
        places: Iterable[tuple[nn.Parameter, int | None]] = ()
        if was_written or (is_due and self._may_read):
            places = ((each, None) for each in self._parameters)
        elif turn % _NUM_BETWEEN_PARTS and not is_wanted:
            self._places = ()
            return  # with the number of the last time
        elif self._may_read and self._parameters:
            places = self._window(turn // _NUM_BETWEEN_PARTS)
        self._places = list(places)
        self._seen = self._glance()
        sums = self._all.values() if is_wanted and self._all is not None else ()
        self._number = hash((self._seen, *(each.bits for each in sums)))

    def _window(self, turn: int) -> Iterable[tuple[nn.Parameter, int]]:
        number = len(self._parameters)
        for place in range(turn * _WINDOW, turn * _WINDOW + min(_WINDOW, number)):
            yield self._parameters[place % number], place // number

    def _has_moved(self) -> bool:
        return self.was_written() or (bool(self._places) and self._glance() != self._seen)

    def _glance(self) -> int:
        return glance_at_bits(*(_some_rows(parameter, part) for parameter, part in self._places))

    def _sum_up(self) -> Values:
        return {name: _sum_up(each.detach()) for name, each in self._named}

    def _count_writes(self) -> int:
        return sum(map(version_of, self._parameters))


def _some_rows(tensor: Tensor, part: int | None) -> Tensor:
    """Return a tensor, or some of its rows, others for each part."""
    if part is None or tensor.numel() <= _WINDOW_ELEMENTS or tensor.dim() == 0:
        return tensor
    num_rows = max(1, _WINDOW_ELEMENTS * tensor.size(0) // tensor.numel())
    first = part * num_rows % tensor.size(0)
    return torch.Tensor.narrow(tensor.detach(), 0, first, min(num_rows, tensor.size(0) - first))


def _sum_up(tensor: Tensor) -> Value:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.reshape(-1).double()
    weights = torch.linspace(-1, 1, flat.numel(), dtype=flat.dtype, device=flat.device)
    precision = torch.finfo(real.dtype).eps if real.is_floating_point() else 0.0
    return Value(
        bits=int(sum_of_bits([tensor])) if tensor.numel() else 0,
        total=float(flat.sum()),
        slope=float(flat @ weights),
        rounding=_ROUNDING * precision * float(flat.norm()),
    )


def odd_parameters(found: Values, expected: Values) -> list[str]:
    """Return the names of those that differ; none where a rank does not know its values (pure)."""
    return [name for name, value in expected.items() if found.get(name, value).bits != value.bits]


def differ_by_rounding(found: Values, expected: Values, names: Iterable[str]) -> bool:
    pairs = [(found[name], expected[name]) for name in names]
    return all(
        max(abs(here.total - there.total), abs(here.slope - there.slope)) <= min(here.rounding, there.rounding)
        for here, there in pairs
    )


@final
class StepGradients(Check):
    """The reduced gradients up to the next backward. Compared is whether that began with those of an earlier step."""

    scope = Scope.RUN

    def __init__(self, reducer: "weakref.ref[Reducer]", world_size: int, *, may_read: bool) -> None:
        self._reducer = reducer
        self._world_size = world_size
        self._sample: tuple[Tensor, int] | None = None
        self._may_read = may_read
        self._turn = 0
        self._seen: list[nn.Parameter] = []
        self._marks: list[tuple[int, int]] = []
        self._first = 0, 0
        self._is_fresh = self._was_fresh = True
        self._keeps = False

    def begin(self) -> None:
        self._was_fresh = self._is_fresh
        if self._is_fresh:
            self._is_fresh = False
            self._keeps = self._are_kept()

    def forget_begin(self) -> None:
        self._is_fresh = self._is_fresh or self._was_fresh

    def number(self) -> int:
        return int(self._keeps)

    def record(self) -> bool:
        return self._keeps

    def judge(self, found: Sequence[bool], lines: Sequence[Lines]) -> LockstepError | None:
        for rank, keeps in others_than_first(found):
            keeping, other = (rank, 0) if keeps else (0, rank)
            return ReductionError(
                f"The backward of rank {keeping} has added to the gradients of an earlier step, and on rank {other} "
                "they had been cleared, so the mean would have been of other things. The last forward was at "
                f"{lines[0].forward}. Call optimizer.zero_grad() on every rank alike. {SWITCH} (LS313)",
            )
        return None

    def reset(self, reduction: Reduced | None) -> None:
        self._is_fresh = True
        self._seen, self._marks, self._first = [], [], (0, 0)
        reducer = self._reducer()
        if reduction is None or reducer is None:
            return
        slots = reducer.plan.slots
        number = len(slots)
        self._turn += 1
        if number:
            first = self._turn * _NUM_SEEN
            chosen = {0, number - 1, *(index % number for index in range(first, first + _NUM_SEEN))}
            self._seen = [slots[index].parameter for index in sorted(chosen)]
            self._marks = _mark_gradients(self._seen)
            self._first = self._marks[0]
            gradient = self._seen[0].grad
            if gradient is not None and not gradient.is_sparse and self._may_read and self._turn <= _NUM_FIRST:
                # A copy, but no `clone`: torch's own test of its wrapper takes one for a copy of the whole output.
                self._sample = torch.cat([gradient.flatten()[:_NUM_SEEN]]), OPEN_GROUPS.num_calls()

    def note_step(self) -> None:
        self._first = _mark_gradients(self._seen[:1])[0] if self._seen else (0, 0)

    def number_of_step(self) -> int:
        """Return a number for what the optimizer is given; 0 if that is what the reduction has left (local)."""
        reducer = self._reducer()
        if reducer is None or not self._may_read:
            return 0
        self._warn_of_sum()
        now = _mark_gradients(self._seen)
        was_written = now != self._marks
        if not was_written and self._turn > _NUM_FIRST and self._turn % _NUM_BETWEEN_PARTS:
            return 0
        messages = [bucket.message for bucket in reducer.buckets if not bucket.message.is_sparse]
        if not was_written and messages and sum([message.nbytes for message in messages]) > _SMALL_BYTES:
            turn = self._turn // _NUM_BETWEEN_PARTS
            return glance_at_bits(_some_rows(messages[turn % len(messages)], turn // len(messages)))
        moved = [
            parameter.grad
            for parameter, (key, _), (before, _) in zip(self._seen, now, self._marks, strict=True)
            if key != before
        ]
        there = [each for each in moved if each is not None]
        return hash((glance_at_bits(*messages, *there), *(each is None for each in moved)))

    def _warn_of_sum(self) -> None:
        """Warn of gradients that are as many times the mean as there are ranks, after calls of the group (local).

        A collective changes no version. Where something else has written too, there was a call for each gradient: who
        multiplies by the number of ranks, for the gradients of a sum, may have reduced a loss for a log.
        """
        sample, self._sample = self._sample, None
        gradient = self._seen[0].grad if self._seen else None
        reducer = self._reducer()
        if sample is None or gradient is None or reducer is None or not sample[0].any():
            return
        num_calls = OPEN_GROUPS.num_calls() - sample[1]
        is_marked = _mark_gradients(self._seen[:1]) == self._marks[:1]
        fewest = 1 if is_marked else len(reducer.plan.slots)
        if num_calls >= fewest and torch.equal(gradient.flatten()[:_NUM_SEEN], sample[0] * self._world_size):
            warn_once(
                f"The gradients with which the optimizer steps at {user_line()} are {self._world_size} times the mean "
                "over the ranks, which the backward had left: they were added up over the ranks once more. Leave that "
                "all_reduce out, or run the backward under no_sync(). (LS311)",
                "The gradients with which the optimizer steps",
            )

    def _are_kept(self) -> bool:
        """Return whether `.grad` holds what the last reduction or step has left."""
        return self._first[0] != 0 and _mark_gradients(self._seen[:1])[0] == self._first


@final
class LocalGradients(Check):
    """What is done to gradients between two backwards of which the first was not reduced: by what they are multiplied.

    To multiply each rank's by the same number is right. Clipping multiplies them by another number on each rank, which
    the mean over the ranks then has in it.
    """

    scope = Scope.RUN

    def __init__(self, reducer: "weakref.ref[Reducer]", *, may_read: bool) -> None:
        self._reducer = reducer
        self._may_read = may_read
        self._left: tuple[nn.Parameter, tuple[int, int], Tensor] | None = None
        self._factors: list[float] = []
        self._has_warned = False

    def end_local(self) -> None:
        reducer = self._reducer()
        if reducer is None or self._has_warned or not self._may_read:
            return
        slots = (slot.parameter for slot in reducer.plan.slots)
        parameter = next((each for each in slots if each.grad is not None and not each.grad.is_sparse), None)
        if parameter is not None:
            self._left = parameter, _mark_gradients([parameter])[0], _sample(parameter)

    def begin(self) -> None:
        left, self._left = self._left, None
        if left is None or left[0].grad is None:
            return
        parameter, (key, _), before = left
        now = _mark_gradients([parameter])[0]
        if now[0] == key and now != left[1]:
            largest = int(before.abs().argmax())
            was, is_now = float(before[largest]), float(_sample(parameter)[largest])
            if was and is_now and math.isfinite(is_now / was):
                self._factors.append(float(f"{is_now / was:.3g}"))

    def number(self) -> int:
        return hash(tuple(self._factors)) if self._factors else 0

    def record(self) -> list[float]:
        return self._factors

    def judge(self, found: Sequence[list[float]], lines: Sequence[Lines]) -> LockstepError | None:
        for rank, factors in others_than_first(found):
            pair = next((pair for pair in zip(factors, found[0], strict=False) if pair[0] != pair[1]), None)
            if pair is not None:
                self._has_warned = True
                warn_once(
                    "Gradients were clipped, or multiplied, before they are averaged: between two backwards, of which "
                    f"the first was under no_sync(), by {pair[0]:g} on rank {rank} and by {pair[1]:g} on rank 0. So "
                    f"the mean is not that of the batch. The last forward was at {lines[0].forward}. Clip once, after "
                    "the backward that is reduced. (LS311)",
                    "Gradients were clipped, or multiplied,",
                )
                break
        return None

    def reset(self, reduction: Reduced | None) -> None:  # noqa: ARG002 - after each reduction alike
        self._left, self._factors = None, []


def _sample(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    # No `clone`: torch's own test of its wrapper takes one for a copy of the whole output.
    return torch.cat([parameter.grad.detach().flatten()[:_NUM_SEEN]])


def _mark_gradients(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return what shows that gradients were replaced or written to. References would count as a holder's."""
    gradients = [parameter.grad for parameter in parameters]
    return [(0, 0) if each is None else (id(each), version_of(each)) for each in gradients]


def has_unsynchronized(reducer: Reducer, parameters: Sequence[nn.Parameter]) -> str:
    """Return the name of a parameter whose gradient was accumulated and not reduced; empty if there is none."""
    chosen = set(map(id, parameters))
    left = (slot for slot in reducer.plan.slots if slot.is_unsynced and id(slot.parameter) in chosen)
    return next((slot.name for slot in left if slot.parameter.grad is not None), "")


@final
class HandAveraging:
    """Finds out whether gradients that were not reduced are the same on all ranks all the same.

        with model.no_sync():
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

    No call shows that it was done for every gradient. But then all ranks step with the same gradients, bit for bit, and
    with gradients of its own each rank has others. So each rank publishes a number for its gradients in the group's
    store, and waits a moment for those of the others. No collective: ranks that do not step by hand would not take part
    in it. The first steps are compared, then every 64th.
    """

    def __init__(self, world: World, model_number: int) -> None:
        store = None if world.group is None else group_store(world.group)
        self._store = None if store is None else dist.PrefixStore(f"lockstep/by_hand/{model_number}", store)
        self._world = world
        self._num_steps = 0
        self._published: list[str] = []

    def is_done(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether all ranks are about to step with the same gradients (each rank with such a step calls)."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if self._store is None:
            return False
        if number >= _NUM_FIRST and number % _NUM_BETWEEN:
            return True
        gradients = [each.grad for each in parameters]
        there = [each for each in gradients if each is not None]
        own = hash((glance_at_bits(*there), *(each is None for each in gradients)))
        keys = [f"{number}/{rank}" for rank in range(self._world.world_size)]
        self._store.set(keys[self._world.rank], f"{own}")
        self._published.append(keys[self._world.rank])
        if len(self._published) > 2:  # noqa: PLR2004 - whoever has published the last one has read those before it
            self._store.delete_key(self._published.pop(0))
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        return all(int(self._store.get(key)) == own for key in keys)
