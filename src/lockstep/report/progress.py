"""Progress of a training on rank 0: a progress bar on a terminal, plain lines otherwise."""

from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.events import (
    CheckpointSaved,
    EpochFinished,
    Event,
    RecordingTakenOver,
    RunStarted,
    StepFinished,
    WorkersChanged,
)


@final
class PlainLines:
    """A recorder that prints one line when the run starts, one per epoch, and one when workers are lost."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_epochs = 0

    def record(self, event: Event) -> None:
        """Print a line, if there is one for this event."""
        match event:
            case RunStarted():
                self._num_epochs = event.num_epochs
                self._console.print(_describe_run(event), highlight=False, soft_wrap=True)
            case EpochFinished():
                self._console.print(_describe_epoch(event, self._num_epochs), highlight=False, soft_wrap=True)
            case WorkersChanged():
                self._console.print(event.text, highlight=False, markup=False, soft_wrap=True)
            case RecordingTakenOver():
                self._num_epochs = event.run.num_epochs
            case StepFinished() | CheckpointSaved():
                pass


@final
class ProgressBar:
    """A recorder that shows a progress bar over the steps of the run, below the lines of `PlainLines`."""

    def __init__(self, console: Console) -> None:
        self._lines = PlainLines(console)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("train", epoch="", loss="", total=None)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def record(self, event: Event) -> None:
        """Update the progress bar."""
        match event:
            case RunStarted():
                self._start(event, event.first_epoch * event.num_steps + event.first_step)
            case RecordingTakenOver():
                self._progress.console.print()  # below what is left of the bar of the process that has ended
                self._start(event.run, event.global_step)
            case StepFinished():
                self._progress.update(
                    self._task,
                    completed=event.global_step,
                    epoch=str(event.epoch + 1),
                    loss=f"{event.loss:.4f}",
                )
            case EpochFinished() | CheckpointSaved() | WorkersChanged():
                pass
        self._lines.record(event)

    def _start(self, run: RunStarted, done: int) -> None:
        total = run.num_epochs * run.num_steps
        epoch = min(done // run.num_steps + 1, run.num_epochs)
        self._progress.update(self._task, total=total, completed=done, epoch=str(epoch))
        self._progress.start()


def _describe_run(event: RunStarted) -> str:
    workers = "1 worker" if event.world_size == 1 else f"{event.world_size} workers"
    kind = "the CPU" if event.device.startswith("cpu") else "GPUs"
    return (
        f"training {event.num_parameters:,} parameters on {event.num_train_samples:,} samples "
        f"with {workers} on {kind}, {event.num_shards} shards per step" + _describe_start(event)
    )


def _describe_start(event: RunStarted) -> str:
    if event.first_epoch >= event.num_epochs:
        return f"; all {event.first_epoch} epochs are done already, so nothing is left to train"
    if event.first_step:
        return f", continuing with epoch {event.first_epoch + 1}, step {event.first_step + 1} of {event.num_steps}"
    return f", continuing with epoch {event.first_epoch + 1}" if event.first_epoch else ""


def _describe_epoch(event: EpochFinished, num_epochs: int) -> str:
    parts = [f"epoch {event.epoch + 1:>{len(str(num_epochs))}}/{num_epochs}", f"loss {event.train_loss:.4f}"]
    parts += [f"test {name} {_format_metric(name, value)}" for name, value in event.test.items()]
    return "  ".join([*parts, f"{event.samples_per_second:,.0f} samples/s"])


def _format_metric(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
