"""A process keeps the memory that it frees, with any glibc."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.processes import host
from lockstep.processes.host import FREED_MEMORY_VARIABLES, keep_freed_memory

TRIM, MMAP = -1, -3
COUNT_FAULTS = """
import resource, sys
if sys.argv[1:]:
    from lockstep.processes.host import keep_freed_memory
    keep_freed_memory()
def get_again():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _held = [bytearray(size << 20) for size in [1] * 29]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([get_again() for _ in range(5)][-1])
"""
ALL_PAGES = (29 << 20) // os.sysconf("SC_PAGE_SIZE")


def count_faults(variables: Mapping[str, str], *arguments: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", COUNT_FAULTS, *arguments]
    done = subprocess.run(command, env={**own, **variables}, capture_output=True, text=True, check=True, timeout=50)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc")
def test_memory_that_was_freed_is_not_fetched_again_page_by_page() -> None:
    assert count_faults({}) > ALL_PAGES // 2, "glibc keeps it by itself now: this is no longer needed"
    assert count_faults(FREED_MEMORY_VARIABLES) < ALL_PAGES // 10, "by the variables, for scripts"
    assert count_faults({}, "by the call") < ALL_PAGES // 10, "by the call, for workers of launch"


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1 << 40, [(MMAP, 1 << 30), (TRIM, 1 << 30)]), (1 << 25, [(MMAP, 1 << 25), (TRIM, 1 << 30)]), (0, [])],
)
def test_a_glibc_that_refuses_large_blocks_keeps_smaller_ones(
    largest: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def mallopt(option: int, value: int) -> int:
        if option == MMAP and value > largest:
            return 0
        taken.append((option, value))
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert taken == expected, "with the end of the heap alone, each block of 128 KiB would be fetched anew"


# -- What `multiprocessing` leaves where a process is killed -----------------------------------------------------------


PROGRAM = """
import multiprocessing, os, runpy, signal, sys
from multiprocessing import connection, util

def listen(queue):
    listener = connection.Listener(family="AF_UNIX")
    queue.put(listener.address)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    runpy.run_path(sys.argv[1])["keep_temporary_files_in"](sys.argv[2])  # without importing torch
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        queue = context.SimpleQueue()
        child = context.Process(target=listen, args=(queue,))
        child.start()
        print(queue.get())
        child.join()
    print(util.get_temp_dir())
"""


def test_children_that_are_killed_leave_their_sockets_in_the_folder(tmp_path: Path) -> None:
    # Each killed loading process of a killed worker left a folder pymp-... in /tmp.
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "f"
    folder.mkdir()
    run = [sys.executable, str(script), host.__file__, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=50, check=True)
    assert {Path(line).parent for line in done.stdout.split()[:2]} == {folder}
    assert done.stdout.split()[2] == str(folder)
