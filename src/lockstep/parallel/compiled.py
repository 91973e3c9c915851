"""Modules that `torch.compile` wrapped, and methods that it is to leave alone.

What it returns for a module is another module, with the one that was given as its only child and a forward that is
tied to that very object: whoever replaces or copies the child does not change what is run.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from lockstep.torch_private.compiler import is_compiled_module, keep_compiler_out, mark_uncompiled, original_of_compiled
from lockstep.torch_private.modules import has_forward_or_backward_hooks

_Method = TypeVar("_Method", bound=Callable[..., object])


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was given to `torch.compile`, or `module` if none was."""
    while is_compiled_module(module):
        original = original_of_compiled(module)
        if has_forward_or_backward_hooks(module):
            raise RuntimeError(
                f"There are hooks on a compiled {type(original).__name__}, and replicas run uncompiled: these hooks "
                "would be lost. Register them on the module itself, before torch.compile. (LS355)"
            )
        module = original
    return module


def not_compiled(method: _Method) -> _Method:
    """Mark a method, as a decorator: the compiler neither traces it nor anything that it calls.

    What `torch.compiler.disable` does, without importing the compiler: code that is compiled breaks off at the call,
    and goes on behind it.
    """
    mark_uncompiled(method)
    return keep_compiler_out(method)
