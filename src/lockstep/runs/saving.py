"""Writing checkpoints into a run directory, and removing old ones."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self, final

from lockstep.checkpoint import Saver, read_manifest
from lockstep.checkpoint.atomic_write import remove_stale_temp_files
from lockstep.checkpoint.step_files import checkpoint_name, find_checkpoints, global_step_of
from lockstep.engine.state_file import Scheduler
from lockstep.engine.trainer import Trainer
from lockstep.errors import CheckpointError
from lockstep.events import CheckpointSaved, Recorder
from lockstep.runs.config import Config
from lockstep.runs.retention import SavedCheckpoint, choose_checkpoints_to_remove, find_best, score_of
from lockstep.runs.run_directory import link_best_checkpoint, make_checkpoint


@final
class RunSaver:
    """Write the checkpoints of one run, on one rank. Use it as a context manager, which waits for the last save.

    Removes temporary files of killed runs from the directory first, because they may fill the disk.

    Args:
        config: The config of the run, with `keep`, `keep_best`, `async_save` and `on_save_error`.
        run_dir: The run directory.
        recorder: Receives an event for each checkpoint that is on the disk.
    """

    def __init__(self, config: Config, run_dir: Path, recorder: Recorder) -> None:
        self._config = config
        self._run_dir = run_dir
        self._recorder = recorder
        self._saver = Saver(is_async=config.async_save, on_error=config.on_save_error, on_saved=self._tell)
        with suppress(OSError):  # the first save will raise if the directory is not usable
            remove_stale_temp_files(run_dir)

    def save(self, trainer: Trainer, scheduler: Scheduler | None, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint (local).

        Args:
            trainer: The trainer.
            scheduler: One that the trainer does not step itself.
            metrics: Means over the test set, by name.

        Raises:
            CheckpointError: This save or the previous one in the background failed. Earlier checkpoints are intact.
        """
        checkpoint = make_checkpoint(trainer, scheduler, self._config, metrics)
        self._saver.save(self._run_dir / checkpoint_name(trainer.global_step), checkpoint, self._clear_up)

    def wait(self) -> None:
        """Wait until the last save is on the disk, or has failed.

        Raises:
            CheckpointError: It failed, and `on_save_error` is "stop".
        """
        self._saver.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._saver.__exit__(kind, error, trace)

    def _tell(self, path: Path) -> None:
        self._recorder.record(CheckpointSaved(path=path, global_step=global_step_of(path)))

    def _clear_up(self, written: Path) -> None:
        """Link best.ckpt to the best checkpoint, then remove old ones; called after each save."""
        try:
            found = {self._describe(path): path for path in find_checkpoints(self._run_dir)}
            best = find_best(list(found))
            if best is not None:
                link_best_checkpoint(self._run_dir, found[best])
            for old in choose_checkpoints_to_remove(list(found), self._config.keep, global_step_of(written)):
                found[old].unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"Old checkpoints in {self._run_dir} could not be removed: {error}.") from error

    def _describe(self, path: Path) -> SavedCheckpoint:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return SavedCheckpoint(global_step=global_step_of(path), is_intact=False, score=None)
        score = score_of(manifest.metrics, self._config.keep_best)
        return SavedCheckpoint(global_step=global_step_of(path), is_intact=True, score=score)
