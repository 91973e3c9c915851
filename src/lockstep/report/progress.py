"""Progress of a training on rank 0: a progress bar on a terminal, plain lines otherwise."""

from collections import deque
from collections.abc import Sequence
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lockstep.doctor.slow import find_slow
from lockstep.errors import counted
from lockstep.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    LoadingProcessLost,
    RecordingTakenOver,
    RunStarted,
    StepFinished,
    WorkersChanged,
)
from lockstep.recording import WorkerRecorder, own_recorder
from lockstep.recording.reading import read_recording

_WIDTH_WITH_BAR = 130
"""On narrower terminals there is only room for the numbers."""
_WIDTH_WITH_BOUND = 110
_NUM_SEEN = 50
_LOOK_SECONDS = 5.0
_LOOK_PAUSE = 500
_MUCH = 1 / 3
_NOTHING_TO_EVALUATE = (
    "there is no set to evaluate, so no accuracy is measured: `data` returned the training set alone; return "
    "(train, test), or sets by name such as {'train': ..., 'val': ...}"
)


@final
class PlainLines:
    """A recorder that prints one line when the run starts, one per epoch, and one when workers are lost."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_epochs = 0

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._num_epochs = event.num_epochs
                self._console.print(_describe_run(event), highlight=False, soft_wrap=True)
                if event.num_test_samples == 0 and event.first_epoch < event.num_epochs:
                    self._console.print(_NOTHING_TO_EVALUATE, highlight=False, soft_wrap=True)
                if event.patch:
                    said = f"uncommitted changes of the code are saved in {event.patch}; not with save_code=false"
                    self._console.print(said, highlight=False, markup=False, soft_wrap=True)
            case EpochFinished():
                width = self._console.width if self._console.is_terminal else None
                for line in fold(_describe_epoch(event, self._num_epochs), width):
                    self._console.print(line, highlight=False, soft_wrap=True)
            case WorkersChanged():
                self._console.print(event.text, highlight=False, markup=False, soft_wrap=True)
            case RecordingTakenOver():
                self._num_epochs = event.run.num_epochs
            case StepFinished() | Evaluated() | CheckpointSaved() | LoadingProcessLost():
                pass


@final
class ProgressBar:
    def __init__(self, console: Console) -> None:
        self._lines = PlainLines(console)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            *([BarColumn()] if console.width >= _WIDTH_WITH_BAR else []),
            TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]}  {task.fields[speed]}"),
            *([TextColumn("{task.fields[bound]}")] if console.width >= _WIDTH_WITH_BOUND else []),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("train", epoch="", loss="", speed="", bound="", total=None)
        self._speed = Speed()
        self._bound = Bound()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event, event.first_epoch * (event.num_steps or 0) + event.first_step)
            case RecordingTakenOver():
                self._progress.console.print()  # below what is left of the bar of the process that has ended
                self._start(event.run, event.global_step)
            case StepFinished():
                self._progress.update(
                    self._task,
                    completed=event.global_step,
                    epoch=str(event.epoch + 1),
                    loss=f"{event.loss:.4f}",
                    speed=self._speed.after(event.global_step),
                    bound=self._bound.text(),
                )
            case EpochFinished() | Evaluated() | CheckpointSaved() | WorkersChanged() | LoadingProcessLost():
                pass
        self._lines.record(event)

    def _start(self, run: RunStarted, done: int) -> None:
        total = None if run.num_steps is None else run.num_epochs * run.num_steps
        epoch = min(done // run.num_steps, run.num_epochs - 1) if run.num_steps else run.first_epoch
        self._speed.begin(run, done)
        self._progress.update(self._task, total=total, completed=done, epoch=str(epoch + 1))
        self._progress.start()


@final
class Speed:
    """Samples per second, and how long the epoch and the run will take, in words."""

    def __init__(self) -> None:
        self._num_samples = self._total = 0
        self._num_steps: int | None = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=_NUM_SEEN)

    def begin(self, run: RunStarted, done: int) -> None:
        self._num_samples, self._num_steps = run.num_train_samples or 0, run.num_steps
        self._total = run.num_epochs * (run.num_steps or 0)
        self._seen.clear()
        self._seen.append((WorkerRecorder.seconds(), done))

    def after(self, step: int) -> str:
        """Return the text after a step; evaluations and saves count as long as they take."""
        self._seen.append((WorkerRecorder.seconds(), step))
        (began, first), (now, _) = self._seen[0], self._seen[-1]
        if step <= first or now <= began:
            return ""
        steps_per_second = (step - first) / (now - began)
        if self._num_steps is None:  # of a stream: neither its samples nor its end are known
            return f"{steps_per_second:,.1f} steps/s"
        left_of_epoch, left = -step % self._num_steps, max(self._total - step, 0)
        samples = steps_per_second * self._num_samples / self._num_steps
        return (
            f"{samples:,.0f} samples/s  left: epoch {_duration(left_of_epoch / steps_per_second)}, "
            f"run {_duration(left / steps_per_second)}"
        )


@final
class Bound:
    """What the last steps spent much of their time on besides computing: "61% loading", "45% waiting for rank 1".

    From the recording of this process. It is read every few seconds, and so seldom that this takes less
    than 0.2 % of the time.
    """

    def __init__(self) -> None:
        self._text = ""
        self._next_look = WorkerRecorder.seconds() + _LOOK_SECONDS

    def text(self) -> str:
        began = WorkerRecorder.seconds()
        if began >= self._next_look:
            self._text = self._look()
            now = WorkerRecorder.seconds()
            self._next_look = now + max(_LOOK_SECONDS, _LOOK_PAUSE * (now - began))
        return self._text

    def _look(self) -> str:
        directory = own_recorder().directory
        if directory is None:
            return ""
        try:
            files = [each for each in read_recording(directory) if not each.is_launchers]
        except OSError:
            return ""
        found = find_slow(files)
        if not found.workers:
            return ""
        shares = {name: share for name, share in found.workers[0].shares.items() if name != "forward and backward"}
        name = max(shares, key=lambda each: shares[each])
        if shares[name] < _MUCH:
            return ""
        who = f" for rank {found.behind}" if name == "waiting" and found.behind is not None else ""
        return f"{shares[name]:.0%} {name}{who}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _describe_run(event: RunStarted) -> str:
    kind = "the CPU" if event.device.startswith("cpu") else "GPUs"
    data = "a stream" if event.num_train_samples is None else f"{event.num_train_samples:,} samples"
    return (
        f"training {event.num_parameters:,} parameters on {data} "
        f"with {counted(event.world_size, 'worker')} on {kind}, {counted(event.num_shards, 'shard')} per step"
        + _describe_start(event)
    )


def _describe_start(event: RunStarted) -> str:
    if event.first_epoch >= event.num_epochs:
        return f"; all {event.first_epoch} epochs are done already, so nothing is left to train"
    if event.first_step:
        of_all = "" if event.num_steps is None else f" of {event.num_steps}"
        return f", continuing with epoch {event.first_epoch + 1}, step {event.first_step + 1}{of_all}"
    return f", continuing with epoch {event.first_epoch + 1}" if event.first_epoch else ""


def fold(parts: Sequence[str], width: int | None) -> list[str]:
    """Join parts to lines no wider than `width` (None: one line), if possible; all after the first are indented."""
    indent = " " * (len(parts[0]) + 2)
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}  {part}"
        if width is None or len(longer) <= width or lines[-1] == parts[0]:
            lines[-1] = longer
        else:
            lines.append(indent + part)
    return lines


def _describe_epoch(event: EpochFinished, num_epochs: int) -> list[str]:
    parts = [f"epoch {event.epoch + 1:>{len(str(num_epochs))}}/{num_epochs}", f"loss {event.train_loss:.4f}"]
    parts += [f"{name.replace('_', ' ', 1)} {_format_metric(name, value)}" for name, value in event.measured.items()]
    return [*parts, f"{event.samples_per_second:,.0f} samples/s"]


def _format_metric(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
