"""Where the processes that a worker starts with `multiprocessing` have their sockets.

A data-loading process sends tensors over a socket in a folder of its own, `/tmp/pymp-...`. It deletes that when it
ends, but not when it is killed, as with its worker. So the launcher makes one folder for all, and has it deleted at the
end.
"""

from multiprocessing import process


def keep_temporary_files_in(folder: str) -> None:
    """Let `multiprocessing` use this folder, here and in processes that this one starts; nothing if empty (local)."""
    if folder:
        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]  # noqa: SLF001
