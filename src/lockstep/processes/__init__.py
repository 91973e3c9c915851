"""Settings of the current process: when it ends, what signals do, random generators and deterministic switches.

This file imports nothing, because launchers, which import no torch, import `lifetime` and `stop_signals`.
"""
