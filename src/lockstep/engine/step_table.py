"""The parts of a step, and what they exchange: a table of the numbers that each part declares as its columns.

    of worker r    a number for each `Column`: whether it can finish the step, its place in the data, ...
    of shard s     a number for each `ShardColumn`: loss * weight, weight, ...

A number is written by one worker and zero on all others, so adding up in any order is exact, and all workers draw the
same conclusions from the same numbers. A worker that is alone exchanges nothing.

Where the model is on an asynchronous device the table holds what the hosts know, and a row on the device the rest:
[Note: host facts and device facts] in `lockstep.engine.losses`.

[Note: the commit point] A worker sends the table when it has all that it needs to finish the step: every reduced
gradient, and shard 0's buffers. So a worker that has read the whole table knows that all workers can finish the step. A
worker that has failed sends the table too, and says so in it: no worker waits for a table that is never sent.

[Note: the second exchange] A part may need more than numbers: buffers of another shape, what hooks have made of the
gradients, the options that differ. Its `check` asks for that, by what the table says, so all workers ask for the same.
What all parts have asked for travels in one exchange more; but what may turn out to be an error is asked for before:
the user's hooks must not be called in a step that fails. In most steps nothing is asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Any, Final, Generic, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World, raise_if_broken
from lockstep.data import Cursor, ShardedBatch
from lockstep.engine.batches import gather_results, name_step
from lockstep.engine.optimizers import UpdateSpec
from lockstep.errors import GroupError
from lockstep.reduce.status import has_cpu_backend
from lockstep.shards import ShardTask, sum_in_tree_order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    loss: float
    weight: float
    is_skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None


@final
class StepResult:
    """What one step did; the same on every worker.

    On an asynchronous device `loss`, `weight` and `is_skipped` wait for the device where its results are not read yet:
    to look at them after each step costs the time in which the host could have launched the next one.

    `cursor` is the step that was taken. `should_stop`: some worker was asked to stop (`Trainer.request_stop`), or a
    callback has ended the training; the same on all workers after the same step. Not after the last step of an epoch,
    unless it is the only one: what a loop does between two epochs (step a scheduler, evaluate) belongs to it. Nor where
    a callback lets the next step be the last one: that is taken first.
    """

    __slots__ = ("_read", "cursor", "should_stop")

    def __init__(self, *, cursor: Cursor, should_stop: bool, read: Callable[[], StepOutcome]) -> None:
        self.cursor = cursor
        self.should_stop = should_stop
        self._read = read

    @property
    def loss(self) -> float:
        """Weighted mean loss of the global batch, in the order of the tree: the same bits on any number of workers."""
        return self._read().loss

    @property
    def weight(self) -> float:
        """Summed weight of the global batch: samples, unless the loss says otherwise."""
        return self._read().weight

    @property
    def values(self) -> Mapping[str, float]:
        """Weighted means over the global batch of what the loss function returned besides the loss, by name.

        With one loss function for each optimizer: the loss of each one that has stepped by its name, and what its loss
        function returned besides as `name/value`.
        """
        return self._read().values

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the reduced gradient before it is clipped; None if it was not computed.

        It is where the trainer clips (`max_grad_norm`) or was made with `track_grad_norm`.
        """
        return self._read().grad_norm

    @property
    def is_skipped(self) -> bool:
        """Whether the loss was not finite and nothing was changed but the cursor and the learning rate."""
        return self._read().is_skipped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepResult) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.loss, self.weight, self.is_skipped, self.cursor, self.should_stop))

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self.loss!r}, weight={self.weight!r}, cursor={self.cursor!r}, "
            f"is_skipped={self.is_skipped!r}, should_stop={self.should_stop!r}"
            f"{f', values={dict(self.values)!r}' if self.values else ''})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.cursor, self.should_stop, self._read())

    def _values(self) -> tuple[Any, ...]:
        return self._read(), self.cursor, self.should_stop


def merge_updates(reads: Mapping[str, Callable[[], StepOutcome]], main: str) -> Callable[[], StepOutcome]:
    """Return what reads the outcome of a step of several updates, with the loss of `main` where that was made."""

    def read() -> StepOutcome:
        outcomes = {name: each() for name, each in reads.items()}
        first = outcomes[main] if main in outcomes else next(iter(outcomes.values()))
        values = {name: each.loss for name, each in outcomes.items()}
        for name, each in outcomes.items():
            values.update({f"{name}/{key}": value for key, value in each.values.items()})
        is_skipped = any(each.is_skipped for each in outcomes.values())
        return StepOutcome(
            loss=first.loss, weight=first.weight, is_skipped=is_skipped, values=values, grad_norm=first.grad_norm
        )

    return read


def _restore(cursor: Cursor, should_stop: bool, outcome: StepOutcome) -> StepResult:
    return StepResult(cursor=cursor, should_stop=should_stop, read=lambda: outcome)


T_co = TypeVar("T_co", covariant=True)

ON_DEVICE: Final = -1.0
"""Stands for a weight that is on the device; a weight is not negative."""


class Failure(IntEnum):
    """Whether a worker can finish the step."""

    NONE = 0
    OWN = 1
    REDUCTION = 2
    """The reduction has raised an error, as on all other workers."""
    UNUSABLE = 3
    """An earlier update has failed in the middle, and no checkpoint was loaded since."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Column(Generic[T_co]):
    """A number that each worker sends in each step."""

    kind: Callable[[Any], T_co]
    read: Callable[["CurrentStep"], float | Tensor]
    is_of_failed: bool = False
    """Whether a worker whose step has failed sends it too; else its number is 0."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShardColumn:
    """A number that is sent of each shard, by the worker that has run it; 0 where it has none."""

    read: Callable[[], Mapping[int, float | Tensor]]


FAILURE: Final[Column[Failure]] = Column(Failure, lambda step: step.failure, is_of_failed=True)


@final
class Rows:
    """What the table holds when all workers' numbers are in it: `rows[column]` has the value of each worker."""

    def __init__(
        self, numbers: Sequence[Any], columns: Sequence[Column[Any]], of_shards: Sequence[ShardColumn], world: World
    ) -> None:
        self.numbers = numbers
        self._num_columns = len(columns)
        self._places = {column: place for place, column in enumerate(columns)}
        self._end = len(columns) * world.world_size
        self._num_shards = (len(numbers) - self._end) // len(of_shards) if of_shards else 0
        self._shard_places = {column: place for place, column in enumerate(of_shards)}

    def __getitem__(self, column: Column[T_co]) -> tuple[T_co, ...]:
        return tuple(map(column.kind, self.numbers[self._places[column] : self._end : self._num_columns]))

    def of_shards(self, column: ShardColumn) -> tuple[float, ...]:
        start = self._end + self._shard_places[column] * self._num_shards
        return tuple(self.numbers[start : start + self._num_shards])


class StepPart:
    """What takes part in each step. A part overrides what it needs; the engine iterates over `STEP_PARTS`.

    phase      called    on
    PREPARE    `begin`   each worker
    AGREE      columns   each worker: what it sends in the table
               `check`   each worker, with the same rows, so all raise alike; it may `ask` in the second exchange
               `change_gradients`    each worker, alike, where an update can be made
    COMMIT     `commit`  each worker, after the update: it must not fail
               `undo`    a worker on which the step has failed, in any phase, before `begin` too

    `check` may make collective calls only where the step fails.
    """

    columns: Sequence[Column[Any]] = ()
    shard_columns: Sequence[ShardColumn] = ()

    def begin(self, step: "CurrentStep") -> None:
        """Check what this worker knows by itself, and record what `undo` puts back (local)."""

    def check(self, step: "CurrentStep", rows: Rows) -> None:
        """Check what all workers have sent."""

    def change_gradients(self, step: "CurrentStep") -> None:
        """Change the gradients of the whole batch, which are the same on every worker (local)."""

    def commit(self, step: "CurrentStep") -> None:
        """Write what lasts (local)."""

    def undo(self, step: "CurrentStep") -> None:
        """Put back what `begin` has recorded, if it was called (local)."""


def mean_in_tree_order(sums: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean over the shards; NaN where nothing has a weight."""
    weight = sum_in_tree_order(weights)
    return sum_in_tree_order(sums) / weight if weight else math.nan


@final
@dataclass(frozen=True, slots=True)
class WeightedLosses:
    losses: tuple[float, ...]
    """0 for a shard without samples, and where they are on the device."""
    weights: tuple[float, ...]
    """`ON_DEVICE` for one whose weight is a tensor on an asynchronous device."""

    @property
    def has_weights_on_device(self) -> bool:
        return ON_DEVICE in self.weights

    @property
    def weight(self) -> float:
        return sum_in_tree_order(self.weights)

    @property
    def mean_loss(self) -> float:
        return mean_in_tree_order(self.losses, self.weights)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    norm: Tensor | None
    is_skipped: bool
    is_bad: Tensor | None
    """A truth value on the device that decides the same, where the host does not know; else None."""
    read: Callable[[], StepOutcome]


@final
class CurrentStep:
    """One update of a step on its way through the phases: what was given, and what the parts have found out so far."""

    def __init__(self, batch: ShardedBatch, update: UpdateSpec, *, is_last: bool) -> None:
        self.batch = batch
        self.update = update
        self.is_last = is_last
        self.is_new_kind = True
        """Whether no step of this update was agreed on before."""
        self.has_recorded_parameters = False
        """Whether what is found to be written was written in this step."""
        self.tasks: Sequence[ShardTask] = ()
        self.failure: Failure = Failure.NONE
        self.error: Exception | None = None
        """Of this worker, where the others are to be sent it."""
        self.rows: Rows | None = None
        self.losses = WeightedLosses((), ())
        self.total_weight: float | Tensor = 0.0
        self.may_be_nonfinite = self.has_hooks = self.has_new_layout = False
        self.problem = ""
        """Why no update can be made, in words, where a loss is not finite."""
        self.decision: Decision | None = None
        self.questions: list[_Question] = []

    @property
    def place(self) -> str:
        return name_step(self.batch.cursor)

    def ask(
        self, purpose: str, send: Callable[[], Any], receive: Callable[[list[Any]], None], *, may_raise: bool = False
    ) -> None:
        """Let `receive` get what `send` returns on every worker. [Note: the second exchange].

        Every worker asks for the same. With `may_raise`, `receive` looks for an error, before anything else is sent.
        """
        self.questions.append(_Question(purpose, send, receive, may_raise))


@final
@dataclass(frozen=True, slots=True)
class _Question:
    purpose: str
    send: Callable[[], Any]
    receive: Callable[[list[Any]], None]
    may_raise: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepAgreement:
    """What the workers have exchanged in a step besides gradients; the same on all."""

    numbers: Sequence[float]
    answers: Mapping[bool, list[list[Any]]]
    """Of every worker, the answers to what was asked to find an error, and to what was asked besides."""
    planned: int
    """The generation of workers that one knows to be planned after this step; 0 for none."""


@final
class StepTable:
    """`ask_others` is called where an exchange has failed here; None where the loss of a worker is an error."""

    def __init__(self, world: World, num_shards: int, device: torch.device) -> None:
        self._world = world
        self._num_shards = num_shards
        self._device = device
        self.agreement: StepAgreement | None = None
        self.ask_others: Callable[[GroupError], StepAgreement | None] | None = None

    def fill_in(self, step: CurrentStep, parts: Sequence[StepPart]) -> Rows:
        columns = list(chain.from_iterable(part.columns for part in parts))
        of_shards = list(chain.from_iterable(part.shard_columns for part in parts))
        start, end = self._world.rank * len(columns), self._world.world_size * len(columns)
        numbers: list[float | Tensor] = [0.0] * (end + len(of_shards) * self._num_shards)
        for place, column in enumerate(columns, start):
            if column.is_of_failed or not step.failure:
                numbers[place] = column.read(step)
        if not step.failure:
            for place, of_shard in enumerate(of_shards):
                for shard, number in of_shard.read().items():
                    numbers[end + place * self._num_shards + shard] = number
        return Rows(numbers, columns, of_shards, self._world)

    def agree(self, step: CurrentStep, rows: Rows) -> None:
        """Let the rows have the numbers of all workers (collective). [Note: the commit point]."""
        numbers = [float(number) + 0.0 for number in rows.numbers]  # as where others add their 0.0 to a -0.0
        try:
            rows.numbers = self.exchange(numbers)
        except GroupError as error:
            if step.failure:
                raise
            rows.numbers = self._ask_others(error).numbers
        step.rows = rows

    def _ask_others(self, error: GroupError) -> StepAgreement:
        agreement = None if self.ask_others is None else self.ask_others(error)
        if agreement is None:
            raise error
        return agreement

    def exchange(self, numbers: list[float]) -> Sequence[float]:
        group = self._world.group
        if group is None or self._world.world_size == 1:
            return numbers
        table = torch.tensor(numbers, dtype=torch.float64)
        if not has_cpu_backend(group):  # then there is no other way, and reading it waits
            table = table.to(self._device)
        dist.all_reduce(table, group=group)
        values: list[float] = table.tolist()
        raise_if_broken(group)  # a reduction that was ended because a rank was lost leaves any value
        return values

    def answer(self, step: CurrentStep, planned: int) -> None:
        """Exchange what parts have asked for, and give it to them (collective). [Note: the second exchange]."""
        answers: dict[bool, list[list[Any]]] = {}
        assert step.rows is not None
        for may_raise in (True, False):
            questions = [question for question in step.questions if question.may_raise is may_raise]
            if questions:
                answers[may_raise] = found = self._gather(questions, may_raise=may_raise)
                for number, question in enumerate(questions):
                    question.receive([each[number] for each in found])
        self.agreement = StepAgreement(numbers=step.rows.numbers, answers=answers, planned=planned)

    def _gather(self, questions: Sequence[_Question], *, may_raise: bool) -> list[list[Any]]:
        if self._world.world_size == 1:
            return [[question.send() for question in questions]]
        purpose = " and ".join(dict.fromkeys(question.purpose for question in questions))
        try:
            return gather_results(self._world, lambda: [question.send() for question in questions], purpose)
        except GroupError as error:
            return self._ask_others(error).answers[may_raise]
