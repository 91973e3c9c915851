"""The reducer: watches gradients arrive, sends each bucket when it is full, completes the rest at the end.

It puts three parts together, each of which knows nothing of the others:

    backward of one rank          BackwardWatch, hooks    BucketSchedule            BucketReduction      the group
    --------------------          --------------------    --------------            ---------------      ---------
    1 gradient accumulated   ->   arrived: to its place
    2 bucket's last gradient ->   it is full         ->   `send_full`: in order ->  `all_reduce`   ->    a message
    3 more gradients ...                                                            (overlap)
    4 end of backward        ->   it has ended       ->   `complete`: the rest, ->  `all_reduce`   ->    the last one
                                                          status of all ranks
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, group_store
from lockstep.errors import PeerLostError, ReductionError
from lockstep.reduce.backward_policy import BackwardPolicy
from lockstep.reduce.backward_watch import BackwardWatch, Phase
from lockstep.reduce.bucket_reduction import BucketReduction
from lockstep.reduce.bucket_schedule import BucketSchedule
from lockstep.reduce.bucket_set import AnySlot, Bucket
from lockstep.reduce.comm_hook import GradBucket
from lockstep.reduce.current_plan import CurrentPlan
from lockstep.reduce.gradient_hooks import GradientHooks
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.options import ReducerOptions
from lockstep.reduce.stall import StallWatch, where
from lockstep.reduce.status import GroupStatus, RankStatus
from lockstep.reduce.times import StepTimes
from lockstep.settings import read_stall_seconds


@final
class Reducer:
    """Reduces the gradients of a model over a group in every backward that synchronises.

    Args:
        model: Its trainable parameters, the same on every rank.
        world: The workers; every rank must run the same number of synchronising backwards.
        options: How.
        reduction: How one bucket is reduced.
        policy: What becomes of backwards that are not reduced, and of a model that changes.

    Attributes:
        watch: Watches the backwards; its `synchronizes` says whether they are reduced.
        schedule: Sends the buckets.
        num_reductions: How many reductions were completed.
        on_status: Called with the status of all ranks after each reduction.
    """

    def __init__(
        self,
        model: TrainedModel,
        world: World,
        options: ReducerOptions,
        reduction: BucketReduction,
        policy: BackwardPolicy,
    ) -> None:
        assert world.group is not None
        self.num_reductions = 0
        self.on_status: Callable[[GroupStatus], None] = _ignore_status
        self._world = world
        self._group = world.group
        self._policy = policy
        self.watch = BackwardWatch(partial(_has_group, world))
        self.schedule = BucketSchedule(world, reduction, purpose=options.purpose, skips_unused=options.skips_unused)
        # Weakly, as everywhere here: reference counts alone must free a reducer's buckets.
        self._hooks = GradientHooks(self.watch, self)
        self._plan = CurrentPlan(model, world, options, partial(_drop_buckets, weakref.ref(self)))
        self._use_buckets()
        self._stop_watching = _watch_for_stalls(self, model, world)

    # -- What its owner says -------------------------------------------------------------------------------------------

    def mark(self, *outputs: Tensor, num_samples: int = 0) -> None:
        """Mark where a backward begins: at `outputs` of a module, or a loss. [Note: the end of a backward].

        Whether that backward synchronises is decided here and there: neither may be under `no_sync`.

        Args:
            outputs: Those of one forward.
            num_samples: How many samples it was given; they count in each backward that goes through it. 0 if that is
                not known.
        """
        self.watch.mark(outputs, num_samples, self)

    def prepare_for_backward(self, _outputs: Sequence[Tensor] = ()) -> None:
        """Let the next backward synchronise, whatever was said when its graph was built (torch's pipelining asks)."""
        self.watch.force_next()

    def use_reduction(self, reduction: BucketReduction, *, only_gradients: bool) -> None:
        """Reduce buckets so from now on (each rank calls, with the same reduction).

        Args:
            reduction: How.
            only_gradients: Whether it must see gradients and nothing else.
        """
        self.schedule.reduction = reduction
        if only_gradients:
            self._plan.use_only_gradients()
        self._begin_anew()

    def finish_interrupted(self) -> None:
        """Complete the reduction of a backward that ended in an exception; called before a forward (collective)."""
        self.watch.finish_interrupted(self)

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank ran no backward, with what `.grad` holds (collective)."""
        self.watch.begin_without_backward(self)
        self.complete()

    def reduce_nothing(self) -> None:
        """Take part in a reduction with zeros; `.grad` stays as it is (collective)."""
        gradients = [(slot.parameter, slot.detach_gradient()) for slot in self._plan.slots]
        try:
            self.reduce_without_backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def fail(self) -> None:
        """Take part in a reduction to which this rank has nothing to give, so that all get an error (collective)."""
        if self.watch.phase is not Phase.SYNCHRONIZING:
            self.begin(Phase.SYNCHRONIZING)
        self.schedule.reduction.expect_nothing()
        self.complete_failed()

    def listen_last(self) -> None:
        """See each gradient after all other hooks that the parameters have by now (local; between two backwards)."""
        self._hooks.listen(self.buckets)

    def close(self) -> None:
        """Reduce no more (local)."""
        self._hooks.remove()
        self._plan.close()
        self._stop_watching()

    # -- What it says --------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they travel."""
        return self._plan.bucket_set.buckets

    @property
    def is_idle(self) -> bool:
        """Whether no backward is under way or was left unfinished."""
        return self.watch.phase is Phase.IDLE

    @property
    def is_in_order(self) -> bool:
        """Whether buckets are in the order in which gradients arrive."""
        return self._plan.is_in_order

    @property
    def times(self) -> StepTimes:
        """When the parts of the last step began and ended."""
        return self.schedule.times

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Let a wait within, which is not the reducer's own, be watched as well."""
        return self.schedule.waits.during(what)

    def describe_progress(self) -> str:
        """Return in words how far this rank is."""
        inside = "is not in a backward" if self.is_idle else "is in a backward"
        return f"{self.schedule.describe_wait() or inside} and has reduced {self.num_reductions} times"

    # -- Names that torch's own hooks use ------------------------------------------------------------------------------

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: torch's reducer has to know of optimizers that run in a hook, this one does not."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Add up what a hook sees of a bucket; the future holds the sum (collective)."""
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(_first_of)  # type: ignore[no-any-return]

    # -- Gradients that arrive (`GradientReceiver`) --------------------------------------------------------------------

    def take(self, slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Take in a gradient that was just accumulated."""
        watch = self.watch
        if watch.arrive(self):
            slot, bucket = self._plan.slot_of(parameter)  # there may be new buckets now
        if not slot.fits:
            return  # [Note: a changed model]
        if watch.phase is Phase.ACCUMULATING:
            self._policy.take_local(slot)
            return
        if slot.has_arrived:
            self._take_second(slot, bucket)
            return
        if not slot.is_small:
            slot.take(1.0 if watch.waits_for_end else self.schedule.reduction.scale)
        if self._plan.wants_order:
            self._plan.note_arrival(slot)
        elif not self._plan.has_changed and not watch.waits_for_end:
            watch.call_plain()
        slot.has_arrived = True
        bucket.num_pending -= 1
        if bucket.num_pending == 0 and not watch.waits_for_end:
            self.schedule.send_full()

    def take_unplanned(self) -> None:
        """Take in a gradient of a parameter that the plan does not have yet."""
        self.watch.arrive(self)

    def send_full(self) -> None:
        """Send what can be sent: a bucket has become full."""
        self.schedule.send_full()

    def _take_second(self, slot: AnySlot, bucket: Bucket) -> None:
        self.watch.note_second_gradient()
        if slot.is_scaled or self.schedule.was_sent(bucket):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward when its first was on its way already, "
                "which happens when a model begins to use a parameter inside a reentrant checkpoint and elsewhere "
                "after its first step. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        slot.take_second()

    # -- Moments of a backward (`BackwardListener`) --------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """Prepare for a backward that begins."""
        if phase is Phase.SYNCHRONIZING:
            # Not earlier: in a forward, `torch.func.functional_call` may have put other tensors in the parameters'
            # places.
            self._look_at_model()
            if self._plan.use_order():
                self._use_buckets()
            self._begin_buckets()
            self.schedule.begin()
        elif self._policy.keeps_local:
            self._look_at_model()
            self._begin_buckets()

    def begin_synchronizing_late(self) -> None:
        """Prepare for gradients that are reduced, in a backward that so far only added up local ones."""
        self._look_at_model()

    def complete(self) -> None:
        """Reduce what has arrived (collective)."""
        own = RankStatus(has_changed=self._plan.has_changed, batch_size=self.watch.num_samples)
        try:
            status = self.schedule.complete(own)
            self.num_reductions += 1
            for bucket in self.buckets if self.schedule.failure is None else ():
                bucket.write_back()
            self._plan.learn_order()
            if self.schedule.failure is not None:
                raise self.schedule.failure  # no local name for it: its traceback holds this frame
        except PeerLostError as error:
            error.add_note(f"This rank had reduced the gradients of {self.num_reductions} backwards before.")
            raise
        finally:
            self.forget()
            self.watch.stop_synchronizing()
        self._look_at_status(status)

    def complete_failed(self) -> None:
        """Make the calls of `complete`, so that the others' find their counterparts (collective)."""
        try:
            self.schedule.complete(RankStatus(has_failed=True))
            self._plan.learn_order()
        finally:
            self.forget()
            self.watch.stop_synchronizing()

    def forget(self) -> None:
        """Forget a backward that is over."""
        self.schedule.reset()
        self._plan.forget_arrivals()
        self.watch.end()

    def _look_at_status(self, status: GroupStatus) -> None:
        if status.failed:
            raise ReductionError(
                f"The backward of {len(status.failed)} of {self._world.world_size} ranks ended in an exception (rank "
                f"{', '.join(map(str, status.failed))}), so these gradients are not whole. The log of "
                f"{'that rank' if len(status.failed) == 1 else 'those ranks'} says why."
            )
        if status.changed:
            self._policy.follow_change(status, self._plan)
            self._begin_anew()
        self.on_status(status)

    # -- The plan ------------------------------------------------------------------------------------------------------

    def _look_at_model(self) -> None:
        self._hooks.listen_unplanned(self._plan.look())
        self.watch.waits_for_end |= self._plan.has_changed

    def _begin_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.begin()

    def _begin_anew(self) -> None:
        self.watch.learn_anew()
        self._use_buckets()

    def _use_buckets(self) -> None:
        self.schedule.use(self._plan.bucket_set, self._plan.make_status_channel(self.schedule.purpose))
        self._hooks.listen(self.buckets)

    def drop_buckets(self) -> None:
        """Hold no buckets: there will be others, for which their memory is needed (local)."""
        self._hooks.remove()
        self.schedule.drop_buckets()


def _watch_for_stalls(reducer: Reducer, model: TrainedModel, world: World) -> Callable[[], object]:
    """Begin to watch the waits of a reducer; return what ends it."""
    seconds = read_stall_seconds()
    store = None if world.group is None else group_store(world.group)
    if world.world_size == 1 or seconds == 0 or store is None:
        return _do_nothing
    names = "".join(str(each.spec) for each in model.trained)
    own_store = dist.PrefixStore(f"stall/{hashlib.sha256(names.encode()).hexdigest()}", store)
    me = weakref.ref(reducer)
    describe = partial(_describe_progress, me, threading.get_ident())
    watch = StallWatch(own_store, world.rank, world.world_size, seconds, partial(_seconds_waited, me), describe)
    # At exit too: a thread that is in the store while the interpreter ends aborts the process.
    return weakref.finalize(reducer, watch.close)


def _seconds_waited(reducer: "weakref.ref[Reducer]") -> float | None:
    alive = reducer()
    return None if alive is None else alive.schedule.waits.seconds()


def _describe_progress(reducer: "weakref.ref[Reducer]", thread_id: int) -> str:
    alive = reducer()
    return "has ended its training" if alive is None else alive.describe_progress() + where(thread_id)


def _drop_buckets(reducer: "weakref.ref[Reducer]") -> None:
    alive = reducer()
    if alive is not None:
        alive.drop_buckets()


def _has_group(world: World) -> bool:
    return world.has_group


def _first_of(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return future.value()[0]


def _ignore_status(_status: GroupStatus) -> None:
    """Do nothing with the status."""


def _do_nothing() -> None:
    """Do nothing: waits are not watched."""
