"""The engine that runs a backward: callbacks, graph tasks, and the hooks that others have put on gradients."""

import sys
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd import Variable

from lockstep.torch_private.compiler_import import disable_compiler

_ENGINE: Any = Variable._execution_engine  # in torch's stub a callback must return None

queue_callback: Callable[[Callable[[], object]], None] = _ENGINE.queue_callback
"""Have the engine call something once, at the end of the graph task in which this is called; an error outside one.

That is the innermost one: a backward inside a backward is a graph task of its own. The engine holds the callback until
then, drops it uncalled if the backward fails, and raises what it raises to whoever called `backward()`.
"""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task that this thread is in, `NO_GRAPH_TASK` outside a backward.

Each `backward()` and each `torch.autograd.grad` of the process takes the next whole number, one inside another too.
"""


def run_backward(root: Tensor, gradient: Tensor) -> None:
    """Do what `root.backward(gradient)` does, but check no shapes: in Python that takes as long as two small layers."""
    _ENGINE.run_backward((root,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def run_backward_of_leaf(leaf: Tensor, gradient: Tensor) -> None:
    """Do what `torch.autograd.grad(leaf, leaf, gradient)` does, without its checks, which take most of its time."""
    _ENGINE.run_backward((leaf,), (gradient,), False, False, (leaf,), allow_unreachable=False, accumulate_grad=False)


@final
class BackwardCount:
    """Says whether backwards have run, of whatever and in any thread: by a backward of its own, which takes 0.1 ms."""

    def __init__(self) -> None:
        self._num_own = 0
        self._count = 0

    @disable_compiler
    def read(self) -> int:
        """Return a number that each backward of the process makes greater by one (local)."""
        found: list[int] = []
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            leaf.register_hook(lambda _: found.append(current_graph_task_id()))
            with suppress(RuntimeError):  # a forked process can have no backward after one of its parent on a GPU
                run_backward_of_leaf(leaf, torch.ones((), device="cpu"))
        if found:
            self._num_own += 1
            self._count = found[0] - self._num_own
        return self._count


BACKWARDS: Final = BackwardCount()


def saved_by(node: Any, name: str) -> Any:
    """Return what a node of a graph keeps for its backward: a tensor, the sizes of one (`self_sym_sizes`), a dimension.

    To read a tensor may run hooks on saved tensors, those of a checkpoint say; to read sizes does not.
    """
    return getattr(node, f"_saved_{name}")


NO_GRAPH_TASK: Final = -1
"""What `current_graph_task_id` returns outside a backward."""

tensor_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of `Tensor.register_hook`, by number, in the order in which they run; None or empty without.

A hook that is taken out of the dictionary is not called, and is again when it is put back.
"""

post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook`, by number, in the order in which they run; None or empty."""


def is_in_distributed_autograd() -> bool:
    """Return whether this thread is in a context of `torch.distributed.autograd`, whose backward may cross RPC.

    Such a backward keeps gradients in its context and not in `.grad`, and runs no hooks of
    `register_post_accumulate_grad_hook`. The backward's own threads are in no context.
    """
    if not _is_rpc_running():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


def _is_rpc_running() -> bool:
    rpc: Any = sys.modules.get("torch.distributed.rpc")  # which is there from the first import of torch.distributed
    return rpc is not None and rpc._is_current_rpc_agent_set()


is_inside_func_grad: Callable[[Tensor], bool] = torch._C._functorch.is_gradtrackingtensor
"""Whether a tensor was computed within `torch.func.grad` or another of its kind, which differentiates it.

Its gradients are returned, not accumulated, and the engine runs no hooks of the parameters.
"""


def is_inside_transform() -> bool:
    """Whether `torch.func` transforms what runs: a tensor that is made now may be wrapped, and end with that."""
    return torch._C._functorch.peek_interpreter_stack() is not None
