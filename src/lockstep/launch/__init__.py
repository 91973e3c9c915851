"""Launching: starting workers and bringing home what they return, or why they failed.

The *launcher* is the process that calls `launch`; a *worker* is a process that it starts. Which code runs where is the
file: `launcher.py` in the parent, `worker.py` in the child, `messages.py` is what crosses.

Invariants: no worker outlives the launcher, however the launcher ends; two launches never clash, because the kernel
picks the port and the launcher holds it; the first failure in time is the one that is reported.
"""

from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run

__all__ = ["Run", "launch"]
