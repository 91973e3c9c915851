"""What `import lockstep` does, and does not."""

import subprocess
import sys

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


def test_help_imports_neither_torch_nor_a_command() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert "predict " in done.stdout
    assert "0 []" in done.stdout, done.stderr
    assert "Trainer 0." in done.stdout  # the package is imported when a name of it is used
