"""The state of a run, kept when its workers change: model, optimizer, scheduler, scaler, and position in the data.

Nothing here holds a `World`: a run may continue with other workers, and each set of workers has an engine of its own
(`lockstep.engine.step_engine`), which is made from this state and writes to it in the commit phase of a step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.data import Cursor, ShardedBatch
from lockstep.engine.arguments import TrainerArguments
from lockstep.engine.batches import BatchSequenceCheck
from lockstep.engine.callbacks import Callbacks
from lockstep.engine.fingerprint import Fingerprint, take_fingerprint
from lockstep.engine.networks import TRAINED_MODELS, NetworksPart
from lockstep.engine.optimizer_state import OptimizerPart
from lockstep.engine.optimizers import (
    OptimizerSet,
    UpdatePlan,
    UpdateSpec,
    combine_optimizers,
    combine_schedulers,
)
from lockstep.engine.sharing import OptimizerSharing
from lockstep.engine.side_effects import StateWatch
from lockstep.engine.state_parts import (
    CallbacksPart,
    ModelPart,
    ObjectPart,
    Scheduler,
    State,
    StatePart,
    StateParts,
    WorkerPart,
)
from lockstep.engine.step_table import StepOutcome
from lockstep.errors import CheckpointError, LossError, UnusableStateError, clause
from lockstep.events import StepAudited
from lockstep.torch_private.compiler import has_compiled_part


@final
@dataclass(slots=True, kw_only=True)
class Findings:
    """What the first steps have shown of the user's code: to look again, with other workers, takes as long as a step.

    A worker that joins gets them with the state: it runs the same code.
    """

    num_contents_compared: int = 0
    """The steps in which the contents of all parameters were compared. [Note: parameters that are written]."""
    num_steps_begun: int = 0
    """Of those in which it is looked at. [`first_steps.py`]"""
    num_evaluations: int = 0
    """Likewise of those that are verified."""
    counts_are_enough: dict[tuple[str, ...], bool] = field(default_factory=dict)
    """By the optimizers of an update. [Note: what an optimizer has written]."""


@final
class RunState:
    """The state of a run on one worker; the same on every worker between two steps.

    `cursor` is the next step; `global_step` counts skipped steps too. With `waits_for_device`, where workers continue
    without one that is lost, the host waits in each step before it exchanges the step table. `is_ending` is the same on
    all workers between two calls. `end_reason` is empty where no callback has ended the training, until the workers
    have agreed. `failed_here` says how the last step has failed here, where other workers may have finished it.
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
        can_differ = arguments.deterministic and self.num_shards > 1
        self.num_verified = arguments.verify_steps if can_differ else 0
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
        self.note_scheduler()
        self.unread_step: Callable[[], LossError | None] | None = None
        """Reads what is on the device of the last step, which may wait; returns its error if it was not finite."""
        self.waits_for_device = False
        self.audited: list[StepAudited] | None = None
        """The updates of which nobody has taken what an audit looks at; None where it is not looked at."""
        self._updates_made: dict[str, Callable[[], StepOutcome]] = {}
        self.unusable_because = ""
        self.failed_here = ""
        self.has_begun = False
        self.forget_findings()
        self.networks = NetworksPart(self.plan.losses, self.model)
        self.sharing = OptimizerSharing()
        self.worker = WorkerPart()
        self.parts = StateParts(
            [
                _ProgressPart(self),
                ModelPart(self.model),
                self.networks,
                OptimizerPart(self.optimizer, self.model, self.sharing),
                ObjectPart("scheduler", self.scheduler, has_class=True),
                ObjectPart("scaler", self.scaler),
                CallbacksPart(self.callbacks),
                self.worker,
            ]
        )
        TRAINED_MODELS.add(self)

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def chosen(self) -> list[Optimizer]:
        if isinstance(self.optimizer, OptimizerSet):
            return [self.optimizer.parts[name] for name in self.optimizer.chosen]
        return [self.optimizer]

    def trained_parameters(self) -> Iterator[nn.Parameter]:
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
        """Return what reads the outcomes of the updates of the present step that were made, by name.

        The caller adds each update. They outlast an engine: a step that has failed after some of them is continued, and
        its loss may be theirs.
        """
        if not self.num_updates:
            self._updates_made = {}
        return self._updates_made

    @property
    def progress(self) -> int:
        """A number that grows with each update, by which workers see whether they have made the same ones."""
        return self.global_step * len(self.plan.losses) + self.num_updates

    def advance(self, batch: ShardedBatch, *, is_last: bool) -> None:
        """Note that an update of the step of `batch` was made; with the last one the step was taken."""
        self.failed_here = ""
        self.num_updates = 0 if is_last else self.num_updates + 1
        if not is_last:
            self.note_scheduler()
            return
        self.cursor = batch.cursor.advance(batch.num_steps)
        self.global_step += 1
        self.has_begun = True
        self.data.note(batch)
        self.note_scheduler()

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
                self.note_scheduler()

        return restore

    def read_last_step(self) -> None:
        """Read what is on the device of the last step, which may wait; an error puts its progress back (local)."""
        if self.unread_step is not None:
            self.unread_step()

    def check_last_step(self) -> None:
        """Raise the `LossError` of the last step, if it was known only later; once (local, the same on all workers)."""
        self.read_last_step()
        read, self.unread_step = self.unread_step, None
        error = None if read is None else read()
        if error is not None:
            raise error

    def note_scheduler(self) -> None:
        """Note how often the scheduler was stepped, which the next step compares (local)."""
        self.num_scheduled: int | None = getattr(self.scheduler, "last_epoch", None)

    def mark_unusable(self, reason: str) -> None:
        """Note that parameters, optimizer and scheduler belong to no step; the reason is a sentence."""
        self.unusable_because = self.unusable_because or reason

    def note_end(self) -> None:
        """Note that a callback, of this worker or another one, has ended the training with the present step."""
        self.is_ending = True
        self.end_reason, self.end_reason_after_step = self.end_reason or self.end_reason_after_step, ""

    def note_failed_step(self, place: str, error: BaseException) -> None:
        left = self.unusable_because or "Nothing was changed by it there."
        self.failed_here = f"{place} failed with {type(error).__name__}: {clause(error)}. {left}"

    def forget_findings(self) -> None:
        """Look again at what the user's code does, from the next step on (local)."""
        self.findings = Findings()
        self.watches: dict[str, StateWatch] = {}

    def check_usable(self) -> None:
        if self.unusable_because:
            raise UnusableStateError(
                f"{self.failed_here or self.unusable_because} This trainer cannot continue. Load a checkpoint on "
                "every rank: trainer.load(path). (LS524)"
            )

    def kept_modules(self) -> nn.Module:
        return self.parts.modules()

    def digest(self) -> str:
        return self.parts.digest()

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
        return self.parts.save()

    @contextmanager
    def restored_from(self, state: Mapping[str, Any], others: Sequence[StatePart] = ()) -> Iterator[None]:
        """Load what `to_dict` returned, and `others`; if that or the block raises, restore the state before."""
        self.read_last_step()
        self.unread_step = None  # what it was is replaced
        with self.parts.loaded(state, others):
            yield
        self._updates_made = {}  # a state in the middle of a step has no losses of its updates
        self.note_scheduler()


@final
class _ProgressPart(StatePart):
    _NEEDED = ("model", "optimizer", "scheduler", "epoch", "step", "global_step", "num_shards", "seed")

    def __init__(self, state: RunState) -> None:
        self._state = state

    def save(self) -> dict[str, Any]:
        state = self._state
        return {
            "epoch": state.cursor.epoch,
            "step": state.cursor.step,
            "global_step": state.global_step,
            "num_shards": state.num_shards,
            "seed": state.seed,
            "loader": state.data.source,
            "fingerprint": state.fingerprint().to_dict(),
        }

    def save_for_worker(self) -> dict[str, Any]:
        return {**self.save(), "flags": self._flags(), "findings": asdict(self._state.findings)}

    def check(self, saved: State) -> None:
        missing = [name for name in self._NEEDED if not isinstance(saved, Mapping) or name not in saved]
        if missing:
            raise CheckpointError(
                f"The state has no {', '.join(missing)}: it is not what trainer.state_dict() returns. Save that, for "
                "the state of a model alone does not hold the position of the run; weights alone go into the model, "
                "before the trainer is made. (LS708)"
            )
        for name, mine in (("num_shards", self._state.num_shards), ("seed", self._state.seed)):
            if saved[name] != mine:
                raise CheckpointError(
                    f"The state was saved with {name} {saved[name]}, and this run has {mine}: the result "
                    f"would differ. Set {name} to {saved[name]}. (LS708)"
                )

    def load(self, saved: State) -> None:
        state = self._state
        state.cursor, state.global_step = Cursor(saved["epoch"], saved["step"]), saved["global_step"]
        state.data.restore(saved.get("loader"))
        self._set_flags((False, "", "", "", ""))
        state.has_begun = True

    def load_for_worker(self, saved: State) -> None:
        self.load(saved)
        self._set_flags(saved["flags"])
        self._state.findings = Findings(**saved["findings"])

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        restore, flags = self._state.record_progress() if is_stepped else self._record(), self._flags()
        has_begun = self._state.has_begun

        def put_back() -> None:
            restore()
            self._set_flags(flags)
            self._state.has_begun = has_begun

        return put_back

    def _record(self) -> Callable[[], None]:
        state = self._state
        before = state.cursor, state.global_step, copy.copy(state.data)

        def restore() -> None:
            state.cursor, state.global_step, state.data = before

        return restore

    def _flags(self) -> tuple[bool, str, str, str, str]:
        state = self._state
        ending = state.is_ending, state.end_reason, state.end_reason_after_step
        return *ending, state.unusable_because, state.failed_here

    def _set_flags(self, flags: Sequence[Any]) -> None:
        state = self._state
        state.is_ending, state.end_reason, state.end_reason_after_step = flags[:3]
        state.unusable_because, state.failed_here = flags[3:]
