"""Messages from one rank to another, through one channel per ordered pair.

    sender                                                  receiver
    1 head page: tag, length, description
    2 chunk into slot 0, add to `full`      ->              3 take from `full`, read the head
                                                            4 find the receive of the tag, or store the message
                                                            5 reply page: as expected, or not
    7 take from `free` for every chunk      <-              6 copy the chunk out, add to `free`
    8 read the reply: not as expected is an error here too

A chunk is at most one slot, and two slots are under way at once. A send ends when all of it was received: then both
sides know whether their descriptions match. Each peer and direction has a channel and a work
queue, made when first used.
"""

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.calls import LONGEST_CALL
from lockstep.comm.shm.file_layout import PAGE
from lockstep.comm.shm.memory import Memory, read_text, write_text
from lockstep.comm.shm.peers import Counter, Peers
from lockstep.comm.shm.work import QueuedWork, WorkQueue
from lockstep.errors import CollectiveMismatchError, GroupError

_HEAD = struct.Struct("<qqi")
_NUM_SLOTS = 2
Item = TypeVar("Item")


class _ChannelEnd:
    """The channel from one rank to another, as each of them sees it."""

    def __init__(self, memory: Memory, peers: Peers, source: int, target: int) -> None:
        self._mapping = memory.map_channel(source, target)
        self._address = ctypes.addressof(self._mapping)
        self._slot_bytes = memory.layout.slot_bytes
        self._peers = peers
        self._names = peers.global_ranks[source], peers.global_ranks[target]
        self._full = Counter(peers, peers.layout.full(source, target))
        self._free = Counter(peers, peers.layout.free(source, target))

    def _slot(self, number: int) -> int:
        """Return where a chunk lies."""
        return self._address + 2 * PAGE + number % _NUM_SLOTS * self._slot_bytes

    def _explain(self, sent: bytes, expected: bytes) -> CollectiveMismatchError:
        source, target = self._names
        return CollectiveMismatchError(
            f"Rank {source} sends {sent.decode()} but rank {target} receives {expected.decode()}. Both must name the "
            "same dtype and number of elements; what was sent is dropped. (LS201)"
        )


@final
class Sender(_ChannelEnd):
    """This rank's end of the channel to `target`."""

    def __init__(self, memory: Memory, peers: Peers, target: int) -> None:
        super().__init__(memory, peers, peers.rank, target)
        self._target = target
        self._any_message = Counter(peers, peers.layout.messages(target))

    def send(self, data: Tensor, tag: int, kind: bytes, call: bytes) -> None:
        """Send a flat tensor, and return when it was received; the receiver must expect this `kind`."""
        head = _HEAD.pack(tag, data.nbytes, len(kind)) + kind
        ctypes.memmove(self._address, head, len(head))
        num_chunks = max(-(-data.nbytes // self._slot_bytes), 1)
        for number in range(num_chunks):
            if number >= _NUM_SLOTS:
                self._peers.wait(self._target, self._free, call)
            start = number * self._slot_bytes
            ctypes.memmove(self._slot(number), data.data_ptr() + start, min(data.nbytes - start, self._slot_bytes))
            self._full.add()
            if number == 0:
                self._any_message.add()
        for _ in range(min(num_chunks, _NUM_SLOTS)):
            self._peers.wait(self._target, self._free, call)
        expected = read_text(self._address + PAGE, LONGEST_CALL)
        if expected:
            raise self._explain(kind, expected)


@final
class Receiver(_ChannelEnd):
    """This rank's end of the channel from `source`."""

    def __init__(self, memory: Memory, peers: Peers, source: int) -> None:
        super().__init__(memory, peers, source, peers.rank)
        self._source = source
        self._lock = threading.Lock()
        self._expected: dict[int, deque[PendingReceive]] = {}
        self._unexpected: dict[int, deque[tuple[bytes, Tensor]]] = {}

    def expect(self, pending: "PendingReceive") -> None:
        """Register `pending` for the next message of its tag; a stored message is delivered at once."""
        with self._lock:
            message = _next(self._unexpected, pending.tag)
            if message is None:
                self._expected.setdefault(pending.tag, deque()).append(pending)
        if message is not None:
            self._deliver(pending, *message)

    def take_until(self, pending: "PendingReceive") -> None:
        """Take messages and deliver each to its receive, until `pending` is complete."""
        while not pending.is_complete:
            self._peers.wait(self._source, self._full, pending.call)
            self._take(pending.call)

    def offer(self, pending: "PendingReceive", may_take: bool) -> bool:
        """Deliver a message that has arrived and that no other receive expects; return whether there was one.

        Unless it `may_take` messages from the channel, only those that are stored count.
        """
        while True:
            with self._lock:
                message = _next(self._unexpected, pending.tag)
            if message is not None:
                self._deliver(pending, *message)
                return True
            if not (may_take and self._full.try_take()):
                return False
            self._take(pending.call, pending)
            if pending.is_complete:
                return True

    def _deliver(self, pending: "PendingReceive", sent: bytes, data: Tensor) -> None:
        """Give a receive a message of its tag; `data` is its place itself if the bytes are there already."""
        error = None if sent == pending.kind else self._explain(sent, pending.kind)
        if error is None and data is not pending.place:
            ctypes.memmove(pending.place.data_ptr(), data.data_ptr(), data.nbytes)
        pending.is_complete = True
        pending.complete(source=self._source, error=error)

    def _take(self, call: bytes, otherwise: "PendingReceive | None" = None) -> None:
        """Take the message whose first chunk has arrived; `otherwise` gets it if no receive of its tag expects it."""
        tag, length, kind_length = _HEAD.unpack(ctypes.string_at(self._address, _HEAD.size))
        sent = ctypes.string_at(self._address + _HEAD.size, min(max(kind_length, 0), LONGEST_CALL))
        with self._lock:
            pending = _next(self._expected, tag)
        if pending is None and otherwise is not None and otherwise.tag == tag:
            pending = otherwise
        fits = pending is not None and pending.kind == sent
        if length < 0 or (pending is not None and fits and length != pending.place.nbytes):
            raise RuntimeError(
                f"rank {self._names[0]} sends {length} bytes as {sent.decode(errors='replace')}, which does not fit: "
                "some program has overwritten the group's memory. (LS213)"
            )
        target = pending.place if pending is not None and fits else torch.empty(length, dtype=torch.uint8, device="cpu")
        reply = pending.kind if pending is not None and not fits else b""
        write_text(self._address + PAGE, reply, LONGEST_CALL)
        for number, start in enumerate(range(0, max(length, 1), self._slot_bytes)):
            if number > 0:
                self._peers.wait(self._source, self._full, call)
            ctypes.memmove(target.data_ptr() + start, self._slot(number), min(length - start, self._slot_bytes))
            self._free.add()
        if pending is None:
            with self._lock:
                pending = _next(self._expected, tag)  # a receive registered while the message was copied
                if pending is None:
                    self._unexpected.setdefault(tag, deque()).append((sent, target))
                    return
        self._deliver(pending, sent, target)


def _next(waiting: Mapping[int, deque[Item]], tag: int) -> Item | None:
    queue = waiting.get(tag)
    return queue.popleft() if queue else None


@final
@dataclass(slots=True, kw_only=True)
class PendingReceive:
    """A receive that waits for its message, a flat tensor; `complete` is called once, with the source or an error."""

    place: Tensor
    tag: int
    kind: bytes
    call: bytes
    complete: Callable[..., None]
    is_complete: bool = False


@final
class PointToPoint:
    def __init__(self, memory: Memory, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._lock = threading.Lock()
        self._senders: dict[int, tuple[WorkQueue, Sender]] = {}
        self._receivers: dict[int, tuple[WorkQueue, Receiver]] = {}
        self._from_any = WorkQueue("lockstep-receive")
        self._any_message = Counter(peers, peers.layout.messages(peers.rank))

    def send(self, data: Tensor, target: int, tag: int, kind: bytes, tensors: Sequence[Tensor]) -> Work:
        with self._lock:
            if target not in self._senders:
                self._senders[target] = (WorkQueue("lockstep-send"), Sender(self._memory, self._peers, target))
            work_queue, sender = self._senders[target]
        call = f"send({kind.decode()}, to rank {self._peers.global_ranks[target]}, tag {tag})".encode()
        return work_queue.put(self._guard(lambda: sender.send(data, tag, kind, call), call), tensors)

    def receive(
        self,
        place: Tensor,
        sources: Sequence[int],
        tag: int,
        kind: bytes,
        tensors: Sequence[Tensor],
        finish: Callable[[], None],
    ) -> Work:
        """Receive a flat tensor from one rank, or from any of several; `finish` is called when they are in `place`."""
        is_from_one = len(sources) == 1
        who = f"rank {self._peers.global_ranks[sources[0]]}" if is_from_one else "any rank"
        call = f"recv({kind.decode()}, from {who}, tag {tag})".encode()
        for source in sources:
            self._open(source)
        work_queue = self._receivers[sources[0]][0] if is_from_one else self._from_any
        work = QueuedWork(self._guard(lambda: self._receive(pending, sources), call), tensors, work_queue)

        def complete(source: int, error: BaseException | None) -> None:
            try:
                if error is None:
                    finish()
            except Exception as problem:  # noqa: BLE001 - it is raised where this receive is waited for
                # The thread of another receive may run this, and must not raise it.
                error = problem
            work.complete(source=source, error=error)

        pending = PendingReceive(place=place, tag=tag, kind=kind, call=call, complete=complete)
        if is_from_one:
            self._receivers[sources[0]][1].expect(pending)
        if not pending.is_complete:
            work_queue.submit(work, soon=True)
        return work

    def close(self, timeout_seconds: float) -> None:
        for work_queue, _ in (*self._senders.values(), *self._receivers.values()):
            work_queue.close(timeout_seconds)
        self._from_any.close(timeout_seconds)
        self._senders.clear()
        self._receivers.clear()

    def _guard(self, action: Callable[[], int | None], call: bytes) -> Callable[[], int | None]:
        def guarded() -> int | None:
            if self._peers.broken is not None:
                raise self._peers.broken.with_traceback(None)  # before it waits for who is gone
            try:
                return action()
            except GroupError:
                raise  # published where it was found, or the channel is as good as before
            except BaseException as error:
                # Part of a message may lie in the channel, and must not be taken for the next.
                self._peers.fail(error, call)
                raise

        return guarded

    def _open(self, source: int) -> None:
        with self._lock:
            if source not in self._receivers:
                work_queue = WorkQueue("lockstep-receive")
                self._receivers[source] = (work_queue, Receiver(self._memory, self._peers, source))

    def _receive(self, pending: PendingReceive, sources: Sequence[int]) -> None:
        """Take messages until the receive has its own, which completes its call."""
        if len(sources) == 1:
            self._receivers[sources[0]][1].take_until(pending)
            return

        def take() -> int | None:
            for source in sources:
                work_queue, receiver = self._receivers[source]
                if work_queue.try_now(partial(receiver.offer, pending)):
                    return source
            return None

        self._peers.wait_for_any(sources, self._any_message, pending.call, take)
