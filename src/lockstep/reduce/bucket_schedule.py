"""The messages of a reduction: buckets in plan order, then the notes; and who is waited for meanwhile.

[Note: one hook at a time] A communication hook such as PowerSGD's makes further calls when its first is done. With the
hooks of two buckets at work, it would depend on the moment which rank makes which call first.

[Note: notes on a GPU] To read a note is to wait for the device. So there a rank reads in one step what was said in the
last one, except when its own model has changed, which is rare and cannot wait.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import OrderedReductions, World, calls_for, runs_in_callers_thread
from lockstep.reduce.bucket import read_numbers
from lockstep.reduce.bucket_set import Bucket, Layout
from lockstep.reduce.comm_hook import CommHook, GradBucket, result_of
from lockstep.reduce.partials import Partials
from lockstep.reduce.status import Note, Notes, read_notes, write_note
from lockstep.reduce.times import StepTimes
from lockstep.shards import Node

_NUM_NAMES = 3
"""So many parameters of a bucket are named."""


@final
class Exchange:
    """Sends the buckets of one backward after the other.

    Args:
        world: The workers.
        layout: The buckets.
        skips_unused: Whether buckets of which nothing arrived are not sent.
        num_shards: Add in the order of the tree over so many shards; None for the group's order.

    Attributes:
        layout: The buckets; may be replaced between two backwards.
        hook: What reduces a bucket in place of an all-reduce.
        scale: By what gradients are multiplied before they are added, unless a hook does it.
        num_buckets_sent: How many buckets of the last backward were sent.
        times: When the parts of the last step began and ended.
        on_end_of_backward: Called when the last gradient has arrived.
        send_besides: Starts what is to travel beside the gradients, just before the last message, and returns what
            waits for it and takes it.
        partials: What this rank's shards have given before the backward whose gradients are sent.
        nodes: The subtrees whose sums each rank will have then, in rank order: its partials that are kept, then the sum
            in the bucket.
    """

    def __init__(self, world: World, layout: Layout, *, skips_unused: bool, num_shards: int | None = None) -> None:
        assert world.group is not None
        self.layout = layout
        self.hook: CommHook | None = None
        self.scale = 1.0
        self.num_buckets_sent = 0
        self.times = StepTimes()
        self.on_end_of_backward: Callable[[], None] = _do_nothing
        self.send_besides: Callable[[], Callable[[], None]] = _send_nothing
        self.partials = Partials()
        self.nodes: Sequence[Sequence[Node]] = [[(rank, rank + 1)] for rank in range(world.world_size)]
        self._ordered = None if num_shards is None else OrderedReductions(world, num_shards)
        self._world = world
        self._group: ProcessGroup = world.group
        self._group_uses_this_thread = runs_in_callers_thread(world.group)
        self._skips_unused = skips_unused
        self._sending = threading.RLock()
        self._finishes: list[Callable[[], object]] = []
        self._take_besides: Callable[[], None] = _do_nothing
        self._awaited: list[torch.futures.Future[object]] = []
        self._unread: tuple[Tensor, torch.Event] | None = None
        self._waiting_since = math.inf
        self._waiting_for: int | str = 0

    def begin(self) -> None:
        """Begin with the next backward."""
        self.num_buckets_sent = 0
        self.times.begin_backward()

    def has_left(self, bucket: Bucket) -> bool:
        """Whether a bucket of this backward was sent."""
        return any(sent is bucket for sent in self.layout.buckets[: len(self._finishes)])

    def send_full(self) -> None:
        """Send buckets in plan order, up to the first that is not full: ranks must send in one order.

        The message with the notes waits for the end. [Note: a whole backward] Two threads of the autograd engine, one
        per device, may have filled a bucket at once.
        """
        buckets = self.layout.buckets
        num_free = len(buckets) - (self.layout.last_message is None)
        with self._sending:
            while len(self._finishes) < num_free and buckets[len(self._finishes)].num_pending == 0:
                self._send(len(self._finishes))

    def complete(self, note: Note) -> Notes | None:
        """Send what has not left, wait for everything, and return what the ranks said, if it is read by now."""
        self.times.end_backward()
        self.on_end_of_backward()
        self._waiting_since, self._waiting_for = time.monotonic(), 0
        numbers = write_note(note, self._world.rank, self._world.world_size)
        buckets, last_message = self.layout.buckets, self.layout.last_message
        while len(self._finishes) < len(buckets):
            is_last = len(self._finishes) == len(buckets) - 1
            self._send(len(self._finishes), numbers if is_last and last_message is None else ())
        if last_message is not None and len(self._finishes) == len(buckets):
            self._finish_hook()
            _write(numbers, self.layout.notes)
            self._all_reduce(last_message, [], is_last=True)
        self._wait()
        self._wait_besides()
        while self._awaited:
            self._awaited.pop().wait()
        self.times.end()
        return self._read_notes(now=note.has_changed)

    def expect_nothing(self) -> None:
        """Let this rank's part of what is still to be sent be empty."""
        self.partials = Partials()
        self.partials.kept = [{} for _ in self.nodes[self._world.rank][1:]]

    def wait_at_end(self, futures: "Sequence[torch.futures.Future[object]]") -> None:
        """Let the next backward wait for these at its end."""
        self._awaited += futures

    def reset(self) -> None:
        """Forget a backward."""
        self._finishes.clear()
        self._take_besides = _do_nothing
        self._waiting_since = math.inf
        for bucket in self.layout.buckets:
            bucket.reset()

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Let a wait within, which is not the exchange's own, count as one."""
        self._waiting_for, self._waiting_since = what, time.monotonic()
        try:
            yield
        finally:
            self._waiting_for, self._waiting_since = 0, math.inf

    def waited(self) -> float:
        """Return for how many seconds this rank has waited by now; below zero if it does not."""
        return time.monotonic() - self._waiting_since

    def describe_wait(self) -> str:
        """Return in words what this rank waits for; empty if it does not."""
        if not math.isfinite(self._waiting_since):
            return ""
        if isinstance(self._waiting_for, str):
            return f"waits for {self._waiting_for}"
        buckets = self.layout.buckets
        if self._waiting_for >= len(buckets):
            return "waits for the last message of a backward"
        names = [slot.name for slot in buckets[self._waiting_for].slots]
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        shown = ", ".join(names[:_NUM_NAMES]) + more
        return f"waits for bucket {self._waiting_for + 1} of {len(buckets)} ({shown})"

    def _send(self, index: int, note: Sequence[float] = ()) -> None:
        bucket = self.layout.buckets[index]
        if self._skips_unused and not any(slot.has_arrived or slot.is_unsynced for slot in bucket.slots):
            bucket.presence.zero_()
            self._finishes.append(_do_nothing)
            return
        self.times.begin_messages()
        self.num_buckets_sent += 1
        bucket.prepare(self.scale if self.hook is None else 1.0)
        if note:
            _write(note, self.layout.notes)
        if self.hook is None:
            kept = bucket.add(self.partials) if self._ordered is not None else []
            self._all_reduce(bucket.message, kept, is_last=bool(note))
            return
        self._finish_hook()
        is_last = index == len(self.layout.buckets) - 1
        future = self.hook.start(GradBucket(bucket, index, is_last=is_last))
        self._finishes.append(lambda: bucket.take(result_of(future)))

    def _all_reduce(self, message: Tensor, kept: Sequence[Tensor], *, is_last: bool) -> None:
        if is_last:
            self._take_besides = self.send_besides()
        number = 1 + len(self._finishes)
        with calls_for(f"bucket {number} of the gradients of a wrapped model's backward"):
            self._start_all_reduce(message, kept, waits=is_last and self._group_uses_this_thread)

    def _start_all_reduce(self, message: Tensor, kept: Sequence[Tensor], *, waits: bool) -> None:
        if waits:
            # The group's calls run one after the other; so it is known which one is waited for, and an error of one is
            # heard before this rank waits in the next, to which the others may never come.
            self._wait()
            self._wait_besides()
            self._waiting_for = len(self._finishes)
        if self._ordered is not None:
            mine = self.nodes[self._world.rank]
            partials = dict(zip(mine, [*kept, message], strict=True))
            self._finishes.append(self._ordered.start(partials, message, self.nodes, waits=waits))
            return
        work = dist.all_reduce(message, group=self._group, async_op=not waits)
        self._finishes.append(_do_nothing if work is None else work.wait)

    def _wait(self) -> None:
        for number, finish in enumerate(self._finishes):
            self._waiting_for = number
            finish()

    def _wait_besides(self) -> None:
        take, self._take_besides = self._take_besides, _do_nothing
        take()

    def _finish_hook(self) -> None:
        """Wait for the hook that was started last. [Note: one hook at a time]."""
        if self.hook is not None and self._finishes:
            self._finishes[-1]()

    def _read_notes(self, *, now: bool) -> Notes | None:
        """Return what the ranks said. [Note: notes on a GPU]."""
        notes = self.layout.notes
        if now or notes.device.type == "cpu":
            self._unread = None
            return read_notes(read_numbers(notes))
        before = self._unread
        self._unread = notes.to("cpu", non_blocking=True), torch.Event(notes.device.type)
        self._unread[1].record()
        if before is None:
            return None
        numbers, event = before
        event.synchronize()
        return read_notes(read_numbers(numbers))


def _do_nothing() -> None:
    """Stand for a message that was not sent."""


def _send_nothing() -> Callable[[], None]:
    """Stand for an owner that has nothing to send besides."""
    return _do_nothing


def _write(numbers: Sequence[float], place: Tensor) -> None:
    place.copy_(torch.tensor(numbers, dtype=torch.float32))
