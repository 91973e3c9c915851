"""What ranks exchange: messages, gathers and broadcasts, and what is checked and compared before them.

[Note: layouts] Tensors travel as bytes, so that one message carries every dtype, and each rank cuts the message by its
own shapes. So ranks compare names, dtypes and shapes as a part of the call. Where the group compares no calls, a number
for them goes before the bytes, and who receives another one raises. If they are too many for the description of a call,
that has the number, under which each rank has put them in the group's store.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.calls import (
    LAYOUT_MARK,
    calls_of,
    describe_call,
    describe_kind,
    pack_text,
    require_equal_texts,
    unpack_text,
)
from lockstep.comm.capabilities import capabilities_of
from lockstep.comm.world import World, current_world
from lockstep.errors import CollectiveMismatchError, GroupError
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.groups import device_types, store_of
from lockstep.torch_private.modules import foreach_copy_

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name of torch 2.13, or of those before it."""
_TAG = 0x10C5
"""Distinguishes our messages from those that a user has under way with tag 0, on backends with tags."""

_SUMMABLE = frozenset({
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
})  # fmt: skip


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


def joined_world(group: ProcessGroup | None) -> World:
    """Return this worker's place in `group`, or in the default group (local)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupError(
            "There is no process group to reduce over. Call ls.init_process_group() first, or start the function with "
            "ls.launch. (LS127)"
        )
    no_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if group == no_member:
        raise GroupError(
            f"Rank {dist.get_rank()} does not belong to this group, and only its members may call. "
            "Call it under `if group is not dist.GroupMember.NON_GROUP_MEMBER`. (LS206)"
        )
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup or None. (LS206)"
        )
    world = current_world(group)
    if not world.is_torchs:
        raise GroupError(
            "The process group was torn down already, or was not made by torch.distributed. Make another, or leave "
            "group out. (LS204)"
        )
    return world


def check_summable(tensor: object, name: str, *, is_written: bool) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor. (LS207)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}, expected a dense tensor. Give {name}.to_dense(). (LS207)")
    if tensor.dtype not in _SUMMABLE:
        raise ValueError(
            f"{name} is {tensor.dtype}, which torch cannot add. Convert it to float32 or int64 first. (LS207)"
        )
    if is_written and any(stride == 0 < size - 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{name} is an expanded tensor, several of its elements share memory, and the sum cannot be written into "
            f"it. Give {name}.contiguous(). (LS207)"
        )
    return tensor


def to_real_row(tensor: Tensor, min_elements: int) -> Tensor:
    """Return the elements of `tensor` in their logical order: its own memory where it lies in that order, else a copy.

    Complex numbers become pairs of real ones: adding those is the same in every part of a vectorised loop, while a
    complex addition may multiply by 1 + 0j first, which infinities do not survive.
    The result is 1-D, without autograd, and padded with zeros to `min_elements`.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    num_missing = min_elements - flat.numel()
    return torch.cat([flat, flat.new_zeros(num_missing)]) if num_missing > 0 else flat


def from_real_row(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `flat`, which `to_real_row` made of `tensor`, into it, unless they share memory."""
    if flat.data_ptr() != tensor.data_ptr():
        values = flat[: tensor.nbytes // flat.element_size()].view(tensor.dtype)
        tensor.detach().copy_(values.view(tensor.shape))


def post_messages(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], world: World
) -> list[dist.Work]:
    """Start sending and receiving CPU tensors (every rank of the group calls, in one order for each pair of ranks).

    Ranks are those of the group. Tensors are contiguous; those that are sent are left alone until the work is done.
    """
    assert world.group is not None
    # Bytes, so that every dtype travels, those included that a backend does not know.
    works = [world.group.recv([part.view(torch.uint8)], peer, _TAG) for peer, part in receives]
    return works + [world.group.send([part.view(torch.uint8)], peer, _TAG) for peer, part in sends]


def all_to_all(
    target: Tensor, source: Tensor, received_bytes: Sequence[int], sent_bytes: Sequence[int], world: World
) -> list[dist.Work]:
    """Start sending each rank its part of a flat tensor, in rank order, and receiving such (collective)."""
    places = target.view(torch.uint8), source.view(torch.uint8)
    work = dist.all_to_all_single(*places, list(received_bytes), list(sent_bytes), group=world.group, async_op=True)
    return [] if work is None else [work]


def gather_single(output: Tensor, piece: Tensor, world: World) -> list[dist.Work]:
    """Start gathering pieces in one flat tensor, which may have `piece` in its place (collective over the group)."""
    work = _all_gather_single(output, piece, group=world.group, async_op=True)
    return [] if work is None else [work]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for messages; on a GPU the current stream waits, and the host does not."""
    for work in works:
        work.wait()


def allocate_buffer(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a flat tensor of zeros that the group reduces with as few copies as it can (local)."""
    if device.type == "cpu" and capabilities_of(group).owns_memory:
        with suppress(GroupError):  # a rank is lost: the first call says so, unless the workers are replaced before
            allocated: Tensor = cast("Any", group).allocate_tensor(num_elements, dtype=dtype, device=device)
            return allocated
    return torch.zeros(num_elements, dtype=dtype, device=device)


def describe_use(operation: str, tensor: Tensor, detail: str = "") -> bytes:
    parts = [detail] if detail else []
    if tensor.device.type != "cpu":
        parts.append(f"on {tensor.device.type}")
    return describe_call(operation, ((tensor.dtype, tensor.shape),), ", ".join(parts))


def require_same_call(call: bytes, device: torch.device, world: World) -> None:
    """Return when every rank has made the same call, or raise on all alike if they differ (collective).

    Before the first message: messages carry bytes, and four float32 that are sent to a rank that expects four int32
    would be added as int32. Groups that compare calls by themselves do so; on all others each rank sends its
    description to each other one.
    """
    if world.group is None or world.world_size == 1:
        return
    if capabilities_of(world.group).compares_calls:
        cast("Any", world.group).compare_calls(call)
        return
    # On the CPU where the group has a backend for it: no rank waits for a GPU or a missing receiver.
    has_cpu = any(known.type == "cpu" for known in device_types(world.group))
    where = torch.device("cpu") if has_cpu else device
    exchange = partial(_exchange_texts, where, world)
    require_equal_texts(call, exchange, find_user_line, dist.get_process_group_ranks(world.group))


def _exchange_texts(device: torch.device, world: World, text: bytes) -> list[bytes]:
    """Return the text of every rank, in rank order (collective)."""
    mine = pack_text(text).to(device)
    pages = mine.new_empty(world.world_size, mine.numel())
    if device.type != "cpu":
        wait_all(gather_single(pages.view(-1), mine, world))
    else:
        pages[world.rank] = mine
        others = [peer for peer in range(world.world_size) if peer != world.rank]
        wait_all(post_messages([(peer, mine) for peer in others], [(peer, pages[peer]) for peer in others], world))
    return [unpack_text(page) for page in pages]


# -- Tensors of one rank on all: as bytes, in as few messages as there are devices -------------------------------------


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
