"""Sends and receives of one rank: a work queue and a channel for each peer and direction, made when first used."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from torch import Tensor
from torch.distributed import Work

from lockstep.comm.shm.file_layout import MESSAGE
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.messages import PendingReceive, Receiver, Sender
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.work import QueuedWork, WorkQueue
from lockstep.errors import GroupError


@final
class PointToPoint:
    def __init__(self, memory: Memory, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._lock = threading.Lock()
        self._senders: dict[int, tuple[WorkQueue, Sender]] = {}
        self._receivers: dict[int, tuple[WorkQueue, Receiver]] = {}
        self._from_any = WorkQueue("lockstep-receive")
        self._any_message = peers.semaphore(MESSAGE, peers.rank, peers.rank)

    def send(self, data: Tensor, target: int, tag: int, kind: bytes, tensors: Sequence[Tensor]) -> Work:
        with self._lock:
            if target not in self._senders:
                self._senders[target] = (WorkQueue("lockstep-send"), Sender(self._memory, self._peers, target))
            work_queue, sender = self._senders[target]
        call = f"send({kind.decode()}, to rank {self._peers.names[target]}, tag {tag})".encode()
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
        """Receive flat bytes from one rank, or from any of several; `finish` is called when they are in `place`."""
        who = f"rank {self._peers.names[sources[0]]}" if len(sources) == 1 else "any rank"
        call = f"recv({kind.decode()}, from {who}, tag {tag})".encode()

        for source in sources:
            self._open(source)
        is_from_one = len(sources) == 1
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

        pending = PendingReceive(self._peers.names, self._peers.rank, place, tag, kind, call, complete)
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
