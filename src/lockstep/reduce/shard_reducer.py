"""The gradients of a step: of all shards of all workers, added in the order of the tree, into `.grad`.

    worker with shards 0 1 2 of 5          partials, a stack
    -----------------------------          -----------------
    begin                                  tasks: (0), (1, adds to 1 partial), (2)
    shard 0: backward, `end`               [0]
    shard 1: backward, `end`               [0 + 1]
    shard 2: backward                      kept [0 + 1]; as gradients of shard 2 arrive, buckets are sent with both
    `end`                                  `.grad` is ((0 + 1) + (2 + (3 + 4))), on every worker

A worker that is alone has the whole tree in its stack, and sends nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from operator import attrgetter, is_not, sub
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.reduce.current_plan import ReducerOptions
from lockstep.reduce.model import TrainedModel, TrainedParameter
from lockstep.reduce.partials import Gradients, Merge, Partials, add_gradients, add_zero, separate, take_gradients
from lockstep.reduce.plan import BucketLimits
from lockstep.reduce.reducer import Reducer
from lockstep.reduce.reduction import TreeReduction, do_nothing
from lockstep.reduce.tensor_bits import largest_magnitude, sum_for_finite_check
from lockstep.shards import ShardTask, even_ranges, partial_nodes_by_size, plan_shard_tasks
from lockstep.torch_private.autograd import (
    NO_GRAPH_TASK,
    current_graph_task_id,
    post_accumulate_grad_hooks,
    run_backward_of_leaf,
)
from lockstep.torch_private.modules import version_of

_PURPOSE = "a training step"
_GRADIENT = attrgetter("grad")


@final
class ShardReducer:
    def __init__(self, model: TrainedModel, world: World, num_shards: int, limits: BucketLimits) -> None:
        self._in_place = InPlaceAccumulation(model.trained)
        self._world = world
        self._num_shards = num_shards
        self._partials = Partials()
        self._last = ShardTask(-1, 0)
        self._num_reductions = 0
        self._on_last_gradient: Callable[[], None] = do_nothing
        self._parameters = [each.parameter for each in model.trained]
        self._hooks: list[tuple[int, ...]] = []
        self._tree: TreeReduction | None = None
        self._reducer: Reducer | None = None
        if world.group is not None and world.world_size > 1:
            options = ReducerOptions(purpose=_PURPOSE, limits=limits, as_view=False, holds_partials=True)
            self._tree = TreeReduction(world, num_shards)
            self._expect(self._tree, even_ranges(world.world_size, num_shards))
            self._reducer = Reducer(model, world, options, self._tree)
            # Only in the last task of a step: a backward between two steps is the user's own.
            self._reducer.watch.synchronizes = False

    @property
    def has_nested_backward(self) -> bool:
        return self._in_place.has_nested_backward

    @property
    def has_reduced(self) -> bool:
        """Whether the reduction since `begin` is over here, so that no other worker waits for this one in it."""
        return self._reducer is not None and self._reducer.num_reductions != self._num_reductions

    @property
    def has_failed_on_all(self) -> bool:
        """Whether the reduction since `begin` has ended in an error that every worker has: it adds nothing to it."""
        return self.has_reduced and self._reducer is not None and self._reducer.failed_on_all

    @property
    def last_gradient_ns(self) -> int:
        """When the last gradient of this worker had arrived in this step; 0 if nothing was recorded of it."""
        return 0 if self._reducer is None else self._reducer.times.moments().backward_end

    def send_besides(self, start: Callable[[], Callable[[], None]]) -> None:
        """Call `start` just before the last message of each step, see `BucketSchedule.send_besides` (local)."""
        if self._reducer is not None:
            self._reducer.schedule.send_besides = start

    def note_single_additions(self, *, adds_once: bool) -> None:
        """Note whether all workers' backwards so far add once to each parameter: they run no others inside (local)."""
        self._in_place.adds_once = adds_once
        if self._reducer is not None and not adds_once:
            self._reducer.watch.wait_for_ends()

    def expect_nested_backward(self) -> None:
        """Look anew whether a backward runs others inside: the next one is of another loss (local)."""
        self._in_place.adds_once = False
        if self._reducer is not None:
            self._reducer.watch.learn_anew()

    def on_last_gradient(self, call: Callable[[], None]) -> None:
        """Call `call` when the gradients of a worker's last shard are computed, before the wait for others (local)."""
        self._on_last_gradient = call
        if self._reducer is not None:
            self._reducer.schedule.on_end_of_backward = call

    def begin(self, ranges: Sequence[range]) -> Sequence[ShardTask]:
        """Begin with a step, for which no parameter has a gradient; return this worker's tasks (local)."""
        tasks = plan_shard_tasks(ranges[self._world.rank], self._num_shards)
        self._last = tasks[-1]
        self._partials = Partials()
        self._in_place.begin_step()
        self._look_at_hooks()
        if self._reducer is not None and self._tree is not None:
            self._reducer.watch.synchronizes = False
            self._num_reductions = self._reducer.num_reductions
            self._expect(self._tree, ranges)
        return tasks

    def mark(self, loss: Tensor, task: ShardTask) -> None:
        self._in_place.watch(loss, is_last=task == self._last)
        merge = None
        if task.num_sums:
            merge = self._in_place.offer(self._partials.kept[-1])
        if merge is not None:
            self._partials.kept.pop()
        if self._reducer is None:
            return
        if task == self._last:
            self._partials.set_aside(task.num_sums - (merge is not None), first=merge)
            self._reducer.watch.synchronize_once()
        self._reducer.mark(loss)

    def end_backward(self) -> None:
        """Look whether the backward of the marked loss has run another one, before anything else runs one (local)."""
        self._in_place.look_for_inner_tasks()

    def end(self, task: ShardTask) -> None:
        """End a task, whether or not it had a backward; after the last one gradients are whole (then collective)."""
        if self._reducer is None or task != self._last:
            gradients, num_added = self._in_place.take()
            self._partials.push(gradients, task.num_sums - num_added)
            if task == self._last:
                self._on_last_gradient()
                for parameter, gradient in self._partials.kept.pop().items():
                    parameter.grad = gradient
            return
        self._in_place.end_in_buckets()
        if self._reducer.num_reductions == self._num_reductions:  # no backward, or one without gradients
            if not self._reducer.watch.synchronizes:
                self._partials.set_aside(task.num_sums)
                self._reducer.watch.synchronize_once()
            self._reducer.reduce_without_backward()
        self._partials.clear()

    def sum_for_finite_check(self, device: torch.device) -> Tensor | float:
        """Return a number that is not finite if a gradient is not, in this worker's segment of each bucket (local)."""
        return sum_for_finite_check(self._own_gradients(), device)

    def largest_magnitude(self, device: torch.device) -> Tensor:
        """Return the largest magnitude in this worker's part of the gradients, as `sum_for_finite_check` (local)."""
        return largest_magnitude(self._own_gradients(), device)

    def _own_gradients(self) -> Iterator[Tensor]:
        if self._reducer is None:
            return (each.grad for each in self._parameters if each.grad is not None)
        segments = (bucket.gradients.tensor_split(self._world.world_size) for bucket in self._reducer.buckets)
        return (parts[self._world.rank] for parts in segments)

    def fail(self, ranges: Sequence[range]) -> None:
        """Let all workers have an error for this step, which this one cannot complete (collective).

        Ranges that cannot be those of these workers, as in a batch of another loader, are replaced by those of the step
        before. A GroupError says that the other workers cannot be informed.
        """
        self._partials.clear()
        self._in_place.begin_step()
        if self._reducer is not None and self._tree is not None:
            shards = [shard for each in ranges for shard in each]
            if len(ranges) == self._world.world_size and shards == list(range(self._num_shards)):
                self._expect(self._tree, ranges)
            self._reducer.fail()

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = self._tree = None

    def _expect(self, tree: TreeReduction, ranges: Sequence[range]) -> None:
        tree.expect(self._partials, [partial_nodes_by_size(shards, self._num_shards) for shards in ranges])

    def _look_at_hooks(self) -> None:
        """Find out which gradients hooks of the user's read; they must run before a gradient is taken."""
        found = self._list_hooks()
        if found == self._hooks:
            return
        if self._reducer is not None:
            self._reducer.listen_last()
        self._hooks = self._list_hooks()
        num_own = int(self._reducer is not None)
        with_hooks = zip(self._parameters, self._hooks, strict=True)
        self._in_place.hooked = {parameter for parameter, hooks in with_hooks if len(hooks) > num_own}

    def _list_hooks(self) -> list[tuple[int, ...]]:
        return [tuple(hooks or ()) for hooks in map(post_accumulate_grad_hooks, self._parameters)]


@final
class InPlaceAccumulation:
    """Lets the backwards of shards add to partials. [Note: accumulating in place] in `lockstep.reduce.partials`.

    [Note: what may be added to in place] A partial may be what `.grad` holds during a backward if that gives the sums
    of the tree, and if no hook reads it that expects the gradient of one shard. `may_accumulate_in_place` checks both:

    - A backward runs another one inside, as a reentrant checkpoint does: parameters may get their gradients in several
      additions. In the first step nothing is added in place; whether any worker had such backwards in any step decides
      for all that follow. ([Note: a backward inside a backward])
    - A loss function runs a backward of its own before it returns: its gradients wait in `.grad` for those of the loss.
    - A sparse gradient whose indices repeat is added in several additions.
    - A hook of the user's, run after accumulation, must be given one shard's gradient.

    [Note: a backward inside a backward] Autograd numbers the graph tasks of a process. If the number after a backward
    is not the next one, then something in it ran a backward of its own. This is sent to all workers; the step in which
    that is first found, if it is not the first, fails on all of them alike, whether anything was added in place there
    or not. To look at the numbers takes as long as many additions. So once it is known that there are no such
    backwards, only the last one of a step is looked at, and in the others, where gradients are added in place, a second
    addition shows in the version of the sum.
    """

    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        self._parameters = [each.parameter for each in trained]
        self.adds_once = False
        self.hooked: set[nn.Parameter] = set()
        self.has_nested_backward = False
        self._sparse = {each.parameter for each in trained if each.spec.is_sparse}
        self._task = NO_GRAPH_TASK
        self._is_waiting = False
        self._target: Gradients | None = None
        self._rest: Gradients = {}
        self._versions: list[int] = []
        self._task_counter = _TaskCounter()

    def begin_step(self) -> None:
        """Forget a step that may have ended in the middle of a backward."""
        self.has_nested_backward = False
        self._task = NO_GRAPH_TASK
        self._target, self._rest, self._versions = None, {}, []

    def watch(self, loss: Tensor, *, is_last: bool) -> None:
        """Watch the backward from `loss`, the last one of this worker in a step or another."""
        if is_last or not self.adds_once:
            loss.register_hook(self._note_task)
        self._is_waiting = any(map(is_not, map(_GRADIENT, self._parameters), repeat(None)))
        if self._is_waiting:
            waiting = {each: each.grad for each in self._parameters if each.grad is not None}
            separate(waiting)  # they are added to in place now
            for parameter, gradient in waiting.items():
                parameter.grad = gradient

    def offer(self, partial: Gradients) -> Merge | None:
        """Let `.grad` be the partial that the gradients to come are to be added to, as far as that may be.

        Returns what is left to be added, where the gradients go to buckets; None if nothing may be added in place.
        """
        chosen = may_accumulate_in_place(
            partial.keys(),
            adds_once=self.adds_once,
            is_waiting=self._is_waiting,
            sparse=self._sparse,
            hooked=self.hooked,
        )
        if not chosen:
            return None
        left_out = partial.keys() - chosen if len(chosen) < len(partial) else ()
        self._rest = {parameter: partial.pop(parameter) for parameter in left_out}
        self._target = partial
        for parameter, gradient in partial.items():
            parameter.grad = gradient
        self._versions = list(map(version_of, partial.values()))
        return Merge(gradients=self._rest, in_place=chosen)

    def take(self) -> tuple[Gradients, int]:
        """Return the gradients of a shard whose backward is over, and to how many partials they were added."""
        target, rest = self._target, self._rest
        self._target, self._rest = None, {}
        if target is None:
            return take_gradients(self._parameters, self._sparse), 0
        num_added = list(map(sub, map(version_of, target.values()), self._versions))
        if max(num_added) > 1:
            self.has_nested_backward = True
        if not all(num_added):
            add_zero([gradient for gradient, number in zip(target.values(), num_added, strict=True) if not number])
        found = take_gradients(self._parameters, self._sparse, target)
        if not rest and not found:
            return target, 1
        summed = {parameter: found.pop(parameter, gradient) for parameter, gradient in target.items()}
        return {**summed, **add_gradients(rest, found)}, 1

    def end_in_buckets(self) -> None:
        self._target, self._rest = None, {}

    def look_for_inner_tasks(self) -> None:
        task, self._task = self._task, NO_GRAPH_TASK
        if task != NO_GRAPH_TASK and not self.has_nested_backward and self._task_counter.next_task() != task + 1:
            self.has_nested_backward = True

    def _note_task(self, _gradient: Tensor) -> None:
        self._task = current_graph_task_id()


def may_accumulate_in_place(
    partial: AbstractSet[nn.Parameter],
    *,
    adds_once: bool,
    is_waiting: bool,
    sparse: AbstractSet[nn.Parameter],
    hooked: AbstractSet[nn.Parameter],
) -> AbstractSet[nn.Parameter]:
    """Return the parameters of a partial that autograd may add to. [Note: what may be added to in place]."""
    if not adds_once or is_waiting:
        return set()
    return partial - (sparse | hooked) if sparse or hooked else partial


@final
class _TaskCounter:
    """Apart from its owner: its hook is a reference cycle, which would hold the model."""

    def __init__(self) -> None:
        self._found = 0
        self._leaf = torch.zeros((), requires_grad=True, device="cpu")
        self._leaf.register_hook(self._note)
        self._gradient = torch.zeros((), device="cpu")

    def next_task(self) -> int:
        """Return the number of the next graph task, which this call uses."""
        run_backward_of_leaf(self._leaf, self._gradient)
        return self._found

    def _note(self, _gradient: Tensor) -> None:
        self._found = current_graph_task_id()
