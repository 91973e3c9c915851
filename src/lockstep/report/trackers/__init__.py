"""Trackers: what shows runs elsewhere, such as TensorBoard. They follow `metrics.jsonl`, which stays the source.

protocol.py     what a tracker does
following.py    the recorder that opens trackers, brings them up to the file, and gives them what comes
known.py        the trackers that a config names, and whether their packages are installed
callback.py     the same for a loop of one's own
"""

from lockstep.report.trackers.following import Following
from lockstep.report.trackers.known import check_trackers, make_trackers
from lockstep.report.trackers.protocol import TrackedRun, Tracker

__all__ = ["Following", "TrackedRun", "Tracker", "check_trackers", "make_trackers"]
