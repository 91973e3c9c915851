"""What `import lockstep` does, and does not."""

import subprocess
import sys


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
