"""What runs here: versions of everything; and whether NCCL takes several ranks on one card (--nccl).

Whether it does decides how much of several workers can be tried on a machine with one card. It is asked with and
without the variable by which newer versions of NCCL allow it.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

import torch
import torch.distributed as dist
from gpu_device import DEVICE, IS_CUDA, MIB, card_bytes, name
from gpu_workers import Outcome, describe, hand_in, is_worker, join, run_workers

import lockstep as ls

PACKAGES = ("triton", "numpy", "cloudpickle", "pydantic", "safetensors", "nvidia-ml-py", "nvidia-nccl-cu13", "pytest")
ALLOW = "NCCL_MULTI_RANK_GPU_ENABLE"
LIMIT_SECONDS = 40.0


def show_versions() -> None:
    print(f"Lockstep {ls.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, device {name()}")
    for package in PACKAGES:
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    if IS_CUDA:
        print(f"cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        properties = torch.cuda.get_device_properties(DEVICE)
        print(
            f"{properties.total_memory / MIB:.0f} MiB, {properties.multi_processor_count} multiprocessors, {properties}"
        )
        product = torch.ones(512, 512, device=DEVICE) @ torch.ones(512, 512, device=DEVICE)
        if float(product.sum()) != 512.0**3:
            raise RuntimeError("a matrix product on the card is wrong.")
        print(
            f"{torch.cuda.device_count()} card(s); {card_bytes() / MIB:.0f} MiB of the first in use, with this process"
        )
    backends = [backend for backend in ("nccl", "gloo", "shm") if dist.is_backend_available(backend)]
    print(f"backends {', '.join(backends)}; {len(os.sched_getaffinity(0))} cores")
    print(torch.__config__.show())
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    if not IS_CUDA and "--small" not in sys.argv:
        raise SystemExit("No GPU can be used here.")


def all_reduce_once() -> None:
    """Add up one tensor over all workers, twice (in a worker)."""
    join("nccl")
    tensor = torch.full((1 << 20,), 1.0 + dist.get_rank(), device=DEVICE)
    for _ in range(2):
        dist.all_reduce(tensor)
    hand_in(float(tensor[0]))


def ask_nccl(world_size: int) -> bool:
    """Return whether NCCL takes so many ranks on one card, and say what it says."""
    outcomes = run_workers(__file__, ["--nccl"], world_size=world_size, limit=LIMIT_SECONDS)
    total = world_size * (world_size + 1) / 2 * world_size
    accepted = all(outcome.result == total for outcome in outcomes)
    allowed = f", {ALLOW}={os.environ[ALLOW]}" if ALLOW in os.environ else ""
    print(f"NCCL with {world_size} rank(s) on one card{allowed}: {'works' if accepted else 'does not work'}")
    for outcome in outcomes:
        print(f"    {describe(outcome)}")
        if not accepted:
            print("        " + reason(outcome).replace("\n", "\n        "))
    return accepted


def reason(outcome: Outcome) -> str:
    said = [line for line in outcome.output.splitlines() if "Duplicate GPU" in line or "NCCL" in line]
    return "\n".join(said[-6:]) or outcome.last_line()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", action="store_true", help="ask NCCL")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    options = parser.parse_args()
    if is_worker():
        all_reduce_once()
    elif options.nccl:
        if not ask_nccl(1):
            raise SystemExit("NCCL does not even work with one rank.")
        if not ask_nccl(2) and IS_CUDA:
            os.environ[ALLOW] = "1"
            ask_nccl(2)
    else:
        show_versions()


if __name__ == "__main__":
    main()
