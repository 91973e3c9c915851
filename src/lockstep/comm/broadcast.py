"""Tensors of one rank on all: as bytes, in as few messages as there are devices.

[Note: layouts] Tensors travel as bytes, so that one message carries every dtype, and each rank cuts the message by its
own shapes. So ranks compare names, dtypes and shapes as a part of the call. Where the group compares no calls, a number
for them goes before the bytes, and who receives another one raises. If they are too many for the description of a call,
that has the number, under which each rank has put them in the group's store.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.calls import LAYOUT_MARK, calls_of, describe_kind
from lockstep.comm.capabilities import capabilities_of
from lockstep.errors import CollectiveMismatchError
from lockstep.torch_private.groups import store_of
from lockstep.torch_private.modules import foreach_copy_

_ALIGNMENT_BYTES: Final = 16
_HEAD_BYTES: Final = 16
"""Before the tensors: the number of the layout."""
_MESSAGE_BYTES: Final = 64 << 20
_KEPT_BYTES: Final = 1 << 20
"""Messages up to this size keep their memory."""
_MOST_LETTERS: Final = 600
"""Layouts up to this length are a part of the call's description."""
_BETWEEN: Final = "; "
_LAYOUT: Final = "tensors of layout "
_LAYOUT_KEY: Final = "lockstep/layout/"
_KIND: Final = attrgetter("dtype", "shape", "device")


@final
class TensorLayout:
    """Names, dtypes and shapes of tensors that travel as bytes. [Note: layouts]."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], group: ProcessGroup) -> None:
        lines = [f"{name} {describe_kind(tensor.dtype, tensor.shape)}" for name, tensor in named]
        text = _BETWEEN.join(lines)
        self.number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        self._group = group
        is_long = len(text) > _MOST_LETTERS
        self._text = f"{len(lines)} {_numbered(self.number)}" if is_long else text
        store = store_of(group)
        if lines and store is not None and (is_long or not capabilities_of(group).compares_calls):
            store.set(f"{_LAYOUT_KEY}{self.number:x}", text)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare the layout in the calls within; an error of theirs names the first tensor that differs."""
        try:
            with calls_of(self._text):
                yield
        except CollectiveMismatchError as error:
            difference = self._name_difference(error.calls)
            if not difference:
                raise
            text = str(error).removesuffix(" (LS201)")
            explained = CollectiveMismatchError(f"{text} {difference} (LS201)")
            explained.calls = error.calls
            raise explained from error

    def check_received(self, number: int, source: int) -> None:
        """Check the number of the layout that another rank of the group has sent."""
        if number == self.number:
            return
        own = self._group.rank()
        calls = {source: _numbered(number), own: _numbered(self.number)}
        difference = self._name_difference({rank: f"{LAYOUT_MARK}{text}".encode() for rank, text in calls.items()})
        raise CollectiveMismatchError(
            f"Rank {source} of the group broadcasts other tensors than rank {own} overwrites with them. {difference} "
            "Make tensors of the same names, shapes and dtypes on every rank, in the same order. Nothing was "
            "overwritten. (LS201)"
        )

    def _name_difference(self, calls: Mapping[int, bytes]) -> str:
        """Return, as a sentence, the first tensor in which the calls of ranks differ; empty if that is not known."""
        layouts: dict[int, list[str]] = {}
        for rank, call in calls.items():
            _, is_layout, text = call.decode(errors="replace").rpartition(LAYOUT_MARK)
            _, is_number, number = text.partition(_LAYOUT)
            if is_number:
                store, key = store_of(self._group), f"{_LAYOUT_KEY}{number}"
                text = store.get(key).decode(errors="replace") if store is not None and store.check([key]) else ""
            if not is_layout or not text:
                return ""
            layouts[rank] = text.split(_BETWEEN)
        first, expected = next(iter(layouts.items()), (0, []))
        for rank, lines in layouts.items():
            for place, (here, there) in enumerate(zip_longest(expected, lines, fillvalue="nothing")):
                if here != there:
                    return f"The first difference is tensor {place}: {here} on rank {first}, {there} on rank {rank}."
        return ""


def _numbered(number: int) -> str:
    return f"{_LAYOUT}{number:x}"


def broadcast_tensors(named: Iterable[tuple[str, Tensor]], group: ProcessGroup, source: int = 0) -> None:
    """Overwrite tensors with those of rank `source` of the group; names are compared too (collective).

    The values are written without autograd's knowledge: version counters stay, so that a graph which saved a
    buffer before the broadcast can still run its backward.
    """
    TensorBroadcast(group).start(named, source, waits=True)


@final
class TensorBroadcast:
    """Broadcasts tensors, with one plan as long as they have the same names, dtypes, shapes and devices."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._compares = capabilities_of(group).compares_calls
        self._names: list[str] = []
        self._kinds: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._messages: list[_Message] = []
        self._layout = TensorLayout((), group)

    def start(self, named: Iterable[tuple[str, Tensor]], source: int = 0, *, waits: bool = False) -> Callable[[], None]:
        """Begin to overwrite tensors as `broadcast_tensors` does; return what waits for that and ends it (collective).

        With `waits` all is done when it returns.
        """
        names, tensors = [], []
        for name, tensor in named:
            names.append(name)
            tensors.append(tensor)
        kinds = list(map(_KIND, tensors))
        if names != self._names or kinds != self._kinds:
            self._plan(names, tensors)
            self._names, self._kinds = names, kinds
        finishes = []
        for message in self._messages:
            finish = self._start_message(message, tensors, source, waits=waits)
            if waits:
                finish()  # now, so that one message at a time has memory
            else:
                finishes.append(finish)

        def finish_all() -> None:
            for finish in finishes:
                finish()

        return finish_all

    def _plan(self, names: list[str], tensors: list[Tensor]) -> None:
        self._layout = TensorLayout(zip(names, tensors, strict=True), self._group)
        self._messages = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            message = _Message(device)
            for index, tensor in enumerate(tensors):
                if tensor.device != device:
                    continue
                if message.indices and message.num_bytes + tensor.nbytes > _MESSAGE_BYTES:
                    self._messages.append(message)
                    message = _Message(device)
                message.add(index, tensor.nbytes)
            self._messages.append(message)

    def _start_message(
        self, message: "_Message", tensors: Sequence[Tensor], source: int, *, waits: bool
    ) -> Callable[[], None]:
        chosen = [tensors[index] for index in message.indices]
        flat, places = message.make_room(chosen)
        is_source = self._group.rank() == source
        if is_source:
            _copy_each(places, chosen)
            flat[:_HEAD_BYTES].view(torch.int64).fill_(self._layout.number)
        layout = self._layout
        with layout.compared():
            work = dist.broadcast(flat, group=self._group, group_src=source, async_op=not waits)

        def finish() -> None:
            if work is not None:
                with layout.compared():
                    work.wait()
            if not is_source:
                if not self._compares and flat.is_cpu:
                    layout.check_received(int(flat[: _HEAD_BYTES // 2].view(torch.int64)), source)
                _copy_each([tensor.data for tensor in chosen], places)
            message.keep_room(flat, places)

        return finish


@final
class _Message:
    """What one message of a broadcast carries, and where in its memory."""

    def __init__(self, device: torch.device) -> None:
        self.indices: list[int] = []
        self.num_bytes = _HEAD_BYTES
        self._room: tuple[Tensor, list[Tensor]] | None = None
        self._device = device
        self._offsets: list[int] = []

    def add(self, index: int, num_bytes: int) -> None:
        self.indices.append(index)
        self._offsets.append(self.num_bytes)
        self.num_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def make_room(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return memory for the message, and the place of each tensor in it; not that of a call which has not ended."""
        if self._room is not None:
            room, self._room = self._room, None
            return room
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        places = [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self._offsets, tensors, strict=True)
        ]
        return flat, places

    def keep_room(self, flat: Tensor, places: list[Tensor]) -> None:
        """Let the next call use this memory; not a device's, which another stream may still read."""
        if self._device.type == "cpu" and self.num_bytes <= _KEPT_BYTES:
            self._room = flat, places


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        if any(map(Tensor.is_conj, targets)) or any(map(Tensor.is_neg, targets)):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            foreach_copy_(targets, sources)
