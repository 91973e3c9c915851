"""What the function of a config's `data`, or of `--data`, returns: a training set, and others by name."""

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import Dataset

from lockstep.errors import ConfigError

TEST, TRAIN = "test", "train"


def split_sets(key: str, path: str, found: Any) -> tuple[Any, dict[str, Any]]:
    """Return the training set and the others by name; `found` is one set, (train, test), or sets by name."""
    if isinstance(found, Mapping):
        if TRAIN not in found or not all(str(name).isidentifier() for name in found):
            raise ConfigError(
                f"{key} is {path!r}, which returned sets called {', '.join(map(str, found))}; expected train and "
                "others with names like val and test. (LS806)"
            )
        return found[TRAIN], {name: each for name, each in found.items() if name != TRAIN and each is not None}
    if isinstance(found, tuple | list) and any(isinstance(part, Dataset) for part in found):
        if len(found) != 2:  # noqa: PLR2004 - (train, test)
            raise ConfigError(
                f"{key} is {path!r}, which returned {len(found)} data sets; expected (train, test), or a "
                "dictionary {'train': ..., 'val': ..., 'test': ...}. (LS806)"
            )
    elif not (isinstance(found, tuple) and len(found) == 2):  # noqa: PLR2004
        return found, {}
    train, test = found
    return train, {} if test is None else {TEST: test}


def preferred_set(train: Any, others: Mapping[str, Any]) -> Any:
    """Return the test set; without one the first of the others, else the training set."""
    return others.get(TEST, next(iter(others.values()), train))


def unknown_set(data: str, known: Collection[str]) -> ConfigError:
    return ConfigError(
        f"--data is {data!r}, which this run does not have: expected {', '.join(dict.fromkeys(known))}, or the import "
        "path of a function that returns a data set, as in mine:new. (LS814)"
    )
