"""Lockstep's classes in place of torch's, in a script that is not changed. Importing this replaces them.

    import lockstep.drop_in              # the first line of a script
    python -m lockstep.drop_in train.py  # or no line at all; also under torchrun
    lockstep run --drop-in train.py      # likewise

Replaced are `DistributedDataParallel`, `DataParallel`, `DistributedSampler`, `SyncBatchNorm`, `data_parallel` and
`init_process_group`: under every name that torch has for them, and in modules that have imported them before. torch's
own classes, where somebody still holds one, construct Lockstep's.

Invariants: all Python processes that this one starts have the same classes, so no rank trains with others; after
`undo()` torch's names are what they were; nothing else in torch changes.
"""

from lockstep.drop_in.replacing import DropIn

__all__ = ["apply", "is_active", "undo"]

_DROP_IN = DropIn()


def apply() -> None:
    """Replace torch's classes in this process and in those that it starts, as importing this module does (local)."""
    _DROP_IN.apply()


def undo() -> None:
    """Restore torch's classes (local). Objects that were made meanwhile stay Lockstep's, and go on working.

    Names that a module has imported from Lockstep stay Lockstep's.
    """
    _DROP_IN.undo()


def is_active() -> bool:
    """Return whether torch's classes are replaced in this process (local)."""
    return _DROP_IN.is_active


apply()
