"""The plan that is in use, and how it follows the model.

[Note: order of arrival] The plan is made anew once, after the first reduction, in the order in which gradients arrived
on rank 0: modules are often used in another order than they were registered in.

[Note: a changed model] A rank that finds other parameters than the plan has sets a flag in its status. Then all ranks,
at the end of that backward, compare their models, plan anew and reduce what the old plan had no place for.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import World
from lockstep.devices.transfer import is_asynchronous
from lockstep.reduce.buckets import AnySlot, Bucket, BucketSet, allocate_buckets, no_buckets, read_used_counts
from lockstep.reduce.model import TrainedModel, TrainedParameter, check_same_model, check_same_values
from lockstep.reduce.plan import BucketLimits, ReductionPlan, plan_buckets
from lockstep.reduce.reduction import MeanReduction
from lockstep.reduce.slot import Slot
from lockstep.reduce.status import StatusChannel, StatusOverHosts, StatusTrailer, has_cpu_backend, status_length

_PLACES: Final[dict[int, "weakref.WeakSet[Slot]"]] = {}
"""The places of each parameter in layouts that are in use. One table, as reducers have only the parameter in common.
A place keeps its parameter alive, so the identity of a parameter names it as long as it has a place."""
_TORCHS_LIMITS = BucketLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    purpose: str
    """What is reduced, in words: ranks compare it, and errors show it."""
    limits: BucketLimits = _TORCHS_LIMITS
    as_view: bool = True
    """Whether `.grad` is a view into its bucket as torch understands it; it lies there in any case."""
    dtype: torch.dtype | None = None
    """Reduce in this dtype; None for that of each parameter."""
    follows_arrival: bool = True
    """Whether to plan anew in the order of arrival. [Note: order of arrival]"""
    holds_partials: bool = False
    """Whether what `.grad` holds before a backward is a partial sum of the same step; then gradients are dense."""
    compares_buffers: bool = True
    """Whether buffers must agree between ranks when the model has changed."""
    skips_unused: bool = False
    """Whether buckets of which nothing arrived are not sent; all ranks must use the same parameters then."""
    local_mean: MeanReduction | None = None
    """How a wrapper averages: it keeps gradients of backwards that are not reduced for the next one that is, and plans
    anew for a model that changes. None for a trainer: it takes those gradients itself, and a model that changes in the
    middle of a step is an error."""
    is_asynchronous: Callable[[torch.device], bool] = is_asynchronous
    """Whether work on a device goes on after the call that starts it; tests let the CPU count as such."""


@final
class CurrentPlan:
    """The buckets of a model, kept up to date; `release` drops what others hold of them, before there are new ones."""

    def __init__(self, model: TrainedModel, world: World, options: ReducerOptions, release: Callable[[], None]) -> None:
        assert world.group is not None
        self._release = release
        self.has_changed = False
        self.is_in_order = False
        """Whether buckets are in the order in which gradients arrive."""
        self._model = model
        self._world = world
        self._group = world.group
        self._options = options
        self._only_gradients = False
        self._now: TrainedModel | None = None
        self._noticed: list[nn.Parameter] = []
        self._elsewhere: set[int] = set()
        self.arrived: list[AnySlot] = []
        """Those of the present backward, while their order is wanted."""
        self._order: list[int] = []
        self._plan = self._make()
        self.bucket_set = self._allocate()
        claim(self._dense_slots)

    @property
    def slots(self) -> list[AnySlot]:
        return [slot for bucket in self.bucket_set.buckets for slot in bucket.slots]

    def make_status_channel(self, purpose: str) -> StatusChannel:
        if self._status_by_hosts:
            return StatusOverHosts(self._group, purpose)
        return StatusTrailer(self.bucket_set.trailer)

    @property
    def _dense_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if isinstance(slot, Slot)]

    def close(self) -> None:
        """Let others have the parameters for themselves; the plan is not used any more (local)."""
        give_up(self._dense_slots)

    def slot_of(self, parameter: nn.Parameter) -> tuple[AnySlot, Bucket]:
        places = ((slot, bucket) for bucket in self.bucket_set.buckets for slot in bucket.slots)
        return next((slot, bucket) for slot, bucket in places if slot.parameter is parameter)

    def use_only_gradients(self) -> None:
        self._only_gradients = True
        self._begin_anew()

    # -- Order of arrival ----------------------------------------------------------------------------------------------

    @property
    def wants_order(self) -> bool:
        return self._options.follows_arrival and not self.is_in_order

    def learn_order(self) -> None:
        """Take rank 0's order of arrival for the next plan, if it is wanted (collective). [Note: order of arrival].

        At the end of the first reduction on every rank, on one whose backward has failed too: it is one call more,
        which no rank may leave out.
        """
        if not self.wants_order:
            return
        self.is_in_order = True
        index = {id(each.parameter): number for number, each in enumerate(self._model.trained)}
        order = [index[id(slot.parameter)] for slot in self.arrived]
        seen = set(order)
        order += [number for number in reversed(range(len(index))) if number not in seen]
        # Over hosts where that is possible: to read what a device holds is to wait for it.
        home = torch.device("cpu") if self._status_by_hosts else self._model.trained[0].parameter.device
        sent = torch.tensor(order, device=home)
        dist.broadcast(sent, group=self._group, group_src=0)
        self._order = sent.tolist()

    def use_order(self) -> bool:
        """Use the order that was learnt, if one was since; return whether there are new buckets.

        Called when the next backward begins: until then gradients may lie in the old buckets.
        """
        if not self._order:
            return False
        plan, self._order = self._make(), []
        is_new = plan != self._plan
        if is_new:
            self._plan = plan
            self._replace()
        return is_new

    def allocate_missing(self) -> bool:
        """Allocate the buckets if there was no memory for them when they were to be replaced; return whether (local).

        Called before a message is sent for a backward that failed: all ranks must send the same ones.
        """
        if self.bucket_set.buckets:
            return False
        self.bucket_set = self._allocate()
        claim(self._dense_slots)
        return True

    # -- A model that changes ------------------------------------------------------------------------------------------

    def look(self) -> list[nn.Parameter]:
        """Find out whether the model has changed; return parameters that are not in the plan and were not found before.

        What no longer fits the plan is left out of it until the status was exchanged. Called in every backward: a model
        that was frozen for a backward which reduced nothing may be as it was again. [Note: a changed model]
        """
        if not self._model.has_changed():
            if self.has_changed:  # it was, no reduction has exchanged that, and it has changed back since
                self.has_changed = False
                for slot in self.slots:
                    slot.fits = True
            return []
        root = self._model.module
        if root is None:
            return []  # only a graph is left of it
        self.has_changed = True
        if self._now is None or self._now.has_changed():
            # Kept, for a model that is frozen and unfrozen in every step looks the same each time.
            self._now = TrainedModel(root, self._model.ignored)
        planned = {id(each.parameter): each.spec for each in self._model.trained}
        found = {id(each.parameter): each for each in self._now.trained}
        for slot in self.slots:
            now = found.get(id(slot.parameter))
            slot.fits = now is not None and now.spec == planned[id(slot.parameter)]
        noticed = set(map(id, self._noticed))
        in_place = {id(slot.parameter) for slot in self.slots if slot.has_gradient_in_place}
        with_gradient = {key for key, each in found.items() if each.parameter.grad is not None}
        self._elsewhere = with_gradient - in_place
        new = [each.parameter for key, each in found.items() if key not in planned and key not in noticed]
        self._noticed += new
        return new

    def follow(self, scale: float) -> None:
        """If any rank's model has changed: compare, plan anew, reduce what had no place before (collective)."""
        unfit = {id(slot.parameter) for slot in self.slots if not slot.fits}
        before = {id(each.parameter): each.spec for each in self._model.trained if id(each.parameter) not in unfit}
        self._model.look()
        check_same_model(self._model, self._world, is_wrapped=True, with_buffers=self._options.compares_buffers)
        late = [each for each in self._model.trained if before.get(id(each.parameter)) != each.spec]
        check_same_values(late, self._world)
        self._begin_anew(self._reduce_late(late, scale) if late else ())

    def _reduce_late(self, late: Sequence[TrainedParameter], scale: float) -> list[AnySlot]:
        """Reduce what the plan has no place for; return the places that it has had for that (collective)."""
        plan = plan_buckets([each.spec for each in late], self._options.limits)
        bucket_set = allocate_buckets(plan, late, self._group, as_view=self._options.as_view)
        for bucket in bucket_set.buckets:
            for slot in bucket.slots:
                slot.has_arrived = slot.parameter.grad is not None
                if isinstance(slot, Slot) and id(slot.parameter) in self._elsewhere:
                    slot.find_in_other_memory()
            bucket.prepare(scale)
            dist.all_reduce(bucket.message, group=self._group)
        if bucket_set.extra_message is not None:
            dist.all_reduce(bucket_set.extra_message, group=self._group)
        counts = read_used_counts(bucket_set.buckets, range(len(bucket_set.buckets)))
        for bucket, numbers in zip(bucket_set.buckets, counts, strict=True):
            bucket.write_back(numbers)
        return [slot for bucket in bucket_set.buckets for slot in bucket.slots]

    # -- Making plans --------------------------------------------------------------------------------------------------

    def _begin_anew(self, late: Sequence[AnySlot] = ()) -> None:
        self.has_changed = False
        self.is_in_order = False
        self._now, self._noticed = None, []
        self._order, self.arrived = [], []
        if self._model.trained:  # else all is frozen, for a while
            self._plan = self._make()
            self._replace(late)

    def _replace(self, late: Sequence[AnySlot] = ()) -> None:
        unsynced = {id(slot.parameter) for slot in self.slots if slot.is_unsynced}
        # None after the ranks have compared their models; here it is the same plan in another order.
        unfit = {id(slot.parameter) for slot in self.slots if not slot.fits and self.has_changed}
        ours = {id(slot.parameter) for slot in [*self._dense_slots, *late] if slot.has_gradient_in_place}
        give_up(self._dense_slots)
        self.bucket_set = no_buckets()
        self._release()
        self.bucket_set = self._allocate()
        claim(self._dense_slots)
        for slot in self.slots:
            slot.is_unsynced = id(slot.parameter) in unsynced
            slot.fits = id(slot.parameter) not in unfit
            if slot.fits and id(slot.parameter) in ours:
                slot.adopt()  # else it would be taken for a gradient that the user put in other memory

    def _make(self) -> ReductionPlan:
        dtype = self._options.dtype
        specs = [each.spec if dtype is None else replace(each.spec, dtype=dtype) for each in self._model.trained]
        if self._options.holds_partials:
            specs = [replace(spec, is_sparse=False) for spec in specs]
        # [Note: two planes] in `lockstep.reduce.status`.
        is_asynchronous = any(map(self._options.is_asynchronous, {spec.device for spec in specs}))
        self._status_by_hosts = is_asynchronous and has_cpu_backend(self._group)
        return plan_buckets(
            specs,
            self._options.limits,
            order=self._order,
            trailer_length=0 if self._status_by_hosts else status_length(self._world.world_size),
            only_gradients=self._only_gradients,
            has_extra_message=self._options.skips_unused,
        )

    def _allocate(self) -> BucketSet:
        return allocate_buckets(
            self._plan,
            self._model.trained,
            self._group,
            as_view=self._options.as_view,
            holds_partials=self._options.holds_partials,
        )


def claim(slots: Iterable[Slot]) -> None:
    """Note the places of a new layout; those of parameters that have another place are shared from now on (local).

    [Note: shared parameters] A gradient lies in one bucket only. If two reducers took it for theirs, the first would
    scale and send the memory that the second is about to read. So each of them copies it when it arrives, leaves
    `.grad` alone, and writes the mean into it at the end: what torch does always. That `.grad` then gets the same mean
    twice is harmless.

        fine = DistributedDataParallel(Sequential(backbone, head))  # while an earlier wrapper of `backbone` still lives
        a, b = DistributedDataParallel(Net(encoder)), DistributedDataParallel(Other(encoder))
    """
    for parameter in [parameter for parameter, places in _PLACES.items() if not places]:
        del _PLACES[parameter]
    for slot in slots:
        places = _PLACES.setdefault(id(slot.parameter), weakref.WeakSet())
        places.add(slot)
        if len(places) > 1:
            for place in places:
                place.share()


def has_place(parameter: nn.Parameter) -> bool:
    """Return whether a gradient of this parameter is reduced by some reducer of this process (local)."""
    return any(place.parameter is parameter for place in _PLACES.get(id(parameter), ()))


def give_up(slots: Iterable[Slot]) -> None:
    """Forget the places of a layout that is not used any more; not during a backward (local)."""
    for slot in slots:
        places = _PLACES.get(id(slot.parameter), weakref.WeakSet())
        places.discard(slot)
        if len(places) == 1:
            for place in places:
                place.use_bucket()
