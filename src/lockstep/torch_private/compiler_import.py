"""The moment in which somebody imports torch's compiler: before it nothing of the compiler is imported, nor needed."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast, final

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., object])

_COMPILER = "torch._dynamo"
_INDUCTOR_CONFIG = "torch._inductor.config"
_DISABLED = "__dynamo_disable"
"""The attribute in which a function that is never compiled keeps what is called in its place."""


@final
class _DynamoImport(MetaPathFinder):
    """Gives torch's functions back what they were when somebody imports the compiler; it finds no module itself."""

    def __init__(self) -> None:
        self._codes: list[tuple[FunctionType, CodeType]] = []
        self._others: list[FunctionType] = []

    def put_off(self, steps: Sequence[FunctionType], others: Sequence[FunctionType]) -> None:
        """Let functions run without what the compiler would mark them with, until it is imported."""
        if _COMPILER in sys.modules:
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._codes += [(step, step.__code__) for step in steps]
        self._others += others
        for step in steps:
            step.__code__ = _STEP
        for function in others:
            vars(function)[_DISABLED] = function

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /) -> None:
        if fullname != _COMPILER:
            return
        for step, code in self._codes:
            step.__code__ = code
        for function in self._others:
            vars(function).pop(_DISABLED, None)
        self._codes.clear()
        self._others.clear()


_dynamo_import = _DynamoImport()


def disable_compiler(function: _Function, *, recursive: bool = True) -> _Function:
    """Mark a function, as a decorator: it is not compiled. As `torch.compiler.disable`, which imports the compiler.

    torch's own mark that does not, `torch._disable_dynamo`, imports it when the function is first called.
    """
    _dynamo_import.put_off([], [cast(FunctionType, function)])
    return cast(_Function, torch._disable_dynamo(function, recursive))


def disable_compiler_here(function: _Function) -> _Function:
    """Mark a function, as a decorator: it is not compiled, and what it calls is."""
    return disable_compiler(function, recursive=False)


def use_optimizers_without_compiler() -> None:
    """Let torch's optimizers be made, used, saved and loaded without importing its compiler.

    That import takes as long as that of torch. The methods do it to break compiled code, or not to be compiled, though
    nothing is compiled before somebody else has imported the compiler. Until then they now run without these marks.
    From that import on they are torch's again.
    """
    base: Any = torch.optim.Optimizer
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, base)]
    steps = [vars(kind)["step"] for kind in kinds if isinstance(vars(kind).get("step"), FunctionType)]
    steps = [step for step in steps if step.__code__ is not _STEP]  # it is where this was called before
    wrapper: Any = nn.parallel.DistributedDataParallel  # ours calls this method of it in each forward
    marked = [base.add_param_group, base.load_state_dict, base.state_dict, base.zero_grad, wrapper._inside_ddp_forward]
    _dynamo_import.put_off(
        [step for step in steps if step.__code__.co_name == _STEP.co_name and step.__code__.co_freevars == ("func",)],
        [inspect.unwrap(method) for method in marked],
    )


def _use_grad_for_differentiable(func: Callable[..., Any]) -> FunctionType:
    """Do what the function of this name in torch.optim.optimizer does, without the breaks in compiled code."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        previous = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            result = func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(previous)
        return result

    return cast(FunctionType, _use_grad)


# Runs with the variables of the function that it is given to: torch's `func`, and `torch` in torch's own module.
_STEP = _use_grad_for_differentiable(lambda: None).__code__


@final
class _InductorImport(MetaPathFinder):
    """Sets the compiler's switch for repeatable code when the compiler is imported; None leaves it alone."""

    def __init__(self) -> None:
        self.deterministic: bool | None = None

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        deterministic = self.deterministic
        if fullname != _INDUCTOR_CONFIG or deterministic is None:
            return None
        self.deterministic = None  # once, and not for the question to the other finders
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        execute = loader.exec_module

        def execute_and_set(module: Any) -> None:
            execute(module)
            module.deterministic = deterministic

        loader.exec_module = execute_and_set
        return spec


_inductor_import = _InductorImport()


def is_inductor_deterministic() -> bool:
    """Return the compiler's own switch for repeatable code, or what it will be when the compiler is imported."""
    config: Any = sys.modules.get(_INDUCTOR_CONFIG)
    return bool(_inductor_import.deterministic if config is None else config.deterministic)


def set_inductor_deterministic(deterministic: bool) -> None:
    """Set the compiler's own switch for repeatable code, now or when it is imported; False lets it measure and tune."""
    config: Any = sys.modules.get(_INDUCTOR_CONFIG)
    if config is not None:
        config.deterministic = deterministic
        return
    _inductor_import.deterministic = deterministic
    if _inductor_import not in sys.meta_path:
        sys.meta_path.insert(0, _inductor_import)
