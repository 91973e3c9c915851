"""The state of a run, kept when its workers change: model, optimizer, scheduler, scaler, and position in the data.

Nothing here holds a `World`: a run may continue with other workers, and each set of workers has an engine of its own
(`lockstep.engine.step_engine`), which is made from this state and writes to it in the commit phase of a step.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint import state_digest
from lockstep.data import Cursor, ShardedBatch
from lockstep.engine.arguments import TrainerArguments
from lockstep.engine.batches import BatchSequenceCheck
from lockstep.engine.callbacks import Callbacks
from lockstep.engine.external_steps import SchedulerStepCheck
from lockstep.engine.fingerprint import Fingerprint, take_fingerprint
from lockstep.engine.optimizer_checks import UnsavedAttributes
from lockstep.engine.optimizers import (
    OptimizerSet,
    UpdatePlan,
    UpdateSpec,
    combine_optimizers,
    combine_schedulers,
    separate_optimizers,
)
from lockstep.engine.restoring import (
    Stateful,
    UnsavedBuffers,
    check_options,
    check_state,
    class_name,
    option_names,
    restored_on_error,
)
from lockstep.engine.state_file import Scheduler
from lockstep.engine.step_result import StepOutcome
from lockstep.errors import LossError, UnusableStateError, clause
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.compiler import has_compiled_part


class UnreadStep(Protocol):
    """A step whose loss may still be on the device."""

    @property
    def error(self) -> LossError | None:
        """The error of a step that was not finite, once it was read."""

    def read(self) -> object:
        """Read it, which may wait for the device."""


@final
class RunState:
    """The state of a run on one worker; the same on every worker between two steps.

    `cursor` is the next step; `global_step` counts skipped steps too. With `waits_for_device`, where workers continue
    without one that is lost, the host waits in each step before it exchanges the step table. `is_ending` is the same on
    all workers between two calls. `end_reason` is empty where no callback has ended the training, until the workers
    have agreed.
    """

    def __init__(self, arguments: TrainerArguments) -> None:
        self.model = arguments.model
        self.optimizer = combine_optimizers(arguments.optimizer, arguments.every)
        self.plan = UpdatePlan(self.optimizer, arguments.loss)
        self.scheduler: Scheduler | None = combine_schedulers(arguments.scheduler, self.optimizer)
        self.scaler = arguments.scaler
        self.precision = None if arguments.precision == "float32" else getattr(torch, arguments.precision)
        self.num_shards = int(arguments.num_shards)
        self.seed = int(arguments.seed)
        self.cursor = Cursor()
        self.global_step = 0
        self.device: torch.device = next(each.device for each in self.model.parameters() if each.requires_grad)
        if self.scaler is not None:  # it begins with the first loss, and a worker without samples has none
            self.scaler.scale(torch.zeros((), device=self.device))
        self.data = BatchSequenceCheck()
        self.callbacks = Callbacks(arguments.callbacks)
        self.is_ending = False
        self.end_reason = ""
        self.end_reason_after_step = ""
        self.scheduler_check = SchedulerStepCheck(self.scheduler)
        self.unread_step: UnreadStep | None = None
        self.may_be_unread = True
        self.waits_for_device = False
        self._unsaved = UnsavedBuffers(self.model)
        self._updates_made: dict[str, Callable[[], StepOutcome]] = {}
        self._unusable_because = ""
        self._failed_step = ""
        self._unsaved_attributes = list(map(UnsavedAttributes, separate_optimizers(self.optimizer)))

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    @property
    def chosen_optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers that step in the present update; empty where the run has one."""
        return self.optimizer.chosen if isinstance(self.optimizer, OptimizerSet) else ()

    def chosen(self) -> list[Optimizer]:
        if isinstance(self.optimizer, OptimizerSet):
            return [self.optimizer.parts[name] for name in self.optimizer.chosen]
        return [self.optimizer]

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the present update changes, group by group."""
        return (parameter for part in self.chosen() for group in part.param_groups for parameter in group["params"])

    def choose(self, update: UpdateSpec) -> None:
        if isinstance(self.optimizer, OptimizerSet):
            self.optimizer.chosen = update.chosen

    @property
    def num_updates(self) -> int:
        """How many updates of the present step were made, of several."""
        return self.optimizer.num_updates if isinstance(self.optimizer, OptimizerSet) else 0

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        if isinstance(self.optimizer, OptimizerSet):
            self.optimizer.num_updates = number

    def updates_made(self) -> dict[str, Callable[[], StepOutcome]]:
        """Return what reads the outcomes of the updates of the present step that were made, by name; to be added to.

        They outlast an engine: a step that has failed after some of them is continued, and its loss may be theirs.
        """
        if not self.num_updates:
            self._updates_made = {}
        return self._updates_made

    @property
    def progress(self) -> int:
        """A number that grows with each update, by which workers see whether they have made the same ones."""
        return self.global_step * self.plan.num_updates + self.num_updates

    def advance(self, batch: ShardedBatch, *, is_last: bool) -> None:
        """Note that an update of the step of `batch` was made; with the last one the step was taken."""
        self._failed_step = ""
        self.num_updates = 0 if is_last else self.num_updates + 1
        if not is_last:
            self.scheduler_check.note()
            return
        self.cursor = batch.cursor.advance(batch.num_steps)
        self.global_step += 1
        self.data.note(batch)
        self.scheduler_check.note()

    def record_progress(self) -> Callable[[], None]:
        """Return what puts cursor, data, scheduler and the optimizer's options back as they are now (local)."""
        cursor, global_step, data = self.cursor, self.global_step, copy.copy(self.data)
        num_updates = self.num_updates
        scheduler = None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())
        options = [dict(group) for group in self.optimizer.param_groups]

        def restore() -> None:
            self.cursor, self.global_step, self.data = cursor, global_step, data
            self.num_updates = num_updates
            if self.scheduler is not None and scheduler is not None:
                self.scheduler.load_state_dict(scheduler)
                for group, before in zip(self.optimizer.param_groups, options, strict=True):
                    group.update(before)
                self.scheduler_check.note()

        return restore

    def read_last_step(self) -> None:
        """Read what is on the device of the last step, which may wait; an error puts its progress back (local)."""
        if self.unread_step is not None:
            self.unread_step.read()

    def check_last_step(self) -> None:
        """Raise the `LossError` of the last step, if it was known only later; once (local, the same on all workers)."""
        self.read_last_step()
        step, self.unread_step = self.unread_step, None
        if step is not None and step.error is not None:
            raise step.error

    @property
    def failed_step(self) -> str:
        """How the last step has failed here, if other workers may have finished it, in words; else empty."""
        return self._failed_step or self._unusable_because

    def mark_unusable(self, reason: str) -> None:
        """Note that parameters, optimizer and scheduler belong to no step; the reason is a sentence."""
        self._unusable_because = self._unusable_because or reason

    def note_end(self) -> None:
        """Note that a callback, of this worker or another one, has ended the training with the present step."""
        self.is_ending = True
        self.end_reason, self.end_reason_after_step = self.end_reason or self.end_reason_after_step, ""

    def note_failed_step(self, place: str, error: BaseException) -> None:
        """Note that a step has failed when other workers may have finished it."""
        left = self._unusable_because or "Nothing was changed by it there."
        self._failed_step = f"{place} failed with {type(error).__name__}: {clause(error)}. {left}"

    def forget_failed_step(self) -> None:
        """Note that no other worker has finished the step that has failed here."""
        self._failed_step = ""

    def check_usable(self) -> None:
        if self._unusable_because:
            raise UnusableStateError(
                f"{self._failed_step or self._unusable_because} This trainer cannot continue. Load a checkpoint on "
                "every rank: trainer.load(path). (LS524)"
            )

    def digest(self) -> str:
        return state_digest({name: each for name, each in self.model.state_dict().items() if isinstance(each, Tensor)})

    def fingerprint(self) -> Fingerprint:
        return take_fingerprint(
            self.device,
            num_shards=self.num_shards,
            seed=self.seed,
            is_compiled=has_compiled_part(self.model),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all that the run needs to resume: plain values, and the live tensors."""
        self.check_usable()
        self.read_last_step()
        unsaved = self._unsaved.changed()
        if unsaved:
            warnings.warn(
                f"The steps have changed {', '.join(unsaved)}, which is not part of the model's state: a run that "
                "resumes from it begins with other values there, and may end in others. Register it with "
                "persistent=True, unless it only keeps what is computed anyway. (LS519)",
                stacklevel=stacklevel_of_user(),
            )
        for each in self._unsaved_attributes:
            each.warn_of_changed()
        return self._collect()

    @contextmanager
    def restored_from(
        self,
        state: Mapping[str, Any],
        scheduler: Scheduler | None = None,
        of_scheduler: dict[str, Any] | None = None,
        others: Sequence[Stateful] = (),
        *,
        has_callbacks: bool = True,
    ) -> Iterator[None]:
        """Load what `to_dict` returned; if the block raises, restore the state before.

        `scheduler` is one that this run does not step by itself; `others` are objects that the block loads.
        """
        self.read_last_step()
        self.unread_step = None  # what it was is replaced
        check_state(state, self._collect())
        options = option_names(self.optimizer)
        of_callbacks = (state.get("callbacks") or {}) if has_callbacks else {}
        parts = [self.scheduler, self.scaler, scheduler, *others]
        if has_callbacks:
            self.callbacks.check_state(of_callbacks)
            parts.append(self.callbacks)
        with restored_on_error(self.model, self.optimizer, parts):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            check_options(self.optimizer, options)
            if self.scaler is not None:
                self.scaler.load_state_dict(state["scaler"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            if scheduler is not None and of_scheduler is not None:
                scheduler.load_state_dict(of_scheduler)
            self.callbacks.load_state_dict(of_callbacks)
            cursor, global_step = Cursor(state["epoch"], state["step"]), state["global_step"]
            yield
        self.cursor, self.global_step = cursor, global_step
        self.scheduler_check.note()
        self.data.restore(state.get("loader"))
        self._unusable_because = self._failed_step = ""
        self.is_ending, self.end_reason, self.end_reason_after_step = False, "", ""

    def for_new_worker(self) -> dict[str, Any]:
        """Return all that a new worker of the run needs: plain values, and the live tensors (local)."""
        return {
            "state": self._collect(),
            "buffers": dict(self.model.named_buffers()),
            "unusable": self._unusable_because,
            "failed_step": self._failed_step,
            "ending": (self.is_ending, self.end_reason, self.end_reason_after_step),
        }

    @torch.no_grad()
    def take_from_worker(self, found: Mapping[str, Any]) -> None:
        """Take what `for_new_worker` has returned on another worker (local); an error changes only buffers' shapes."""
        buffers: Mapping[str, Tensor] = found["buffers"]
        for name, mine in self.model.named_buffers():
            new = buffers.get(name)
            if new is not None and new.shape != mine.shape:  # they grow in some models
                owner, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(owner), attribute, torch.empty_like(new))
        with self.restored_from(found["state"]):
            for name, mine in self.model.named_buffers():
                mine.copy_(buffers[name])  # also those that are not part of the model's state
        self._unusable_because, self._failed_step = found["unusable"], found["failed_step"]
        self.is_ending, self.end_reason, self.end_reason_after_step = found["ending"]

    def _collect(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": class_name(self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scheduler_class": class_name(self.scheduler),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "epoch": self.cursor.epoch,
            "step": self.cursor.step,
            "global_step": self.global_step,
            "num_shards": self.num_shards,
            "seed": self.seed,
            "loader": self.data.source,
            "fingerprint": self.fingerprint().to_dict(),
        }
