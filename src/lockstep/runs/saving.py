"""A run's checkpoints while it trains: writing them into its directory, and removing those that are too old."""

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
    """Write the checkpoints of one run, on one rank. Use it as a context: at its end the last save is waited for.

    What killed savers have left in the directory is removed first, for it may be what fills the disk.

    Args:
        config: `keep`, `keep_best`, `async_save` and `on_save_error`; it goes into every checkpoint.
        run_dir: Where they go.
        recorder: Told of each one that is durable.
    """

    def __init__(self, config: Config, run_dir: Path, recorder: Recorder) -> None:
        self._config = config
        self._run_dir = run_dir
        self._recorder = recorder
        self._saver = Saver(is_async=config.async_save, on_error=config.on_save_error, on_saved=self._tell)
        with suppress(OSError):  # the first save will tell
            remove_stale_temp_files(run_dir)

    def save(self, trainer: Trainer, scheduler: Scheduler | None, metrics: Mapping[str, float]) -> None:
        """Save where the run stands (local).

        Args:
            trainer: What is trained.
            scheduler: One that the trainer does not step itself.
            metrics: Means over the test set, by name.

        Raises:
            CheckpointError: This save failed, or the one before did in the background; earlier ones are whole.
        """
        checkpoint = make_checkpoint(trainer, scheduler, self._config, metrics)
        self._saver.save(self._run_dir / checkpoint_name(trainer.global_step), checkpoint, self._clear_up)

    def wait(self) -> None:
        """Wait until the last save is durable, or has failed.

        Raises:
            CheckpointError: It has failed, and is not only to be warned of.
        """
        self._saver.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._saver.__exit__(kind, error, trace)

    def _tell(self, path: Path) -> None:
        self._recorder.record(CheckpointSaved(path=path, global_step=global_step_of(path)))

    def _clear_up(self, written: Path) -> None:
        """Point to the best checkpoint, then remove what is too old; called when a new one is whole."""
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
