"""Warnings of `DistributedDataParallel`."""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

from lockstep.reduce import GroupStatus

_LOGGER = logging.getLogger("lockstep")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def warn_of_ignored(
    *,
    check_reduction: bool = False,
    mixed_precision: Any = None,
    is_static_again: bool = False,
    finds_unused: bool = False,
) -> None:
    """Warn of arguments where torch does."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
    if mixed_precision is not None:
        _LOGGER.warning("Received mixed precision config %s", mixed_precision)
    if is_static_again:
        warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=3)
    elif finds_unused:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically, so you do not need to set find_unused_parameters=true.",
            stacklevel=3,
        )


@final
class UnevenBatchWarning:
    """Warns once, on rank 0, that ranks trained on batches of different sizes.

    Args:
        rank: Number of this rank.

    Attributes:
        is_expected: Whether they may differ now, as within `join`.
    """

    def __init__(self, rank: int) -> None:
        self.is_expected = False
        self._rank = rank
        self._has_warned = False

    def look_at(self, status: GroupStatus) -> None:
        """Warn if the ranks' batches have differed."""
        if not status.uneven_batch_sizes or self._has_warned or self.is_expected:
            return
        self._has_warned = True
        if self._rank == 0:
            warn_of_uneven_batches(status.batch_sizes)


def warn_of_uneven_batches(batch_sizes: Sequence[int]) -> None:
    """Warn, at the user's line, that ranks trained on batches of different sizes, which count the same."""
    most, least = max(batch_sizes), min(size for size in batch_sizes if size > 0)
    warnings.warn(
        f"In one step rank {batch_sizes.index(most)} trained on {most} samples and rank {batch_sizes.index(least)} on "
        f"{least}, by the first dimension of the inputs. DistributedDataParallel averages the ranks' gradients, so a "
        "sample of the smaller batch counts for more. Give every rank the same number (DistributedSampler with "
        "drop_last, a DataLoader with drop_last=True), or train with ls.Trainer, which weights by samples. If that "
        "dimension is not the batch, or the loss is weighted already, ignore this warning: "
        'warnings.filterwarnings("ignore", message="In one step rank"). It is given once.',
        stacklevel=_stacklevel_of_user(),
    )


def _stacklevel_of_user() -> int:
    """Return the level, for a warning of our caller's, of the innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's name for it
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return 1 if frame is None else level
