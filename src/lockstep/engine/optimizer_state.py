"""The optimizer as a part of the state of the run, with the names of its parameters: its own state goes by position."""

import copy
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.optimizer_checks import UnsavedAttributes, saves_by_itself
from lockstep.engine.optimizers import OptimizerSet, class_name, separate_optimizers
from lockstep.engine.state_parts import State, StatePart, check_class
from lockstep.errors import CheckpointError, counted
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description, describe_options


@final
class OptimizerPart(StatePart):
    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._unsaved = list(map(UnsavedAttributes, separate_optimizers(optimizer)))

    def warn_of_unsaved(self) -> None:
        for each in self._unsaved:
            each.warn_of_changed()
        if self._has_addresses(self._optimizer.state_dict()):
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

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        before: Any = self._optimizer.state_dict()  # taking another one replaces it, and steps write to it
        if is_stepped:
            before = copy.deepcopy(before)
        return lambda: self._load(before, dict(self._model.named_parameters()))

    def describe(self) -> Description:
        return {
            "optimizer": str(class_name(self._optimizer)),
            **describe_options(self._optimizer),
            # Their number alone: all names would be too much to read.
            **_describe_names(self._names()),
        }

    def _names(self) -> list[list[str]]:
        """Return the names of the parameters of each group; of several names of one the first in the alphabet."""
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


def _describe_names(names: Sequence[Sequence[str]]) -> Description:
    number = sum(map(len, names))
    return {"the optimizer's list of parameters": f"{number} (order {zlib.crc32(repr(names).encode()):08x})"}


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
    """Return an optimizer's state with the parameters of each group in this run's order."""
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
    """Whether a dictionary within a state has one of these keys."""
    if isinstance(value, Mapping):
        return any(isinstance(key, int) and key in keys for key in value) or any(
            _has_key(each, keys) for each in value.values()
        )
    return isinstance(value, list | tuple) and any(_has_key(each, keys) for each in value)
