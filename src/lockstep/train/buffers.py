"""What becomes of a model's buffers in a step of several shards.

[Note: buffers of shard 0] BatchNorm's running statistics come from the samples of one shard, as torch's come from those
of one rank. Which one must not depend on the number of workers, so it is shard 0: every shard starts from the buffers
that the step began with, what shard 0 makes of them is kept, and rank 0, which always runs shard 0, shares it.
"""

from typing import final

from torch import Tensor, nn


@final
class BuffersOfShard0:
    """Lets every shard of a worker start from the step's buffers, and keeps those of shard 0.

    Buffers are looked up by name each time: a forward may put another tensor in a buffer's place.

    Args:
        model: Whose buffers; those it has now are the ones that the step began with.
        num_slices: How many slices this worker runs; with one there is nothing to put back.
    """

    def __init__(self, model: nn.Module, *, num_slices: int) -> None:
        self._model = model
        self._is_needed = num_slices > 1
        self._before = self._kept = self._copy() if self._is_needed else {}

    def after(self, shard: int, *, is_last: bool) -> None:
        """Put back what the shard's forward changed; call it after each backward, which may still read it."""
        if not self._is_needed:
            return
        if shard == 0:
            self._kept = self._copy()
        wanted = self._kept if is_last else self._before
        for name, buffer in self._model.named_buffers():
            if name in wanted:
                buffer.data.copy_(wanted[name])

    def _copy(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
