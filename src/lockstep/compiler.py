"""Keeping torch.compile away from functions that C++ calls.

While a compiled function runs, the compiler intercepts every Python function that is called, also by C++: hooks of the
autograd engine, and a process group written in Python. It would compile each of these, or fail.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from lockstep.torch_private import skip_frames

_Function = TypeVar("_Function", bound=Callable[..., object])
_Class = TypeVar("_Class", bound=type)


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
