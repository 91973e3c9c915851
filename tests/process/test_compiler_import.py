"""What we rely on of the import of torch's compiler; each assertion says what breaks without it."""

import subprocess
import sys

import pytest


def run_with_lockstep(source: str) -> list[str]:
    """Return the words that a program prints, in an interpreter of its own: a forked one may have imported more."""
    command = [sys.executable, "-c", f"import lockstep\n{source}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_neither_the_package_nor_optimizers_import_the_compiler_and_torch_is_itself_again_when_somebody_does() -> None:
    source = """
import sys, torch, lockstep
from pathlib import Path
from torch import nn
from lockstep.torch_private.compiler import *
from lockstep.torch_private.compiler_import import *

net = nn.Linear(2, 2)
assert not is_compiled_module(net) and not is_compiled_autograd_on() and not is_compiled_function(net.forward)
set_inductor_deterministic(True)
def function(): pass
skip_frames(function.__code__)
mark_uncompiled(function)
disable_compiler(function)
forget_compiled_call(dict(vars(net)))
print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)

num_finders = len(sys.meta_path)
use_optimizers_without_compiler()  # `import lockstep` has done it already
print(len(sys.meta_path) == num_finders)
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([parameter])
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
optimizer.zero_grad()
parameter.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())

def train(differentiable):
    modes = []
    parameter = torch.nn.Parameter(torch.arange(3.0))
    given = parameter.clone() if differentiable else parameter
    optimizer = torch.optim.SGD([given], lr=0.5, differentiable=differentiable)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones(3)
    optimizer.step(lambda: modes.append(torch.is_grad_enabled()))
    modes.append(torch.is_grad_enabled())
    scheduler.step()
    return weight.tolist(), modes

ours = train(False), train(True)
print("torch._dynamo" in sys.modules)
import torch._dynamo
wrapped = torch.optim.Optimizer.zero_grad.__wrapped__
print(hasattr(wrapped, "__dynamo_disable"))
optimizer.zero_grad()
print(parameter.grad, getattr(wrapped, "__dynamo_disable") is not wrapped)
steps = [vars(kind)["step"] for kind in vars(torch.optim).values() if isinstance(kind, type) and "step" in vars(kind)]
print(any(step.__code__.co_filename.startswith(str(Path(lockstep.__file__).parent)) for step in steps))
print(ours == (train(False), train(True)), len(ours[0][1]))  # a step without the compiler is torch's step
"""
    *imported, is_once, has_imported, is_marked, gradient, is_disabled, is_ours, is_torchs, num_modes = (
        run_with_lockstep(source)
    )
    assert imported == ["False", "False"], "`import lockstep` would take a second longer"
    assert is_once == "True"
    assert has_imported == "False", "the start of a worker: it would take twice the time"
    assert [is_marked, gradient, is_disabled, is_ours] == ["False", "None", "True", "False"]
    assert [is_torchs, num_modes] == ["True", "2"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_compiler_that_is_imported_later_makes_repeatable_code_if_it_was_told_to(deterministic: bool) -> None:
    source = f"""
from lockstep.torch_private.compiler_import import is_inductor_deterministic, set_inductor_deterministic
set_inductor_deterministic(True)
set_inductor_deterministic({deterministic})
print(is_inductor_deterministic())
from torch._inductor import config
print(config.deterministic, is_inductor_deterministic())
set_inductor_deterministic({not deterministic})
print(config.deterministic)
"""
    found = run_with_lockstep(source)
    expected = [str(deterministic)] * 3 + [str(not deterministic)]
    assert found == expected, "compiled models: kernels chosen by timing have other bits in each run"
