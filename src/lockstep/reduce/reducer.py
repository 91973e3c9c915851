"""The reducer of a model: what a wrapper or a trainer calls between two backwards, and what runs during one.

    backward of one rank          BackwardWatch           Reducer                   BucketSchedule       the group
    --------------------          -------------           -------                   --------------       ---------
    1 begins                 ->   a new graph task   ->   `begin`: buckets ready
    2 gradient accumulated   ->   `GradientHooks`: to its place
    3 bucket's last gradient ->   `GradientHooks`: it is full                  ->  `send_full`      ->   a message
    4 more gradients ...                                                           (overlap)
    5 ends                   ->   the end of the task ->  `complete`           ->  `complete`       ->   the last one

[Note: ownership] A reducer owns its watch, plan, schedule and hooks. None of them has a strong reference back, so that
reference counts alone free the buckets. The graph of a forward has one: it may live longer than the wrapper, and its
backward must be reduced all the same.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.errors import PeerLostError, ReductionError
from lockstep.reduce.backward_watch import BackwardWatch, Phase
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.current_plan import CurrentPlan, ReducerOptions
from lockstep.reduce.gradient_hooks import GradientHooks
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.reduction import BucketReduction, GradBucket
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.status import GroupStatus, RankStatus


@final
class Reducer:
    """Reduces the gradients of a model over a group in every backward that synchronises: as many on every rank."""

    def __init__(self, model: TrainedModel, world: World, options: ReducerOptions, reduction: BucketReduction) -> None:
        assert world.group is not None
        self.group = world.group
        self.num_reductions = 0
        self.failed_on_all = False
        """Whether the last reduction ended in an error that every rank has, from the status of all."""
        self.watch = BackwardWatch(lambda: world.has_group)
        self.schedule = BucketSchedule(world, reduction, purpose=options.purpose, skips_unused=options.skips_unused)
        self.times = self.schedule.times
        self._world = world
        self._mean = options.local_mean
        self.plan = CurrentPlan(model, world, options, partial(_drop_buckets, weakref.ref(self)))
        self._hooks = GradientHooks(
            self.watch, self.plan, self.schedule, self, keeps_local=options.local_mean is not None
        )
        self._use_buckets()
        record_this_worker(world.rank, world.world_size)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.plan.bucket_set.buckets

    @property
    def is_idle(self) -> bool:
        """Whether no backward is under way or was left unfinished."""
        return self.watch.phase is Phase.IDLE

    # -- Between two backwards -----------------------------------------------------------------------------------------

    def mark(self, *outputs: Tensor, num_samples: int = 0, on_reached: Callable[[], None] | None = None) -> None:
        """See `BackwardWatch.mark`; a backward is reduced if neither this call nor the backward is under `no_sync`."""
        self.watch.mark(outputs, num_samples, self, on_reached)

    def use_reduction(self, reduction: BucketReduction, *, only_gradients: bool) -> None:
        """Reduce buckets so from now on (each rank calls, with the same reduction)."""
        self.schedule.reduction = reduction
        if only_gradients:
            self.plan.use_only_gradients()
        self._renew()

    def finish_interrupted(self) -> None:
        """Complete the reduction of a backward that ended in an exception; called before a forward (collective)."""
        self.watch.finish_interrupted(self)

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank ran no backward, with what `.grad` holds (collective)."""
        self.watch.begin_without_backward(self)
        self.complete()

    def reduce_nothing(self) -> None:
        """Take part in a reduction with zeros; `.grad` stays as it is (collective)."""
        gradients = self.detach_gradients()
        try:
            self.reduce_without_backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def detach_gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Take the gradients away from the parameters, with their values and out of the buckets (local)."""
        return [(slot.parameter, slot.detach_gradient()) for slot in self.plan.slots]

    def fail(self) -> None:
        """Take part with nothing, so that all get an error (collective). No `begin`: there may be no memory for it."""
        if self.watch.phase is not Phase.SYNCHRONIZING:
            self._use_order()
            self.schedule.begin()
        self.complete_failed()

    def listen_last(self) -> None:
        """See each gradient after all other hooks that the parameters have by now (local; between two backwards)."""
        self._hooks.listen(self.buckets, self.schedule.kept_bucket)

    def close(self) -> None:
        self._hooks.remove()
        self.plan.close()

    # -- Moments of a backward (`BackwardListener`) --------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        if self.schedule.observer is not None:
            self.schedule.observer.begin()
        self._hooks.listen_unfrozen()
        if phase is Phase.SYNCHRONIZING:
            # Not earlier: in a forward, `torch.func.functional_call` may have put other tensors in the parameters'
            # places.
            self.begin_synchronizing_late()
            self._use_order()
            self.schedule.begin()
        elif self._mean is not None:
            self.begin_synchronizing_late()
        else:
            return
        for streams in self.plan.bucket_set.streams:
            streams.begin()
        for bucket in self.buckets:
            bucket.begin()

    def begin_synchronizing_late(self) -> None:
        """Compare the model with the plan; also in a backward that so far only added up local gradients."""
        self._hooks.listen_unplanned(self.plan.look())
        self.watch.waits_for_end |= self.plan.has_changed

    def complete(self) -> None:
        own = RankStatus(
            has_changed=self.plan.has_changed,
            batch_size=self.watch.num_accumulated_samples,
            num_backwards=1 + self.watch.num_local_backwards,
        )
        self.failed_on_all = False
        try:
            status = self.schedule.complete(own)
            self.num_reductions += 1
            if self.schedule.failure is None:
                num_full = self._world.world_size - len(status.empty)
                factor = self._world.world_size / num_full if num_full else 1.0  # a mean over those that had a backward
                for bucket, counts in zip(self.buckets, self.schedule.used_counts, strict=True):
                    bucket.write_back(counts, factor)
            else:
                self._forget_accumulated()
            self.plan.learn_order()
            if self.schedule.failure is not None:
                raise self.schedule.failure  # no local name for it: its traceback holds this frame
        except PeerLostError as error:
            error.add_note(f"This rank had reduced the gradients of {self.num_reductions} backwards before.")
            raise
        finally:
            self._forget_reduced()
        self.failed_on_all = True
        self._follow_status(status)
        self.failed_on_all = False

    def complete_failed(self) -> None:
        self.schedule.reduction.expect_nothing()
        if self.plan.allocate_missing():
            self._use_buckets()
        try:
            self.schedule.complete(RankStatus(has_failed=True))
            self.plan.learn_order()
        finally:
            self._forget_accumulated()
            self._forget_reduced()

    def forget(self) -> None:
        if self.schedule.observer is not None:
            if self.watch.has_arrived:
                self.schedule.observer.end_local()
            else:
                self.schedule.observer.forget_begin()
        self.schedule.reset()
        self.plan.arrived = []
        self.watch.end()

    def _forget_accumulated(self) -> None:
        """Forget which gradients were accumulated before a backward that has failed here: they are lost with it."""
        for slot in self.plan.slots:
            slot.is_unsynced = False

    def _forget_reduced(self) -> None:
        """Forget a backward that was reduced, or has failed, and how many there were before it."""
        self.forget()
        self.watch.forget_local()
        self.watch.stop_synchronizing()

    def _follow_status(self, status: GroupStatus) -> None:
        num_ranks = self._world.world_size
        if status.failed:
            raise ReductionError(
                f"The backward of {len(status.failed)} of {num_ranks} ranks ended in an exception (rank "
                f"{', '.join(map(str, status.failed))}), so these gradients are not whole. The log of "
                f"{'that rank' if len(status.failed) == 1 else 'those ranks'} shows it. (LS306)"
            )
        if status.changed:
            if self._mean is None:
                raise ReductionError(
                    f"The parameters of the model were changed during a step on {len(status.changed)} of {num_ranks} "
                    "ranks, so these gradients are not whole. Change a model between steps only. (LS305)"
                )
            self.plan.follow(self._mean.scale)
            self._renew()
        if self.schedule.observer is not None:
            self.schedule.observer.compare(status)

    # -- Buckets -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Use buckets that were planned anew (local; between two backwards)."""
        self.watch.learn_anew()
        self._use_buckets()

    def _use_order(self) -> None:
        if self.plan.use_order():
            self._use_buckets()

    def _use_buckets(self) -> None:
        self.schedule.use(self.plan.bucket_set, self.plan.make_status_channel(self.schedule.purpose))
        self.listen_last()

    def drop_buckets(self) -> None:
        """Hold no buckets: there will be others, for which their memory is needed (local)."""
        self._hooks.remove()
        self.schedule.drop_buckets()

    # -- Methods of torch's C++ reducer that torch itself and other programs call on the `reducer` of a wrapper --------

    def prepare_for_backward(self, _outputs: Sequence[Tensor] = ()) -> None:
        """Reduce the next backward, whether or not its graph was built under `no_sync` (pipelining calls this)."""
        self.watch.force_next()

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: torch's reducer must be informed of optimizers that run in a hook, this one need not."""

    def _rebuild_buckets(self) -> bool:
        """Do nothing: buckets are made again without it. Lightning calls this before a manual backward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: nothing is delayed. Lightning calls this after the first manual backward of a static graph."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Add up what a hook sees of a bucket; the future holds the sum (collective)."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        assert work is not None
        return work.get_future().then(_first_of)  # type: ignore[no-any-return]

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Explain that an attribute is missing; Python calls this for no other."""
            whose = "which torch's C++ reducer has" if hasattr(dist.Reducer, name) else "and torch's has none either"
            raise AttributeError(
                f"Lockstep's reducer has no {name!r}, {whose}. Use the methods of DistributedDataParallel instead; or, "
                "for torch's reducer, wrap the model with torch's own class: call lockstep.drop_in.undo() before, if "
                "this script runs with the drop-in."
            )


def _first_of(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return future.value()[0]


def _drop_buckets(reducer: "weakref.ref[Reducer]") -> None:
    alive = reducer()
    if alive is not None:
        alive.drop_buckets()
