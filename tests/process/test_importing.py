"""What `import lockstep` does, and does not."""

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep as ls

COMMAND = """
import sys
import lockstep_command
sys.argv = ["lockstep", *sys.argv[1:]]
try:
    lockstep_command.main()
except SystemExit as ended:
    print(ended.code, sorted({"torch", "numpy", "pydantic"} & set(sys.modules)))
    import lockstep
    print(lockstep.Trainer.__name__, lockstep.__version__)
"""

IMPORT_ALL = """
import importlib, sys
import lockstep_command
lockstep_command._put_off_package_init()
sys.modules["torch"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
WITHOUT_TORCH = {
    "": (
        "__main__ channel checkpoint cli devices doctor errors events explanations held_objects launch "
        "processes recipes recording report runs secrets settings shards version"
    ),
    "channel": "client server table",
    "checkpoint": "atomic_write interop step_files",
    "checkpoint.interop": "names",
    "cli": "check doctor evaluate explain failures init main options predict report run runs scale train",
    "devices": "choose inventory look nvml request",
    "doctor": ("activity diagnosis examination finding report scripts slow slow_causes stacks stall_watch system"),
    "doctor.scripts": "rules source",
    "launch": (
        "continuation control environment exits functions guardian "
        "launcher membership messages output pickling rendezvous restarts scaling "
        "script_entry scripts sessions signals supervision template worker_pool"
    ),
    "processes": "ending forking host stop_signals user_line",
    "recording": "file_format reading stacks writing",
    "report": "metrics_file page progress trackers",
    "report.page": "figures measure run_data texts",
    "report.trackers": "known",
    "runs": "changes config directory importing listing opening predictions",
    "shards": "assignment tree",
}
"""Modules by package: the launcher, the doctor and the commands that need no model begin a second or two earlier."""


def test_importing_does_no_work_on_tensors() -> None:
    # With TORCH_CUDA_SANITIZER=1 every operation looks for a CUDA device, so `import lockstep` needed one.
    code = (
        "import torch\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Refuse(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, *_rest): raise SystemExit(f'{func} while importing')\n"
        "with Refuse():\n"
        "    import lockstep, lockstep.reduce, lockstep.engine, lockstep.parallel\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


IN_CHILDREN = """
import os, sys
for command in sys.argv[1:]:
    if os.fork() == 0:
        import lockstep_command
        sys.argv = ["lockstep", command, "--help"]
        try:
            lockstep_command.main()
        except SystemExit as ended:
            print("ended:", command, ended.code, {"torch", "numpy"} & set(sys.modules), flush=True)
        os._exit(0)
    os.wait()
"""


def test_commands_that_begin_at_once_import_neither_torch_nor_numpy() -> None:
    # NumPy alone, which a merge of two modules once brought, made the start of `lockstep run` a third longer.
    commands = ["run", "runs", "predict", "report", "scale", "explain"]
    done = subprocess.run([sys.executable, "-c", IN_CHILDREN, *commands], capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert found == [f"ended: {command} 0 set()" for command in commands]


def test_help_imports_neither_torch_nor_a_command() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert "predict " in done.stdout
    assert "0 []" in done.stdout, done.stderr
    assert "Trainer 0." in done.stdout  # the package is imported when a name of it is used


def test_what_the_launcher_needs_loads_without_torch() -> None:
    names = [
        ".".join(filter(None, ("lockstep", package, name)))
        for package, each in WITHOUT_TORCH.items()
        for name in each.split()
    ]
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
import lockstep
sys.modules |= dict.fromkeys("PIL bokeh jinja2 pydantic pydantic_core rich ruamel typer".split())
for found in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    if not found.name.startswith(sys.argv[1:]) and not found.ispkg:
        importlib.import_module(found.name)
from lockstep.report.page import make_page
make_page([])
"""


def test_the_wrapper_and_the_trainer_need_no_package_of_an_extra() -> None:
    ours = ["cli", "report", "runs", "recipes.images", "doctor.report", "plugins", "drop_in", "torch_private.startup"]
    names = [f"lockstep.{each}" for each in [*ours, "__main__"]]
    code = WITHOUT_EXTRAS.replace("sys.argv[1:]", repr(tuple(names)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line]
    # The page needs what a config needs, and comes first here.
    assert said[-1].endswith(
        "needs the package pydantic, which is not installed: pip install 'lockstep-ddp[train]'. (LS822)"
    )


def test_the_command_names_the_extra_that_it_needs() -> None:
    code = "import sys; sys.modules['typer'] = None; import lockstep_command; lockstep_command.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "pip install 'lockstep-ddp[train]'. (LS822)" in done.stderr


def test_every_public_name_is_found_where_type_checkers_find_it() -> None:
    stub = ast.parse(Path(ls.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    found = {name.asname: (str(each.module), name.name) for each in imported for name in each.names}
    assert sorted([*map(str, found), "__version__"]) == sorted(vars(ls)["__all__"])
    for name, (module, original) in found.items():
        assert name == original
        assert getattr(ls, name) is getattr(importlib.import_module(module), name)
        assert name in dir(ls)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = ls.Trainr  # type: ignore[attr-defined]


SUBMODULES = """
import importlib
import lockstep as ls
from torch import nn
assert ls.parallel.DataParallel is ls.DataParallel
assert ls.checkpoint and ls.data and ls.engine and ls.means and ls.reduce
assert not hasattr(ls, "drop_in")  # its import replaces torch's names
load = nn.Module.load_state_dict
importlib.reload(ls)
assert nn.Module.load_state_dict is load
"""


def test_packages_are_attributes_and_a_reload_wraps_nothing_twice() -> None:
    subprocess.run([sys.executable, "-c", SUBMODULES], check=True, timeout=100)


def test_it_is_imported_from_a_zip_file_too(tmp_path: Path) -> None:
    folder = Path(ls.__file__).parent
    found = shutil.make_archive(str(tmp_path / "lockstep"), "zip", folder.parent, folder.name)
    code = f"import sys; sys.path.insert(0, {found!r}); import lockstep; lockstep.Trainer; print(lockstep.__file__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=100, stdout=subprocess.PIPE, text=True)
    assert done.stdout.startswith(found)


def test_a_script_with_the_wrapper_alone_does_not_import_the_trainer() -> None:
    # 0.2 s of each start on an idle machine, 0.5 s under load.
    code = """
import sys
import lockstep as ls
ls.DistributedDataParallel, ls.DistributedSampler
print([name for name in ("lockstep.engine", "lockstep.launch.launcher", "lockstep.checkpoint") if name in sys.modules])
print(callable(ls.launch), __import__("gc").isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True True"]
