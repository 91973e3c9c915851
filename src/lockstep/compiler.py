"""Keeping torch.compile out of code that is none of its business.

While a compiled function runs, the compiler looks at every Python function that is called, also by C++: hooks of the
autograd engine, and a process group written in Python. It would compile these one by one, or fail.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from lockstep.torch_private import skip_frames

_Function = TypeVar("_Function", bound=Callable[..., object])
_Class = TypeVar("_Class", bound=type)


def keep_compiler_out(function: _Function) -> _Function:
    """Mark a function, as a decorator: it is not compiled when C++ calls it, nor is anything that it calls.

    It costs nothing per call, and does not import the compiler, which `torch.compiler.disable` does both. A function
    that Python code calls within a compiled function needs that one.
    """
    skip_frames(function.__code__)
    return function


def keep_compiler_out_of_methods(cls: _Class) -> _Class:
    """Mark every function that a class defines itself, as a decorator: for a class that stands for one of C++."""
    for function in vars(cls).values():
        if isinstance(function, FunctionType):
            keep_compiler_out(function)
    return cls
