"""What `DistributedDataParallel` warns of."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

_LOGGER = logging.getLogger("lockstep")


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


def warn_of_uneven_batches(batch_sizes: Sequence[int]) -> None:
    """Warn that ranks trained on batches of different sizes, each of which counts the same."""
    most, least = max(batch_sizes), min(size for size in batch_sizes if size > 0)
    warnings.warn(
        f"In one step rank {batch_sizes.index(most)} trained on {most} samples and rank {batch_sizes.index(least)} on "
        f"{least}, by the first dimension of the inputs. DistributedDataParallel averages the ranks' gradients, so a "
        "sample of the smaller batch counts for more. Give each rank as many samples (DistributedSampler with "
        "drop_last, a DataLoader with drop_last=True), or train with ls.Trainer, which weighs by samples. "
        "This is said once.",
        stacklevel=2,
    )
