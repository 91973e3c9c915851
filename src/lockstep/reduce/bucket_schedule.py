"""What schedules buckets: which one may be sent, in what order, and what travels with the last message.

Buckets are sent in the order of the plan, whatever the order in which gradients arrive: ranks must send in one order.

    gradients arrive        `send_full`    buckets, up to the first that is not full
    the backward ends       `complete`     the rest; the status of this rank; what the owner sends besides
                                           then wait for all, and read the status of all ranks

[Note: a whole backward] The last message is sent at the end of a backward, and its status says whether the backward was
completed. A rank whose backward ended in an exception sends the messages that the others wait for before its next
forward, with a status that says so. Where a gradient does not fit its bucket, a rank sends zeros and that status at
once. So all ranks raise an error for that backward, and may continue with the next one.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch.distributed import ProcessGroup

from lockstep.comm import World, calls_for, capabilities_of
from lockstep.reduce.bucket_reduction import BucketReduction, Finish, start_all_reduce
from lockstep.reduce.bucket_set import Bucket, BucketSet, no_buckets
from lockstep.reduce.status import GroupStatus, RankStatus, read_status, write_status
from lockstep.reduce.status_message import StatusChannel, StatusTrailer
from lockstep.reduce.times import StepTimes
from lockstep.reduce.waits import Waits


@final
class BucketSchedule:
    """Sends the buckets of one backward after the other.

    Args:
        world: The ranks; there is a group.
        reduction: How a bucket is reduced.
        purpose: What the messages are for, in words that the owner chooses: ranks compare them, and errors show them.
        skips_unused: Whether buckets of which nothing arrived are not sent.

    Attributes:
        reduction: How a bucket is reduced; may be replaced between two backwards.
        num_buckets_sent: How many buckets of the last backward were sent.
        times: When the parts of the last step began and ended.
        waits: What this rank waits for.
        failure: The error that this rank had when it made a message of this backward ready. It sent zeros instead, and
            the status says that its backward failed.
        on_end_of_backward: Called when the last gradient has arrived.
        send_besides: Starts what is to travel beside the gradients, just before the last message, and returns what
            waits for it and takes it.
    """

    def __init__(
        self,
        world: World,
        reduction: BucketReduction,
        *,
        purpose: str,
        skips_unused: bool = False,
    ) -> None:
        assert world.group is not None
        self.reduction = reduction
        self.num_buckets_sent = 0
        self.times = StepTimes()
        self.waits = Waits()
        self.failure: Exception | None = None
        self.on_end_of_backward: Callable[[], None] = _do_nothing
        self.send_besides: Callable[[], Finish] = _send_nothing
        self._world = world
        self._group: ProcessGroup = world.group
        self._group_uses_this_thread = capabilities_of(world.group).runs_in_callers_thread
        self._purpose = purpose
        self._skips_unused = skips_unused
        self._bucket_set = no_buckets()
        self._status: StatusChannel = StatusTrailer(self._bucket_set.trailer)
        self._lock = threading.RLock()
        self._finishes: list[Finish] = []
        self._finish_besides: Finish = _do_nothing
        self._awaited: list[torch.futures.Future[object]] = []

    @property
    def purpose(self) -> str:
        """What the messages are for."""
        return self._purpose

    def use(self, bucket_set: BucketSet, status: StatusChannel) -> None:
        """Send these buckets from now on, and the status over this channel; called between two backwards."""
        self._bucket_set, self._status = bucket_set, status

    def drop_buckets(self) -> None:
        """Hold no buckets, until there are others."""
        self._bucket_set = no_buckets()
        self._status = StatusTrailer(self._bucket_set.trailer)

    def begin(self) -> None:
        """Begin with the next backward."""
        self.num_buckets_sent = 0
        self.times.begin_backward()

    def was_sent(self, bucket: Bucket) -> bool:
        """Whether a bucket of this backward was sent."""
        return any(sent is bucket for sent in self._bucket_set.buckets[: len(self._finishes)])

    def send_full(self) -> None:
        """Send buckets in plan order, up to the first that is not full.

        The message with the status waits for the end. [Note: a whole backward] Two threads of the autograd engine, one
        per device, may have filled a bucket at once.
        """
        buckets = self._bucket_set.buckets
        num_free = len(buckets) - (self._bucket_set.extra_message is None)
        with self._lock:
            while len(self._finishes) < num_free and buckets[len(self._finishes)].num_pending == 0:
                self._send(len(self._finishes))

    def complete(self, status: RankStatus) -> GroupStatus:
        """Send what was not sent yet, wait for everything, and return the status of all ranks (collective)."""
        self.times.end_backward()
        self.on_end_of_backward()
        self.waits.begin(0)
        num_buckets, extra_message = len(self._bucket_set.buckets), self._bucket_set.extra_message
        while len(self._finishes) < num_buckets - (extra_message is None):
            self._send(len(self._finishes))
        if extra_message is None:
            self._prepare(num_buckets - 1)  # before the status, which says whether that has failed
        status = replace(status, has_failed=status.has_failed or self.failure is not None)
        # At this place on every rank, however many buckets it sent earlier: some groups have one order for all calls.
        self._status.post(write_status(status, self._world.rank, self._world.world_size))
        if extra_message is None:
            self._send_prepared(num_buckets - 1, is_last_message=True)
        else:
            self._finish_previous()
            self._start(partial(start_all_reduce, extra_message, self._group), is_last_message=True)
        self._wait()
        self._wait_besides()
        while self._awaited:
            self._awaited.pop().wait()
        group_status = read_status(self._status.receive())
        self.times.end()
        return group_status

    def describe_wait(self) -> str:
        """Return in words what this rank waits for; empty if it does not."""
        return self.waits.describe(self._bucket_set.buckets)

    def wait_at_end(self, futures: "Sequence[torch.futures.Future[object]]") -> None:
        """Let the next backward wait for these at its end."""
        self._awaited += futures

    def reset(self) -> None:
        """Forget a backward."""
        self.failure = None
        self._finishes.clear()
        self._finish_besides = _do_nothing
        self.waits.end()
        for bucket in self._bucket_set.buckets:
            bucket.reset()

    def _send(self, index: int) -> None:
        bucket = self._bucket_set.buckets[index]
        if self._skips_unused and not any(slot.has_arrived or slot.is_unsynced for slot in bucket.slots):
            bucket.used_counts.zero_()
            self._finishes.append(_do_nothing)
            return
        self._prepare(index)
        self._send_prepared(index)

    def _prepare(self, index: int) -> None:
        """Make a message ready. [Note: a whole backward]: a gradient that does not fit must not stop the messages."""
        self.times.begin_messages()
        bucket = self._bucket_set.buckets[index]
        try:
            bucket.prepare(self.reduction.scale)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this message
            bucket.prepare_nothing()
            self.failure = self.failure or error

    def _send_prepared(self, index: int, *, is_last_message: bool = False) -> None:
        bucket = self._bucket_set.buckets[index]
        self.num_buckets_sent += 1
        self._finish_previous()
        is_last = index == len(self._bucket_set.buckets) - 1
        start = partial(self.reduction.all_reduce, bucket, index=index, is_last=is_last)
        self._start(start, is_last_message=is_last_message)

    def _start(self, start: "Callable[..., Finish]", *, is_last_message: bool) -> None:
        if is_last_message:
            self._finish_besides = self.send_besides()
        waits = is_last_message and self._group_uses_this_thread
        with calls_for(f"bucket {1 + len(self._finishes)} of the gradients of {self._purpose}"):
            if waits:
                # The group's calls run one after the other; so it is known which one is waited for, and an error of one
                # is raised before this rank waits in the next, to which the others may never come.
                self._wait()
                self._wait_besides()
                self.waits.turn_to(len(self._finishes))
            self._finishes.append(start(waits=waits))

    def _finish_previous(self) -> None:
        """Wait for the reduction that was started last, if only one may be under way."""
        if self.reduction.is_one_at_a_time and self._finishes:
            self._finishes[-1]()

    def _wait(self) -> None:
        for index, finish in enumerate(self._finishes):
            self.waits.turn_to(index)
            finish()

    def _wait_besides(self) -> None:
        finish, self._finish_besides = self._finish_besides, _do_nothing
        finish()


def _do_nothing() -> None:
    """Do nothing: no message was sent."""


def _send_nothing() -> Finish:
    """Send nothing beside the gradients."""
    return _do_nothing
