"""Optimizers of which a part would not be saved, or that do not take what a step computes."""

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from lockstep.reduce.tensor_bits import sum_of_bits

_SAVED = frozenset({"state", "param_groups", "defaults"})
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})
"""What a GradScaler leaves with an optimizer during a step."""


def check_can_be_saved(optimizer: Optimizer) -> None:
    """Check that a state of an optimizer holds the state of the optimizers within it.

    One that is made of several, or wraps another, inherits a `state_dict` that knows nothing of them: the run would
    resume with empty moments and other bits.

    Raises:
        ValueError: It does not.
    """
    if _saves_by_itself(optimizer):
        return
    kind = type(optimizer)
    inner = next((each for each in _optimizers_in(optimizer) if each[1].state is not optimizer.state), None)
    if inner is not None:
        name, part = inner
        raise ValueError(
            f"The optimizer is a {kind.__name__} that holds another one, {name} ({type(part).__name__}), and has no "
            "state_dict and load_state_dict of its own. Optimizer's save nothing of the state of that one, so a "
            "resumed run would differ. Define both, with the state of each optimizer within."
        )


def check_takes_dense_gradients(optimizer: Optimizer) -> None:
    """Check that an optimizer takes the gradients that a step computes.

    Raises:
        ValueError: It takes sparse ones alone.
    """
    parts = [optimizer, *(part for _, part in _optimizers_in(optimizer))]
    if any(isinstance(part, SparseAdam) for part in parts):
        raise ValueError(
            "The optimizer is a SparseAdam, which takes sparse gradients alone. The trainer adds up dense ones, also "
            "of an embedding with sparse=True. Use torch.optim.Adam or AdamW."
        )


@final
class UnsavedAttributes:
    """Numbers and tensors that an optimizer keeps in attributes, which `Optimizer.state_dict` leaves out, as at first.

    Args:
        optimizer: Whose attributes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = self._look()

    def warn_of_changed(self) -> None:
        """Warn of those that steps have changed, when the optimizer is about to be saved (local)."""
        changed = [name for name, value in self._look().items() if self._at_first.get(name) != value]
        if changed:
            warnings.warn(
                f"Steps have changed {', '.join(changed)} of the optimizer, a {type(self._optimizer).__name__}, whose "
                "state_dict does not save that: a run that resumes begins with other values there, and may end in "
                "others. Keep it in self.state[parameter] or in the parameter groups, or define state_dict and "
                "load_state_dict.",
                stacklevel=4,
            )

    def _look(self) -> dict[str, object]:
        if _saves_by_itself(self._optimizer):
            return {}
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        saved = {id(each) for each in chain.from_iterable(group["params"] for group in groups)}
        saved.update(id(each) for state in states if isinstance(state, Mapping) for each in state.values())
        found: dict[str, object] = {}
        for name, value in vars(self._optimizer).items():
            parts = [part for part in _items(value) if id(part) not in saved and isinstance(part, Tensor | int | float)]
            if parts and not name.startswith("_") and name not in _SAVED | _OF_A_SCALER:
                found[name] = [int(sum_of_bits([part])) if isinstance(part, Tensor) else part for part in parts]
        return found


def _saves_by_itself(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict and kind.load_state_dict is not Optimizer.load_state_dict


def _items(value: Any) -> Iterator[Any]:
    """Yield what is in a list, a tuple or a dictionary; of anything else the value itself."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def _optimizers_in(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers that one holds in its attributes, or in lists and dictionaries there, by name."""
    for name, value in vars(optimizer).items():
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        yield from ((f"{name}[{key!r}]", part) for key, part in parts if isinstance(part, Optimizer))
        if isinstance(value, Optimizer):
            yield name, value
