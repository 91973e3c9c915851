"""Checks for side effects of a forward: each worker runs other shards, so side effects would differ between workers.

[Note: parameters that are written] An average of the weights that a forward keeps in frozen parameters is updated once
per shard: after a step it would depend on which shards a worker has run. Writes show in a tensor's version, and
replaced memory in its address. Writes through `.data` show in neither; for them the contents are compared, in the first
steps only, for that reads every parameter.
"""

import warnings
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm import World, broadcast_tensors, calls_for
from lockstep.engine.tensor_bits import sum_of_bits
from lockstep.torch_private import version_of

_NUM_READ = 3
"""The first steps in which contents are compared. An average that starts from equal weights is equal after step 1."""
_PLAIN = (bool, int, float, str)


@final
class WrittenParameterCheck:
    """Checks whether parameters are written between the beginning of a step and the update.

    Args:
        model: Whose parameters; they stay the same tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.names = list(named)
        self._parameters = list(named.values())
        self._num_reads = _NUM_READ
        self._before: tuple[list[int], list[int]] = [], []
        self._bits: Tensor | None = None
        self._written: list[int] = []

    def begin(self) -> None:
        """Record versions, addresses and, in the first steps, contents of the parameters."""
        self._before = self._look()
        self._bits = self._read_bits() if self._num_reads else None

    def find_written(self) -> int:
        """Return the number of the first parameter that was written since, counted from 1; 0 if none was."""
        pairs = zip(self._before, self._look(), strict=True)
        written = {
            number
            for before, now in pairs
            for number, (old, new) in enumerate(zip(before, now, strict=True), start=1)
            if old != new
        }
        if self._bits is not None:
            is_changed = (self._read_bits() != self._bits).tolist()  # the one wait for a device
            written.update(number for number, changed in enumerate(is_changed, start=1) if changed)
            self._num_reads, self._bits = self._num_reads - 1, None
        self._written = sorted(written)
        return min(written, default=0)

    def put_back(self, world: World) -> list[str]:
        """Give written parameters the values of a worker that has not written them (collective).

        Returns:
            The names of those that every worker has written, or replaced by one of another shape; the same on all.
        """
        if world.group is None:
            return [self.names[number - 1] for number in self._written]
        shapes = {number: tuple(self._parameters[number - 1].shape) for number in self._written}
        with calls_for("putting back parameters that a forward has written"):
            found: list[dict[int, tuple[int, ...]]] = world.gather_objects(shapes)
        lost = []
        for number in sorted(set().union(*found)):
            parameter, name = self._parameters[number - 1], self.names[number - 1]
            source = next((rank for rank, each in enumerate(found) if number not in each), None)
            if source is None or len({each[number] for each in found if number in each}) > 1:
                lost.append(name)
                continue
            with calls_for(f"putting back parameter {name}"):
                broadcast_tensors([parameter.data], world.group, source)
        return lost

    def _look(self) -> tuple[list[int], list[int]]:
        return list(map(version_of, self._parameters)), list(map(Tensor.data_ptr, self._parameters))

    def _read_bits(self) -> Tensor:
        """Return a number for the contents of each parameter, without waiting for a device."""
        device = self._parameters[0].device
        return torch.stack([sum_of_bits([parameter]).to(device) for parameter in self._parameters])


def warn_of_counters(before: dict[str, object], after: dict[str, object]) -> None:
    """Warn of plain attributes of modules that a shard's forward has changed; both are by full name."""
    changed = [name for name, value in after.items() if name in before and before[name] != value]
    if changed:
        more = f" and {len(changed) - 1} more attributes" if len(changed) > 1 else ""
        warnings.warn(
            f"The forward of a shard has changed {changed[0]}{more} of the model, and each worker runs other shards. "
            "If what the model computes depends on it, its weights will depend on the number of workers: keep such "
            "state in a buffer (register_buffer), of which every shard of a step sees the same.",
            stacklevel=6,
        )


def plain_attributes(model: nn.Module) -> dict[str, object]:
    """Return the numbers and texts that modules keep in plain attributes, by full name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in _PLAIN
    }
