"""How a step of several shards treats the model's buffers.

[Note: buffers of shard 0] BatchNorm's running statistics come from the samples of one shard, as torch's come from those
of one rank. Which one must not depend on the number of workers, so it is shard 0: every shard starts from the buffers
that the step began with, and what shard 0 makes of them is kept. Rank 0 runs shard 0, as its first one.

    `begin`          copy the buffers                          so that a step that fails can put them back
    after each shard put the copy back before the next one;    after shard 0, copy its buffers first
    `start_sending`  rank 0 sends shard 0's buffers beside the last message of the reduction; not yet in the model
    `commit`         write shard 0's buffers, when every worker has them
    `undo`           put the copy back

[Note: buffers of another layout] The message beside the reduction has the shapes with which the step began. Where rank
0's buffers have others, it says so in the step table, and sends the new buffers in the second exchange.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import TensorLayout, World, calls_for
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.buffer_snapshot import (
    BufferParts,
    BufferSnapshot,
    BufferSpec,
    BufferSpecs,
    FlatMemory,
    buffer_parts,
    copy_each,
    describe_buffers,
    name_buffers,
    unique_buffers,
    without_repeats,
)
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart

_PURPOSE = "sending shard 0's buffers"


@final
class ShardZeroBuffers(StepPart):
    """Lets every shard of a worker start from the step's buffers, and keeps those of shard 0."""

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._is_sent = world.group is not None and world.world_size > 1
        self.cover(model)
        self._is_recorded = False
        self._has_several = False
        self._has_copy_of_shard_0 = False
        self._send_error: Exception | None = None
        self._new: list[dict[str, Tensor | None]] | None = None
        self._new_layout = Column(bool, lambda _: world.rank == 0 and self.has_new_layout())
        self.columns = (self._new_layout,)

    def cover(self, model: nn.Module) -> None:
        """Treat the buffers of another module from the next step on (local)."""
        self._parts = buffer_parts(model)
        prefers_flat = is_asynchronous(self._device)
        self._before = BufferSnapshot(self._parts, prefers_flat=prefers_flat)
        self._before.record()  # a step that fails before `begin` takes part in the message too
        self._shard_0 = BufferSnapshot(self._parts, prefers_flat=prefers_flat)
        self._message = FlatMemory()
        self._layout: TensorLayout | None = None

    def begin(self, _step: CurrentStep) -> None:
        self.record()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        step.has_new_layout = rows[self._new_layout][0]
        if step.has_new_layout and self._is_sent:
            step.ask(_PURPOSE, self._send_new, self._take_new)

    def commit(self, step: CurrentStep) -> None:
        """Let the model's buffers be those of shard 0, or what they were before where the step is bad (local)."""
        assert step.decision is not None
        if step.decision.is_skipped:
            self.put_back()
        else:
            self._commit(step.decision.is_bad)

    def undo(self, _step: CurrentStep) -> None:
        self.put_back()

    def record(self) -> None:
        """Record the buffers with which a step begins (local)."""
        self._is_recorded = self._has_several = self._has_copy_of_shard_0 = False
        self._send_error = self._new = None
        self._before.record()
        self._is_recorded = True

    def end_shard(self, shard: int, *, is_last: bool) -> None:
        """Put back what the shard's forward changed (local); call it after each backward, which may still read it."""
        self._has_several |= not is_last
        if not self._has_several:
            return  # the buffers are those of the only shard
        if shard == 0:
            self._shard_0.record()
            self._has_copy_of_shard_0 = True
        if not is_last:
            self._before.put_back()

    def begin_shard_again(self) -> None:
        """Let the buffers be those of the step's begin, during a shard that begins anew (local)."""
        self._before.put_back()

    @contextmanager
    def of_step_begin(self) -> Iterator[None]:
        with BufferSnapshot(self._parts).kept():
            self._before.put_back()
            yield

    def at_begin(self, buffer: Tensor) -> Tensor:
        """Return the values that one of the buffers had when the step began (local)."""
        return self._before.copy_of(buffer)

    def has_new_layout(self) -> bool:
        """Whether shard 0 has left other buffers or shapes; asked on rank 0. Raises what failed in `start_sending`."""
        if self._send_error is not None:
            raise self._send_error
        return self._before.is_other_layout(self._shard_0.names if self._has_copy_of_shard_0 else self._parts)

    def start_sending(self) -> Callable[[], None]:
        """Start to send shard 0's buffers to all, and return what waits for them (collective).

        It raises no error of its own: the other ranks need this message, even if this rank's step has failed.
        """
        if not self._is_sent or not self._before.live:
            return _do_nothing
        assert self._world.group is not None
        if self._message.fit(self._before.live) or self._layout is None:
            named = zip(name_buffers(self._before.names), self._before.live, strict=True)
            self._layout = TensorLayout(named, self._world.group)
        layout = self._layout
        if self._world.rank == 0:
            try:
                if not self.has_new_layout():
                    copy_each(self._message.values, self._values_of_shard_0())
            except Exception as error:  # noqa: BLE001 - raised when this rank fills in its step table
                self._send_error = error
        with calls_for(_PURPOSE), layout.compared():
            works = [
                dist.broadcast(flat, group=self._world.group, group_src=0, async_op=True)
                for flat in self._message.flat_by_device.values()
            ]

        def wait() -> None:
            with layout.compared():
                for work in works:
                    if work is not None:
                        work.wait()

        return wait

    def _send_new(self) -> tuple[BufferSpecs, list[Tensor]] | None:
        """Return rank 0's buffers, which have other shapes than the step began with."""
        if self._world.rank != 0:
            return None
        source = self._shard_0.names if self._has_copy_of_shard_0 else self._parts
        return describe_buffers(source), [each.cpu() for each in self._values_of_shard_0()]

    def _take_new(self, found: list[tuple[BufferSpecs, list[Tensor]] | None]) -> None:
        """Keep rank 0's buffers, which `commit` writes."""
        assert found[0] is not None
        specs, values = found[0]
        self._new = _make_buffers(specs, values, self._device)

    def can_be_left_out(self) -> bool:
        """Whether `commit` can leave the buffers as they were, by a truth value on the device (local)."""
        return self._before.is_flat and set(self._before.memory.flat_by_device) <= {self._device}

    def _commit(self, is_bad: Tensor | None) -> None:
        self._is_recorded = False
        self._write()
        if is_bad is not None and self._before.live:
            before, now = self._before, [without_repeats(buffer.data) for buffer in unique_buffers(self._parts)]
            self._message.fit(before.live)
            copy_each(self._message.values, now)
            (recorded,), (written,) = before.memory.flat_by_device.values(), self._message.flat_by_device.values()
            torch.where(is_bad, recorded, written, out=written)
            copy_each(now, self._message.values)

    def _write(self) -> None:
        if self._world.rank == 0:
            if self._has_copy_of_shard_0:
                self._shard_0.put_back()
            return
        self._before.restore_names()
        if self._new is not None:
            _take_new(self._parts, self._new)
        elif self._before.live:
            copy_each(self._before.live, self._message.values)

    def _values_of_shard_0(self) -> list[Tensor]:
        if self._has_copy_of_shard_0:
            return self._shard_0.values
        return [without_repeats(buffer.detach()) for buffer in unique_buffers(self._parts)]

    def put_back(self) -> None:
        """Put the recorded buffers back, if the step that has begun has not ended (local)."""
        self._send_error = None  # its traceback holds the step
        if self._is_recorded:  # else the record is that of an earlier step
            self._is_recorded = False
            self._before.put_back()


def _make_buffers(specs: BufferSpecs, values: Sequence[Tensor], device: torch.device) -> list[dict[str, Tensor | None]]:
    made: dict[int, Tensor] = {}

    def make(spec: BufferSpec | None) -> Tensor | None:
        if spec is None:
            return None
        if spec.number not in made:
            place = torch.device("cpu") if spec.is_on_cpu else device
            made[spec.number] = values[spec.number].to(place, copy=True).expand(spec.shape)
        return made[spec.number]

    return [{name: make(spec) for name, spec in part.items()} for part in specs]


@torch.no_grad()
def _take_new(parts: BufferParts, found: Sequence[dict[str, Tensor | None]]) -> None:
    """Have the buffers of rank 0; those of the same shape and dtype stay the same tensors, with other values."""
    taken: dict[int, Tensor] = {}
    for part, new in zip(parts, found, strict=True):
        wanted = {
            name: None if value is None else _take_one(part.get(name), value, taken) for name, value in new.items()
        }
        part.clear()
        part.update(wanted)


def _take_one(present: Tensor | None, value: Tensor, taken: dict[int, Tensor]) -> Tensor:
    if id(value) not in taken:
        taken[id(value)] = value
        if present is not None and present.shape == value.shape and present.dtype == value.dtype:
            target, source = without_repeats(present.data), without_repeats(value)
            if target.shape == source.shape:
                target.copy_(source)
                taken[id(value)] = present
    return taken[id(value)]


def _do_nothing() -> None:
    """Do nothing: no message was sent, so there is none to wait for."""
