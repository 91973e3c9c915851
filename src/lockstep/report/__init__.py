"""Reporting: what a run shows and leaves behind.

Everything here is a recorder of events, or reads what one wrote. A worker that is not rank 0 reports nothing.
`curves.py` is imported by who draws, for matplotlib takes its time to import.
"""

from lockstep.report.metrics_file import MetricsFile, sum_epoch
from lockstep.report.progress import PlainLines, ProgressBar

__all__ = ["MetricsFile", "PlainLines", "ProgressBar", "sum_epoch"]
