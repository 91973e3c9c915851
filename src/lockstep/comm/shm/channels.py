"""Messages from one rank to another, through one channel per ordered pair.

    sender                                                  receiver
    1 head page: tag, length, description
    2 chunk into slot 0, post FULL          ->              3 wait FULL, read the head
                                                            4 the tag that is wanted? else keep the message aside
                                                            5 reply page: as expected, or not
    7 wait FREE for every chunk             <-              6 copy the chunk out, post FREE
    8 read the reply: not as expected is an error here too

A chunk is at most one slot, and two slots are under way at once. A send ends when all of it was received: then both
sides know whether they meant the same.
"""

import ctypes
import mmap
import struct
from collections import deque
from typing import final

import torch
from torch import Tensor

from lockstep.comm.calls import LONGEST_CALL
from lockstep.comm.shm import semaphores
from lockstep.comm.shm.layout import FREE, FULL, MAIL, PAGE
from lockstep.comm.shm.memory import Memory
from lockstep.comm.shm.peers import Peers
from lockstep.errors import CollectiveMismatchError

_HEAD = struct.Struct("<qqi")


@final
class Sender:
    """This rank's end of the channel to `target`."""

    def __init__(self, memory: Memory, peers: Peers, target: int) -> None:
        self._mapping = memory.map_channel(peers.rank, target)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._slots = _map_slots(self._mapping, memory.layout.slot_bytes)
        self._slot_bytes = memory.layout.slot_bytes
        self._peers = peers
        self._target = target
        self._full = peers.semaphore(FULL, peers.rank, target)
        self._free = peers.semaphore(FREE, target, peers.rank)
        self._mail = peers.semaphore(MAIL, target, target)

    def send(self, data: Tensor, tag: int, kind: bytes, call: bytes) -> None:
        """Send `data`, flat bytes, and return when it was received.

        Args:
            data: What to send.
            tag: Which receive it is for.
            kind: Description of the tensor, compared with the receiver's.
            call: Description of this call, for messages.

        Raises:
            CollectiveMismatchError: The receiver expects another kind of tensor.
            PeerLostError: The receiver is lost.
        """
        head = _HEAD.pack(tag, data.numel(), len(kind)) + kind
        ctypes.memmove(self._address, head, len(head))
        chunks = data.split(self._slot_bytes) if data.numel() else [data]
        for number, chunk in enumerate(chunks):
            if number >= len(self._slots):
                self._peers.wait(self._target, self._free, call)
            self._slots[number % len(self._slots)][: chunk.numel()].copy_(chunk)
            semaphores.post(self._full)
            if number == 0:
                semaphores.post_if_zero(self._mail)
        for _ in range(min(len(chunks), len(self._slots))):
            self._peers.wait(self._target, self._free, call)
        expected = _read_text(self._address + PAGE)
        if expected:
            raise _explain(self._peers.rank, kind, self._target, expected)


@final
class Receiver:
    """This rank's end of the channel from `source`."""

    def __init__(self, memory: Memory, peers: Peers, source: int) -> None:
        self._mapping = memory.map_channel(source, peers.rank)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._slots = _map_slots(self._mapping, memory.layout.slot_bytes)
        self._peers = peers
        self._source = source
        self._full = peers.semaphore(FULL, source, peers.rank)
        self._free = peers.semaphore(FREE, peers.rank, source)
        self._aside: dict[int, deque[tuple[bytes, Tensor]]] = {}

    def receive(self, place: Tensor, tag: int, kind: bytes, call: bytes) -> None:
        """Fill `place`, flat bytes, with the next message of `tag`; messages of other tags are kept for their receives.

        Raises:
            CollectiveMismatchError: The sender sends another kind of tensor.
            PeerLostError: The sender is lost.
        """
        while not self._take_aside(place, tag, kind):
            self._peers.wait(self._source, self._full, call)
            if self._take(place, tag, kind, call):
                return

    def try_receive(self, place: Tensor, tag: int, kind: bytes, call: bytes) -> bool:
        """Do what `receive` does if a message of `tag` is here already; return whether one was."""
        if self._take_aside(place, tag, kind):
            return True
        return semaphores.try_wait(self._full) and self._take(place, tag, kind, call)

    def _take_aside(self, place: Tensor, tag: int, kind: bytes) -> bool:
        kept = self._aside.get(tag)
        if not kept:
            return False
        sent, data = kept.popleft()
        if sent != kind:
            raise _explain(self._source, sent, self._peers.rank, kind)
        place.copy_(data)
        return True

    def _take(self, place: Tensor, tag: int, kind: bytes, call: bytes) -> bool:
        """Take the message whose first chunk is here; return whether it was the one wanted."""
        found, length, kind_length = _HEAD.unpack(ctypes.string_at(self._address, _HEAD.size))
        sent = ctypes.string_at(self._address + _HEAD.size, min(kind_length, LONGEST_CALL))
        fits = found == tag and sent == kind
        target = place if fits else torch.empty(length, dtype=torch.uint8)
        reply = kind if found == tag and not fits else b""
        ctypes.memmove(self._address + PAGE, struct.pack("<i", len(reply)) + reply, 4 + len(reply))
        chunks = target.split(self._slots[0].numel()) if length else [target]
        for number, chunk in enumerate(chunks):
            if number > 0:
                self._peers.wait(self._source, self._full, call)
            chunk.copy_(self._slots[number % len(self._slots)][: chunk.numel()])
            semaphores.post(self._free)
        if found != tag:
            self._aside.setdefault(found, deque()).append((sent, target))
            return False
        if not fits:
            raise _explain(self._source, sent, self._peers.rank, kind)
        return True


def _map_slots(mapping: mmap.mmap, slot_bytes: int) -> list[Tensor]:
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=slot_bytes, offset=2 * PAGE + number * slot_bytes)
        for number in (0, 1)
    ]


def _read_text(address: int) -> bytes:
    length = struct.unpack("<i", ctypes.string_at(address, 4))[0]
    return ctypes.string_at(address + 4, min(max(length, 0), LONGEST_CALL))


def _explain(source: int, sent: bytes, target: int, expected: bytes) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"Rank {source} sends {sent.decode()} but rank {target} receives {expected.decode()}. Both must name the same "
        "dtype and number of elements; what was sent is dropped."
    )
