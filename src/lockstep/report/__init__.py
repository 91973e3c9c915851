"""Reporting: progress on the terminal, the metrics file, and curves.

Everything here is a recorder of events, or reads a file of a recorder. Only rank 0 reports.
`curves.py` is not imported here, because importing matplotlib is slow.
"""

from lockstep.report.metrics_file import MetricsFile, sum_epoch
from lockstep.report.progress import PlainLines, ProgressBar

__all__ = ["MetricsFile", "PlainLines", "ProgressBar", "sum_epoch"]
