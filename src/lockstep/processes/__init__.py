"""Settings of the current process: when it ends, what signals do, random generators and deterministic switches.

This file imports nothing: launchers, which do not import torch, import `ending`, `host` and `stop_signals`.
"""
