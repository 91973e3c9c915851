"""What is sent to a worker, as a process finds it that has imported other modules than the sender."""

import pickle
import subprocess
import sys
from pathlib import Path

import torch
from tests.process import warm
from torch.nn.attention import SDPBackend

from lockstep.launch.pickling import pack

WALK = """
import contextlib, importlib, pickle, pkgutil, sys, types, warnings
import torch
from lockstep.launch.pickling import pack
warnings.simplefilter("ignore")
def load(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2].startswith("_") or "testing" in found.name:
            continue
        with contextlib.suppress(Exception):  # it needs something that is not installed here
            module = importlib.import_module(found.name)
            if found.ispkg:
                load(module)
load(torch)
modules = {name: module for name, module in sys.modules.items() if name.startswith("torch")}
wrong = [name for name, module in modules.items() if pickle.loads(pack(module)) is not module]
odd = [name for name, module in modules.items() if type(module) is not types.ModuleType]
print(len(modules), len(odd), wrong)
"""


def test_every_module_of_torch_is_sent_by_name() -> None:
    found = warm.run([sys.executable, "-c", WALK])
    num_modules, num_odd, wrong = found.stdout.splitlines()[-1].split(maxsplit=2)  # some modules print
    assert int(num_modules) > 1000
    assert int(num_odd) > 10
    assert wrong == "[]"


def test_a_fresh_process_finds_what_was_sent_by_name() -> None:
    program = "import pickle, sys; print(*map(type, pickle.load(sys.stdin.buffer).values()), sep='\\n')"
    sent = {
        "aten": torch.ops.aten,
        "packet": torch.ops.aten.add,
        "overload": torch.ops.aten.add.Tensor,
        "namespace of classes": torch.classes.quantized,
        "rnn": torch.backends.cudnn.rnn,
        "config": torch.compiler.config,
        "class of another name": SDPBackend,
    }
    found = subprocess.run([sys.executable, "-c", program], input=pack(sent), capture_output=True, check=True).stdout
    assert found.decode().splitlines() == [str(type(value)) for value in sent.values()]


def test_a_cached_function_of_a_script_arrives_with_an_empty_cache(tmp_path: Path) -> None:
    # It was sent as a name in the script, which the worker does not have.
    (tmp_path / "script.py").write_text(
        "import functools, sys\n"
        "from lockstep.launch.pickling import pack\n"
        "@functools.lru_cache(maxsize=7)\n"
        "def square(x): return x * x\n"
        "class Holder:\n"
        "    @functools.cached_property\n"
        "    def nine(self): return square(3)\n"
        "square(2)\n"
        "print(pack((square, Holder())).hex())\n"
    )
    packed = warm.run([sys.executable, "script.py"], cwd=tmp_path).stdout
    square, holder = pickle.loads(bytes.fromhex(packed))
    assert square.cache_info() == (0, 0, 7, 0)
    assert holder.nine == holder.nine == 9
    assert square.cache_info().misses == 1
