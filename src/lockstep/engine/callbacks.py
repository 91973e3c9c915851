"""Callbacks: code of the user's that a trainer calls at named moments, with state that is saved with the run.

    on_start              before the first step, and before the first one after a checkpoint was loaded
    on_step               after each step, when its update is made
    on_epoch              after the last step of an epoch
    on_evaluate           after an evaluation
    on_save               after a checkpoint was written, or begun to be written in the background
    on_workers_changed    when the workers continue without one that is lost
    on_end                when the trainer is closed, or the run of a config ends

[Note: callbacks and workers] Every worker calls the same callbacks at the same moments, so their state is the same on
all and need not be sent: a worker that continues without a lost one has it, and a checkpoint holds rank 0's. `on_step`
is a part of the step, so that a worker that joins between two steps gets the state after it. The other moments are
between two collective calls of the trainer.
"""

import difflib
import inspect
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import nn

from lockstep.engine.callback_types import Continued, StepResult, Trainer
from lockstep.errors import CheckpointError
from lockstep.recording import EventKind, own_recorder


class Callback:
    """What a trainer calls at named moments; override the methods of those that you want.

        class Stop(ls.Callback):
            def on_evaluate(self, trainer, values):
                if values["accuracy"] > 0.99:
                    trainer.request_end("it is good enough")

    Every worker makes one of its own and calls it alike. What it computes must follow from what is the same on all
    workers (the trainer, results of steps and evaluations), unless it only shows something. To end the training it
    calls `trainer.request_end`, which holds for all workers, whichever has called it.

    It may freeze and unfreeze parameters (`requires_grad_`) in every moment but `on_step`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Take note that training begins or is resumed (every worker).

        A callback that is given to a second trainer still has its state here. Those of `ls` begin anew if that trains
        another model, unless a state was loaded.
        """

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Look at a step (every worker; local: evaluate, save and other collective calls are refused here).

        Args:
            trainer: The trainer; its cursor is at the next step.
            result: The `StepResult`.
        """

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """Look at the end of an epoch, before it is evaluated (every worker).

        Args:
            trainer: The trainer.
            epoch: The epoch, counted from 0.
        """

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Look at the result of an evaluation (every worker), but not of one that is made within this moment.

        A run that has ended in the middle of an epoch (`max_steps`, `max_time`) is evaluated there, and one that goes
        on without an end is not: what decides should leave such an evaluation out, see `is_of_cut_epoch`.

        Args:
            trainer: The trainer.
            values: The means, by name.
        """

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Take note of a checkpoint (every worker), but not of one that is saved within this moment.

        Args:
            trainer: The trainer.
            path: The file. It may still be in the making, where it is written in the background.
        """

    def on_workers_changed(self, trainer: Trainer, continued: Continued) -> None:
        """Take note that the workers continue without a lost one (every one that is left; local).

        Args:
            trainer: The trainer.
            continued: Who was lost, in `lost`; `str` says it in a line.
        """

    def on_end(self, trainer: Trainer) -> None:
        """Take note that training has ended (every worker)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, text, tensors and containers of these; empty for nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` has returned."""


@final
class StateOwner:
    """The model of whose training a callback has its state, held weakly; of a copy of the callback it is not known."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None

    def change_to(self, model: nn.Module) -> bool:
        """Note the model that is trained now; return whether the state is of another one's training: begin it anew."""
        is_other = self._model is not None and self._model() is not model
        self._model = weakref.ref(model)
        return is_other

    def forget(self) -> None:
        """Let the state be that of the next model, whichever that is: it was loaded."""
        self._model = None

    def __reduce__(self) -> tuple[type["StateOwner"], tuple[()]]:
        return StateOwner, ()


def is_of_cut_epoch(trainer: Any) -> bool:
    """Whether an evaluation is made because the run has ended in the middle of an epoch.

    What it decides would change a run that is resumed there, as against one that was never ended.
    """
    return bool(trainer.is_ending and trainer.cursor.step)


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@final
class Callbacks:
    """The callbacks of a trainer, by name: that of the class, with a number for the second of one class.

    `has_started`: `on_start` was called. `has_started_elsewhere`: this worker is new, and the others have called it.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.has_started = not callbacks
        self.has_started_elsewhere = False
        self._by_name: dict[str, Callback] = {}
        for each in callbacks:
            check_callback(each)
            kind = type(each).__name__
            number = sum(type(other).__name__ == kind for other in self._by_name.values())
            self._by_name[kind if number == 0 else f"{kind}-{number + 1}"] = each
        self._by_moment = {
            moment: [each for each in callbacks if getattr(type(each), moment) is not getattr(Callback, moment)]
            for moment in MOMENTS
        }
        self._recorded = {
            moment: [f"{type(each).__name__}.{moment}" for each in looking]
            for moment, looking in self._by_moment.items()
        }

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[Callback]:
        return list(self._by_name.values())

    def of(self, moment: str) -> list[Callback]:
        return self._by_moment[moment]

    def call(self, moment: str, *args: Any) -> None:
        recorder = own_recorder()
        for name, each in zip(self._recorded[moment], self._by_moment[moment], strict=True):
            event = recorder.begin(EventKind.CALLBACK, 0, 0, recorder.text(name))
            try:
                getattr(each, moment)(*args)
            finally:
                recorder.end(event)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def state_dict(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._by_name.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, state in state_dict.items():
            self._by_name[name].load_state_dict(state)

    def check_state(self, saved: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for name in saved:
            if name not in self._by_name:
                raise CheckpointError(
                    f"The state holds that of a callback {name}, which this run does not have "
                    f"({', '.join(self.names) or 'it has none'}): the result would differ. Make the trainer with the "
                    "same callbacks. (LS708)"
                )
        for name in mine:
            if name not in saved:
                raise CheckpointError(
                    f"This run has a callback {name}, of which the state holds nothing: it would begin anew in the "
                    "middle of the run. Make the trainer as it was made when the state was saved. (LS708)"
                )


def check_callbacks(value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"callbacks is {value!r}, expected a list: callbacks=[...]. (LS525)")
    for each in value:
        check_callback(each)


def check_callback(value: Any) -> None:
    if isinstance(value, type) and issubclass(value, Callback):
        raise TypeError(
            f"callbacks holds the class {value.__name__}, expected an object of it: {value.__name__}(...). (LS525)"
        )
    if not isinstance(value, Callback):
        raise TypeError(
            f"callbacks holds a {type(value).__name__}, expected objects of classes of ls.Callback. (LS525)"
        )
    for name in dir(value):
        if name.startswith("on_") and name not in MOMENTS and callable(getattr(value, name)):
            near = difflib.get_close_matches(name, MOMENTS, n=1, cutoff=0.5)
            raise ValueError(
                f"The callback {type(value).__name__} has a method {name}, which is never called: there is no such "
                f"moment. {f'Did you mean {near[0]}?' if near else ''} Known: {', '.join(MOMENTS)}. (LS525)"
            )
    for name in MOMENTS:
        _check_arguments(type(value).__name__, name, getattr(value, name))


def _check_arguments(kind: str, name: str, method: Any) -> None:
    """Check that a method can be called as its moment calls it, which may be hours later."""
    _, *expected = inspect.signature(getattr(Callback, name)).parameters
    try:
        inspect.signature(method).bind(*expected)
    except TypeError:
        taken = ", ".join(["self", *inspect.signature(method).parameters])
        raise ValueError(
            f"The callback {kind} has a method {name}({taken}), and the trainer calls "
            f"{name}({', '.join(expected)}). Write: def {name}(self, {', '.join(expected)}). (LS525)"
        ) from None
    except ValueError:  # a built-in without a signature
        return
