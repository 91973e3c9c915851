"""A process ends with its own exit code although a thread of it comes back from native code meanwhile."""

import subprocess
import sys

SCRIPT = """
import sys, time
import torch
from lockstep.processes.ending import start_thread_left_alone

def compute():
    tensor = torch.ones(300_000)
    while True:
        tensor.add_(1)  # leaves the interpreter, and comes back, again and again

start_thread_left_alone(compute, name="computes")
sys.exit(3)
"""


def test_a_thread_in_native_code_does_not_abort_the_process() -> None:
    # "terminate called without an active exception", and exit code -6: seen when a rank was lost while Gloo connected.
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
