"""Runs: what a config describes, in a directory of its own; begun, stopped, and resumed.

Invariants: a run directory is never written over; it holds one history; what a checkpoint cannot restore is refused.
"""
