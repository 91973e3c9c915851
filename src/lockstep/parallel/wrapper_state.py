"""What of a wrapper is copied and pickled: all but what belongs to its group.

A copy begins anew over the default group, as torch's does.
"""

from collections.abc import Mapping
from typing import Any, Final

_NOT_COPIED: Final = frozenset({"process_group", "reducer", "_workers", "_sync", "_averaging", "_uneven", "_hook"})
"""Attributes that belong to a group, or live only in this process."""


def state_for_copy(attributes: Mapping[str, Any], delayed: tuple[list[str], str] | None) -> dict[str, Any]:
    """Return what a copy of a wrapper needs (local); `delayed` is of `DelayedParameters.names_for_copy`."""
    state = {name: value for name, value in attributes.items() if name not in _NOT_COPIED}
    return {**state, "_delayed": delayed}
