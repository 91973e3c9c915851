"""Reporting: progress on the terminal, the metrics file, trackers, and `report.html`.

Everything here is a recorder of events, or reads a file of a recorder. Rank 0 reports; if it is lost, the next rank 0.
"""
