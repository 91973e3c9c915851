"""The reducer: watches gradients arrive, sends each bucket when it is full, completes the rest at the end.

It is driven by gradients, not by forward, so it does not matter how the forward was called: through the wrapper,
through the module itself, or twice before the first backward.

    backward of one rank          reducer                                       the group
    --------------------          -------                                       ---------
    1 gradient accumulated   ->   `take_gradient`: copy into the bucket
    2 bucket's last gradient ->   `_send_ready`: buckets leave in plan order ->  all_reduce starts
    3 more gradients ...          ... while earlier buckets are under way        (overlap)
    4 end of backward        ->   `_complete`: absent gradients filled in,   ->  the last all_reduce
                                  then wait for all and settle each bucket

[Note: the end of a backward] The autograd engine runs a queued callback at the end of *the graph task in which it was
queued*. A reentrant checkpoint runs a graph task inside another, so a callback queued by a gradient of the inner one
would run too early. Therefore the outermost task is marked where it begins, at the outputs of the module or at the loss
(`mark`), and gradients that arrive in a task within it wait for the end of the marked one.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lockstep.comm import allocate_buffer
from lockstep.errors import ReductionError
from lockstep.reduce.bucket import Bucket, Slot
from lockstep.reduce.plan import BucketLimits, describe_parameters, plan_buckets

_NO_TASK = -1


class _Phase(Enum):
    """What the reducer is doing: IDLE -> COLLECTING (`_begin`) -> IDLE (`_complete`, or `abandon`)."""

    IDLE = auto()
    COLLECTING = auto()


@final
class Reducer:
    """Reduces the gradients of `parameters` over `group` in every backward.

    Args:
        parameters: Named trainable parameters in registration order, the same on every rank.
        group: The group; every rank of it must run the same number of backwards.
        limits: Sizes of the buckets.
        average: Divide by the number of ranks (before adding, as torch does, so that half precision does not
            overflow); otherwise gradients are summed.

    Attributes:
        synchronizes: False while gradients should only accumulate locally; looked at when they arrive.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        limits: BucketLimits,
        average: bool,
    ) -> None:
        self.synchronizes = True
        self._group = group
        self._scale = 1 / dist.get_world_size(group) if average else 1.0
        plans = plan_buckets(describe_parameters(parameters), limits)
        self._buckets = [
            Bucket(plan, parameters, allocate_buffer(plan.num_elements, plan.dtype, plan.device, group))
            for plan in plans
        ]
        self._phase = _Phase.IDLE
        self._task = _NO_TASK
        self._callback: Callable[[], partial[None] | None] = _no_callback
        self._any_arrived = False
        self._waits_for_end = False
        self._works: list[dist.Work] = []
        # Held weakly: when the owner lets go of the reducer, its hooks go too, and the model can be wrapped anew.
        deliver = partial(_deliver, weakref.ref(self))
        handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(deliver, slot))
            for bucket in self._buckets
            for slot in bucket.slots
        ]
        weakref.finalize(self, _remove, handles)

    def mark(self, output: Tensor) -> None:
        """Mark where a backward begins: at `output`, a module's output or a loss. [Note: the end of a backward]."""
        if output.grad_fn is not None:
            output.register_hook(self._on_output)

    def abandon_interrupted(self) -> None:
        """Forget a backward that ended in an exception, so that the next one starts clean (local).

        The engine holds the callback as long as the backward runs, and lets go of it uncalled when it fails.
        """
        if self._phase is _Phase.COLLECTING and self._callback() is None:
            for work in self._works:
                work.wait()
            self._reset()

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank has no gradient at all (collective)."""
        self.abandon_interrupted()
        self._phase = _Phase.COLLECTING
        self._complete()

    def _on_output(self, _gradient: Tensor) -> None:
        self.abandon_interrupted()
        if self.synchronizes and self._phase is _Phase.IDLE:
            self._begin()

    def take_gradient(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Take in a gradient that was just accumulated; called by the hook of its parameter."""
        _check_dense(slot, parameter)
        self.abandon_interrupted()
        if not self.synchronizes:
            slot.adopt_gradient()
            slot.is_unsynced = True
            return
        if self._phase is _Phase.IDLE:
            self._begin()
        self._any_arrived = True
        if slot.is_scaled or (slot.has_arrived and self._has_left(slot.bucket)):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward when its first was on its way already, "
                "which happens when a parameter is used both inside and outside a reentrant checkpoint. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        if self._task != torch._C._current_graph_task_id():  # noqa: SLF001
            self._waits_for_end = True
        if self._waits_for_end or self._scale == 1.0:
            slot.adopt_gradient()
        else:
            slot.adopt_scaled_gradient(self._scale)
        if not slot.has_arrived:
            slot.has_arrived = True
            slot.bucket.num_pending -= 1
            if slot.bucket.num_pending == 0 and not self._waits_for_end:
                self._send_ready()

    def _begin(self) -> None:
        self._phase = _Phase.COLLECTING
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001
        callback = partial(self._on_end, self._task)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)  # noqa: SLF001

    def _on_end(self, task: int) -> None:
        if task != self._task:
            return
        if self._any_arrived:
            self._complete()
        else:
            self._reset()  # torch.autograd.grad: nothing was accumulated, nothing is reduced

    def _has_left(self, bucket: Bucket) -> bool:
        return any(sent is bucket for sent in self._buckets[: len(self._works)])

    def _send_ready(self) -> None:
        """Send buckets in plan order, up to the first that is not full: ranks must send in one order."""
        for bucket in self._buckets[len(self._works) :]:
            if bucket.num_pending > 0:
                return
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.write_presence()
        if self._scale != 1.0:
            bucket.scale(self._scale)
        work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)

    def _complete(self) -> None:
        for bucket in self._buckets[len(self._works) :]:
            self._send(bucket)
        for work, bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            bucket.settle()
        self._reset()

    def _reset(self) -> None:
        self._works.clear()
        for bucket in self._buckets:
            bucket.reset()
        self._any_arrived = False
        self._waits_for_end = False
        self._task = _NO_TASK
        self._phase = _Phase.IDLE


def _no_callback() -> None:
    """Stand for the callback of a backward that has not begun."""


def _deliver(reducer: "weakref.ref[Reducer]", slot: Slot, parameter: nn.Parameter) -> None:
    alive = reducer()
    if alive is not None:
        alive.take_gradient(slot, parameter)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _check_dense(slot: Slot, parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise ReductionError(
            f"Parameter {slot.name} has a sparse gradient, and buckets hold dense ones. "
            "Build the embedding with sparse=False."
        )
