"""The reducer: watches gradients arrive, sends each bucket when it is full, completes the rest at the end.

It is driven by gradients, not by forward, so it does not matter how the forward was called: through the wrapper,
through the module itself, or twice before the first backward.

    backward of one rank          reducer                                       the group
    --------------------          -------                                       ---------
    1 gradient accumulated   ->   `_take`: into its place in the bucket
    2 bucket's last gradient ->   `_send_full`: buckets leave in plan order ->  all_reduce starts
    3 more gradients ...          ... while earlier buckets are under way       (overlap)
    4 end of backward        ->   `_complete`: absent gradients filled in, ->   the last message, with notes
                                  then wait for all and settle each bucket

[Note: the end of a backward] The autograd engine runs a queued callback at the end of *the graph task in which it was
queued*. A reentrant checkpoint runs a graph task inside another, so a callback queued by a gradient of the inner one
would run too early. Therefore the outermost task is marked where it begins, at the outputs of the module or at the loss
(`mark`), and gradients that arrive in a task within it wait for the end of the marked one. Whether a model does such
things shows in its first backward, so that one sends nothing before its end.

[Note: a whole backward] The last message leaves at the end of a backward and says whether it came there. A rank whose
backward ended in an exception sends what the others wait for when it next comes by, with a note that it is not whole.
So either all ranks failed alike and go on, or all of them get an error; none waits without end.

[Note: order of arrival] The plan is made anew once, after the first reduction, in the order in which gradients arrived
on rank 0: modules are often used in another order than they were registered in.

[Note: a changed model] A rank that finds other parameters than the plan has says so in a note, and then all ranks,
at the same point, compare their models, plan anew and reduce what the old plan had no place for.
"""

import hashlib
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lockstep.comm import World, group_store
from lockstep.compiler import keep_compiler_out
from lockstep.errors import ReductionError
from lockstep.reduce.agreement import check_same_model
from lockstep.reduce.bucket import read_numbers
from lockstep.reduce.hook import CommHook, GradBucket, result_of
from lockstep.reduce.layout import AnySlot, Bucket, Layout, lay_out
from lockstep.reduce.model import TrainedModel, TrainedParameter
from lockstep.reduce.notes import Note, Notes, num_notes, read_notes, write_note
from lockstep.reduce.plan import BucketLimits, Plan, plan_buckets
from lockstep.reduce.sparse_bucket import SparseSlot
from lockstep.reduce.stall import StallWatch, where
from lockstep.reduce.times import StepTimes
from lockstep.settings import read_stall_seconds

_NO_TASK = -1
_NUM_NAMES = 3
"""So many parameters of a bucket are named."""
_NUM_WATCHED = 32
"""Of so many parameters is seen whether `torch.autograd.grad` asks for their gradients; each costs a call."""
_LOCAL_GRADIENTS = (
    "torch.autograd.grad gave gradients of this rank alone for parameters of a model that is trained on several: they "
    "are not averaged. Call backward() for averaged ones, or average these with torch.distributed.all_reduce."
)
_Finish = Callable[[], None]


class _Phase(Enum):
    """What the reducer is doing.

    IDLE -> COLLECTING or ACCUMULATING (`_begin`); ACCUMULATING -> COLLECTING (`_on_output`, when a part of the graph
    turns out to be for synchronising); both -> IDLE (`_on_end`, `finish_interrupted`).
    """

    IDLE = auto()
    ACCUMULATING = auto()
    """In a backward that only adds up local gradients."""
    COLLECTING = auto()
    """In a backward whose gradients are reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced."""

    limits: BucketLimits = BucketLimits()  # noqa: RUF009 - it is frozen
    """Sizes of the buckets."""
    average: bool = True
    """Divide by the number of ranks (before adding, as torch does, so that half precision does not overflow)."""
    as_view: bool = True
    """Whether `.grad` is a view into its bucket as torch understands it; it lies there in any case."""
    dtype: torch.dtype | None = None
    """Reduce in this dtype; None for that of each parameter."""
    follows_arrival: bool = True
    """Whether to plan anew in the order of arrival. [Note: order of arrival]"""
    skips_unused: bool = False
    """Whether buckets of which nothing arrived are not sent; all ranks must use the same parameters then."""


@final
class Reducer:
    """Reduces the gradients of a model over a group in every backward.

    Args:
        model: Its trainable parameters, the same on every rank.
        world: The workers; every rank must run the same number of synchronising backwards.
        options: How.

    Attributes:
        synchronizes: False while gradients should only accumulate locally; looked at when a graph is marked and when
            its gradients arrive.
        num_dividing: By how many an average divides.
        num_reductions: How many reductions were completed.
        num_buckets_sent: How many buckets the last one sent.
        times: When the parts of the last step began and ended.
    """

    def __init__(self, model: TrainedModel, world: World, options: ReducerOptions) -> None:
        assert world.group is not None
        self.synchronizes = True
        self.num_dividing = world.world_size
        self.num_reductions = 0
        self._model = model
        self._world = world
        self._group: ProcessGroup = world.group
        self._options = options
        self._hook: CommHook | None = None
        self._on_notes: Callable[[Notes], None] = _ignore_notes
        self._phase = _Phase.IDLE
        self._task = _NO_TASK
        self._callback: Callable[[], partial[None] | None] = _no_callback
        self._any_arrived = False
        self._was_asked = False
        self._has_warned = False
        self._waits_for_end = False
        self._always_waits = True  # until a first backward has shown that it need not. [Note: the end of a backward]
        self._has_inner_tasks = False
        self._is_forced = False
        self._has_changed = False
        self._num_samples = 0
        self._finishes: list[_Finish] = []
        self._awaited: list[torch.futures.Future[object]] = []
        self._waiting_since = math.inf
        self._waiting_for = 0
        self._waiting_text = ""
        self._unread: tuple[Tensor, torch.Event] | None = None
        self._handles: list[RemovableHandle] = []
        self._arrived: list[AnySlot] = []
        self._order: list[int] = []
        self._knows_order = not options.follows_arrival
        self.times = StepTimes()
        self.num_buckets_sent = 0
        self._plan = self._make_plan()
        self._layout = self._lay_out()
        self._listen()
        weakref.finalize(self, _remove, self._handles)
        self._watch_for_stalls()

    # -- What its owner says -------------------------------------------------------------------------------------------

    def mark(self, output: Tensor) -> None:
        """Mark where a backward begins: at `output`, a module's output or a loss. [Note: the end of a backward].

        Whether that backward synchronises is decided here and there: neither may be under `no_sync`.
        """
        if output.grad_fn is not None:
            # A strong reference: a graph outlives a wrapper that nobody kept, and its backward must synchronise all the
            # same.
            output.register_hook(partial(self._on_output, self.synchronizes))

    def prepare_for_backward(self, _outputs: Sequence[Tensor] = ()) -> None:
        """Let the next backward synchronise, whatever was said when its graph was built (torch's pipelining asks)."""
        self._is_forced = True

    def count_samples(self, num_samples: int) -> None:
        """Note a forward of so many samples, whose gradients are to come (local)."""
        self.times.begin_forward()
        self._num_samples += num_samples

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on (each rank calls, with the same hook)."""
        self._hook = hook
        self._rebuild()

    def wait_at_end(self, futures: "Sequence[torch.futures.Future[object]]") -> None:
        """Let the next synchronising backward wait for these at its end."""
        self._awaited += futures

    def on_notes(self, call: Callable[[Notes], None]) -> None:
        """Call `call` with what all ranks said, after each reduction."""
        self._on_notes = call

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they travel."""
        return self._layout.buckets

    @property
    def is_idle(self) -> bool:
        """Whether no backward is under way or was left unfinished."""
        return self._phase is _Phase.IDLE

    def finish_interrupted(self) -> None:
        """Complete the reduction of a backward that ended in an exception here; called before a forward (collective).

        The engine holds the callback as long as the backward runs, and lets go of it uncalled when it fails.

        Raises:
            ReductionError: Another rank's backward did not fail. [Note: a whole backward]
        """
        if self._phase is _Phase.IDLE or self._callback() is not None:
            return
        if self._phase is _Phase.ACCUMULATING:
            self._reset()
            return
        try:
            notes = self._exchange(Note(has_failed=True))
        finally:
            self._reset()
        if notes is not None and notes.num_failed < self._world.world_size:
            raise ReductionError(
                "The last backward of this rank ended in an exception, and that of other ranks did not: their step and "
                "this one's are not the same any more. Let the exception end the training, or catch it on every rank."
            )

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank ran no backward, with what `.grad` holds (collective)."""
        self.finish_interrupted()
        self._look_at_model()
        if self._order:
            self._plan_anew()
        self._phase = _Phase.COLLECTING
        self._complete()

    def reduce_nothing(self) -> None:
        """Take part in a reduction with zeros; `.grad` stays as it is (collective)."""
        gradients = [(slot.parameter, slot.take_away()) for slot in self._slots()]
        try:
            self.reduce_without_backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def close(self) -> None:
        """Reduce no more (local)."""
        _remove(self._handles)
        self._stop_watching()

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Let a wait within, which is not the reducer's own, be watched as well."""
        self._waiting_text, self._waiting_since = what, time.monotonic()
        try:
            yield
        finally:
            self._waiting_text, self._waiting_since = "", math.inf

    def stands(self) -> str:
        """Return in words how far this rank is."""
        count = f"has reduced {self.num_reductions} times"
        if not math.isfinite(self._waiting_since):
            inside = "is in a backward" if self._phase is not _Phase.IDLE else "is not in a backward"
            return f"{inside} and {count}"
        if self._waiting_text:
            return f"waits for {self._waiting_text} and {count}"
        buckets = self._layout.buckets
        if self._waiting_for >= len(buckets):
            return f"waits for the last message of a backward and {count}"
        names = [slot.name for slot in buckets[self._waiting_for].slots]
        shown = ", ".join(names[:_NUM_NAMES]) + (
            f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        )
        return f"waits for bucket {self._waiting_for + 1} of {len(buckets)} ({shown}) and {count}"

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: torch's reducer has to know of optimizers that run in a hook, this one does not."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Add up what a hook sees of a bucket; the future holds the sum (collective; torch's hooks call it so)."""
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(_first_of)  # type: ignore[no-any-return]

    def _watch_for_stalls(self) -> None:
        seconds = read_stall_seconds()
        store = group_store(self._group)
        if self._world.world_size == 1 or seconds == 0 or store is None:
            self._stop_watching = weakref.finalize(self, _do_nothing)
            return
        names = "".join(str(each.spec) for each in self._model.trained)
        mine = dist.PrefixStore(f"stall/{hashlib.sha256(names.encode()).hexdigest()}", store)
        me = weakref.ref(self)
        thread_id = threading.get_ident()
        watch = StallWatch(
            mine,
            self._world.rank,
            self._world.world_size,
            seconds,
            partial(_waited, me),
            partial(_stands, me, thread_id),
        )
        # At exit too: a thread that is in the store while the interpreter ends aborts the process.
        self._stop_watching = weakref.finalize(self, watch.close)

    # -- During a backward ---------------------------------------------------------------------------------------------

    def _take(self, slot: AnySlot, parameter: nn.Parameter) -> None:
        """Take in a gradient that was just accumulated."""
        if torch._C._current_graph_task_id() != self._task:  # noqa: SLF001
            self._enter()
        self._any_arrived = True
        if not slot.fits:
            return  # [Note: a changed model]
        if self._phase is _Phase.ACCUMULATING:
            slot.adopt()
            slot.is_unsynced = True
            return
        if slot.has_arrived:
            self._take_again(slot)
            return
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided and not isinstance(slot, SparseSlot):
            raise _unexpected_sparse(slot.name)
        if not slot.is_small:
            slot.take(1.0 if self._waits_for_end or self._hook is not None else self._scale)
        slot.has_arrived = True
        if not self._knows_order:
            self._arrived.append(slot)
        bucket = slot.bucket
        bucket.num_pending -= 1
        if bucket.num_pending == 0 and not self._waits_for_end:
            self._send_full()

    def _take_again(self, slot: AnySlot) -> None:
        self._has_inner_tasks = True
        if slot.is_scaled or self._has_left(slot.bucket):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward when its first was on its way already, "
                "which happens when a model begins to use a parameter inside a reentrant checkpoint and elsewhere "
                "after its first step. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def _take_unplanned(self) -> None:
        """Note a gradient of a parameter that the plan does not have yet."""
        if torch._C._current_graph_task_id() != self._task:  # noqa: SLF001
            self._enter()
        self._any_arrived = True

    def _enter(self) -> None:
        """Begin with a graph task that is not the one that is under way, or is inside it."""
        self._drop_if_interrupted()
        if self._phase is _Phase.IDLE:
            self._begin(_Phase.COLLECTING if self.synchronizes else _Phase.ACCUMULATING)
        else:
            self._has_inner_tasks = self._waits_for_end = True

    @keep_compiler_out
    def _on_output(self, synchronizes: bool, _gradient: Tensor) -> None:
        wanted = (synchronizes and self.synchronizes) or self._is_forced
        self._drop_if_interrupted()
        if self._phase is _Phase.IDLE:
            self._begin(_Phase.COLLECTING if wanted else _Phase.ACCUMULATING)
        elif wanted and self._phase is _Phase.ACCUMULATING:
            self._phase = _Phase.COLLECTING
            self._look_at_model()

    def _drop_if_interrupted(self) -> None:
        if self._phase is not _Phase.IDLE and self._callback() is None:
            self.finish_interrupted()

    def _begin(self, phase: _Phase) -> None:
        self.num_buckets_sent = 0
        # Not earlier: in a forward, `torch.func.functional_call` may have put other tensors in the parameters' places.
        if phase is _Phase.COLLECTING:
            self._look_at_model()
        self.times.begin_backward()
        if self._order:
            self._plan_anew()
        self._phase = phase
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001
        self._waits_for_end = self._always_waits or self._has_changed
        callback = partial(self._on_end, self._task)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)  # noqa: SLF001

    @keep_compiler_out
    def _on_end(self, task: int) -> None:
        if task != self._task:
            return
        if self._phase is _Phase.COLLECTING and self._any_arrived:
            self._always_waits = self._has_inner_tasks
            self._complete()
            return
        # torch.autograd.grad: nothing was accumulated, nothing is reduced
        is_local = self._was_asked and not self._any_arrived
        self._reset()
        if is_local and not self._has_warned:
            self._has_warned = True
            warnings.warn(_LOCAL_GRADIENTS, stacklevel=2)

    # -- Messages ------------------------------------------------------------------------------------------------------

    @property
    def _scale(self) -> float:
        return 1 / self.num_dividing if self._options.average else 1.0

    def _slots(self) -> list[AnySlot]:
        return [slot for bucket in self._layout.buckets for slot in bucket.slots]

    def _has_left(self, bucket: Bucket) -> bool:
        return any(sent is bucket for sent in self._layout.buckets[: len(self._finishes)])

    def _send_full(self) -> None:
        """Send buckets in plan order, up to the first that is not full: ranks must send in one order.

        The message with the notes waits for the end. [Note: a whole backward]
        """
        buckets = self._layout.buckets
        num_free = len(buckets) - (self._layout.last_message is None)
        while len(self._finishes) < num_free and buckets[len(self._finishes)].num_pending == 0:
            self._send(len(self._finishes))

    def _send(self, index: int, note: Sequence[float] = ()) -> None:
        bucket = self._layout.buckets[index]
        if self._options.skips_unused and bucket.num_pending == len(bucket.slots) and not _has_unsynced(bucket):
            bucket.presence.zero_()
            self._finishes.append(_do_nothing)
            return
        self.times.begin_messages()
        self.num_buckets_sent += 1
        hook = self._hook
        bucket.prepare(self._scale if hook is None else 1.0)
        if note:
            _write(note, self._layout.notes)
        if hook is None:
            work = dist.all_reduce(bucket.message, group=self._group, async_op=True)
            assert work is not None
            self._finishes.append(work.wait)
        else:
            self._finish_hook()
            is_last = index == len(self._layout.buckets) - 1
            future = hook.start(GradBucket(bucket, index, is_last=is_last))
            self._finishes.append(lambda: bucket.take(result_of(future)))

    def _finish_hook(self) -> None:
        """Wait for the last hook that was started, before another call of this backward.

        A hook such as PowerSGD's makes further calls when its first is done. With two at a time, it would depend on the
        moment which rank makes which call first.
        """
        if self._hook is not None and self._finishes:
            self._finishes[-1]()

    def _exchange(self, note: Note) -> Notes | None:
        """Send what has not left, wait for everything, and return what the ranks said, if it can be read by now."""
        self.times.end_backward()
        numbers = write_note(note, self._world.rank, self._world.world_size)
        buckets, last_message = self._layout.buckets, self._layout.last_message
        while len(self._finishes) < len(buckets):
            is_last = len(self._finishes) == len(buckets) - 1
            self._send(len(self._finishes), numbers if is_last and last_message is None else ())
        if last_message is not None and len(self._finishes) == len(buckets):
            self._finish_hook()
            _write(numbers, self._layout.notes)
            work = dist.all_reduce(last_message, group=self._group, async_op=True)
            assert work is not None
            self._finishes.append(work.wait)
        self._waiting_since = time.monotonic()
        for number, finish in enumerate(self._finishes):
            self._waiting_for = number
            finish()
        while self._awaited:
            self._awaited.pop().wait()
        return self._read_notes()

    def _read_notes(self) -> Notes | None:
        notes = self._layout.notes
        if notes.device.type == "cpu":
            return read_notes(read_numbers(notes))
        # Reading now would wait for the device in every step: read what the last step's ranks said, which is there.
        before, event = self._unread if self._unread is not None else (None, None)
        copy = notes.to("cpu", non_blocking=True)
        self._unread = copy, torch.Event(notes.device.type)
        self._unread[1].record()
        if before is None or event is None:
            return None
        event.synchronize()
        return read_notes(read_numbers(before))

    def _complete(self) -> None:
        note = Note(has_changed=self._has_changed, batch_size=self._num_samples)
        try:
            notes = self._exchange(note)
            for bucket in self._layout.buckets:
                bucket.settle()
            self.times.end()
            self.num_reductions += 1
            if not self._knows_order:
                self._learn_order()
        finally:
            self._reset()
        if notes is not None:
            self._heed(notes)

    def _heed(self, notes: Notes) -> None:
        if notes.num_failed > 0:
            raise ReductionError(
                f"The backward of {notes.num_failed} of {self._world.world_size} ranks ended in an exception, so these "
                "gradients are not whole. The log of those ranks says why."
            )
        if notes.num_changed > 0:
            self._follow_model()
        self._on_notes(notes)

    def _reset(self) -> None:
        self._finishes.clear()
        for bucket in self._layout.buckets:
            bucket.reset()
        self._arrived.clear()
        self._any_arrived = False
        self._was_asked = False
        self._waits_for_end = False
        self._is_forced = False
        self._waiting_since = math.inf
        self._num_samples = 0
        self._task = _NO_TASK
        self._phase = _Phase.IDLE

    # -- Order of arrival ----------------------------------------------------------------------------------------------

    def _learn_order(self) -> None:
        """Take rank 0's order of arrival for the next plan (collective). [Note: order of arrival]."""
        self._knows_order = True
        index = {id(each.parameter): number for number, each in enumerate(self._model.trained)}
        order = [index[id(slot.parameter)] for slot in self._arrived]
        order += [number for number in reversed(range(len(index))) if number not in set(order)]
        told = torch.tensor(order, device=self._model.trained[0].parameter.device)
        dist.broadcast(told, group=self._group, group_src=0)
        self._order = told.tolist()

    @property
    def has_replanned(self) -> bool:
        """Whether the plan is that of the order of arrival."""
        return self._knows_order and self._options.follows_arrival

    def _plan_anew(self) -> None:
        """Use the order that was learnt. Not at once: until now, gradients may have lain in the old buckets."""
        plan = self._plan if self._has_changed else self._make_plan()
        if plan != self._plan:
            self._plan = plan
            self._replace_layout()
        self._order = []

    def _replace_layout(self) -> None:
        unsynced = {id(slot.parameter) for slot in self._slots() if slot.is_unsynced}
        self._layout = self._lay_out()
        for slot in self._slots():
            slot.is_unsynced = id(slot.parameter) in unsynced
        self._listen()

    # -- A model that changes ------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        dtype = self._options.dtype
        specs = [each.spec if dtype is None else replace(each.spec, dtype=dtype) for each in self._model.trained]
        return plan_buckets(
            specs,
            self._options.limits,
            order=self._order,
            num_notes=num_notes(self._world.world_size),
            only_gradients=self._hook is not None,
            notes_apart=self._options.skips_unused,
        )

    def _lay_out(self) -> Layout:
        return lay_out(self._plan, self._model.trained, self._group, as_view=self._options.as_view)

    def _listen(self) -> None:
        _remove(self._handles)
        # Held weakly: when the owner lets go of the reducer, its hooks go too, and the model can be wrapped anew.
        me = weakref.ref(self)
        self._handles += [
            slot.parameter.register_post_accumulate_grad_hook(partial(_deliver, me, slot)) for slot in self._slots()
        ]
        self._handles += [
            slot.parameter.register_hook(partial(_note_asked, me)) for slot in self._slots()[:_NUM_WATCHED]
        ]

    def _look_at_model(self) -> None:
        if not self._has_changed and self._model.has_changed():
            self._notice_change()
            self._waits_for_end = True

    def _notice_change(self) -> None:
        """Find out what has changed; what no longer fits the plan is left out of it until all ranks have been told."""
        self._has_changed = True
        current = TrainedModel(self._model.module, self._model.ignored)
        planned = {id(each.parameter): each.spec for each in self._model.trained}
        found = {id(each.parameter): each for each in current.trained}
        for slot in self._slots():
            now = found.get(id(slot.parameter))
            slot.fits = now is not None and _is_same_place(now, planned[id(slot.parameter)])
        unplanned = [each.parameter for key, each in found.items() if key not in planned]
        hook = partial(_deliver_unplanned, weakref.ref(self))
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in unplanned]

    def _follow_model(self) -> None:
        """Compare models, plan anew, and reduce what the old plan had no place for. [Note: a changed model]."""
        before = {id(each.parameter): each.spec for each in self._model.trained}
        self._model.look()
        check_same_model(self._model, self._world)
        late = [
            each
            for each in self._model.trained
            if id(each.parameter) not in before or not _is_same_place(each, before[id(each.parameter)])
        ]
        if late:
            self._reduce_late(late)
        self._rebuild()

    def _reduce_late(self, late: Sequence[TrainedParameter]) -> None:
        plan = plan_buckets([each.spec for each in late], self._options.limits)
        layout = lay_out(plan, late, self._group, as_view=self._options.as_view)
        for bucket in layout.buckets:
            for slot in bucket.slots:
                slot.has_arrived = slot.parameter.grad is not None
            bucket.prepare(self._scale)
            dist.all_reduce(bucket.message, group=self._group)
        if layout.last_message is not None:
            dist.all_reduce(layout.last_message, group=self._group)
        for bucket in layout.buckets:
            bucket.settle()

    def _rebuild(self) -> None:
        self._has_changed = False
        self._always_waits, self._has_inner_tasks = True, False
        self._order, self._knows_order = [], not self._options.follows_arrival
        if self._model.trained:
            self._plan = self._make_plan()
            self._replace_layout()
        else:
            _remove(self._handles)


def _waited(reducer: "weakref.ref[Reducer]") -> float | None:
    alive = reducer()
    return None if alive is None else time.monotonic() - alive._waiting_since  # noqa: SLF001


def _stands(reducer: "weakref.ref[Reducer]", thread_id: int) -> str:
    alive = reducer()
    return "has ended its training" if alive is None else alive.stands() + where(thread_id)


def _do_nothing() -> None:
    """Stand for a message that was not sent."""


def _has_unsynced(bucket: Bucket) -> bool:
    return any(slot.is_unsynced for slot in bucket.slots)


def _first_of(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return future.value()[0]


def _write(numbers: Sequence[float], place: Tensor) -> None:
    place.copy_(torch.tensor(numbers, dtype=torch.float32))


def _is_same_place(now: TrainedParameter, before: object) -> bool:
    return now.spec == before


def _ignore_notes(_notes: Notes) -> None:
    """Stand for an owner that does not want to know."""


def _no_callback() -> None:
    """Stand for the callback of a backward that has not begun."""


@keep_compiler_out
def _deliver(reducer: "weakref.ref[Reducer]", slot: AnySlot, parameter: nn.Parameter) -> None:
    alive = reducer()
    if alive is not None:
        alive._take(slot, parameter)  # noqa: SLF001 - this is a part of the reducer


@keep_compiler_out
def _note_asked(reducer: "weakref.ref[Reducer]", _gradient: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive._was_asked = True  # noqa: SLF001


@keep_compiler_out
def _deliver_unplanned(reducer: "weakref.ref[Reducer]", _parameter: nn.Parameter) -> None:
    alive = reducer()
    if alive is not None:
        alive._take_unplanned()  # noqa: SLF001


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _unexpected_sparse(name: str) -> ReductionError:
    return ReductionError(
        f"Parameter {name} has a sparse gradient, and its bucket holds dense ones. Only torch.nn.Embedding and "
        "EmbeddingBag with sparse=True may have sparse ones; elsewhere, build them with sparse=False."
    )
