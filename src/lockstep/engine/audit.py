"""What the audit log of a run holds of each step, as short texts of numbers: `StepAudited.facts`.

    inputs    options    the optimizer's options: learning rate, weight decay, ...
              samples    of each shard, the bits of its samples
              state      the bits of parameters and buffers as the step begins
    outputs   loss       of each shard
              gradient   the bits of the gradient of the whole batch, as the update has left it; none of a skipped step,
                         whose gradient was not summed, or whose NaN have bits that depend on the workers

Whoever computes the step again from the same inputs has the same outputs, on any number of workers. So the first fact
that differs, in this order, says what went wrong. The numbers of the state, and of the gradient of the step before, are
compared between the workers in each step.

[Note: audited in turn] To read all bits of a large model takes as long as a part of its update. So a step reads up to
`_WINDOW_BYTES` of state and of gradient, and the next step the following ones. A smaller model is read as a whole in
each step. The digest in each checkpoint is of the whole state.
"""

import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, final

import numpy as np
from torch import Tensor

from lockstep.audit_facts import NUM_MARKS, condense, number_of
from lockstep.data import Slice
from lockstep.data.contents import slice_number
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import Column, CurrentStep, Rows, ShardColumn, StepPart
from lockstep.errors import ReductionError
from lockstep.events import StepAudited
from lockstep.reduce.model import describe_options
from lockstep.reduce.tensor_bits import numbers_of_bits
from lockstep.sharding.pieces import Piece
from lockstep.torch_private.modules import tree_leaves

_WINDOW_BYTES: Final = 1 << 18
_EXACT: Final = (bool, int, float, complex, str, bytes, type(None))
"""What enters in full; other objects by what they hold, or described."""
_CODE = (type, types.ModuleType, types.FunctionType)
_MAX_DEPTH = 8


def windows_of(tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
    """Return what is read in one step after the other: all of it, or some of a large model."""
    windows: list[list[Piece]] = [[]]
    room = _WINDOW_BYTES
    for name, tensor in tensors.items():
        size, start = tensor.element_size(), 0
        while start < tensor.numel():
            if room < size:
                windows.append([])
                room = _WINDOW_BYTES
            stop = min(tensor.numel(), start + room // size)
            windows[-1].append(Piece(name, start, stop))
            room -= (stop - start) * size
            start = stop
    return windows


@final
class _Rotation:
    """The windows of some tensors, kept until these have other names or sizes."""

    def __init__(self) -> None:
        self._sizes: list[tuple[str, int]] = []
        self._windows: list[list[Piece]] = [[]]

    def window(self, tensors: Mapping[str, Tensor], step: int) -> list[Piece]:
        sizes = [(name, each.numel()) for name, each in tensors.items()]
        if sizes != self._sizes:
            self._sizes, self._windows = sizes, windows_of(tensors)
        return self._windows[step % len(self._windows)]


@final
class AuditedStep(StepPart):
    """Off where `RunState.audited` is None: then its columns are zeros."""

    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._world, self._trained = runs.state, runs.world, runs.trained
        self._of_state, self._of_gradient = _Rotation(), _Rotation()
        self._samples: dict[int, float] = {}
        self._numbers: dict[str, Sequence[float]] = {}
        self._places: dict[str, list[str]] = {}
        self._options = ""
        self._last_gradient = 0.0
        self._number_of_update = 0
        self._scale = 1.0
        self._found = Column(float, lambda _: self._number("state") if self._state.audited is not None else 0.0)
        self._before = Column(float, lambda _: self._last_gradient)
        self._of_shards = ShardColumn(lambda: self._samples)
        self.columns = self._found, self._before
        self.shard_columns = (self._of_shards,)

    def begin(self, step: CurrentStep) -> None:
        if self._state.audited is None:
            return
        self._places = {}
        self._options = f"{zlib.crc32(repr(describe_options(self._state.optimizer)).encode()):08x}"
        self._scale = 1.0 if self._state.scaler is None else self._state.scaler.get_scale()
        self._samples = numbers_of_samples(step.batch.slices)
        tensors = self._state.parts.tensors()
        self._number_of_update = self._state.progress
        window = self._of_state.window(tensors, self._number_of_update)
        self._read("state", window, tensors)

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if self._state.audited is None:
            return
        for column, what in ((self._before, "The gradient before"), (self._found, "The state of the model")):
            numbers = {rank: number for rank, number in enumerate(rows[column]) if number}  # a new worker has none
            first = next(iter(numbers), 0)
            odd = next((rank for rank, number in numbers.items() if number != numbers[first]), None)
            if odd is not None:
                raise ReductionError(
                    f"{what} {step.place} has other bits on rank {odd} than on rank {first}, though all workers have "
                    "made the same updates. Look for a fault of memory, of a processor or of a link between workers, "
                    "and for code that writes parameters through .data. Load the newest checkpoint. (LS534)"
                )

    def commit(self, step: CurrentStep) -> None:
        if self._state.audited is None or step.rows is None:
            return
        is_used = self._is_updated(step)
        found = {each.spec.name: each.parameter.grad for each in self._trained.trained if is_used}
        gradients = {name: each for name, each in found.items() if each is not None}
        self._read("gradient", self._of_gradient.window(gradients, self._number_of_update), gradients)
        self._last_gradient = self._number("gradient")
        shards: dict[str, Sequence[float]] = {
            "samples": step.rows.of_shards(self._of_shards),
            "loss": step.losses.losses,
        }
        texts = {name: condense(numbers, NUM_MARKS[name]) for name, numbers in (shards | self._numbers).items()}
        self._state.audited.append(
            StepAudited(
                epoch=step.batch.cursor.epoch,
                step=step.batch.cursor.step,
                global_step=self._state.global_step + (not step.is_last),
                update=step.update.name,
                workers=self._world.world_size,
                facts={**texts, "options": self._options},
                places=self._places,
            )
        )

    def _is_updated(self, step: CurrentStep) -> bool:
        decision, scaler = step.decision, self._state.scaler
        if decision is None or decision.is_skipped or decision.is_bad:
            return False
        return scaler is None or scaler.get_scale() >= self._scale  # it is made smaller where a gradient overflows

    def _number(self, name: str) -> float:
        return float(number_of(self._numbers[name]))

    def _read(self, fact: str, window: Sequence[Piece], tensors: Mapping[str, Tensor]) -> None:
        self._numbers[fact] = numbers_of_bits([piece.of(tensors[piece.name]) for piece in window])
        self._places[fact] = [piece.name for piece in window]


def numbers_of_samples(slices: Sequence[Slice]) -> dict[int, float]:
    """Return a number for all bits of each slice, by shard (local)."""
    leaves = [list(_leaves(part.data, _MAX_DEPTH)) for part in slices]
    tensors = [list(chain.from_iterable(map(_strided, each))) for each in leaves]
    numbers = iter(numbers_of_bits(list(chain.from_iterable(tensors))))
    found: dict[int, float] = {}
    for part, of_leaves, mine in zip(slices, leaves, tensors, strict=True):
        others = [_exactly(each) for each in of_leaves if not isinstance(each, Tensor)]
        found[part.shard] = float(number_of([*islice(numbers, len(mine)), *others]))
    return found


def _leaves(data: object, depth: int) -> Iterator[object]:
    """Yield what containers hold, and objects: torch's walk does not enter a tokenizer's own dictionary, say."""
    for leaf in tree_leaves(data):
        inner = dict(leaf) if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", None)
        if inner and depth and not isinstance(leaf, (Tensor, np.ndarray, *_EXACT, *_CODE)):
            yield from _leaves([type(leaf).__name__, *inner, *inner.values()], depth - 1)
        else:
            yield leaf


def _exactly(leaf: object) -> object:
    if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.hasobject:
        return leaf.dtype.str, leaf.shape, zlib.crc32(leaf.tobytes())
    return leaf if isinstance(leaf, _EXACT) else slice_number(leaf)


def _strided(leaf: object) -> Sequence[Tensor]:
    if not isinstance(leaf, Tensor):
        return ()
    return leaf.unbind() if leaf.is_nested else (leaf,)
