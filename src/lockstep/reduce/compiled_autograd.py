"""Is the backward compiled? Then a reducer sees nothing of it.

torch's compiled autograd runs a graph of its own in place of the engine's: hooks on parameters and the engine's
callbacks do not run, so that each rank would train alone, without a word.
"""

import sys

from lockstep.errors import ReductionError


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on (local).

    The compiler is not imported for that: where nobody has, it cannot be on.

    Raises:
        ReductionError: It is.
    """
    config = sys.modules.get("torch._dynamo.config")
    state = sys.modules.get("torch._dynamo.compiled_autograd")
    asked_for = config is not None and config.compiled_autograd
    if asked_for or (state is not None and (state.compiled_autograd_enabled or state.in_compiled_autograd_region)):
        raise ReductionError(
            "Compiled autograd is on, and under it gradients are not averaged over the ranks: it runs no hooks on "
            "parameters. Turn it off (torch._dynamo.config.compiled_autograd = False); torch.compile of the model "
            "works without it."
        )
