"""Calling the callbacks of a trainer, and agreeing on what they have decided."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from lockstep.comm import World
from lockstep.engine.batches import gather_results
from lockstep.engine.evaluation import Mean
from lockstep.engine.present import Continued, PresentEngine
from lockstep.engine.run_state import RunState
from lockstep.engine.step_result import StepResult


@final
class Moments:
    """Calls callbacks at named moments. [Note: callbacks and workers] in `lockstep.engine.callbacks`."""

    def __init__(self, trainer: Any, state: RunState, present: PresentEngine) -> None:
        self._trainer = weakref.ref(trainer)
        self._state = state
        self._present = present
        self.callbacks = state.callbacks
        self._has_started = not self.callbacks
        self._has_ended = not self.callbacks
        self._evaluations: dict[str, float] | None = None
        self._under_way: set[str] = set()
        if self.callbacks.of("on_step"):
            present.on_step = self._look_at_step

    def start(self, *, is_new_worker: bool = False) -> None:
        """Call `on_start`, once (collective, but for a new worker, of which the others have no call)."""
        if self._has_started:
            return
        self._has_started = True
        self.callbacks.call("on_start", self._trainer())
        if is_new_worker:
            self._present.remake_alone()
        else:
            self._agree()

    def begin_again(self) -> None:
        """Let `on_start` be called again: a checkpoint was loaded (local)."""
        self._has_started = self._has_ended = not self.callbacks

    def end_epoch(self, result: StepResult) -> None:
        """Call `on_epoch` if a step was the last one of its epoch (collective)."""
        if self.callbacks and self._state.cursor.step == 0:
            self._state.check_last_step()  # a step that is undone ends no epoch
            self.callbacks.call("on_epoch", self._trainer(), result.cursor.epoch)
            self._agree()

    def look_at_evaluation(self, found: Any, name: str = "") -> None:
        """Call `on_evaluate` (collective)."""
        if not self.callbacks:
            return
        prefix = f"{name}_" if name else ""
        values = {f"{prefix}{key}": value for key, value in read_values(found).items()}
        if self._evaluations is not None:
            self._evaluations.update(values)
            return
        self._look("on_evaluate", values)

    @contextmanager
    def no_evaluation(self) -> Iterator[None]:
        """Let callbacks not look at the evaluations in this context (local)."""
        self._evaluations = {}
        try:
            yield
        finally:
            self._evaluations = None

    @contextmanager
    def one_evaluation(self) -> Iterator[None]:
        """Let the evaluations in this context be one for the callbacks, called at its end (collective)."""
        if self._evaluations is not None:  # within `no_evaluation`
            yield
            return
        self._evaluations = {}
        try:
            yield
            values = self._evaluations
        finally:
            self._evaluations = None
        if values:
            self.look_at_evaluation(values)

    def will_end(self) -> bool:
        """Return whether a callback of any worker has let the next step be the last one (collective)."""
        if not self.callbacks:
            return False

        def requested(world: World) -> list[str]:
            mine = self._state.end_reason or self._state.end_reason_after_step
            return gather_results(world, lambda: mine, "agreeing on whether the next step is the last one")

        return any(self._present.repeatable(requested))

    def note_save(self, path: Any) -> None:
        """Call `on_save` (collective)."""
        if self.callbacks:
            self._look("on_save", path)

    def end(self) -> None:
        """Call `on_end`, once, if training had begun (local)."""
        if not self._has_ended and self._has_started:
            self._has_ended = True
            self.callbacks.call("on_end", self._trainer())

    def with_callbacks(self, listener: Callable[[Continued, World], None]) -> Callable[[Continued, World], None]:
        if not self.callbacks.of("on_workers_changed"):
            return listener

        def listen(continued: Continued, world: World) -> None:
            listener(continued, world)
            self.callbacks.call("on_workers_changed", self._trainer(), continued)

        return listen

    def _look(self, moment: str, value: Any) -> None:
        """Call those that look at a moment (collective); not for what one of them does in it, which would not end."""
        if moment in self._under_way:
            return
        self._under_way.add(moment)
        try:
            self.callbacks.call(moment, self._trainer(), value)
        finally:
            self._under_way.discard(moment)
        self._agree()

    def _look_at_step(self, result: StepResult) -> None:
        self.callbacks.call("on_step", self._trainer(), result)

    def _agree(self) -> None:
        """Let all workers end, or train other parameters, if the callbacks of one have decided so (collective)."""

        def decided(world: World) -> list[tuple[str, bool]]:
            mine = self._state.end_reason, self._present.has_other_parameters()
            return gather_results(world, lambda: mine, "agreeing on what the callbacks have decided")

        found = self._present.repeatable(decided)
        self._state.end_reason = next((reason for reason, _ in found if reason), "")
        self._state.is_ending = self._state.is_ending or bool(self._state.end_reason)
        if any(is_changed for _, is_changed in found):
            self._present.remake()


def read_values(found: Any) -> Mapping[str, float]:
    """Return the result of an evaluation as numbers by name."""
    if isinstance(found, Mapping):
        return {name: value.value if isinstance(value, Mean) else _as_number(value) for name, value in found.items()}
    return {"metric": _as_number(found)}


def _as_number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return value
