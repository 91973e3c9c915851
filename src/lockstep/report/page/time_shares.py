"""Where the time of a worker went, from its recording; pure.

The phases of steps divide the time of a worker without gaps. Between two steps it loads, evaluates, saves, or does
something else: what the loop of the user does, printing among it.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lockstep.recording import EventKind

_IDLE, _PREPARE, COMPUTE, _REDUCE, AGREE, _COMMIT = 1, 2, 3, 4, 5, 6
SHARES: Final = ("loading", "compute", "gradients", "others", "update", "evaluating", "saving", "rest")
"""Parts of the time, in the order of a step; `texts` has what the page calls them."""
_BETWEEN: Final = {
    "loading": EventKind.LOADING,
    "evaluating": EventKind.EVALUATING,
    "saving": EventKind.SAVING,
}
_OF_PHASE: Final = {_PREPARE: "rest", COMPUTE: "compute", _REDUCE: "gradients", AGREE: "others", _COMMIT: "update"}
_SECOND: Final = 1e9


def phases(table: NDArray[Any]) -> NDArray[np.int64]:
    """Return the phases of a recording as rows of (begin, end, phase, step), in nanoseconds of its clock.

    The last one ends where the recording does.
    """
    rows = table[table["kind"] == EventKind.PHASE]
    if not len(rows):
        return np.empty((0, 4), np.int64)
    last = max(int(table["begin"].max()), int(table["end"].max()))
    ends = np.append(rows["begin"][1:], max(last, int(rows["begin"][-1])))
    return np.stack([rows["begin"], ends, rows["index"], rows["step"]], axis=1).astype(np.int64)


def time_shares(table: NDArray[Any]) -> dict[str, float]:
    """Return the seconds of each of `SHARES` between the first and the last step of a recording."""
    found = phases(table)
    shares = dict.fromkeys(SHARES, 0.0)
    if not len(found):
        return shares
    for phase, share in _OF_PHASE.items():
        chosen = found[found[:, 2] == phase]
        shares[share] += float((chosen[:, 1] - chosen[:, 0]).sum()) / _SECOND
    idle = found[found[:, 2] == _IDLE, :2]
    between = float((idle[:, 1] - idle[:, 0]).sum()) / _SECOND
    for share, kind in _BETWEEN.items():
        rows = table[(table["kind"] == kind) & (table["end"] > 0)]
        inside = _overlap(idle, np.stack([rows["begin"], rows["end"]], axis=1)) / _SECOND
        shares[share] = min(inside, between)
        between -= shares[share]
    shares["rest"] += between
    return shares


def _overlap(outer: NDArray[np.int64], inner: NDArray[np.int64]) -> float:
    """Return how long both an interval of `outer`, which are in order and apart, and one of `inner` last."""
    total = 0
    position = 0
    for begin, end in inner[np.argsort(inner[:, 0])].tolist():
        while position < len(outer) and outer[position, 1] <= begin:
            position += 1
        place = position
        while place < len(outer) and outer[place, 0] < end:
            total += min(end, int(outer[place, 1])) - max(begin, int(outer[place, 0]))
            place += 1
    return float(total)
