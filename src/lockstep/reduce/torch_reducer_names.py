"""Methods of torch's C++ reducer that torch itself and other programs call on the `reducer` of a wrapper."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.reduce.backward_watch import BackwardWatch
from lockstep.reduce.reduction import GradBucket


class TorchReducerNames:
    """The names; abstract. They need only the attributes below."""

    watch: BackwardWatch
    group: ProcessGroup

    def prepare_for_backward(self, _outputs: Sequence[Tensor] = ()) -> None:
        """Reduce the next backward, whether or not its graph was built under `no_sync` (pipelining calls this)."""
        self.watch.force_next()

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: torch's reducer must be informed of optimizers that run in a hook, this one need not."""

    def _rebuild_buckets(self) -> bool:
        """Do nothing: buckets are made again without it. Lightning calls this before a manual backward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: nothing is delayed. Lightning calls this after the first manual backward of a static graph."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Add up what a hook sees of a bucket; the future holds the sum (collective)."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        assert work is not None
        return work.get_future().then(_first_of)  # type: ignore[no-any-return]

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Explain that an attribute is missing; Python calls this for no other."""
            whose = "which torch's C++ reducer has" if hasattr(dist.Reducer, name) else "and torch's has none either"
            raise AttributeError(
                f"Lockstep's reducer has no {name!r}, {whose}. Use the methods of DistributedDataParallel instead; or, "
                "for torch's reducer, wrap the model with torch's own class: call lockstep.drop_in.undo() before, if "
                "this script runs with the drop-in."
            )


def _first_of(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    return future.value()[0]
