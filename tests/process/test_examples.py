"""The examples, as a user runs them on a machine without a GPU."""

import os
import re
import sys
from pathlib import Path

from tests.process import warm

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run_example(name: str, *launcher: str) -> str:
    """Return what an example prints; a warning in any of its processes is an error."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error::UserWarning"}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = warm.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_a_model_on_several_devices_trains_alike_on_every_worker() -> None:
    printed = run_example("model_parallel.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < 0.3 < losses[0]
    assert "2 workers, 58,474 parameters: the same on all" in printed


def test_a_script_in_torchs_style_trains_and_counts_each_image_once() -> None:
    printed = run_example("ddp_script.py", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert re.search(r"test accuracy 9\d\.\d+% \(\d+ of 360\)", printed)
