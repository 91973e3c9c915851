"""What we rely on of torch.compile; each assertion says what breaks without it."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lockstep.torch_private.compiler import (
    forget_compiled_call,
    has_cuda_graphs_of_compiler,
    is_compiled_autograd_on,
    is_compiled_function,
    is_compiled_module,
    mark_uncompiled,
    original_of_compiled,
    skip_frames,
)
from lockstep.torch_private.compiler_import import disable_compiler, set_inductor_deterministic

HOOKS = "the reducer and the groups: their functions would be compiled one by one, or fail to"
REPLICAS = "DataParallel: replicas would run the module that was compiled, on the first device"


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    import torch._dynamo

    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Recorder:
    """A backend that notes which operations it was given."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.operations += [str(node.target) for node in graph.graph.nodes if node.op != "output"]
        return graph.forward

    def compiled(self, name: str) -> bool:
        return any(name in operation for operation in self.operations)


def test_a_compiled_module_is_known_and_leads_to_the_module() -> None:
    net = nn.Linear(2, 2)
    compiled: Any = torch.compile(net, backend="eager")
    assert is_compiled_module(compiled), REPLICAS
    assert not is_compiled_module(net)
    assert original_of_compiled(compiled) is net, REPLICAS
    assert is_compiled_module(torch.compile(nn.Sequential(compiled), backend="eager"))


def test_a_compiled_function_is_known_and_leads_to_the_function() -> None:
    known = nn.functional.cross_entropy
    assert not is_compiled_function(known)
    compiled = torch.compile(known, backend="eager")
    assert is_compiled_function(compiled), "DataParallelCriterion: class weights would be cut"
    assert inspect.unwrap(compiled) is known


def run_with_hook(hook: Callable[[Tensor], None], recorder: Recorder) -> None:
    """Run a compiled step in which C++ calls `hook`."""
    net = nn.Linear(2, 2)
    net.weight.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor) -> None:
        net(x).sum().backward()

    torch.compile(step, backend=recorder)(torch.ones(1, 2))


def test_a_function_that_cpp_calls_is_left_alone_with_all_that_it_calls() -> None:
    called: list[Tensor] = []

    def inner(parameter: Tensor) -> Tensor:
        return parameter.grad.cosh()

    def hook(parameter: Tensor) -> None:
        called.append(inner(parameter))

    skip_frames(hook.__code__)
    recorder = Recorder()
    run_with_hook(hook, recorder)
    assert len(called) == 1
    assert recorder.operations, "nothing was compiled, so this shows nothing"
    assert not recorder.compiled("cosh"), HOOKS


def test_without_that_it_is_compiled() -> None:
    def hook(parameter: Tensor) -> None:
        parameter.grad.cosh()

    recorder = Recorder()
    run_with_hook(hook, recorder)
    assert recorder.compiled("cosh"), "`skip_frames` may not be needed any more"


@pytest.mark.parametrize("mark", ["mark_uncompiled", "disable_compiler"])
def test_a_marked_function_is_called_by_compiled_code_and_not_traced(mark: str) -> None:
    def inner(x: Tensor) -> Tensor:
        return x.sinh()

    def function(x: Tensor) -> Tensor:
        return inner(x.cosh())

    marked: Callable[[Tensor], Tensor] = function
    if mark == "mark_uncompiled":
        mark_uncompiled(function)
        skip_frames(function.__code__)  # for what it calls
    else:
        marked = disable_compiler(function)

    def step(x: Tensor) -> Tensor:
        return marked(x.tanh()).sigmoid()

    recorder = Recorder()
    x = torch.ones(2)
    torch.testing.assert_close(torch.compile(step, backend=recorder)(x), x.tanh().cosh().sinh().sigmoid())
    assert recorder.compiled("tanh"), "what comes before would not be compiled"
    assert recorder.compiled("sigmoid"), "what comes behind would not be compiled"
    assert not recorder.compiled("cosh"), "DataParallel and DDP: the compiler would trace threads and hooks, and fail"
    assert not recorder.compiled("sinh"), "likewise, within what they call"


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sinh()


def test_a_copy_forgets_what_compile_has_left() -> None:
    net = Net()
    recorder = Recorder()
    net.compile(backend=recorder)
    twin = Net.__new__(Net)
    state = dict(net.__dict__)
    forget_compiled_call(state)
    twin.__dict__.update(state)
    twin(torch.ones(1, 2))
    assert not recorder.operations, REPLICAS
    net(torch.ones(1, 2))
    assert recorder.operations, "the module itself stays compiled"


def test_compiled_autograd_is_seen_and_calls_no_hooks_of_ours() -> None:
    assert not is_compiled_autograd_on()
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert is_compiled_autograd_on(), "DDP: each rank would train alone, without a word"
    assert not is_compiled_autograd_on()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert is_compiled_autograd_on(), "DDP: each rank would train alone, without a word"
    assert not is_compiled_autograd_on()


def test_the_switch_for_repeatable_code_is_there() -> None:
    from torch._inductor import config

    before = config.deterministic
    try:
        set_inductor_deterministic(deterministic=True)
        assert config.deterministic is True, "compiled models: kernels chosen by timing have other bits in each run"
        set_inductor_deterministic(deterministic=False)
        assert config.deterministic is False
    finally:
        config.deterministic = before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the import
def test_graphs_of_the_compiler_are_known_by_their_managers() -> None:
    from torch._inductor import cudagraph_trees as trees

    lost = "the trainer's partials: the next run of a CUDA graph would overwrite the gradients of the last shard"
    assert not has_cuda_graphs_of_compiler(), "each gradient of each shard would be copied"
    container = trees.get_container(0)
    container.tree_manager = cast("Any", object())  # as `get_tree_manager` does, which needs a GPU
    try:
        assert has_cuda_graphs_of_compiler(), lost
    finally:
        container.tree_manager = None
    assert not has_cuda_graphs_of_compiler()
