"""The reducer: watches gradients arrive, sends each bucket when it is full, completes the rest at the end.

It is driven by gradients, not by forward, so it does not matter how the forward was called: through the wrapper,
through the module itself, or twice before the first backward.

    backward of one rank          reducer                                       the group
    --------------------          -------                                       ---------
    1 gradient accumulated   ->   `_take`: into its place in the bucket
    2 bucket's last gradient ->   `send_full`: buckets leave in plan order  ->  all_reduce starts
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
So all ranks get an error for that backward, and are in step if they all go on; none waits without end.

[Note: plain arrivals] A model may have hundreds of small parameters, and each gradient costs a call into Python. After
one that had nothing special about it, those that follow in the same graph task have not either, and are only counted.
"""

import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from lockstep.comm import World, group_store
from lockstep.compiler import keep_compiler_out
from lockstep.errors import PeerLostError, ReductionError
from lockstep.reduce.bucket_schedule import Exchange
from lockstep.reduce.bucket_set import AnySlot, Bucket, empty_layout
from lockstep.reduce.comm_hook import CommHook, GradBucket
from lockstep.reduce.compiled_autograd import refuse_compiled_autograd
from lockstep.reduce.current_plan import LivePlan
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.options import ReducerOptions
from lockstep.reduce.partials import Partials
from lockstep.reduce.stall import StallWatch, where
from lockstep.reduce.status import Note, Notes
from lockstep.reduce.times import StepTimes
from lockstep.settings import read_stall_seconds
from lockstep.shards import Node

_NO_TASK = -1
_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - torch has no public name for it
_NUM_WATCHED = 32
"""Of so many parameters is seen whether `torch.autograd.grad` asks for their gradients; each costs a call."""
_LOCAL_GRADIENTS = (
    "torch.autograd.grad gave gradients of this rank alone for parameters of a model that is trained on several: they "
    "are not averaged. Call backward() for averaged ones, or average these with torch.distributed.all_reduce."
)


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


@final
class Reducer:
    """Reduces the gradients of a model over a group in every backward.

    Args:
        model: Its trainable parameters, the same on every rank.
        world: The workers; every rank must run the same number of synchronising backwards.
        options: How.

    Attributes:
        synchronizes: False while gradients should only accumulate locally; looked at when a graph is marked and when
            its gradients arrive. Where ranks run several shards each it is True for one backward, when its owner says
            so: a backward between two steps is nobody else's business.
        num_reductions: How many reductions were completed.
    """

    def __init__(self, model: TrainedModel, world: World, options: ReducerOptions) -> None:
        assert world.group is not None
        self.synchronizes = options.num_shards is None
        self.num_reductions = 0
        self._group = world.group
        self._world = world
        self._averages = options.average
        self._handles: list[RemovableHandle] = []
        # Weakly, as everywhere here: reference counts alone must free a reducer's buckets.
        self._plan = LivePlan(model, world, options, partial(_let_go, weakref.ref(self)))
        self._exchange = Exchange(
            world, self._plan.layout, skips_unused=options.skips_unused, num_shards=options.num_shards
        )
        self._accumulates_apart = options.num_shards is not None
        self._exchange.scale = 1 / world.world_size if options.average else 1.0
        self._on_notes: Callable[[Notes], None] = _ignore_notes
        self._phase = _Phase.IDLE
        self._entering = threading.RLock()
        self._task = _NO_TASK
        self._plain_task = _NO_TASK - 1
        self._callback: Callable[[], partial[None] | None] = _no_callback
        self._any_arrived = False
        self._was_asked = False
        self._has_warned = False
        self._waits_for_end = False
        self._always_waits = True  # until a first backward has shown that it need not. [Note: the end of a backward]
        self._has_inner_tasks = False
        self._is_forced = False
        self._forwards: dict[int, _Forward] = {}
        self._listen()
        weakref.finalize(self, _remove, self._handles)
        self._stop_watching = _watch_for_stalls(self, model, world)

    # -- What its owner says -------------------------------------------------------------------------------------------

    def mark(self, *outputs: Tensor, num_samples: int = 0) -> None:
        """Mark where a backward begins: at `outputs` of a module, or a loss. [Note: the end of a backward].

        Whether that backward synchronises is decided here and there: neither may be under `no_sync`.

        Args:
            outputs: Those of one forward.
            num_samples: How many samples it was given; they count in each backward that goes through it. 0 if that is
                not known.
        """
        forward = _Forward(num_samples)
        for output in outputs:
            if output.grad_fn is not None:
                refuse_compiled_autograd()
                # A strong reference: a graph outlives a wrapper that nobody kept, and its backward must synchronise all
                # the same.
                output.register_hook(partial(self._on_output, self.synchronizes, forward))

    def prepare_for_backward(self, _outputs: Sequence[Tensor] = ()) -> None:
        """Let the next backward synchronise, whatever was said when its graph was built (torch's pipelining asks)."""
        self._is_forced = True

    def begin_forward(self) -> None:
        """Note that a forward begins, whose gradients are to come (local)."""
        self._exchange.times.begin_forward()

    def divide_by(self, num_ranks: int) -> None:
        """Let averages from now on be those of so many ranks (each rank calls)."""
        self._exchange.scale = 1 / num_ranks if self._averages else 1.0

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on (each rank calls, with the same hook)."""
        self._exchange.hook = hook
        self._plan.use_only_gradients()
        self._begin_anew()

    def wait_at_end(self, futures: "Sequence[torch.futures.Future[object]]") -> None:
        """Let the next synchronising backward wait for these at its end."""
        self._exchange.wait_at_end(futures)

    def on_notes(self, call: Callable[[Notes], None]) -> None:
        """Call `call` with what all ranks said, after each reduction."""
        self._on_notes = call

    def on_end_of_backward(self, call: Callable[[], None]) -> None:
        """Call `call` when a backward has brought its last gradient, before the wait for others."""
        self._exchange.on_end_of_backward = call

    def send_besides(self, start: Callable[[], Callable[[], None]]) -> None:
        """Call `start` in each reduction just before its last message.

        It starts what is to travel beside the gradients, and returns what waits for that and takes it in. Every rank
        makes the same calls there, one whose backward has failed too.
        """
        self._exchange.send_besides = start

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Let a wait within, which is not the reducer's own, be watched as well."""
        return self._exchange.waiting_for(what)

    def finish_interrupted(self) -> None:
        """Complete the reduction of a backward that ended in an exception here; called before a forward (collective).

        The engine holds the callback as long as the backward runs, and lets go of it uncalled when it fails.
        """
        if self._phase is _Phase.IDLE or self._callback() is not None:
            return
        if self._phase is _Phase.ACCUMULATING:
            self._reset()
            return
        self._complete_failed()

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank ran no backward, with what `.grad` holds (collective)."""
        self.finish_interrupted()
        self._prepare()
        self._phase = _Phase.COLLECTING
        self._complete()

    def expect_last(self, partials: Partials, nodes: Sequence[Sequence[Node]]) -> None:
        """Let the next reduction be that of all shards: of what it brings and of this rank's partials (local).

        Args:
            partials: What this rank's other shards gave; what is merged is added to as gradients arrive.
            nodes: The subtrees whose sums each rank will have, in rank order: those it keeps, then that with the
                gradients to come.
        """
        self._exchange.partials, self._exchange.nodes = partials, nodes

    def wait_for_ends(self) -> None:
        """Send nothing before the end of a backward from now on. [Note: the end of a backward]."""
        self._always_waits = self._has_inner_tasks = True

    def listen_last(self) -> None:
        """See each gradient after all other hooks that the parameters have by now (local; between two backwards)."""
        self._listen()

    def fail(self) -> None:
        """Take part in a reduction to which this rank has nothing to give, so that all get an error (collective)."""
        if self._phase is not _Phase.COLLECTING:
            self._prepare()
        self._exchange.expect_nothing()
        self._complete_failed()

    def reduce_nothing(self) -> None:
        """Take part in a reduction with zeros; `.grad` stays as it is (collective)."""
        gradients = [(slot.parameter, slot.take_away()) for slot in self._plan.slots]
        try:
            self.reduce_without_backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def close(self) -> None:
        """Reduce no more (local)."""
        _remove(self._handles)
        self._plan.close()
        self._stop_watching()

    # -- What it says --------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they travel."""
        return self._plan.layout.buckets

    @property
    def num_buckets_sent(self) -> int:
        """How many buckets the last reduction sent."""
        return self._exchange.num_buckets_sent

    @property
    def times(self) -> StepTimes:
        """When the parts of the last step began and ended."""
        return self._exchange.times

    @property
    def is_idle(self) -> bool:
        """Whether no backward is under way or was left unfinished."""
        return self._phase is _Phase.IDLE

    @property
    def is_in_order(self) -> bool:
        """Whether buckets are in the order in which gradients arrive."""
        return self._plan.is_in_order

    def waited(self) -> float:
        """Return for how many seconds this rank has waited for others by now; below zero if it does not wait."""
        return self._exchange.waited()

    def stands(self) -> str:
        """Return in words how far this rank is."""
        inside = "is not in a backward" if self.is_idle else "is in a backward"
        return f"{self._exchange.describe_wait() or inside} and has reduced {self.num_reductions} times"

    # -- Names that torch's own hooks use ------------------------------------------------------------------------------

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: torch's reducer has to know of optimizers that run in a hook, this one does not."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Add up what a hook sees of a bucket; the future holds the sum (collective)."""
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(_first_of)  # type: ignore[no-any-return]

    # -- During a backward ---------------------------------------------------------------------------------------------

    def _take(self, slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Take in a gradient that was just accumulated."""
        if _current_task() != self._task:
            self._enter()
            slot, bucket = self._plan.slot_of(parameter)  # there may be a new layout now
        self._any_arrived = True
        if not slot.fits:
            return  # [Note: a changed model]
        if self._phase is _Phase.ACCUMULATING:
            if not self._accumulates_apart:
                slot.adopt()
                slot.is_unsynced = True
            return
        if slot.has_arrived:
            self._take_again(slot, bucket)
            return
        if not slot.is_small:
            slot.take(1.0 if self._waits_for_end or self._exchange.hook is not None else self._exchange.scale)
        if self._plan.wants_order:
            self._plan.note_arrival(slot)
        elif not self._plan.has_changed and not self._waits_for_end:
            self._plain_task = self._task  # [Note: plain arrivals]
        slot.has_arrived = True
        bucket.num_pending -= 1
        if bucket.num_pending == 0 and not self._waits_for_end:
            self._exchange.send_full()

    def _take_again(self, slot: AnySlot, bucket: Bucket) -> None:
        self._has_inner_tasks = True
        if slot.is_scaled or self._exchange.has_left(bucket):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward when its first was on its way already, "
                "which happens when a model begins to use a parameter inside a reentrant checkpoint and elsewhere "
                "after its first step. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        slot.take_again()

    def _take_unplanned(self) -> None:
        """Note a gradient of a parameter that the plan does not have yet."""
        if _current_task() != self._task:
            self._enter()
        self._any_arrived = True

    def _enter(self) -> None:
        """Begin with a graph task that is not the one that is under way, or is inside it.

        Two threads of the autograd engine, one per device, may come here at once with gradients of one task.
        """
        with self._entering:
            if _current_task() != self._task:
                self._enter_alone()

    def _enter_alone(self) -> None:
        self.finish_interrupted()
        if self._phase is _Phase.IDLE:
            self._begin(_Phase.COLLECTING if self.synchronizes else _Phase.ACCUMULATING)
        else:
            self._has_inner_tasks = self._waits_for_end = True
            self._plain_task = _NO_TASK - 1

    @keep_compiler_out
    def _on_output(self, synchronizes: bool, forward: "_Forward", _gradient: Tensor) -> None:
        refuse_compiled_autograd()
        with self._entering:
            self._enter_at_output((synchronizes and self.synchronizes) or self._is_forced)
            self._forwards[id(forward)] = forward

    def _enter_at_output(self, wanted: bool) -> None:
        self.finish_interrupted()
        if self._phase is _Phase.IDLE:
            self._begin(_Phase.COLLECTING if wanted else _Phase.ACCUMULATING)
        elif wanted and self._phase is _Phase.ACCUMULATING:
            self._phase = _Phase.COLLECTING
            self._look_at_model()

    def _begin(self, phase: _Phase) -> None:
        self._waits_for_end = self._always_waits
        if not self._world.has_group:
            phase = _Phase.ACCUMULATING  # the group was destroyed: this rank trains alone
        if phase is _Phase.COLLECTING:
            self._prepare()
        elif not self._accumulates_apart:
            self._look_at_model()
            self._begin_buckets()
        self._phase = phase
        self._task = _current_task()
        callback = partial(self._on_end, self._task)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)  # noqa: SLF001

    def _prepare(self) -> None:
        # Not earlier: in a forward, `torch.func.functional_call` may have put other tensors in the parameters' places.
        self._look_at_model()
        if self._plan.use_order():
            self._use_layout()
        self._begin_buckets()
        self._exchange.begin()

    def _begin_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.begin()

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

    def _complete(self) -> None:
        note = Note(has_changed=self._plan.has_changed, batch_size=_count_samples(self._forwards.values()))
        try:
            notes = self._exchange.complete(note)
            for bucket in self.buckets:
                bucket.settle()
            self.num_reductions += 1
            self._plan.learn_order()
        except PeerLostError as error:
            error.add_note(f"This rank had reduced the gradients of {self.num_reductions} backwards before.")
            raise
        finally:
            self._disarm()
        if notes is not None:
            self._heed(notes)

    def _complete_failed(self) -> None:
        """Make the calls of `_complete`, so that the others' find their counterparts."""
        try:
            self._exchange.complete(Note(has_failed=True))
            self._plan.learn_order()
        finally:
            self._disarm()

    def _disarm(self) -> None:
        self._reset()
        if self._accumulates_apart:
            self.synchronizes = False

    def _heed(self, notes: Notes) -> None:
        if notes.num_failed > 0:
            raise ReductionError(
                f"The backward of {notes.num_failed} of {self._world.world_size} ranks ended in an exception, so these "
                "gradients are not whole. The log of those ranks says why."
            )
        if notes.num_changed > 0 and self._accumulates_apart:
            raise ReductionError(
                f"The parameters of the model were changed during a step on {notes.num_changed} of "
                f"{self._world.world_size} ranks, so these gradients are not whole. Change a model between steps only."
            )
        if notes.num_changed > 0:
            self._plan.follow(notes, self._exchange.scale)
            self._begin_anew()
        self._on_notes(notes)

    def _reset(self) -> None:
        self._exchange.reset()
        self._plan.forget_arrivals()
        self._any_arrived = False
        self._was_asked = False
        self._waits_for_end = False
        self._is_forced = False
        self._forwards.clear()
        self._task = _NO_TASK
        self._plain_task = _NO_TASK - 1
        self._phase = _Phase.IDLE

    # -- The plan ------------------------------------------------------------------------------------------------------

    def _look_at_model(self) -> None:
        unplanned = self._plan.look()
        hook = partial(_deliver_unplanned, weakref.ref(self))
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in unplanned]
        self._waits_for_end |= self._plan.has_changed

    def _begin_anew(self) -> None:
        self._always_waits, self._has_inner_tasks = True, False
        self._use_layout()

    def _use_layout(self) -> None:
        self._exchange.layout = self._plan.layout
        self._listen()

    def _listen(self) -> None:
        _remove(self._handles)
        # Held weakly: when the owner lets go of the reducer, its hooks go too, and the model can be wrapped anew.
        me = weakref.ref(self)
        places = [(slot, bucket) for bucket in self.buckets for slot in bucket.slots if slot.parameter.requires_grad]
        for slot, bucket in places:
            hook = partial(_deliver, me, slot, bucket)
            self._handles.append(slot.parameter.register_post_accumulate_grad_hook(hook))
        for slot, _ in places[:_NUM_WATCHED]:
            self._handles.append(slot.parameter.register_hook(partial(_note_asked, me)))

    def _let_go_of_layout(self) -> None:
        _remove(self._handles)
        self._exchange.layout = empty_layout()


def _watch_for_stalls(reducer: Reducer, model: TrainedModel, world: World) -> Callable[[], object]:
    """Begin to watch the waits of a reducer; return what ends it."""
    seconds = read_stall_seconds()
    store = None if world.group is None else group_store(world.group)
    if world.world_size == 1 or seconds == 0 or store is None:
        return _do_nothing
    names = "".join(str(each.spec) for each in model.trained)
    mine = dist.PrefixStore(f"stall/{hashlib.sha256(names.encode()).hexdigest()}", store)
    me = weakref.ref(reducer)
    stands = partial(_stands, me, threading.get_ident())
    watch = StallWatch(mine, world.rank, world.world_size, seconds, partial(_waited, me), stands)
    # At exit too: a thread that is in the store while the interpreter ends aborts the process.
    return weakref.finalize(reducer, watch.close)


def _waited(reducer: "weakref.ref[Reducer]") -> float | None:
    alive = reducer()
    return None if alive is None else alive.waited()


def _stands(reducer: "weakref.ref[Reducer]", thread_id: int) -> str:
    alive = reducer()
    return "has ended its training" if alive is None else alive.stands() + where(thread_id)


def _do_nothing() -> None:
    """Stand for the end of a watch that there is not."""


def _first_of(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return future.value()[0]


def _ignore_notes(_notes: Notes) -> None:
    """Stand for an owner that does not want to know."""


def _no_callback() -> None:
    """Stand for the callback of a backward that has not begun."""


@keep_compiler_out
def _deliver(reducer: "weakref.ref[Reducer]", slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
    alive = reducer()
    if alive is None:
        return
    if slot.is_small and not slot.has_arrived and _current_task() == alive._plain_task:  # noqa: SLF001
        slot.has_arrived = True  # [Note: plain arrivals]
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            alive._exchange.send_full()  # noqa: SLF001
    else:
        alive._take(slot, bucket, parameter)  # noqa: SLF001 - this is a part of the reducer


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


@final
class _Forward:
    """One forward, which a backward may go through at several outputs.

    Args:
        num_samples: How many samples it was given; 0 if that is not known.
    """

    __slots__ = ("num_samples",)

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples


def _count_samples(forwards: Iterable[_Forward]) -> int:
    """Return of how many samples these are the forwards; 0 if that of one is not known."""
    counts = [forward.num_samples for forward in forwards]
    return sum(counts) if all(counts) else 0


def _let_go(reducer: "weakref.ref[Reducer]") -> None:
    alive = reducer()
    if alive is not None:
        alive._let_go_of_layout()  # noqa: SLF001


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
