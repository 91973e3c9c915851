# ruff: noqa: SLF001
"""Modules that `torch.compile` wrapped, and methods that it is to leave alone.

What it returns for a module is another module, with the one that was given as its only child and a forward that is
tied to that very object: whoever replaces or copies the child does not change what is run.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from lockstep.compiler import keep_compiler_out

_Method = TypeVar("_Method", bound=Callable[..., object])


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile(other_module)` returned; does not import the compiler."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # without which nothing was compiled
    return frames is not None and isinstance(module, frames.OptimizedModule)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was given to `torch.compile`, or `module` if none was.

    Raises:
        RuntimeError: There are hooks on the compiled module, which would be lost.
    """
    while is_compiled(module):
        if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
            original: Any = module._modules["_orig_mod"]
            raise RuntimeError(
                f"There are hooks on a compiled {type(original).__name__}, and replicas run uncompiled: these hooks "
                "would be lost. Register them on the module itself, before torch.compile."
            )
        module = getattr(module, "_orig_mod")  # noqa: B009 - typed as a tensor or a module
    return module


def not_compiled(method: _Method) -> _Method:
    """Mark a method, as a decorator: the compiler neither traces it nor anything that it calls.

    What `torch.compiler.disable` does, without importing the compiler: code that is compiled breaks off at the call,
    and goes on behind it.
    """
    vars(method)["_torchdynamo_disable"] = True
    return keep_compiler_out(method)
