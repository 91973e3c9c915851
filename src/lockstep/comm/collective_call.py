"""One call of a collective, as read from the arguments that torch passes to a process group."""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.shm.arithmetic import Reduction


@final
class CollectiveCall:
    """What one call of a collective is about; `Collective.read` makes it.

    Not a frozen dataclass: one is made for each call, and a frozen one costs a microsecond more.
    `inputs` is `outputs` where the call works in place; `options` are the arguments after the tensors: torch's options
    object, or reduce operation, root and timeout.
    """

    __slots__ = ("arguments", "description", "inputs", "name", "options", "outputs", "reductions", "root")

    def __init__(
        self,
        name: str,
        arguments: Sequence[Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        options: Sequence[Any],
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.outputs = outputs
        self.inputs = inputs
        self.options = options
        self.description = b""
        """What is compared with the calls of the other ranks, and what messages say."""
        self.reductions: Sequence[Reduction] = ()
        """How to reduce each output, where the collective reduces and shared memory does it."""
        self.root = 0
        """The rank of the group that all send to or receive from, where the collective has one."""

    @property
    def is_async(self) -> bool:
        """Whether the caller does not wait at once."""
        return bool(getattr(self.options[0], "asyncOp", True)) if self.options else True

    @property
    def op(self) -> Any:
        """The reduce operation; SUM if none was given."""
        for option in self.options:
            found = getattr(option, "reduceOp", None)
            if found is not None:
                return found
            if isinstance(option, ReduceOp):
                return option
        return ReduceOp.SUM


def read_root(options: Sequence[Any]) -> int:
    """Return the rank of the group that all send to or receive from; 0 if none was given."""
    for option in options:
        found = option if isinstance(option, int) else getattr(option, "rootRank", None)
        if found is not None:
            return int(found)
    return 0
