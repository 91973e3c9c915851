"""Making what a config says about its data: the sets, the order of the training set, how samples become batches."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data import Stream, read_lengths, read_weights
from lockstep.errors import ConfigError, LockstepError
from lockstep.runs.config import Config
from lockstep.runs.importing import import_object

BALANCED = "balanced"
"""The name of the weights with which each class is drawn equally often."""
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


def build_weights(config: Config, train_set: Dataset[Any]) -> Tensor | None:
    """Return how often to draw each sample of the training set, in proportion; None for each sample once per epoch.

    A run that is to overfit sees each of its samples, so it has no weights.
    """
    if config.overfit is not None:
        return None
    return _build("weights", config.weights, train_set, read_weights)


def build_lengths(config: Config, train_set: Dataset[Any]) -> Tensor | None:
    """Return the lengths by which samples are put into batches with similar ones; None for any.

    A run that is to overfit has other samples than those of the function, so it has no lengths.
    """
    if config.overfit is not None:
        return None
    return _build("lengths", config.lengths, train_set, read_lengths)


def build_collate(config: Config) -> Callable[[list[Any]], Any] | None:
    """Return what makes a batch of a list of samples; None for torch's `default_collate`."""
    if config.collate is None:
        return None
    found: Callable[[list[Any]], Any] = import_object("collate", config.collate)
    if not callable(found):
        raise ConfigError(
            f"collate is {config.collate!r}, a {type(found).__name__}, expected a function of a list. (LS806)"
        )
    return found


def _build(
    key: str, value: str | None, train_set: Dataset[Any], read: Callable[[Any, Dataset[Any]], Tensor]
) -> Tensor | None:
    if value is not None and isinstance(train_set, Stream):
        raise ConfigError(
            f"{key} is {value!r}, and the training set is a stream, whose samples have no index: "
            f"leave {key} out. (LS409)"
        )
    if value is None or not hasattr(train_set, "__len__"):
        return None
    try:
        return read(BALANCED if value == BALANCED else _call(key, value, train_set), train_set)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} is {value!r}, which cannot be used: {error} (LS806)") from error


def _call(key: str, path: str, train_set: Dataset[Any]) -> Any:
    function = import_object(key, path)
    if not callable(function):
        raise ConfigError(
            f"{key} is {path!r}, a {type(function).__name__}, expected a function of the training set. (LS806)"
        )
    try:
        return function(train_set)
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} is {path!r}, which was called with the training set and raised {type(error).__name__}: {error}. "
            "Run with --debug to see the traceback. (LS806)"
        ) from error
