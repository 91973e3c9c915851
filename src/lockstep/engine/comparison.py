"""Check that all workers train the same, by numbers in each step.

Of the two numbers per worker and step, sent in the step table, one is of the optimizer's options: a learning rate that
is set on one rank alone gives that rank other weights. The other is of the parameters' bits. Reading them all takes as
long as a part of an update, so it is done only where something has written to them since the last update: weights that
were loaded, or a forward that changes them. Each parameter counts its writes (`_version`), and the optimizer's are the
same on every worker.
"""

import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

from torch import Tensor

from lockstep.engine.networks import TRAINED_MODELS
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.model import Description, describe_differences, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import version_of

_PURPOSE = "comparing what the workers train"


@final
class WorkerComparison(StepPart):
    def __init__(self, runs: ShardRuns) -> None:
        self._buffers = runs.buffers
        self._state = runs.state
        self._optimizer = runs.state.optimizer
        self._is_alone = runs.world.world_size == 1
        self._num_writes = -1
        self._named: dict[str, Tensor] = {}
        self._num_trained = (0, 0)
        self._of_networks: object = None
        self._at_begin: list[tuple[Tensor, int]] = []
        self._begun: dict[str, Tensor] = {}
        self._number_at_begin: Tensor | int = 0
        self._options = Column(float, lambda _: self.options_number())
        self._values = Column(float, lambda _: self.values_number())
        self.columns = self._options, self._values

    def begin(self, _step: CurrentStep) -> None:
        self._begun = {} if self._is_alone else self._state.parts.compared_at_begin()
        is_same = _have_versions(self._begun.values(), self._at_begin)
        self._number_at_begin = 0 if is_same else sum_of_bits(self._begun.values())

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if len(set(rows[self._options])) > 1:
            send = partial(describe_options, self._optimizer)
            step.ask(_PURPOSE, send, partial(_compare_options, step.place), may_raise=True)
        if len(set(rows[self._values])) > 1:
            step.ask(_PURPOSE, self._number_each, partial(self._compare_each, step.place), may_raise=True)

    def commit(self, _step: CurrentStep) -> None:
        """Note that the parameters are equal on all workers, until something writes to them (local)."""
        if not self._is_alone:
            self._num_writes = self._count_writes()
            self._at_begin = [(each, version_of(each)) for each in self._state.parts.compared_at_begin().values()]

    def undo(self, _step: CurrentStep) -> None:
        self._num_writes, self._at_begin = -1, []

    def options_number(self) -> int:
        return 0 if self._is_alone else zlib.crc32(repr(describe_options(self._optimizer)).encode())

    def values_number(self) -> Tensor | int:
        """Return a number that is the same for the same parameters, or 0 if only updates have written them (local)."""
        if self._is_alone or self._num_writes == self._count_writes():
            return self._number_at_begin
        return sum_of_bits(self._compared().values()) ^ self._number_at_begin

    def _number_each(self) -> dict[str, int]:
        begun = {name: self._buffers.before.copy_of(each) for name, each in self._begun.items()}
        found = {**self._compared(), **begun}
        return {name: int(sum_of_bits([each])) for name, each in found.items() if each.numel()}

    def _compare_each(self, place: str, found: list[dict[str, int]]) -> None:
        first = found[0]
        for rank, numbers in enumerate(found):
            odd = next((name for name in first if numbers.get(name) != first[name]), None)
            if odd is not None:
                what = "Buffer" if odd in self._begun else "Parameter"
                raise ParameterMismatchError(
                    f"{what} {odd} has other values on rank {rank} than on rank 0 at {place}. Something other than "
                    "the optimizer has written to it on one rank (weights that were loaded after the trainer was made, "
                    "say, or the model's forward), or an update has failed there. Load weights on every rank, or "
                    "before making the trainer, which sends rank 0's to all. Nothing was changed by this step. (LS515)"
                )

    def _compared(self) -> dict[str, Tensor]:
        """Return the parameters: the same ones, unless the loss has other networks, or one a trainer of its own."""
        of_networks = self._state.networks.parameters
        if self._num_trained != TRAINED_MODELS.num_changes or self._of_networks is not of_networks:
            self._num_trained, self._of_networks = TRAINED_MODELS.num_changes, of_networks
            self._named = self._state.parts.compared()
        return self._named

    def _count_writes(self) -> int:
        return sum(map(version_of, self._compared().values()))


def _have_versions(tensors: Iterable[Tensor], expected: Sequence[tuple[Tensor, int]]) -> bool:
    found = list(tensors)
    return len(found) == len(expected) and all(
        each is before and version_of(each) == count for each, (before, count) in zip(found, expected, strict=True)
    )


def _compare_options(place: str, found: list[Description]) -> None:
    for rank, options in enumerate(found):
        if options != found[0]:
            raise ValueError(
                f"The optimizers of ranks {rank} and 0 differ at {place}: {describe_differences(options, found[0])}. "
                "Set options, and step a scheduler, alike on every rank. Nothing was changed by this step. (LS515)"
            )
