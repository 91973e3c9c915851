"""Optimizers of which a part would not be saved, or that do not take what a step computes."""

import difflib
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.tensor_bits import sum_of_bits

_SAVED = frozenset({"state", "param_groups", "defaults"})
_MISTYPED_LETTERS = 2
"""By so many letters a misspelt name is longer or shorter."""
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})
"""What a GradScaler leaves with an optimizer during a step."""


def check_can_be_saved(optimizer: Optimizer) -> None:
    """Check that a state of an optimizer holds the state of the optimizers within it.

    One that is made of several, or wraps another, inherits a `state_dict` that knows nothing of them: the run would
    resume with empty moments and other bits.
    """
    if saves_by_itself(optimizer):
        return
    kind = type(optimizer)
    inner = next((each for each in _optimizers_in(optimizer) if each[1].state is not optimizer.state), None)
    if inner is not None:
        name, part = inner
        raise ValueError(
            f"The optimizer is a {kind.__name__} that holds another one, {name} ({type(part).__name__}), and has no "
            "state_dict and load_state_dict of its own. Optimizer's save nothing of the state of that one, so a "
            "resumed run would differ. Define both, with the state of each optimizer within. (LS504)"
        )


def check_takes_dense_gradients(optimizer: Optimizer) -> None:
    parts = [optimizer, *(part for _, part in _optimizers_in(optimizer))]
    if any(isinstance(part, SparseAdam) for part in parts):
        raise ValueError(
            "The optimizer is a SparseAdam, which takes sparse gradients alone. The trainer adds up dense ones, also "
            "of an embedding with sparse=True. Use torch.optim.Adam or AdamW. (LS504)"
        )


def check_group_options(optimizer: Optimizer) -> None:
    """Check that no option of a parameter group is a misspelt one: optimizers read those that they know, alone."""
    for group in optimizer.param_groups:
        for option in set(group) - {"params", *optimizer.defaults}:
            near = difflib.get_close_matches(option, optimizer.defaults, n=1, cutoff=0.8)
            if near and abs(len(near[0]) - len(option)) <= _MISTYPED_LETTERS:  # max_momentum is a scheduler's
                raise ValueError(
                    f"A parameter group gives {type(optimizer).__name__} the option {option!r}, which it would never "
                    f"read. Did you mean {near[0]!r}? (LS504)"
                )


def list_optimizers(optimizer: Any, every: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the optimizers of a run by name; one that is alone has an empty name."""
    if not isinstance(optimizer, Mapping):
        if every:
            raise ValueError(
                f"every={dict(every)!r} says when each of several optimizers steps, and there is one. Give several by "
                'name: optimizer={"critic": ..., "generator": ...}. (LS505)'
            )
        return {"": optimizer}
    odd = next((name for name in optimizer if not isinstance(name, str) or not name or "/" in name), None)
    if not optimizer or odd is not None:
        raise ValueError(
            f"The optimizers have the names {list(optimizer)!r}, expected at least one, and names without a "
            "slash. (LS505)"
        )
    every = {} if every is None else every
    if not isinstance(every, Mapping) or not set(every) <= set(optimizer):
        raise ValueError(
            f"every is {every!r}, expected a dictionary with names of optimizers, of {', '.join(optimizer)}: in every "
            "how many steps each of them steps. (LS505)"
        )
    for name, number in every.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"every[{name!r}] is {number!r}, expected a whole number of steps, at least 1. (LS505)")
    if all(every.get(name, 1) > 1 for name in optimizer):
        raise ValueError(
            f"every is {dict(every)!r}: in most steps no optimizer would step. "
            "Let at least one step in every step. (LS505)"
        )
    return dict(optimizer)


def list_losses(loss: Any, optimizer: Any) -> list[Any]:
    if not isinstance(loss, Mapping):
        return [loss]
    if not isinstance(optimizer, Mapping) or set(loss) != set(optimizer):
        expected = ", ".join(optimizer) if isinstance(optimizer, Mapping) else "one optimizer, without a name"
        raise ValueError(
            f"There are loss functions for {', '.join(map(str, loss)) or 'no optimizer'}, expected one for each of "
            f"{expected}: optimizer= and loss= have the same names, or loss= is one function. (LS505)"
        )
    return list(loss.values())


def list_schedulers(scheduler: Any, optimizer: Any) -> dict[str, Any]:
    if scheduler is None:
        return {}
    if isinstance(optimizer, Mapping) != isinstance(scheduler, Mapping):
        raise ValueError(
            "Several optimizers have a scheduler each: scheduler= is a dictionary with the names of optimizers, as "
            "optimizer= is. (LS505)"
        )
    if not isinstance(scheduler, Mapping):
        return {"": scheduler}
    if not scheduler or not set(scheduler) <= set(optimizer):
        raise ValueError(
            f"There are schedulers for {', '.join(map(str, scheduler)) or 'no optimizer'}, expected names of "
            f"{', '.join(optimizer)}. (LS505)"
        )
    return dict(scheduler)


def check_separate(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Check that no two optimizers have a parameter in common."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            other = holders.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"The optimizers {other} and {name} both hold {names[id(parameter)]}: each parameter belongs to "
                    "one of them. (LS504)"
                )


@final
class UnsavedAttributes:
    """Numbers and tensors in attributes of an optimizer, which `Optimizer.state_dict` leaves out, as at first."""

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
                "load_state_dict. (LS519)",
                stacklevel=stacklevel_of_user(),
            )

    def _look(self) -> dict[str, object]:
        if saves_by_itself(self._optimizer):
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


def saves_by_itself(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict and kind.load_state_dict is not Optimizer.load_state_dict


def _items(value: Any) -> Iterator[Any]:
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
