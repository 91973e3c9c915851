"""Reading a training script for what goes wrong in data-parallel, without running it.

A *mistake* is what trains something else than meant, fails, or waits for ever with several workers. A *note* is what
works and is seldom meant. A rule reports only what it sees in the file: what comes from another module, or from an
argument, counts as right.
"""

from lockstep.doctor.scripts.rules import check_source
from lockstep.doctor.scripts.source import Level, ScriptFinding

__all__ = ["Level", "ScriptFinding", "check_source"]
