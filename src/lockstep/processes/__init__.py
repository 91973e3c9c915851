"""What a process asks of the system for itself: when it ends, what signals do, and its random and deterministic state.

Kept free of imports: launchers, which import no torch, read `lifetime` and `stop_signals` from here.
"""
