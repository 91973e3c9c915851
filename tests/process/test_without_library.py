"""A package that was installed without a C compiler: the same sums over Gloo, and one line that says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lockstep

SCRIPT = """
import torch, torch.distributed as dist
import lockstep as ls


def main(run):
    totals = [torch.full((3,), float(run.rank)) for _ in range(2)]
    dist.all_reduce(totals[0])
    dist.all_reduce(totals[1], group=dist.new_group([0, 1, 2]))
    return [total.tolist() for total in totals]


if __name__ == "__main__":
    print(ls.launch(main, devices="cpu", workers=3))
    try:
        ls.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    except ls.GroupError as error:
        print(error)
"""
REASON = "the package was installed without a working C compiler; install one, such as gcc, then install the package"


def test_workers_use_gloo_and_one_line_says_why_and_what_to_do(tmp_path: Path) -> None:
    place = tmp_path / "lockstep"
    shutil.copytree(Path(lockstep.__file__).parent, place, ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    sums, refused = done.stdout.splitlines()
    assert sums == str([[[3.0] * 3] * 2] * 3)
    assert refused.startswith("The backend shm cannot be used on host ")
    [line] = [line for line in done.stderr.splitlines() if "LS116" in line]
    assert line.startswith("Gloo carries CPU tensors in place of shared memory, because rank 0 cannot share memory (")
    for each in (line, refused):
        assert f"{REASON} again: pip install --force-reinstall --no-deps --no-cache-dir lockstep-ddp" in each
