"""What schedules buckets: which one may be sent, in what order, and what is sent with the last message.

Buckets are sent in the order of the plan, whatever the order in which gradients arrive: ranks must send in one order.

    gradients arrive        `send_full`    buckets, up to the first that is not full
    the backward ends       `complete`     the rest; what the owner sends besides; the status of this rank
                                           then wait for all, and read the status of all ranks

[Note: a whole backward] The status is sent at the end of a backward, and shows whether the backward was completed. A
rank whose backward ended in an exception sends the messages that the others wait for before its next forward, with
zeros and a status that shows the failure. Where a gradient does not fit its bucket, or a user's hook fails, a rank
sends zeros and that status at once. So all ranks raise an error for that backward, and may continue with the next one.

[Note: a rank that is cut off] Where the status has a message of its own over the hosts, a rank whose device has failed
can still send it, with a flag that its gradients are missing. Then all ranks abort the group and raise an error.

[Note: unused buckets] With `skips_unused`, buckets of which no rank has a gradient are not sent. Which ones, all ranks
must decide alike, also one whose backward has failed. So a rank sends the buckets that were used in the last backward;
then the used-parameter counts, with the status; then the buckets that were not used before and are now.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar, final

import torch
from torch.distributed import ProcessGroup

from lockstep.comm import World, calls_for, capabilities_of
from lockstep.errors import GroupError
from lockstep.recording import NO_EVENT, EventKind, own_recorder
from lockstep.reduce.buckets import Bucket, BucketSet, no_buckets, read_used_counts
from lockstep.reduce.reduction import BucketReduction, Finish, do_nothing, start_all_reduce
from lockstep.reduce.status import GroupStatus, RankStatus, StatusChannel, StatusTrailer, read_status, write_status
from lockstep.torch_private.groups import abort_device_backends

Result = TypeVar("Result")
_NUM_NAMES: Final = 3
"""So many parameters of a bucket are named in the recording."""


@final
class BucketSchedule:
    """Sends the buckets of one backward after the other.

    `reduction` may be replaced between two backwards. `failure` is this rank's error in this backward, for which it
    sent zeros. `send_besides` starts what is sent just before the last message, and returns what waits for that and
    stores it. `used_counts`, after `complete`: how many ranks had each gradient, of each bucket in which one was absent
    here.
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
        self.failure: Exception | None = None
        self.on_end_of_backward: Callable[[], None] = do_nothing
        self.send_besides: Callable[[], Finish] = lambda: do_nothing
        self.observer: BackwardObserver | None = None
        self._world = world
        self._group: ProcessGroup = world.group
        self._group_uses_this_thread = capabilities_of(world.group).runs_in_callers_thread
        self.purpose = purpose
        self._skips_unused = skips_unused
        self._bucket_set = no_buckets()
        self._status: StatusChannel = StatusTrailer(self._bucket_set.trailer)
        self._lock = threading.RLock()
        self._next = 0
        self._finishes: dict[int, Finish] = {}
        self._events: dict[int, int] = {}
        self._recorder = own_recorder()
        self._texts: dict[int, int] = {}
        self._used: set[int] = set()
        self._prepared: set[int] = set()
        self._sends_nothing = False
        self._is_cut_off = False
        self.used_counts: list[Sequence[float]] = []
        self._finish_besides: Finish = do_nothing
        self._awaited: list[torch.futures.Future[object]] = []

    @property
    def kept_bucket(self) -> Bucket | None:
        """The bucket that is never sent before the end of a backward: the status goes with it."""
        buckets = self._bucket_set.buckets
        return buckets[-1] if self._num_free < len(buckets) else None

    def use(self, bucket_set: BucketSet, status: StatusChannel) -> None:
        """Send these buckets from now on, and the status over this channel; called between two backwards."""
        self._bucket_set, self._status, self._texts = bucket_set, status, {}
        self._used = set()

    def drop_buckets(self) -> None:
        self._bucket_set = no_buckets()
        self._status = StatusTrailer(self._bucket_set.trailer)

    def begin(self) -> None:
        self.num_buckets_sent = 0
        self.times.begin_backward()

    def was_sent(self, bucket: Bucket) -> bool:
        return any(self._bucket_set.buckets[index] is bucket for index in self._finishes)

    def send_full(self) -> None:
        """Send buckets in plan order, up to the first that is not full.

        A message with the status waits for the end. [Note: a whole backward] Two threads of the autograd engine, one
        per device, may have filled a bucket at once.
        """
        buckets = self._bucket_set.buckets
        with self._lock:
            while self._next < self._num_free and (
                not self._is_sent_in_turn(self._next) or not buckets[self._next].num_pending
            ):
                self._send_next()

    def complete(self, status: RankStatus) -> GroupStatus:
        """Send what was not sent yet, wait for everything, and return the status of all ranks (collective)."""
        self.times.end_backward()
        self._sends_nothing = status.has_failed
        self._run_local(self.on_end_of_backward)
        for streams in self._bucket_set.streams:
            self._run_local(streams.join)
        while self._next < self._num_free:
            self._send_next()
        self._count_unsent()
        last = self._next
        if last < len(self._bucket_set.buckets):
            self._prepare(last)  # before the status, which shows whether that has failed
        self._finish_previous()
        if self.observer is not None:
            status = self._run_local(partial(self.observer.fill_in, status)) or status
        if self.failure is not None:
            status = replace(status, has_failed=True)
        if self._status.is_message:
            group_status = self._exchange_over_hosts(status)
            self._wait()
        else:
            group_status = self._send_with_last(status, last)
        self._send_late(group_status)
        while self._awaited:
            self._awaited.pop().wait()
        self.times.end()
        return group_status

    def wait_at_end(self, futures: "Sequence[torch.futures.Future[object]]") -> None:
        """Let the next backward wait for these at its end."""
        self._awaited += futures

    def reset(self) -> None:
        self.failure = None
        self._next = 0
        self._finishes.clear()
        self._prepared.clear()
        self.used_counts = []
        self._sends_nothing = self._is_cut_off = False
        self._finish_besides = do_nothing
        self.times.wait_no_more()
        for bucket in self._bucket_set.buckets:
            bucket.reset()

    # -- Buckets -------------------------------------------------------------------------------------------------------

    @property
    def _num_free(self) -> int:
        has_status = self._bucket_set.extra_message is None and not self._status.is_message
        return len(self._bucket_set.buckets) - has_status

    def _is_sent_in_turn(self, index: int) -> bool:
        """Whether a bucket is sent before it is known who uses it. [Note: unused buckets]."""
        return not self._skips_unused or index in self._used

    def _send_next(self) -> None:
        index, self._next = self._next, self._next + 1
        if self._is_sent_in_turn(index):
            self._prepare(index)
            self._send_prepared(index)

    def _count_unsent(self) -> None:
        """Count what buckets hold that may be sent late, and prepare those that are: the status says if that fails."""
        for index in set(range(self._next)) - self._finishes.keys():
            bucket = self._bucket_set.buckets[index]
            self._run_local(bucket.count_nothing if self._sends_nothing else bucket.count_used)
            if len(bucket.unused) < len(bucket.slots):
                self._prepare(index)
                self._prepared.add(index)

    def _prepare(self, index: int) -> None:
        """Make a message ready. [Note: a whole backward]: a gradient that does not fit must not stop the messages."""
        bucket = self._bucket_set.buckets[index]
        if not self._sends_nothing:
            try:
                bucket.prepare(self.reduction.scale)
                if self.observer is not None:
                    self.observer.look_at(bucket)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this message
                self.failure = self.failure or error
            else:
                return
        self._run_local(bucket.prepare_nothing)

    def _send_prepared(self, index: int, *, is_last_message: bool = False) -> None:
        bucket = self._bucket_set.buckets[index]
        self.num_buckets_sent += 1
        self._finish_previous()
        is_last = index == len(self._bucket_set.buckets) - 1
        start = partial(self.reduction.all_reduce, bucket, index=index, is_last=is_last)
        self._start(index, start, is_last_message=is_last_message)

    def _start(self, index: int, start: "Callable[..., Finish]", *, is_last_message: bool = False) -> None:
        waits = is_last_message and self._group_uses_this_thread
        self._events[index] = self._recorder.begin(EventKind.BUCKET, index, 0, self._text(index))
        self.times.begin_message(self._events[index])
        with calls_for(f"bucket {1 + index} of the gradients of {self.purpose}"):
            if waits:
                # The group's calls run one after the other; so it is known which one is waited for, and an error of one
                # is raised before this rank waits in the next, which the others may never reach.
                self._wait()
            finish = self._run_local(partial(start, waits=waits))
        self._finishes[index] = finish or do_nothing
        if waits:
            self._recorder.end(self._events[index])

    def _text(self, index: int) -> int:
        if index not in self._texts and self._recorder.is_open:
            slots = self._bucket_set.buckets[index].slots if index < len(self._bucket_set.buckets) else ()
            names = ", ".join(slot.name for slot in slots[:_NUM_NAMES])
            more = f" and {len(slots) - _NUM_NAMES} more" if len(slots) > _NUM_NAMES else ""
            self._texts[index] = self._recorder.text(names + more)
        return self._texts.get(index, 0)

    def _finish_previous(self) -> None:
        """Wait for the reduction that was started last, if only one may be under way."""
        if self.reduction.is_one_at_a_time and self._finishes:
            index = next(reversed(self._finishes))
            finish, self._finishes[index] = self._finishes[index], do_nothing
            self._run_local(finish)
            self._recorder.end(self._events[index])

    def _run_local(self, function: Callable[[], Result]) -> Result | None:
        """Run what may fail on this rank alone, and go on where the other ranks can be informed of it."""
        if self._is_cut_off:
            return None
        try:
            return function()
        except GroupError:
            raise
        except Exception as error:
            if not self.reduction.runs_users_code:
                if not self._status.is_message:
                    raise
                self._is_cut_off = True
            self.failure = self.failure or error
        return None

    # -- Status --------------------------------------------------------------------------------------------------------

    def _send_with_last(self, status: RankStatus, last: int) -> GroupStatus:
        """Send the status with the last message, and return that of all ranks (collective)."""
        self._status.post(write_status(status, self._world.rank, self._world.world_size), ())
        self._finish_besides = self.send_besides()
        extra = self._bucket_set.extra_message
        if extra is None:
            self._send_prepared(last, is_last_message=True)
        else:
            self._start(last, partial(start_all_reduce, extra, self._group), is_last_message=True)
        self._wait()
        numbers, _ = self._status.receive()
        buckets = self._bucket_set.buckets
        self.used_counts = read_used_counts(buckets, (index for index, bucket in enumerate(buckets) if bucket.absent))
        return read_status(tuple(numbers))

    def _exchange_over_hosts(self, status: RankStatus) -> GroupStatus:
        """Send the status in a message of its own, and return that of all ranks (collective)."""
        rank, world_size = self._world.rank, self._world.world_size
        self._finish_besides = self._run_local(self.send_besides) or do_nothing
        # At this place on every rank, however many buckets it sent earlier: some groups have one order for all calls.
        cut_off = [float(self._is_cut_off and other == rank) for other in range(world_size)]
        buckets = self._bucket_set.buckets
        used = [float(index not in bucket.unused) for bucket in buckets for index in range(len(bucket.slots))]
        status = replace(status, has_failed=status.has_failed or self.failure is not None)
        self._status.post(write_status(status, rank, world_size), [*cut_off, *used])
        numbers, further = self._status.receive()
        lost = [other for other in range(world_size) if further[other] > 0]
        if lost:
            self._raise_cut_off(lost)
        counts = further[world_size:]
        self.used_counts = []
        for bucket in buckets:
            self.used_counts.append(counts[: len(bucket.slots)])
            counts = counts[len(bucket.slots) :]
        return read_status(tuple(numbers))

    def _raise_cut_off(self, ranks: Sequence[int]) -> None:
        """Raise the error of a group that cannot be used any more. [Note: a rank that is cut off]."""
        self._finishes.clear()
        abort_device_backends(self._group)
        raise GroupError(
            f"Rank {', '.join(map(str, ranks))} could not send its gradients to the other ranks, and its log shows "
            "why: its device has failed, or is out of memory. The process group was aborted on every rank and cannot "
            "be used any more. Start the program again, from a checkpoint. (LS214)"
        ) from self.failure

    def _send_late(self, status: GroupStatus) -> None:
        """Send the buckets that were not expected to be used, and are (collective). [Note: unused buckets]."""
        if not self._skips_unused:
            return
        buckets = self._bucket_set.buckets
        counts = self.used_counts if self._status.is_message else read_used_counts(buckets, range(len(buckets)))
        now = {index for index, numbers in enumerate(counts) if any(numbers)}
        for index in sorted(now - self._used):
            total = buckets[index].used_counts.clone()
            if index not in self._prepared:
                self._prepare(index)
            self._send_prepared(index)
            buckets[index].used_counts.copy_(total)
        self._wait()
        if not status.failed:
            self._used = now

    def _wait(self) -> None:
        for index, finish in self._finishes.items():
            self._finishes[index] = do_nothing
            if self.reduction.is_one_at_a_time:
                self._run_local(finish)
            else:
                finish()
            if finish is not do_nothing:
                self._recorder.end(self._events[index])
        finish_besides, self._finish_besides = self._finish_besides, do_nothing
        finish_besides()


class StepMoments(NamedTuple):
    """When the parts of the last step began or ended, in nanoseconds; 0 for what it did not reach."""

    forward_start: int
    backward_start: int
    messages_start: int
    backward_end: int
    messages_end: int


@final
class StepTimes:
    """On a GPU these are the times at which work was launched. [Note: one clock] in `lockstep.recording.writing`."""

    __slots__ = ("_backward", "_forward", "_message", "_num_forwards", "_recorder", "_reducing", "_waiting")

    def __init__(self) -> None:
        self._recorder = own_recorder()
        self._forward = self._backward = self._message = self._reducing = self._waiting = NO_EVENT
        self._num_forwards = 0

    def begin_forward(self) -> None:
        self._num_forwards += 1
        self._recorder.set_step(self._num_forwards)
        self._forward = self._recorder.mark(EventKind.FORWARD, 0, 0, 0)

    def begin_backward(self) -> None:
        self._backward = self._recorder.begin(EventKind.BACKWARD, 0, 0, 0)
        self._message = self._reducing = NO_EVENT

    def begin_message(self, event: int) -> None:
        """Note that a bucket is sent, of which this is the event; the first one counts."""
        if self._message == NO_EVENT:
            self._message = event

    def end_backward(self) -> None:
        self._reducing = self._waiting = self._recorder.begin(EventKind.REDUCING, 0, 0, 0)

    def end(self) -> None:
        self._recorder.end(self._reducing)
        self._recorder.end(self._backward)

    def wait_no_more(self) -> None:
        """Note that this rank does not wait for gradients any more, whether or not it has them."""
        self._waiting = NO_EVENT

    @property
    def seconds_waiting(self) -> float:
        """For how many seconds this rank has waited for the gradients of others; 0 if it does not. For any thread."""
        begin, end = self._recorder.moments(self._waiting)
        return self._recorder.seconds() - begin / 1e9 if begin and not end else 0.0

    def moments(self) -> StepMoments:
        read = self._recorder.moments
        return StepMoments(
            read(self._forward)[0], read(self._backward)[0], read(self._message)[0], *read(self._reducing)
        )


class BackwardObserver(Protocol):
    """Looks at the backwards of one rank, and has a part in its status. The thread that runs the backward calls all."""

    def begin(self) -> None:
        """Look at what `.grad` of the parameters hold: a backward begins (local)."""

    def forget_begin(self) -> None:
        """Forget the last `begin`: that backward has accumulated nothing (local)."""

    def end_local(self) -> None:
        """Look at what a backward has accumulated that is not reduced (local)."""

    def look_at(self, bucket: Bucket) -> None:
        """Look at the gradients of this rank, which are about to be reduced (local)."""

    def fill_in(self, status: RankStatus) -> RankStatus:
        """Return the status of this rank with what there is to compare (local)."""

    def compare(self, status: GroupStatus) -> None:
        """Look at the status of all ranks, and raise on all alike (collective where they differ, which all see)."""
