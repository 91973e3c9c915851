"""Lockstep's classes in place of torch's, under the names by which torch's tests reach them.

Names are replaced, in the modules that tests read them from; torch's classes and the modules that define them stay
what they are, so that `super()` and isinstance inside torch go on meaning torch's.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

OURS = {
    "DistributedDataParallel": "lockstep.parallel",
    "SyncBatchNorm": "lockstep.parallel.sync_batchnorm",
    "DistributedSampler": "lockstep.data",
}
"""The classes, and the modules where ours are."""


def place_of(name: str) -> ModuleType:
    """Return the module of torch through which users reach the class of this name."""
    places = {"SyncBatchNorm": nn, "DistributedSampler": torch.utils.data}
    return places.get(name, nn.parallel)


def ours() -> dict[str, Any]:
    """Return Lockstep's classes by the name that torch has for them, those that exist."""
    there = {name: module for name, module in OURS.items() if find_spec(module) is not None}
    return {name: getattr(importlib.import_module(module), name) for name, module in there.items()}


@contextmanager
def in_place_of_torch(test_module: ModuleType) -> Iterator[None]:
    """Let code that names torch's classes get Lockstep's."""
    with ExitStack() as stack:
        for name, replacement in ours().items():
            for place in (place_of(name), test_module):
                if hasattr(place, name):
                    stack.enter_context(mock.patch.object(place, name, replacement))
        yield


def concerns(test: Callable[..., Any], owner: type, test_module: ModuleType) -> bool:
    """Whether a test method of `owner`, or a function that it calls, names one of the classes."""
    waiting, seen = [inspect.unwrap(test)], set()
    while waiting:
        function = waiting.pop()
        if function in seen or not hasattr(function, "__code__"):
            continue
        seen.add(function)
        for name in _names(function.__code__):
            if name in OURS:
                return True
            # Every definition: an override that calls super() hides what torch's own says.
            places = [*owner.__mro__, test_module]
            called = [vars(place)[name] for place in places if name in vars(place)]
            waiting += [inspect.unwrap(function) for function in called if inspect.isfunction(function)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
