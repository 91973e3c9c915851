"""Warnings of `DistributedDataParallel`."""

import logging
import warnings
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
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
            "Please avoid using it. (LS325)",
            FutureWarning,
            stacklevel=3,
        )
    if mixed_precision is not None:
        _LOGGER.warning("Received mixed precision config %s", mixed_precision)
    if is_static_again:
        warnings.warn("You've set static_graph to be True, no need to set it again. (LS325)", stacklevel=3)
    elif finds_unused:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically, so you do not need to set find_unused_parameters=true. (LS325)",
            stacklevel=3,
        )
