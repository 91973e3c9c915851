"""torch.compile, seen from outside, and kept away from functions that C++ calls.

Nothing here imports the compiler, which takes a second: unless somebody else has imported it, nothing is compiled.
While a compiled function runs, the compiler intercepts every Python function that is called, also by C++: hooks of the
autograd engine, and a process group written in Python. It would compile each of these, or fail.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., object])
_Class = TypeVar("_Class", bound=type)

_MOST_GRAPHS = 64
"""How many graphs of a module there may be; torch's own limit, 8, is not enough for slices of uneven sizes in training
and evaluation. Beyond it the compiler raises an error."""


def skip_frames(code: CodeType) -> None:
    """Have the compiler neither compile the function with this code nor anything that it calls.

    Only where C++ calls the function, as the autograd engine calls hooks: one that Python code calls within a compiled
    function is traced there all the same. It costs nothing per call.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def mark_uncompiled(function: _Function) -> _Function:
    """Mark a function as `torch.compiler.disable` does: compiled code breaks off at the call and goes on behind it."""
    vars(function)["_torchdynamo_disable"] = True
    return function


def is_compiled_module(module: nn.Module) -> bool:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def original_of_compiled(module: nn.Module) -> nn.Module:
    """Return the module that was given to `torch.compile`; `module` is what that returned.

    It is the only child; the forward is tied to that very object, so replacing the child does not change what is run.
    """
    original: Any = module._modules["_orig_mod"]
    return original  # type: ignore[no-any-return]


def is_compiled_function(function: Callable[..., object]) -> bool:
    """Return whether a function is what `torch.compile(other_function)` returned, or calls another uncompiled.

    `inspect.unwrap` returns the other function.
    """
    return "_torchdynamo_orig_callable" in getattr(function, "__dict__", {})


def compile_module(module: nn.Module, backend: str) -> None:
    """Have calls of a module run compiled: one whole graph for each set of shapes, which depends on these shapes alone.

    With torch's default the second shape of an input makes a graph for all shapes. Which graph a shape gets would then
    depend on the shapes before it, and so on the number of workers. Parameters and submodules keep their names.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # Not module.compile(): the frame that it compiles is one of torch's, which the compiler skips unless the module's
    # forward is somebody else's. So a Sequential would run uncompiled.
    inline: Any = importlib.import_module("torch._dynamo.external_utils").wrap_inline
    call = torch.compile(inline(module._call_impl), backend=backend, dynamic=False, fullgraph=True)
    module._compiled_call_impl = call


def has_compiled_part(module: nn.Module) -> bool:
    return any(each._compiled_call_impl is not None or is_compiled_module(each) for each in module.modules())


def without_compiler() -> AbstractContextManager[object]:
    """Let compiled functions run uncompiled in this context: for other shapes they would be compiled anew."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_compiler_error(error: BaseException) -> bool:
    errors: Any = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(error, errors.TorchDynamoException | errors.FailOnRecompileLimitHit)


def forget_compiled_call(state: dict[str, Any]) -> None:
    """Drop from a copy of a module's `__dict__` what `module.compile()` left there: it would run the module itself."""
    state.pop("_compiled_call_impl", None)


def is_compiled_autograd_on() -> bool:
    """Return whether a backward would be, or is, run by compiled autograd, which calls no hooks on parameters."""
    config = sys.modules.get("torch._dynamo.config")
    state = sys.modules.get("torch._dynamo.compiled_autograd")
    asked_for = config is not None and config.compiled_autograd
    return bool(
        asked_for or (state is not None and (state.compiled_autograd_enabled or state.in_compiled_autograd_region))
    )


def has_cuda_graphs_of_compiler() -> bool:
    """Return whether the compiler has made CUDA graphs for this thread, as `mode="reduce-overhead"` has it do.

    The compiler keeps a manager of graphs per device as long as a compiled function with graphs lives. A tensor alone
    does not show whether it lies in the memory of a graph: the run that is recorded returns ordinary tensors.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")  # not there before the first graph
    if trees is None:
        return False
    containers = trees.get_obj(trees.local, "tree_manager_containers")
    return any(container.tree_manager is not None for container in containers.values())


def keep_compiler_out(function: _Function) -> _Function:
    """Mark a function, as a decorator: it is not compiled when C++ calls it, nor is anything that it calls.

    `torch.compiler.disable` costs time in each call and imports the compiler; this does neither. But a function that
    Python code calls within a compiled function needs `torch.compiler.disable`.
    """
    skip_frames(function.__code__)
    return function


def keep_compiler_out_of_methods(cls: _Class) -> _Class:
    """Mark every function that a class defines itself, as a decorator: for a class whose methods C++ calls."""
    for function in vars(cls).values():
        if isinstance(function, FunctionType):
            keep_compiler_out(function)
    return cls
