"""What the ranks of a threaded group share, and one call of one of them. [`threaded_group`]"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
from tests.support.collectives import PerRank
from tests.support.fake_device import start_beside, untracked
from tests.support.turns import Turns
from torch import Tensor
from torch.distributed import HashStore, Store, Work

from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError

_POISON = 0x5A


class UnsafeAccessError(AssertionError):
    """A tensor was written while a call that uses it was under way."""


@final
@dataclass(slots=True)
class Collective:
    """One collective of all ranks."""

    described: dict[int, bytes] = field(default_factory=dict)
    """By every rank that has called."""
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    """Copies of what they send."""
    received: PerRank | None = None
    """What every rank receives."""


@final
@dataclass(slots=True, eq=False)
class Message:
    """One message, as its sender describes it, its receiver, or both."""

    sources: Collection[int]
    """Which rank sends; for a receive from any rank all of them."""
    target: int
    tag: int
    tensor: Tensor | None = None
    """What is sent; None before it is."""
    is_received: bool = False
    """Whether the receive was called."""


@final
class GroupState:
    """What the ranks of one group share.

    Args:
        turns: Who runs.
        threads: Number, among the threads, of each rank of the group.
        poisons: Whether outputs hold poison until `wait()`.
    """

    def __init__(self, turns: Turns, threads: Sequence[int], *, poisons: bool) -> None:
        self.turns = turns
        self.threads = tuple(threads)
        self.poisons = poisons
        self.store: Store = HashStore()
        self.broken: GroupError | None = None
        self._lock = threading.RLock()
        self._collectives: dict[tuple[bool, int], Collective] = {}
        self._open_messages: list[Message] = []
        self._subgroups: dict[tuple[tuple[int, ...], int], GroupState] = {}

    def join(self, number: tuple[bool, int], rank: int, described: bytes, given: list[Tensor]) -> Collective:
        """Take part in a collective of the group; `number` is whether it is the device's, and which of these it is."""
        with self._lock:
            collective = self._collectives.setdefault(number, Collective())
            collective.described[rank] = described
            collective.given[rank] = given
            if len(collective.described) == len(self.threads):
                del self._collectives[number]  # nobody else comes; those that have come hold it
        self.turns.notify()
        return collective

    def send(self, source: int, target: int, tag: int, tensor: Tensor) -> Message:
        """Send a message; it is that of the oldest receive that fits."""
        with self._lock:
            for message in self._open_messages:
                if (
                    message.tensor is None
                    and message.target == target
                    and message.tag == tag
                    and source in message.sources
                ):
                    self._open_messages.remove(message)
                    break
            else:
                message = Message(sources=(source,), target=target, tag=tag)
                self._open_messages.append(message)
            message.sources, message.tensor = (source,), tensor
        self.turns.notify()
        return message

    def receive(self, sources: Collection[int], target: int, tag: int) -> Message:
        """Receive a message: the oldest that fits."""
        with self._lock:
            for message in self._open_messages:
                is_fitting = message.target == target and message.tag == tag and set(message.sources) <= set(sources)
                if message.tensor is not None and is_fitting:
                    self._open_messages.remove(message)
                    break
            else:
                message = Message(sources=tuple(sources), target=target, tag=tag)
                self._open_messages.append(message)
            message.is_received = True
        self.turns.notify()
        return message

    def wait_for(self, rank: int, missing: Callable[[], Collection[int]], what: str) -> None:
        """Wait until `rank` misses nobody, or the group has failed; then raise what it failed with."""

        def threads_missing() -> list[int]:
            return [] if self.broken is not None else [self.threads[peer] for peer in missing()]

        if self.broken is None:
            try:
                self.turns.wait_for(self.threads[rank], threads_missing, what)
            except GroupError as error:
                self.broken = self.broken or error
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raise what the group failed with, anew: each rank adds its own traceback."""
        if isinstance(self.broken, PeerLostError):
            raise PeerLostError(str(self.broken), rank=self.broken.rank)
        if self.broken is not None:
            raise type(self.broken)(str(self.broken))

    def subgroup(self, threads: tuple[int, ...], number: int) -> "GroupState":
        """Return what the ranks share of the `number`-th group of these threads."""
        with self._lock:
            made = GroupState(self.turns, threads, poisons=self.poisons)
            return self._subgroups.setdefault((threads, number), made)


@final
class ThreadedWork(Work):
    """One call of one rank, complete when it was waited for.

    Args:
        group: What the ranks of the group share.
        rank: Who called.
        what: Name of the call, for messages.
        inputs: What is read until then.
        outputs: What is written then.
    """

    def __init__(
        self, group: GroupState, rank: int, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._group = group
        self._rank = rank
        self._what = what
        self._outputs = [tensor.detach() for tensor in outputs]
        self._wait_in_stream = start_beside(inputs, outputs, what)
        memory = {_memory_of(tensor) for tensor in outputs}
        kept = [tensor.detach() for tensor in inputs if _memory_of(tensor) not in memory]
        self.missing: Callable[[], Collection[int]] = tuple
        self.receive: Callable[[], Sequence[Tensor]] = tuple
        self._error: BaseException | None = None
        self._is_done = False
        self._source = -1
        self._futures: list[torch.futures.Future[list[Tensor]]] = []
        with untracked():
            if group.poisons:
                for tensor in self._outputs:
                    _poison(tensor)
            self._watched = [(tensor, tensor.clone()) for tensor in (*kept, *self._outputs)]

    def finish(self) -> None:
        """Wait for the others and write the outputs; an error is kept."""
        if self._is_done:
            return
        try:
            self._group.wait_for(self._rank, self.missing, self._what)
            with untracked():
                self._receive()
            self._wait_in_stream()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it, and the future has it
            self._error = error
        self._is_done = True
        self._watched = []
        for future in self._futures:
            self._settle(future)

    def _receive(self) -> None:
        for tensor, before in self._watched:
            _require_same(tensor, before, f"Rank {self._rank}: a tensor of {self._what}")
        received = self.receive()
        assert len(received) in {0, len(self._outputs)}
        for output, tensor in zip(self._outputs, received, strict=False):
            _write(tensor, output)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the others, and write the outputs.

        Raises:
            GroupError: The call failed.
            UnsafeAccessError: A tensor was written meanwhile.
        """
        self.finish()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future of the tensors; the call completes when it, or one made of it by `then`, is waited for."""
        future: torch.futures.Future[list[Tensor]] = _WaitingFuture(self.finish)
        if self._is_done:
            self._settle(future)
        else:
            self._futures.append(future)
        return future

    def _settle(self, future: "torch.futures.Future[list[Tensor]]") -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


class _WaitingFuture(torch.futures.Future[Any]):
    """A future that calls `finish`, which completes it, when it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self) -> Any:
        self._finish()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = _WaitingFuture(self._finish)

        def deliver(done: Any) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:  # noqa: BLE001 - who waits for it gets it
                following.set_exception(error)

        self.add_done_callback(deliver)
        return following


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _poison(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.data.logical_not_()
    else:
        tensor.data.fill_(_POISON)


def _require_same(tensor: Tensor, before: Tensor, name: str) -> None:
    if not _are_same(tensor, before):
        raise UnsafeAccessError(f"{name} was written before the call was waited for.")


def _are_same(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        return bool(torch.equal(one.to_dense(), other.to_dense()))
    if one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _write(tensor: Tensor, output: Tensor) -> None:
    """Copy as a backend does, whose writes autograd does not see."""
    if output.layout is not torch.strided:
        output.data.copy_(tensor)
        return
    if tensor.numel() != output.numel():
        raise CollectiveMismatchError(
            f"{tensor.numel()} elements are sent to a tensor of shape {list(output.shape)}, {output.numel()} elements."
        )
    with torch.inference_mode(output.is_inference()):
        output.data.copy_(tensor.reshape(output.shape))
