"""Runs: training what a config describes, in a directory of its own; starting, stopping and resuming it.

Invariants: an existing run directory is never overwritten. All its checkpoints are of one sequence of steps. Resuming
refuses changes that a checkpoint cannot restore.
"""
