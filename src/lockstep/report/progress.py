"""Progress of a training on rank 0: a progress bar on a terminal, plain lines otherwise."""

from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.events import CheckpointSaved, EpochFinished, Event, RunStarted, StepFinished


@final
class PlainLines:
    """A recorder that prints one line when the run starts and one per epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_epochs = 0

    def record(self, event: Event) -> None:
        """Print a line at the start of the run and after each epoch."""
        match event:
            case RunStarted():
                self._num_epochs = event.num_epochs
                self._console.print(_describe_run(event), highlight=False, soft_wrap=True)
            case EpochFinished():
                self._console.print(_describe_epoch(event, self._num_epochs), highlight=False, soft_wrap=True)
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
                total = event.num_epochs * event.num_steps
                done = event.first_epoch * event.num_steps + event.first_step
                self._progress.update(self._task, total=total, completed=done, epoch=str(event.first_epoch + 1))
                self._progress.start()
            case StepFinished():
                self._progress.update(
                    self._task,
                    completed=event.global_step,
                    epoch=str(event.epoch + 1),
                    loss=f"{event.loss:.4f}",
                )
            case EpochFinished() | CheckpointSaved():
                pass
        self._lines.record(event)


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
