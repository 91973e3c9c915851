"""Reduces what a backward gives: it is called when a backward begins and when it ends, and owns all that takes part.

    backward of one rank          BackwardWatch           BackwardReducer           BucketSchedule       the group
    --------------------          -------------           ---------------           --------------       ---------
    1 begins                 ->   a new graph task   ->   `begin`: buckets ready
    2 gradient accumulated   ->   `GradientIntake`: to its place
    3 bucket's last gradient ->   `GradientIntake`: it is full                 ->  `send_full`      ->   a message
    4 more gradients ...                                                           (overlap)
    5 ends                   ->   the end of the task ->  `complete`           ->  `complete`       ->   the last one

[Note: ownership] A backward reducer owns its watch, plan, schedule, intake and hooks. None of them has a strong
reference back, so that reference counts alone free the buckets. The graph of a forward has one: it may live longer than
the wrapper, and its backward must be reduced all the same.
"""

import weakref
from functools import partial
from typing import final

from lockstep.comm import World
from lockstep.errors import PeerLostError, ReductionError
from lockstep.reduce.backward_policy import BackwardPolicy
from lockstep.reduce.backward_watch import BackwardWatch, Phase
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.current_plan import CurrentPlan, ReducerOptions
from lockstep.reduce.gradient_hooks import GradientHooks
from lockstep.reduce.gradient_intake import GradientIntake
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.reduction import BucketReduction
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.status import GroupStatus, RankStatus


@final
class BackwardReducer:
    """Reduces the gradients of a model in every backward that is to be synchronised (a `BackwardListener`)."""

    def __init__(
        self,
        model: TrainedModel,
        world: World,
        options: ReducerOptions,
        reduction: BucketReduction,
        policy: BackwardPolicy,
    ) -> None:
        self.num_reductions = 0
        self.failed_on_all = False
        self.watch = BackwardWatch(partial(_has_group, world))
        self.schedule = BucketSchedule(world, reduction, purpose=options.purpose, skips_unused=options.skips_unused)
        self.plan = CurrentPlan(model, world, options, partial(_drop_buckets, weakref.ref(self)))
        self._world = world
        self._policy = policy
        self._intake = GradientIntake(self.watch, self.plan, self.schedule, policy, self)
        self._hooks = GradientHooks(self.watch, self._intake)
        self._use_buckets()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.plan.bucket_set.buckets

    def listen_last(self) -> None:
        self._hooks.listen(self.buckets, self.schedule.kept_bucket)

    def renew(self) -> None:
        """Use buckets that were planned anew (local; between two backwards)."""
        self.watch.learn_anew()
        self._use_buckets()

    def fail(self) -> None:
        """Without what `begin` prepares for gradients: there may be no memory for it (collective)."""
        if self.watch.phase is not Phase.SYNCHRONIZING:
            self._use_order()
            self.schedule.begin()
        self.complete_failed()

    def close(self) -> None:
        self._hooks.remove()
        self.plan.close()

    # -- Moments of a backward (`BackwardListener`) --------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        self.schedule.observer.begin()
        self._hooks.listen_unfrozen()
        if phase is Phase.SYNCHRONIZING:
            # Not earlier: in a forward, `torch.func.functional_call` may have put other tensors in the parameters'
            # places.
            self.begin_synchronizing_late()
            self._use_order()
            self.schedule.begin()
        elif self._policy.keeps_local:
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
            self._forget_reduced()

    def _forget_reduced(self) -> None:
        """Forget a backward that was reduced, or has failed, with all that was accumulated before it."""
        self.forget()
        for slot in self.plan.slots:
            slot.is_unsynced = False
        self.watch.forget_local()
        self.watch.stop_synchronizing()

    def forget(self) -> None:
        if not self.watch.has_arrived:
            self.schedule.observer.forget_begin()
        self.schedule.reset()
        self.plan.forget_arrivals()
        self.watch.end()

    def _follow_status(self, status: GroupStatus) -> None:
        if status.failed:
            raise ReductionError(
                f"The backward of {len(status.failed)} of {self._world.world_size} ranks ended in an exception (rank "
                f"{', '.join(map(str, status.failed))}), so these gradients are not whole. The log of "
                f"{'that rank' if len(status.failed) == 1 else 'those ranks'} shows it. (LS306)"
            )
        if status.changed:
            self._policy.follow_change(status, self.plan)
            self.renew()
        self.schedule.observer.compare(status)

    # -- Buckets -------------------------------------------------------------------------------------------------------

    def _use_order(self) -> None:
        if self.plan.use_order():
            self._use_buckets()

    def _use_buckets(self) -> None:
        self.schedule.use(self.plan.bucket_set, self.plan.make_status_channel(self.schedule.purpose))
        self._hooks.listen(self.buckets, self.schedule.kept_bucket)

    def drop_buckets(self) -> None:
        """Hold no buckets: there will be others, for which their memory is needed (local)."""
        self._hooks.remove()
        self.schedule.drop_buckets()


def _drop_buckets(reducer: "weakref.ref[BackwardReducer]") -> None:
    alive = reducer()
    if alive is not None:
        alive.drop_buckets()


def _has_group(world: World) -> bool:
    return world.has_group
