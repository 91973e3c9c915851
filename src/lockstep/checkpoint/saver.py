"""Writing checkpoints in the background.

      training thread                              saving thread
    1 wait for the previous save, if it runs
    2 copy the state
    3 start the saving thread                      compute the digest of the copy
      next step ...                                checksums, write, fsync, rename; throttled
      next step ...                                remove old checkpoints
    4 at the next save, or at close: report the save, or raise its error

Only 1 and 2 block the training.

[Note: a thread per save] The saving thread ends with its save and is not a daemon thread. So the interpreter waits for
a running save however the program ends, and no idle thread keeps the program from ending.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self, final

import torch
from torch import Tensor

from lockstep.checkpoint.file import Pause, Throttle, no_pause, save_checkpoint, with_digest
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.devices.transfer import is_asynchronous
from lockstep.errors import CheckpointError, without_code
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.recording import EventKind, own_recorder

OnError = Literal["stop", "warn"]

_NICENESS = 10
"""Nice value of the saving thread, so that the scheduler prefers the training's threads."""
_WARNING_SECONDS = 10.0
"""After how long a wait for the save before it is warned of."""
AfterSave = Callable[[Path], None] | None
"""What `Saver` calls on the saving thread after a file was written, with its path."""


@final
class Saver:
    """Write checkpoints, one at a time, in the background or synchronously.

    Use it as a context manager, or call `close`. An error of a save in the background is raised by the next `save`,
    `wait` or `close`. `on_saved` is called on the thread that calls these.
    """

    def __init__(
        self,
        *,
        is_async: bool = True,
        on_error: OnError = "stop",
        on_saved: Callable[[Path], None] | None = None,
    ) -> None:
        self._is_async = is_async
        self._on_error = on_error
        self._on_saved = on_saved
        self._copy = StateCopy()
        self._thread: threading.Thread | None = None
        self._throttle = Throttle()
        self._saved: list[Path] = []
        self._errors: list[Exception] = []

    def save(self, path: Path, checkpoint: Checkpoint, after: AfterSave = None) -> None:
        """Write a checkpoint; the state may change as soon as this returns (local; call it on one rank).

        Waits first for a save that is still running. The digest in the manifest is computed here, from the saved state.
        """
        self.wait()
        if not self._is_async:
            self._write(path, checkpoint, after)
            self.wait()
            return
        try:
            with own_recorder().during(EventKind.SAVING, text="copy"):
                copy = self._copy.copy_of(checkpoint)
        except RuntimeError as error:
            self._errors.append(
                CheckpointError(
                    f"The checkpoint {path} was not written, because the state could not be copied: {error}. Saving in "
                    "the background needs memory for one copy of the state. To save without a copy, set async_save: "
                    "false. (LS703)"
                )
            )
            self.wait()
            return
        # [Note: a thread per save]
        self._throttle = Throttle()
        self._thread = threading.Thread(
            target=self._write_at_low_priority,
            args=(path, copy, after, self._throttle.pause),
            name="lockstep-saver",
            daemon=False,
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread could be started: a limit was reached, or the interpreter is shutting down
            self._thread = None
            self._write(path, copy, after)
            self.wait()

    def wait(self) -> None:
        """Wait until no save is running, then report finished saves and errors."""
        if self._thread is not None:
            self._throttle.disable()
            if self._thread.ident is not None:  # None after a KeyboardInterrupt before the thread started
                with own_recorder().during(EventKind.SAVING, text="wait"):
                    self._join(self._thread)
            self._thread = None
        saved, self._saved = self._saved, []
        errors, self._errors = self._errors, []
        for path in saved:
            if self._on_saved is not None:
                self._on_saved(path)
        for error in errors:
            if self._on_error == "stop" or not isinstance(error, CheckpointError):
                raise error
            warnings.warn(
                f"{without_code(error)} The training continues without this checkpoint. (LS703)",
                stacklevel=stacklevel_of_user(),
            )

    def close(self) -> None:
        """Wait for the last save and free the memory of the copy."""
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
        except CheckpointError as failed:  # it must not replace the exception that ends the block
            warnings.warn(str(failed), stacklevel=stacklevel_of_user())

    def _join(self, thread: threading.Thread) -> None:
        thread.join(_WARNING_SECONDS)
        if thread.is_alive():
            warnings.warn(
                f"The previous checkpoint is still being written after a wait of {_WARNING_SECONDS:.0f} s. The "
                "training waits for it, because two saves never overlap. Save less often, or to a faster disk. (LS707)",
                stacklevel=stacklevel_of_user(),
            )
            thread.join()

    def _write_at_low_priority(self, path: Path, checkpoint: Checkpoint, after: AfterSave, pause: Pause) -> None:
        if sys.platform == "linux":  # elsewhere this would change the priority of the whole process
            with suppress(OSError):
                os.nice(_NICENESS)
        self._write(path, checkpoint, after, pause)

    def _write(self, path: Path, checkpoint: Checkpoint, after: AfterSave, pause: Pause = no_pause) -> None:
        try:
            with own_recorder().during(EventKind.SAVING, text="write" if self._is_async else "save"):
                save_checkpoint(path, with_digest(checkpoint, pause), pause)
            self._saved.append(path)
            if after is not None:
                after(path)
        except Exception as error:  # noqa: BLE001 - `wait` raises it on the training thread
            self._errors.append(error)


@final
class StateCopy:
    """CPU memory for one copy of a state, which is reused from copy to copy.

    GPU tensors are copied to pinned memory without blocking, which is several times faster than to pageable memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, bool], Tensor] = {}

    def copy_of(self, checkpoint: Checkpoint) -> Checkpoint:
        copied = self.fill({**checkpoint.model, **checkpoint.optimizer})
        return replace(
            checkpoint,
            model={name: copied[name] for name in checkpoint.model},
            optimizer={name: copied[name] for name in checkpoint.optimizer},
        )

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors and return the copies, which are valid until the next call; RuntimeError without memory."""
        previous, self._buffers = self._buffers, {}  # memory that is not reused below is freed
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            is_pinned = is_asynchronous(tensor.device)  # the buffer's; is_pinned() would be slow
            key = name, is_pinned
            buffer = previous.pop(key, None)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
            copies[name] = self._buffers[key] = buffer.copy_(tensor.detach(), non_blocking=is_pinned)
        for device in {tensor.device for tensor in tensors.values() if is_asynchronous(tensor.device)}:
            torch.accelerator.synchronize(device)
        return copies
