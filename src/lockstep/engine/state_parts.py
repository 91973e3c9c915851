"""The parts of the state of a run, in one list: what is done with the state is done with each of them.

    what is done with it                         asks a part for
    -------------------------------------------  ---------------------------------------------------------
    `Trainer.state_dict`, a file                 warn_of_unsaved, save; check, load
    a worker that joins                          save_for_worker; check, load_for_worker
    a load that fails, `Trainer.verify`          keep
    a shard of a step, a slice of an evaluation  modules: each begins with their buffers, which are put back;
                                                 a step keeps those of shard 0
    comparison when a trainer is made            describe
    comparison in the steps                      compared, compared_at_begin
    digest                                       tensors

Whatever more a run has gets a class and a line in `RunState`. A part leaves as it is here what does not concern it.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lockstep.checkpoint.file import state_digest
from lockstep.engine.buffers import BufferSnapshot, buffer_parts
from lockstep.engine.callbacks import Callbacks
from lockstep.engine.optimizers import class_name
from lockstep.errors import CheckpointError, LockstepError
from lockstep.processes.reproducibility import read_generator_states, set_generator_states
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import non_persistent_buffer_names

State = Mapping[str, Any]
"""What `Trainer.state_dict` returns: entries of all parts."""


class Stateful(Protocol):
    """An object that has a state: a scheduler, a scaler, what a training loop keeps beside the trainer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Scheduler(Protocol):
    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class StatePart:
    def warn_of_unsaved(self) -> None:
        """Warn of what the steps have changed and `save` leaves out."""

    def save(self) -> dict[str, Any]:
        """Return its entries of the state, under keys that no other part has: plain values, and the live tensors."""
        return {}

    def save_for_worker(self) -> dict[str, Any]:
        """Return its entries for a worker that joins, which needs more."""
        return self.save()

    def check(self, saved: State) -> None:
        """Raise `CheckpointError` if these are the entries of another run; nothing is changed."""

    def load(self, saved: State) -> None:
        """Take what `save` has returned."""

    def load_for_worker(self, saved: State) -> None:
        """Take what `save_for_worker` has returned on another worker."""
        self.load(saved)

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        """Return what puts the part back as it is now, after a load, or with `is_stepped` after steps."""
        del is_stepped
        return lambda: None

    def modules(self) -> Sequence[nn.Module]:
        """Return the modules whose buffers belong to the part."""
        return ()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what the digest is of, by names that no other part has."""
        return {}

    def describe(self) -> Description:
        """Return what must be the same on all workers when a trainer is made."""
        return {}

    def compared(self) -> Mapping[str, Tensor]:
        """Return what only an update writes, alike on all workers, by name."""
        return {}

    def compared_at_begin(self) -> Mapping[str, Tensor]:
        """Return what is the same on all workers when a step begins, and not after its shards, by name."""
        return {}


@final
class StateParts:
    """The parts, in the order in which they are loaded."""

    def __init__(self, parts: Iterable[StatePart]) -> None:
        self._parts = list(parts)

    def save(self) -> dict[str, Any]:
        for part in self._parts:
            part.warn_of_unsaved()
        return _merged(part.save() for part in self._parts)

    def save_for_worker(self) -> dict[str, Any]:
        return _merged(part.save_for_worker() for part in self._parts)

    @contextmanager
    def loaded(self, saved: State, others: Sequence[StatePart] = ()) -> Iterator[None]:
        """Load a state, and that of parts that only this one has; put all back if that or the block raises (local)."""
        parts = [*self._parts, *others]
        for part in parts:
            part.check(saved)
        kept = [part.keep(is_stepped=False) for part in parts]
        try:
            for part in parts:
                part.load(saved)
            yield
        except BaseException as error:
            for put_back in kept:
                put_back()
            if isinstance(error, LockstepError) or not isinstance(error, Exception):
                raise
            raise CheckpointError(
                "The state does not fit this model, optimizer, scheduler or scaler, which are as they were. "
                f"{type(error).__name__}: {error} (LS708)"
            ) from error

    def load_for_worker(self, saved: State) -> None:
        """Take what `save_for_worker` has returned on another worker (local); after an error this one cannot go on."""
        for part in self._parts:
            part.check(saved)
        for part in self._parts:
            part.load_for_worker(saved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all back at the end of the block, in which steps may be taken (local)."""
        kept = [part.keep(is_stepped=True) for part in self._parts]
        try:
            yield
        finally:
            for put_back in kept:
                put_back()

    def modules(self) -> nn.Module:
        found = list(chain.from_iterable(part.modules() for part in self._parts))
        return found[0] if len(found) == 1 else nn.ModuleList(found)

    def tensors(self) -> dict[str, Tensor]:
        return _merged(part.tensors() for part in self._parts)

    def digest(self) -> str:
        return state_digest(self.tensors())

    def describe(self) -> Description:
        return {name: each for part in self._parts for name, each in part.describe().items()}

    def compared(self) -> dict[str, Tensor]:
        return _merged(part.compared() for part in self._parts)

    def compared_at_begin(self) -> dict[str, Tensor]:
        return _merged(part.compared_at_begin() for part in self._parts)


@final
class ModelPart(StatePart):
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._unsaved = UnsavedBuffers(model)

    def warn_of_unsaved(self) -> None:
        warn_of_unsaved_buffers(self._unsaved.changed(), "the model's state")

    def save(self) -> dict[str, Any]:
        return {"model": self._model.state_dict()}

    def load(self, saved: State) -> None:
        self._model.load_state_dict(saved["model"])

    def save_for_worker(self) -> dict[str, Any]:
        return {**self.save(), "model_buffers": unsaved_buffers(self._model)}

    def load_for_worker(self, saved: State) -> None:
        load_with_buffers(self._model, saved["model"], saved["model_buffers"])

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        del is_stepped
        return keep_module(self._model)

    def modules(self) -> Sequence[nn.Module]:
        return [self._model]

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: each for name, each in self._model.state_dict().items() if isinstance(each, Tensor)}

    def compared(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())


@final
class ObjectPart(StatePart):
    def __init__(self, name: str, value: Stateful | None, *, has_class: bool = False) -> None:
        self._name = name
        self._value = value
        self._has_class = has_class

    def save(self) -> dict[str, Any]:
        kinds = {f"{self._name}_class": class_name(self._value)} if self._has_class else {}
        return {self._name: None if self._value is None else self._value.state_dict(), **kinds}

    def check(self, saved: State) -> None:
        if self._has_class:
            check_class(self._name, saved, class_name(self._value))
        if (self._value is None) != (saved.get(self._name) is None):
            has, lacks = ("The state", "this trainer") if self._value is None else ("This trainer", "the state")
            raise CheckpointError(
                f"{has} has a {self._name}, and {lacks} has none: the result would differ. Make the trainer as "
                "it was made when the state was saved. (LS708)"
            )

    def load(self, saved: State) -> None:
        if self._value is not None:
            self._value.load_state_dict(saved[self._name])

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        del is_stepped
        value = self._value
        if value is None:
            return lambda: None
        before = copy.deepcopy(value.state_dict())
        return lambda: value.load_state_dict(before)

    def describe(self) -> Description:
        return {self._name: str(class_name(self._value))} if self._has_class else {}


@final
class CallbacksPart(StatePart):
    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    def save(self) -> dict[str, Any]:
        return {"callbacks": self._callbacks.state_dict()}

    def check(self, saved: State) -> None:
        self._callbacks.check_state(saved.get("callbacks") or {})

    def load(self, saved: State) -> None:
        self._callbacks.load_state_dict(saved.get("callbacks") or {})

    def save_for_worker(self) -> dict[str, Any]:
        return {**self.save(), "callbacks_started": self._callbacks.has_started}

    def load_for_worker(self, saved: State) -> None:
        self.load(saved)
        self._callbacks.has_started_elsewhere = saved["callbacks_started"]

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        if is_stepped:  # the steps that are put back call none
            return lambda: None
        before = copy.deepcopy(self._callbacks.state_dict())
        return lambda: self._callbacks.load_state_dict(before)


@final
class WorkerPart(StatePart):
    """What only a worker that joins needs: a file holds no generators, for a step seeds them."""

    def __init__(self) -> None:
        self._loop: Stateful | None = None
        self._taken: Any = None

    def use_loop(self, loop: Stateful | None) -> None:
        """Save and load this too; of several trainers the others get their loops after their states."""
        self._loop = loop
        self._load_loop()

    def save_for_worker(self) -> dict[str, Any]:
        loop = None if self._loop is None else self._loop.state_dict()
        return {"loop": loop, "generators": read_generator_states()}

    def load_for_worker(self, saved: State) -> None:
        self._taken = saved["loop"]
        self._load_loop()
        set_generator_states(saved["generators"])

    def _load_loop(self) -> None:
        if self._loop is not None and self._taken is not None:
            taken, self._taken = self._taken, None
            self._loop.load_state_dict(taken)


@final
class UnsavedBuffers:
    """The buffers that are no part of a module's state (`persistent=False`), as they were at first."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_first = dict(self._look())

    def changed(self) -> list[str]:
        return [name for name, number in self._look() if self._at_first.get(name, number) != number]

    def _look(self) -> Iterator[tuple[str, int]]:
        for prefix, module in self._module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in non_persistent_buffer_names(module):
                    yield f"{prefix}.{name}".lstrip("."), int(sum_of_bits([buffer]))


def check_class(name: str, saved: State, mine: str | None) -> None:
    key = f"{name}_class"
    if key in saved and saved[key] != mine:
        raise CheckpointError(
            f"The state was saved with {name} {saved[key]}, and this run has {mine}: the result would "
            f"differ. Make the trainer with the same {name}. (LS708)"
        )


def warn_of_unsaved_buffers(names: Sequence[str], of: str) -> None:
    if names:
        warnings.warn(
            f"The steps have changed {', '.join(names)}, which is not part of {of}: a run that "
            "resumes from it begins with other values there, and may end in others. Register it with "
            "persistent=True, unless it only keeps what is computed anyway. (LS519)",
            stacklevel=stacklevel_of_user(),
        )


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict()
    return {name: each for name, each in module.named_buffers() if name not in saved}


@torch.no_grad()
def load_with_buffers(module: nn.Module, state: Mapping[str, Any], unsaved: Mapping[str, Tensor]) -> None:
    """Load a state, and buffers that it does not have; buffers may have grown."""
    found = {**state, **unsaved}
    for name, mine in list(module.named_buffers()):
        new = found.get(name)
        if new is not None and new.shape != mine.shape:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, torch.empty_like(new, device=mine.device))
    module.load_state_dict(state)
    own = dict(module.named_buffers())
    for name, value in unsaved.items():
        own[name].copy_(value)


def keep_module(module: nn.Module) -> Callable[[], object]:
    buffers = BufferSnapshot(buffer_parts(module))
    buffers.record()
    values = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    extra = {name: copy.deepcopy(each) for name, each in module.state_dict().items() if not isinstance(each, Tensor)}

    @torch.no_grad()
    def put_back() -> None:
        for parameter, value in values:
            parameter.copy_(value)
        buffers.put_back()
        if extra:
            module.load_state_dict(extra, strict=False)

    return put_back


def _merged(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for each in found:
        twice = merged.keys() & each.keys()
        assert not twice, f"two parts have {twice}"
        merged |= each
    return merged
