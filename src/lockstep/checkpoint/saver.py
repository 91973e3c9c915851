"""Writing checkpoints while the training goes on.

      the training                             the background
    1 wait for the save before, if it runs
    2 copy the state                                                     the pause that a save costs
    3 start a thread                           digest of the copy
      the next step ...                        checksums, write, flush, rename; at the pace of pace.py
      the next step ...                        what comes after a save: removing old ones
    4 at the next save, or at close: tell of it, or of its error

[Note: a thread per save] The thread ends with its save and is no daemon: so the interpreter waits for a save under way,
whatever ends the program, and there is never one that waits for work which will not come.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, Self, final

from lockstep.checkpoint.digest import state_digest
from lockstep.checkpoint.file import save_checkpoint
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.checkpoint.state_copy import StateCopy
from lockstep.checkpoint.throttle import Pause, Throttle, no_pause
from lockstep.errors import CheckpointError

OnError = Literal["stop", "warn"]
"""What becomes of a save that fails: an error, or a warning."""

_NICENESS = 10
"""Priority of the writing thread: it takes what the training leaves of a core."""


class AfterSave(Protocol):
    """What is to be done when a file is whole."""

    def __call__(self, path: Path, /) -> None:
        """Do it; called in the background."""


def do_nothing(_path: Path, /) -> None:
    """Do nothing after a save."""


@final
class Saver:
    """Write checkpoints, one at a time, in the background or at once. Use it as a context, or call `close`.

    Args:
        is_async: Copy the state and write the copy in the background. Takes memory for one copy of the state, which is
            used again from save to save.
        on_error: "stop": a save that failed raises at the next `save`, `wait` or `close`. "warn": it is warned of.
        on_saved: Called with each file that is whole and durable, on the thread that calls the saver.
        patience_seconds: A wait for the save before is warned of after so long.
    """

    def __init__(
        self,
        *,
        is_async: bool = True,
        on_error: OnError = "stop",
        on_saved: Callable[[Path], None] = do_nothing,
        patience_seconds: float = 10.0,
    ) -> None:
        self._is_async = is_async
        self._on_error = on_error
        self._on_saved = on_saved
        self._patience_seconds = patience_seconds
        self._copy = StateCopy()
        self._thread: threading.Thread | None = None
        self._throttle = Throttle()
        self._saved: list[Path] = []
        self._errors: list[Exception] = []

    def save(self, path: Path, checkpoint: Checkpoint, after: AfterSave = do_nothing) -> None:
        """Write a checkpoint; the state may change as soon as this returns (local; call it on one rank).

        A save that still runs is waited for first. The digest in the manifest is computed from what is written.

        Raises:
            CheckpointError: The save before failed, or this one did, or there is no memory for the copy.
        """
        self.wait()
        if not self._is_async:
            self._write(path, checkpoint, after)
            self.wait()
            return
        try:
            copied = self._copy.fill({**checkpoint.model, **checkpoint.optimizer})
        except RuntimeError as error:
            self._errors.append(
                CheckpointError(
                    f"The checkpoint {path} was not written, for the state could not be copied: {error}. Saving in the "
                    "background takes memory for one copy of it; async_save: false takes none."
                )
            )
            self.wait()
            return
        held = Checkpoint(
            model={name: copied[name] for name in checkpoint.model},
            optimizer={name: copied[name] for name in checkpoint.optimizer},
            manifest=checkpoint.manifest,
        )
        # [Note: a thread per save]
        self._throttle = Throttle()
        self._thread = threading.Thread(
            target=self._write_at_low_priority,
            args=(path, held, after, self._throttle.pause),
            name="lockstep-saver",
            daemon=False,
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, by a limit or because the interpreter ends
            self._thread = None
            self._write(path, held, after)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written, and tell of what was.

        Raises:
            CheckpointError: A save failed, and is not only to be warned of.
        """
        if self._thread is not None:
            self._throttle.disable()
            if self._thread.ident is not None:  # a Ctrl-C may come before it is started
                self._join(self._thread)
            self._thread = None
        saved, self._saved = self._saved, []
        errors, self._errors = self._errors, []
        for path in saved:
            self._on_saved(path)
        for error in errors:
            if self._on_error == "stop" or not isinstance(error, CheckpointError):
                raise error
            warnings.warn(f"{error} The training goes on without it.", stacklevel=3)

    def close(self) -> None:
        """Wait for the last save, and free the memory of the copy.

        Raises:
            CheckpointError: It failed.
        """
        try:
            self.wait()
        finally:
            self._copy = StateCopy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failed:  # not instead of the error that ends the block
            warnings.warn(str(failed), stacklevel=2)

    def _join(self, thread: threading.Thread) -> None:
        thread.join(self._patience_seconds)
        if thread.is_alive():
            warnings.warn(
                f"Waiting for the last checkpoint, which is still being written after {self._patience_seconds:.0f} s: "
                "two saves never overlap. Save less often, or onto a faster disk.",
                stacklevel=4,
            )
            thread.join()

    def _write_at_low_priority(self, path: Path, checkpoint: Checkpoint, after: AfterSave, pause: Pause) -> None:
        if sys.platform == "linux":  # elsewhere this would be the whole process's priority
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._write(path, checkpoint, after, pause)

    def _write(self, path: Path, checkpoint: Checkpoint, after: AfterSave, pause: Pause = no_pause) -> None:
        try:
            manifest = replace(checkpoint.manifest, digest=state_digest(checkpoint.model, pause))
            save_checkpoint(path, replace(checkpoint, manifest=manifest), pause)
            self._saved.append(path)
            after(path)
        except Exception as error:  # noqa: BLE001 - whatever it is, `wait` raises it
            self._errors.append(error)
