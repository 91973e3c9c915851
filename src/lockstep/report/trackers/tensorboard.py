"""TensorBoard's event files."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.report.trackers.protocol import Ending, TrackedRun


@final
class TensorBoard:
    """Writes event files, with `torch.utils.tensorboard`, or with tensorboardX where tensorboard is not installed.

    After a resume the file is written anew from `metrics.jsonl`, so that each step is in it once for every program
    that reads it, and nothing is missing that a killed process had not written yet. Without `folder` it is in
    `tensorboard` in the run directory.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> int:
        """Begin a file, in place of those that this run has written before."""
        is_installed = importlib.util.find_spec("tensorboard") is not None
        module = importlib.import_module("torch.utils.tensorboard" if is_installed else "tensorboardX")
        folder = run.folder / "tensorboard" if self._folder is None else Path(self._folder)
        ending = f".{run.key}.lockstep"
        before = list(folder.glob(f"events.out.tfevents.*{ending}"))
        for path in before:
            path.unlink()
        # purge_step: a TensorBoard that has read the old files drops what it knows.
        self._writer = module.SummaryWriter(str(folder), purge_step=0 if before else None, filename_suffix=ending)
        self._writer.add_text("config", "\n\n".join(f"{name}: {value}" for name, value in run.config.items()))
        return 0

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers; a thread of the writer's writes them."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step)

    def end(self, ending: Ending) -> None:
        """Write what is queued."""
        del ending
        self._writer.close()
