"""Which optimizers can be trained with and saved, and the optimizer as a part of the state of the run.

Its own state goes by position, so the part has the names of its parameters.
"""

import copy
import difflib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lockstep.engine.optimizers import OptimizerSet, class_name, separate_optimizers
from lockstep.engine.sharing import OptimizerSharing
from lockstep.engine.state_parts import State, StatePart, check_class
from lockstep.errors import CheckpointError, counted
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits

_SAVED = frozenset({"state", "param_groups", "defaults"})
_MISTYPED_LETTERS = 2
"""By so many letters a misspelt name is longer or shorter."""
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})
"""What a GradScaler leaves with an optimizer during a step."""


def check_can_be_saved(optimizer: Optimizer) -> None:
    """Refuse one that holds others and inherits a `state_dict` without them: a run would resume with empty moments."""
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


@final
class OptimizerPart(StatePart):
    def __init__(self, optimizer: Optimizer, model: nn.Module, sharing: OptimizerSharing) -> None:
        self._optimizer = optimizer
        self._model = model
        self._sharing = sharing
        self._unsaved = list(map(UnsavedAttributes, separate_optimizers(optimizer)))

    def warn_of_unsaved(self) -> None:
        for each in self._unsaved:
            each.warn_of_changed()
        with self._sharing.without_states():
            has_addresses = self._has_addresses(self._optimizer.state_dict())
        if has_addresses:
            warnings.warn(
                f"The state of the optimizer, {class_name(self._optimizer)}, says by addresses in memory (id) which "
                "parameter each part belongs to. A run that resumes has other addresses: it begins without that part, "
                "and may end in others. Let state_dict name parameters by their position, as torch's does. (LS519)",
                stacklevel=stacklevel_of_user(),
            )

    def save(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "optimizer_class": class_name(self._optimizer),
            "optimizer_parameters": self._names(),
        }

    def save_for_worker(self) -> dict[str, Any]:
        with self._sharing.without_states():  # workers share it when they settle
            saved = self.save()
        if self._has_addresses(saved["optimizer"]):
            raise CheckpointError(
                f"The state of the optimizer, {class_name(self._optimizer)}, says by addresses in memory (id) which "
                "parameter each part belongs to, so no worker can join this run: it would train without that part. Let "
                "state_dict name parameters by their position, as torch's does. (LS704)"
            )
        return saved

    def check(self, saved: State) -> None:
        check_class("optimizer", saved, class_name(self._optimizer))
        self._in_order(saved)

    def load(self, saved: State) -> None:
        options = [set(group) & set(self._optimizer.defaults) for group in self._optimizer.param_groups]
        self._load(self._in_order(saved), saved["model"])
        # Taking a state gives its `defaults` options that its groups may never have had.
        for group, before in zip(self._optimizer.param_groups, options, strict=True):
            missing = sorted(before - set(group))
            if missing:
                raise ValueError(
                    f"The state is of another optimizer than {type(self._optimizer).__name__}: "
                    f"it has no {', '.join(missing)}. (LS708)"
                )

    def load_for_worker(self, saved: State) -> None:
        self.load(saved)
        self._sharing.forget()

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        put_back_parts = self._sharing.keep(is_stepped=is_stepped)
        with self._sharing.without_states():
            before: Any = self._optimizer.state_dict()  # taking another one replaces it, and steps write to it
        if is_stepped:
            before = copy.deepcopy(before)

        def put_back() -> None:
            self._load(before, dict(self._model.named_parameters()))
            put_back_parts()

        return put_back

    def describe(self) -> Description:
        names = self._names()
        number = f"{sum(map(len, names))} (order {zlib.crc32(repr(names).encode()):08x})"
        return {
            "optimizer": str(class_name(self._optimizer)),
            **describe_options(self._optimizer),
            "the optimizer's list of parameters": number,  # all names would be too much to read
            **self._sharing.describe(),
        }

    def _names(self) -> list[list[str]]:
        names: dict[int, str] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names[id(parameter)] = min(name, names.get(id(parameter), name))
        return [[names[id(each)] for each in group["params"]] for group in self._optimizer.param_groups]

    def _in_order(self, saved: State) -> Any:
        """Return the optimizer's state with its parameters in the order of this run's, as far as it has names."""
        state, mine = saved["optimizer"], self._names()
        names = saved.get("optimizer_parameters")
        is_of_model = saved["model"].keys() == self._model.state_dict().keys()  # else its own load says what differs
        if names is None or names == mine or not is_of_model:
            return state
        if list(map(sorted, names)) != list(map(sorted, mine)):
            raise CheckpointError(
                "The state's optimizer has other parameters than this run's, or in other groups: "
                f"{_first_other(names, mine)}. Its state would go to the wrong ones. Make the optimizer with the "
                "groups of parameters with which the state was saved. (LS708)"
            )
        if not isinstance(self._optimizer, OptimizerSet):
            return _reordered(self._optimizer, state, names, mine)
        parts, begin = {}, 0
        for name, part in self._optimizer.parts.items():
            groups = slice(begin, begin + len(part.param_groups))
            parts[name] = _reordered(part, state["optimizers"][name], names[groups], mine[groups])
            begin = groups.stop
        return {**state, "optimizers": parts}

    def _load(self, state: Any, parameters: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
        names = chain.from_iterable(self._names())
        kinds = [getattr(parameters.get(name), "dtype", None) for name in names]
        begin = 0
        for number, part in enumerate(separate_optimizers(self._optimizer)):
            held = [each for group in part.param_groups for each in group["params"]]
            own = [*state["optimizers"].values()][number] if isinstance(self._optimizer, OptimizerSet) else state
            _restore_dtypes(part, own, held, kinds[begin : begin + len(held)])
            begin += len(held)

    def _has_addresses(self, state: Any) -> bool:
        return any(_has_key(state, {id(each) for each in group["params"]}) for group in self._optimizer.param_groups)


def _first_other(saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> str:
    if len(saved) != len(mine):
        return f"it has {counted(len(saved), 'group')}, and this run's has {len(mine)}"
    number, group, own = next(
        (number, set(group), set(own))
        for number, (group, own) in enumerate(zip(saved, mine, strict=True))
        if sorted(group) != sorted(own)
    )
    odd = sorted(group - own) or sorted(own - group)
    where = "the state's" if group - own else "this run's"
    return f"group {number} has {odd[0]} in {where} alone"


def _reordered(optimizer: Optimizer, state: Any, saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> Any:
    if list(saved) == list(mine):
        return state
    if saves_by_itself(optimizer):
        raise CheckpointError(
            f"The state's optimizer has its parameters in another order than this run's, and "
            f"{type(optimizer).__name__} saves its state in a way of its own, which cannot be put in order. Make the "
            "model, and the optimizer, with the parameters in the order in which the state was saved. (LS708)"
        )
    groups = []
    for group, names, own in zip(state["param_groups"], saved, mine, strict=True):
        place = {name: number for number, name in enumerate(names)}
        moved = {key: [group[key][place[name]] for name in own] for key in ("params", "param_names") if key in group}
        groups.append({**group, **moved})
    return {**state, "param_groups": groups}


def _restore_dtypes(
    optimizer: Optimizer, state: Any, held: Sequence[Tensor], kinds: Sequence[torch.dtype | None]
) -> None:
    """Give tensors of an optimizer's state their dtypes back, which torch makes those of the parameters in a load.

    So it has other bits after it: a mean in float32 of a parameter in bfloat16. `kinds` are the dtypes with which the
    parameters were saved; where a parameter has another one now, its state gets it too.
    """
    if saves_by_itself(optimizer):
        return
    places = chain.from_iterable(group["params"] for group in state["param_groups"])
    for place, parameter, kind in zip(places, held, kinds, strict=True):
        saved, loaded = state["state"].get(place), optimizer.state.get(parameter)
        if parameter.dtype is kind and isinstance(saved, dict) and isinstance(loaded, dict):
            for name, value in saved.items():
                found = loaded.get(name)
                if isinstance(value, Tensor) and isinstance(found, Tensor) and value.dtype is not found.dtype:
                    loaded[name] = value.to(device=found.device)  # a shared one stays shared


def _has_key(value: Any, keys: set[int]) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(key, int) and key in keys for key in value) or any(
            _has_key(each, keys) for each in value.values()
        )
    return isinstance(value, list | tuple) and any(_has_key(each, keys) for each in value)
