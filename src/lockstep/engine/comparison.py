"""Check that all workers train the same: two numbers per worker and step, sent in the step table.

One is of the optimizer's options: a learning rate that is set on one rank alone gives that rank other weights. The
other is of the parameters' bits. Reading them all takes as long as a part of an update, so it is done only where
something has written to them since the last update: weights that were loaded, or a forward that changes them. Each
parameter counts its writes (`_version`), and the optimizer's are the same on every worker.
"""

import zlib
from collections.abc import Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.engine.batches import gather_results
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.model import describe_differences, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import version_of

_PURPOSE = "comparing what the workers train"


@final
class WorkerComparison:
    """Compares the optimizer's options and the parameters of the workers, step by step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self._named = list(model.named_parameters())
        self._optimizer = optimizer
        self._world = world
        self._is_alone = world.group is None or world.world_size == 1
        self._num_writes = -1

    def options_number(self) -> int:
        """Return a number that is the same for the same options (local)."""
        return 0 if self._is_alone else zlib.crc32(repr(describe_options(self._optimizer)).encode())

    def values_number(self) -> Tensor | int:
        """Return a number that is the same for the same parameters, or 0 if only updates have written them (local)."""
        if self._is_alone or self._num_writes == self._count_writes():
            return 0
        return sum_of_bits(parameter for _, parameter in self._named)

    def note_equal_values(self) -> None:
        """Note after an update that the parameters are equal on all workers, until something writes to them (local)."""
        self._num_writes = -1 if self._is_alone else self._count_writes()

    def compare_values_next_step(self) -> None:
        """Compare the parameters in the next step, whether or not something writes to them (local)."""
        self._num_writes = -1

    def check_options(self, numbers: Sequence[float], place: str) -> None:
        """Compare the workers' numbers of this step (collective where they differ, which all see)."""
        if len(set(numbers)) == 1:
            return
        first, *others = gather_results(self._world, lambda: describe_options(self._optimizer), _PURPOSE)
        for rank, options in enumerate(others, start=1):
            if options != first:
                raise ValueError(
                    f"The optimizers of ranks {rank} and 0 differ at {place}: {describe_differences(options, first)}. "
                    "Set options, and step a scheduler, alike on every rank. Nothing was changed by this step. (LS515)"
                )

    def check_values(self, numbers: Sequence[float], place: str) -> None:
        """Compare the workers' numbers of this step (collective where they differ, which all see)."""
        if len(set(numbers)) == 1:
            return

        def read() -> dict[str, int]:
            return {name: int(sum_of_bits([parameter])) for name, parameter in self._named}

        first, *others = gather_results(self._world, read, _PURPOSE)
        for rank, found in enumerate(others, start=1):
            odd = next((name for name in first if found[name] != first[name]), None)
            if odd is not None:
                raise ParameterMismatchError(
                    f"Parameter {odd} has other values on rank {rank} than on rank 0 at {place}. Something other than "
                    "the optimizer has written to it on one rank (weights that were loaded after the trainer was made, "
                    "say, or the model's forward), or an update has failed there. Load weights on every rank, or "
                    "before making the trainer, which sends rank 0's to all. Nothing was changed by this step. (LS515)"
                )

    def _count_writes(self) -> int:
        return sum(version_of(parameter) for _, parameter in self._named)
