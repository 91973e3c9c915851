"""What watches a backward: which graph task it is, when it begins, whether it was interrupted, and when it ends.

It is driven by gradients and by hooks on outputs, not by forward, so it does not matter how the forward was called:
through the wrapper, through the module itself, or twice before the first backward.

    backward of one rank            BackwardWatch               its listener
    --------------------            -------------               ------------
    1 reaches a marked output   ->  `_on_output`: begin     ->  `begin`: buckets are made ready
    2 gradient accumulated      ->  `arrive`                    the gradient goes to its bucket
    3 inner graph task          ->  `waits_for_end`             nothing is sent any more before 4
    4 end of the graph task     ->  `_on_end`               ->  `complete`: all gradients are reduced, then `end`
    - or an exception           ->  `finish_interrupted`    ->  `complete_failed`, before the next forward

[Note: the end of a backward] The autograd engine runs a queued callback at the end of *the graph task in which it was
queued*. A reentrant checkpoint runs a graph task inside another, so a callback queued by a gradient of the inner one
would run too early. Therefore the outermost task is marked where it begins, at the outputs of the module or at the loss
(`mark`), and gradients that arrive in a task within it wait for the end of the marked one. Whether a model does such
things shows in its first backward, so that one sends nothing before its end.

[Note: plain arrivals] A model may have hundreds of small parameters, and each gradient costs a call into Python. After
one that had nothing special about it, those that follow in the same graph task have not either, and are only counted
(`lockstep.reduce.gradient_hooks`). `plain_task` is the number of that graph task. [Note: a hook that is switched] in
`lockstep.reduce.slot` tells how some of them are counted without Python code.

The watch has no reference to its listener, so each call passes it. [Note: ownership] in `lockstep.reduce.reducer`.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol, final

from torch import Tensor

from lockstep.errors import ReductionError
from lockstep.reduce.slot import PlainArrivals
from lockstep.torch_private.autograd import (
    NO_GRAPH_TASK,
    current_graph_task_id,
    is_in_distributed_autograd,
    queue_callback,
)
from lockstep.torch_private.compiler import is_compiled_autograd_on, keep_compiler_out

_NEVER_A_TASK: Final = -2


class Phase(Enum):
    """What a rank is doing.

    | from | to | when |
    | --- | --- | --- |
    | IDLE | ACCUMULATING | a backward begins that is not to be synchronised |
    | IDLE | SYNCHRONIZING | a backward begins that is |
    | ACCUMULATING | SYNCHRONIZING | it reaches an output that is to be synchronised |
    | both | IDLE | it has ended, or was found to have ended in an exception |
    """

    IDLE = auto()
    ACCUMULATING = auto()
    SYNCHRONIZING = auto()


_TRANSITIONS: Final = {
    Phase.IDLE: {Phase.ACCUMULATING, Phase.SYNCHRONIZING},
    Phase.ACCUMULATING: {Phase.SYNCHRONIZING, Phase.IDLE},
    Phase.SYNCHRONIZING: {Phase.IDLE},
}


class BackwardListener(Protocol):
    def begin(self, phase: Phase) -> None: ...

    def begin_synchronizing_late(self) -> None:
        """Prepare for gradients that are reduced, in a backward that so far only added up local ones."""

    def complete(self) -> None:
        """Reduce what has arrived, and call `BackwardWatch.end` (collective)."""

    def complete_failed(self) -> None:
        """Take part in the reduction of a backward that failed here, and call `BackwardWatch.end` (collective)."""

    def forget(self) -> None:
        """Forget a backward that reduces nothing, and call `BackwardWatch.end`."""


@final
class BackwardWatch:
    """Watches the backwards of one rank, which trains alone where it may not synchronize: without a group.

    `synchronizes` is looked at when a graph is marked and when its gradients arrive. `was_asked`: the gradient of a
    parameter was computed, accumulated or not; `has_local_gradients`, by `torch.autograd.grad` since a reduction;
    `has_arrived`, one was accumulated in the present backward.
    """

    def __init__(self, may_synchronize: Callable[[], bool]) -> None:
        self.synchronizes = True
        self.waits_for_end = False
        self.plain_task = _NEVER_A_TASK
        self.was_asked = False
        self.has_local_gradients = False
        self.has_arrived = False
        self.num_local_backwards = 0
        self._local_samples: list[int] = []
        self._may_synchronize = may_synchronize
        self._phase = Phase.IDLE
        self._lock = threading.RLock()
        self._task = NO_GRAPH_TASK
        self._callback: Callable[[], partial[None] | None] = _nothing
        self._switch: Callable[[], PlainArrivals | None] = _nothing
        self._only_once = False
        self._is_forced = False
        self._always_waits = True  # until a first backward has shown that it need not. [Note: the end of a backward]
        self._has_inner_tasks = False
        self._forwards: dict[int, _Forward] = {}

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def num_samples(self) -> int:
        """Of how many samples the forwards are that this backward has gone through; 0 if that of one is not known."""
        counts = [forward.num_samples for forward in self._forwards.values()]
        return sum(counts) if all(counts) else 0

    @property
    def num_accumulated_samples(self) -> int:
        """The same, with those of the backwards since the last reduction that were not reduced."""
        counts = [*self._local_samples, self.num_samples]
        return sum(counts) if all(counts) else 0

    # -- Before a backward ---------------------------------------------------------------------------------------------

    def mark(
        self,
        outputs: Iterable[Tensor],
        num_samples: int,
        listener: BackwardListener,
        on_reached: Callable[[], None] | None = None,
    ) -> None:
        """Mark where a backward begins: at `outputs` of a module, or a loss. [Note: the end of a backward].

        `num_samples` is 0 if not known; `on_reached` is called once, when a backward reaches one of the outputs.
        """
        forward = _Forward(num_samples, on_reached)
        for output in outputs:
            if output.grad_fn is not None:
                refuse_compiled_autograd()
                refuse_distributed_autograd()
                output.register_hook(partial(self._on_output, listener, self.synchronizes, forward))

    def use_switch(self, switch: PlainArrivals | None) -> None:
        """Switch this where gradients become plain, and when a backward is over; it is held weakly."""
        self._switch = _nothing if switch is None else weakref.ref(switch)

    def force_next(self) -> None:
        """Let the next backward synchronise, whatever was said when its graph was built."""
        self._is_forced = True

    def synchronize_once(self) -> None:
        """Let one backward synchronise, and none after it."""
        self.synchronizes = self._only_once = True

    def wait_for_ends(self) -> None:
        """Send nothing before the end of a backward from now on. [Note: the end of a backward]."""
        self._always_waits = self._has_inner_tasks = True

    def learn_anew(self) -> None:
        """Wait for the end of the next backward, and see in it whether that is needed."""
        self._always_waits, self._has_inner_tasks = True, False

    def finish_interrupted(self, listener: BackwardListener) -> None:
        """End a backward that ended in an exception here; called before a forward (then collective).

        The engine holds the callback as long as the backward runs, and lets go of it uncalled when it fails.
        """
        if self._phase is Phase.IDLE or self._callback() is not None:
            return
        if self._phase is Phase.SYNCHRONIZING and self._may_synchronize():
            listener.complete_failed()
        else:
            listener.forget()

    def begin_without_backward(self, listener: BackwardListener) -> None:
        self.finish_interrupted(listener)
        self._change_phase(Phase.SYNCHRONIZING)
        listener.begin(Phase.SYNCHRONIZING)

    # -- During a backward ---------------------------------------------------------------------------------------------

    def arrive(self, listener: BackwardListener) -> bool:
        """Note that a gradient was accumulated; return whether a graph task began with it."""
        is_new_task = current_graph_task_id() != self._task
        if is_new_task:
            self._enter_task(listener)
        self.has_arrived = True
        return is_new_task

    def call_plain(self) -> None:
        """Say that the gradients to come in this graph task need only be counted. [Note: plain arrivals]."""
        if self.plain_task == self._task:
            return
        self.plain_task = self._task
        switch = self._switch()
        if switch is not None:
            switch.begin()

    def note_second_gradient(self) -> None:
        """Note that a parameter got two gradients in one backward, as it does inside a reentrant checkpoint."""
        self._has_inner_tasks = True

    def end(self) -> None:
        """Forget the backward that is over; the listener calls this."""
        self.has_arrived = self.was_asked = False
        self.waits_for_end = self._is_forced = False
        self._forwards.clear()
        self._task, self.plain_task = NO_GRAPH_TASK, _NEVER_A_TASK
        _end_switch(self._switch)
        if self._phase is not Phase.IDLE:
            self._change_phase(Phase.IDLE)

    def forget_local(self) -> None:
        """Forget the backwards that were not reduced: one was now, and with it what they have accumulated."""
        self.num_local_backwards = 0
        self.has_local_gradients = False
        self._local_samples.clear()

    def stop_synchronizing(self) -> None:
        """Reduce no further backward, if only one was to be reduced; called when one was, or was to be."""
        if self._only_once:
            self.synchronizes = self._only_once = False

    def _change_phase(self, phase: Phase) -> None:
        assert phase in _TRANSITIONS[self._phase], f"{self._phase} -> {phase}"
        self._phase = phase

    def _enter_task(self, listener: BackwardListener) -> None:
        """Two threads of the autograd engine, one per device, may come here at once with gradients of one task."""
        with self._lock:
            if current_graph_task_id() == self._task:
                return
            self.finish_interrupted(listener)
            if self._phase is Phase.IDLE:
                self._begin(listener, wanted=self.synchronizes)
            else:
                self._has_inner_tasks = self.waits_for_end = True
                self.plain_task = _NEVER_A_TASK

    @keep_compiler_out
    def _on_output(
        self, listener: BackwardListener, synchronizes: bool, forward: "_Forward", _gradient: Tensor
    ) -> None:
        refuse_compiled_autograd()
        with self._lock:
            wanted = (synchronizes and self.synchronizes) or self._is_forced
            self.finish_interrupted(listener)
            if self._phase is Phase.IDLE:
                self._begin(listener, wanted=wanted)
            elif wanted and self._phase is Phase.ACCUMULATING:
                self._change_phase(Phase.SYNCHRONIZING)
                listener.begin_synchronizing_late()
            self._forwards[id(forward)] = forward
            forward.note_reached()

    def _begin(self, listener: BackwardListener, *, wanted: bool) -> None:
        self.waits_for_end = self._always_waits
        phase = Phase.SYNCHRONIZING if wanted and self._may_synchronize() else Phase.ACCUMULATING
        # First of all: after an error in `begin`, the next forward makes the calls that other ranks wait for.
        self._change_phase(phase)
        listener.begin(phase)
        self._task = current_graph_task_id()  # not earlier, or another thread would not wait for `begin`
        callback = partial(self._on_end, listener, self._task)
        # If the backward fails, its hooks must see the next one, which may not begin at a marked output.
        self._callback = weakref.ref(callback, partial(_end_switch, self._switch))
        queue_callback(callback)

    @keep_compiler_out
    def _on_end(self, listener: BackwardListener, task: int) -> None:
        if task != self._task:
            return
        switch = self._switch()
        if switch is not None:
            switch.mark_arrived()
        if self._phase is Phase.SYNCHRONIZING and self.has_arrived:
            self._always_waits = self._has_inner_tasks
            listener.complete()
            return
        if self.has_arrived:
            self.num_local_backwards += 1
            self._local_samples.append(self.num_samples)
        elif self.was_asked:  # torch.autograd.grad: nothing was accumulated, nothing is reduced
            self.has_local_gradients = True
        listener.forget()


@final
class _Forward:
    """One forward, which a backward may go through at several outputs."""

    __slots__ = ("_on_reached", "num_samples")

    def __init__(self, num_samples: int, on_reached: Callable[[], None] | None) -> None:
        self.num_samples = num_samples
        self._on_reached = on_reached

    def note_reached(self) -> None:
        on_reached, self._on_reached = self._on_reached, None
        if on_reached is not None:
            on_reached()


def _end_switch(find: Callable[[], PlainArrivals | None], _callback: object = None) -> None:
    switch = find()
    if switch is not None:
        switch.end()


def _nothing() -> None:
    """Return no callback, as no backward has begun, or no switch."""


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on (local). Without the compiler it cannot be on, so this does not import that."""
    if is_compiled_autograd_on():
        raise ReductionError(
            "Compiled autograd is on, and under it gradients are not averaged over the ranks: it runs no hooks on "
            "parameters. Turn it off (torch._dynamo.config.compiled_autograd = False); torch.compile of the model "
            "works without it. (LS310)"
        )


def refuse_distributed_autograd() -> None:
    """Raise in a context of `torch.distributed.autograd`, likewise; called after a forward, on all ranks alike."""
    if is_in_distributed_autograd():
        raise ReductionError(
            "This forward ran within torch.distributed.autograd.context(), whose backward keeps gradients in the "
            "context and not in .grad: they would not be averaged over the ranks. Keep the wrapped module out of the "
            "context and call loss.backward(), or wrap it with torch.nn.parallel.DistributedDataParallel, which "
            "averages gradients in such a context. (LS310)"
        )
