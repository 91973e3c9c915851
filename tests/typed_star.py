"""All names by a star, as `make types` sees them: from a stub that computes `__all__` it would take none."""

# mypy: disable-error-code="misc"

from lockstep import *  # noqa: F403


def main() -> None:
    launch(print, Trainer, SyncBatchNorm)  # noqa: F405
