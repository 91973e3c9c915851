"""What `multiprocessing` leaves where a process is killed."""

import subprocess
import sys
from pathlib import Path

from lockstep.processes import host

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
