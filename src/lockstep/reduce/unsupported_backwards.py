"""Backwards that run no hooks of a reducer: without a refusal each rank would train alone, without any error.

torch's compiled autograd runs a graph of its own in place of the engine's: hooks on parameters and the engine's
callbacks do not run. A backward of `torch.distributed.autograd` keeps gradients in its context, not in `.grad`.
"""

from lockstep.errors import ReductionError
from lockstep.torch_private.autograd import is_in_distributed_autograd
from lockstep.torch_private.compiler import is_compiled_autograd_on


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on (local).

    The compiler is not imported for that: as long as it is not imported, it cannot be on.
    """
    if is_compiled_autograd_on():
        raise ReductionError(
            "Compiled autograd is on, and under it gradients are not averaged over the ranks: it runs no hooks on "
            "parameters. Turn it off (torch._dynamo.config.compiled_autograd = False); torch.compile of the model "
            "works without it. (LS310)"
        )


def refuse_distributed_autograd() -> None:
    """Raise in a context of `torch.distributed.autograd`; called after a forward, alike on every rank (local)."""
    if is_in_distributed_autograd():
        raise ReductionError(
            "This forward ran within torch.distributed.autograd.context(), whose backward keeps gradients in the "
            "context and not in .grad: they would not be averaged over the ranks. Keep the wrapped module out of the "
            "context and call loss.backward(), or wrap it with torch.nn.parallel.DistributedDataParallel, which "
            "averages gradients in such a context. (LS310)"
        )
