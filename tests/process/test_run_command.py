"""`lockstep run` as a user runs it: real scripts, real signals, and a count of what is left of them."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.ranks import wait_until
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.settings import LAUNCHED, Settings

COMMAND = [str(Path(sys.executable).with_name("lockstep")), "run"]
GONE_SECONDS = 60.0
"""Within this time after the launcher's end, or a signal to it, everything has to be gone; it would live for 60."""


@pytest.fixture
def marker() -> Iterator[str]:
    """A word that stands in the arguments of all that a test starts; what bears it after the test is killed."""
    word = f"marked-{uuid.uuid4().hex}"
    yield word
    for process in bearing(word):
        process.kill()


def bearing(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(marker: str, launcher: subprocess.Popen[bytes], seconds: float = GONE_SECONDS) -> None:
    """Wait for the end of everything but the launcher, which has to say something after it."""
    wait_until(lambda: {process.pid for process in bearing(marker)} <= {launcher.pid}, "the end of everything", seconds)


def write(folder: Path, text: str, name: str = "script.py") -> None:
    (folder / name).write_text(text)


def run(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess[Any]:
    options = {"capture_output": True, "text": True, "timeout": 50, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run([*COMMAND, *arguments], cwd=folder, check=False, **options)


SHOWING = """
import json, os, pathlib, sys
has_torch = "libtorch" in pathlib.Path(f"/proc/{os.getppid()}/maps").read_text()
print(json.dumps([dict(os.environ), sys.argv, has_torch]))
"""


def test_a_worker_has_the_environment_and_the_arguments_of_torchrun(tmp_path: Path) -> None:
    write(tmp_path, SHOWING)
    # --lr, --workers and -- stand after the script, and are its own.
    options = ["--standalone", "--nnodes=1", "--nproc-per-node", "2", "--threads-per-worker", "3"]
    # Started from a worker of `launch`, it is no such worker: a script's own `launch` would start others beside it.
    inherited = {**os.environ, LAUNCHED: "1"}
    found = run(tmp_path, *options, "script.py", "--lr", "0.1", "--workers", "9", "--", "-m", env=inherited)
    assert found.returncode == 0, found.stderr
    assert found.stderr.startswith("devices: CPU, 2 workers")
    assert "; 3 threads each (" in found.stderr
    lines = sorted(found.stdout.splitlines())
    assert [line[:9] for line in lines] == ["[rank 0] ", "[rank 1] "]
    environments = []
    for rank, line in enumerate(lines):
        environment, argv, has_torch = json.loads(line[9:])
        assert not has_torch, "the launcher has imported torch, and kept the script waiting for it"
        environments.append(environment)
        assert argv == ["script.py", "--lr", "0.1", "--workers", "9", "--", "-m"]
        names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
        assert [environment[name] for name in names] == [*[str(rank)] * 3, "2", "2", "0", "3"]
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert environment["PYTHONHASHSEED"] == "0"  # a vocabulary made from a set had another order on every rank
        assert environment["MALLOC_TRIM_THRESHOLD_"] == str(1 << 30)  # each step got its memory page by page
        assert not Settings(environment).is_launched()
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1
    assert len({environment["TORCHELASTIC_RUN_ID"] for environment in environments}) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    # The next pipe had the number of the stream, and the command ended with a traceback, or said nothing.
    write(tmp_path, "import os, pathlib; print('shown'); pathlib.Path('ran-' + os.environ['RANK']).touch()")
    command = [*COMMAND, "--workers", "2", "script.py"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    found = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-0", "ran-1"}
    assert found.stdout.count("shown") == (2 if closed == "2>&-" else 0)
    assert "Traceback" not in found.stderr


def test_output_that_finds_a_full_disk_is_missed_and_the_workers_go_on(tmp_path: Path) -> None:
    # The output was gone without a word, and the next print of a worker raised BrokenPipeError.
    write(tmp_path, "import os, time; print('a'); time.sleep(0.5); print('b'); open('ran' + os.environ['RANK'], 'w')")
    shell = ["sh", "-c", 'exec "$@" > /dev/full', "sh", *COMMAND, "--workers", "2", "script.py"]
    found = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert found.returncode == 0, found.stderr
    assert {path.name for path in tmp_path.glob("ran*")} == {"ran0", "ran1"}
    assert "warning: some of the workers' output is lost: No space left on device." in found.stderr


def test_a_current_directory_that_was_deleted_is_told_at_once(tmp_path: Path) -> None:
    # Each worker ended in an error of MKL about a library of torch that it could not load.
    (tmp_path / "gone").mkdir()
    shell = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *COMMAND, "--workers", "2", "script.py"]
    found = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert found.returncode == 2
    assert found.stderr == "error: The current directory was deleted. Change to one that exists, and start again.\n"


LOADING_WITH_A_LONG_PATH = """
import torch
import lockstep as ls
from torch.utils.data import DataLoader
def main(run):
    return sum(len(each) for each in DataLoader(torch.arange(4.0), batch_size=2, num_workers=1))
if __name__ == "__main__":
    print(ls.launch(main, workers=1, devices="cpu"))
"""


def test_data_loading_processes_work_where_tmpdir_is_too_long_for_a_socket(tmp_path: Path) -> None:
    # They wrote "AF_UNIX path too long", and the worker waited for their batches for ever.
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    write(tmp_path, LOADING_WITH_A_LONG_PATH)
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.stdout == "[4]\n", done.stderr


INTERRUPTED_EARLY = """
import signal, sys, typer
typer.Typer.__call__ = lambda *_, **__: signal.raise_signal(signal.SIGINT)
from lockstep_command import main
sys.argv = ["lockstep", "run", "script.py"]
main()
"""


def test_an_interrupt_before_anything_began_is_one_line() -> None:
    # Between the imports and the command itself it was a traceback.
    command = [sys.executable, "-c", INTERRUPTED_EARLY]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (found.returncode, found.stderr) == (130, "\nInterrupted before anything began.\n")


FOR_LAUNCH = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--lr", type=float)
arguments = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
assert dist.get_rank() == int(os.environ["RANK"]) and dist.get_node_local_rank() == int(os.environ["LOCAL_RANK"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
print("gradient", model.module.weight.grad.tolist(), "local rank", arguments.local_rank, "lr", arguments.lr)
dist.destroy_process_group()
"""
FOR_SPAWN = """
import os, psutil, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    hosts = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if not each.raddr}
    os.write(1, b"sum %.1f, listens at %s\\n" % (total.item(), ", ".join(hosts).encode()))  # both write to one pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    work(0, 1)
    mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_script_for_torchrun_or_torch_distributed_launch_runs_unchanged(tmp_path: Path) -> None:
    write(tmp_path, FOR_LAUNCH)
    found = run(tmp_path, "--devices", "cpu:2", "--no-prefix", "--local_rank", "script.py", "--lr=0.5")
    expected = [f"gradient [[0.5, 0.5]] local rank {rank} lr 0.5" for rank in (0, 1)]
    assert sorted(found.stdout.splitlines()) == expected, found.stderr


def test_a_script_that_spawns_its_processes_itself_runs_unchanged(tmp_path: Path) -> None:
    write(tmp_path, FOR_SPAWN)
    found = run(tmp_path, "--workers", "1", "script.py")
    # Torch served the store of the worker and that of the processes on every interface of the host.
    where = "listens at 127.0.0.1"
    assert found.stdout.splitlines() == [f"sum 1.0, {where}", *[f"sum 2.0, {where}"] * 2], found.stderr


NESTED = """
import os, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

if __name__ == "__main__":
    mp.start_processes(work, args=(2,), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module", autouse=True)
def nested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a script in two copies, of which each starts two processes; they look for a rendezvous for 8 s."""
    folder = tmp_path_factory.mktemp("nested")
    write(folder, NESTED)
    word = f"marked-{uuid.uuid4().hex}"
    command = [*COMMAND, "--workers", "2", "--devices", "cpu", "script.py", word]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    yield process, word
    process.kill()
    process.communicate()


def test_a_single_worker_is_as_by_hand(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "import sys\nprint('read', input(), sys.argv[1:])\nsys.exit(7)", "__main__.py")
    found = run(tmp_path, "--workers", "1", "-m", "package", "-m", input="a line\n", stdin=None)
    assert found.stdout == "read a line ['-m']\n"
    assert found.returncode == 7
    assert "error: Worker 0 failed first: ended with exit code 7" in found.stderr


def test_modules_of_the_current_directory_do_not_hide_pythons(tmp_path: Path) -> None:
    # The same of `ls.launch`, whose workers those of `lockstep train` are, is in test_launch.py.
    for name in ("types", "json", "signal", "pickle", "lockstep", "torch"):
        write(tmp_path, f"raise SystemExit('{name} of the current directory')", f"{name}.py")
    (tmp_path / "code").mkdir()
    write(tmp_path / "code", "import json, signal, types\nprint('ran')")
    found = run(tmp_path, "--workers", "1", "code/script.py")
    assert found.stdout == "ran\n", found.stderr
    train = [COMMAND[0], "train", "code/missing.yaml"]
    found = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 2
    assert "missing.yaml" in found.stderr
    assert "current directory" not in found.stderr


FAILING = """
import os, subprocess, sys, time
rank = os.environ["RANK"]
print("output of", rank)
if rank == "1":
    # Holds the pipes open, in a session of its own, so nobody ends it: it must not hold up the launcher.
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]], start_new_session=True)
    while not all(os.path.exists(f"ready-{other}") for other in (0, 2)):
        time.sleep(0.02)
    try:
        {}["the cause"]
    except KeyError as error:
        raise ValueError("boom") from error
open(f"ready-{rank}", "w").close()
time.sleep(300)
"""


def test_the_first_failure_is_reported_and_the_rest_are_stopped(tmp_path: Path, marker: str) -> None:
    write(tmp_path, FAILING)
    found = run(tmp_path, "--workers", "3", "--log-dir", "new/logs", "script.py", marker)
    assert found.returncode == 1
    report = found.stderr.partition("error: ")[2]
    assert report.startswith("Worker 1 failed first: ended with exit code 1 (log: new/logs/rank-1.stderr.log)")
    assert "Traceback" not in report  # it was printed once already, as worker 1 wrote it
    assert found.stderr.count("KeyError: 'the cause'") == 1
    assert 'script.py", line ' in report
    assert report.endswith("ValueError: boom\nIts traceback is above.\n")
    assert sorted(found.stdout.splitlines()) == [f"[rank {rank}] output of {rank}" for rank in range(3)]
    logs = tmp_path / "new" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == sorted(
        f"rank-{rank}.{stream}.log" for rank in range(3) for stream in ("stdout", "stderr")
    )
    assert (logs / "rank-2.stdout.log").read_text() == "output of 2\n"
    assert (logs / "rank-1.stderr.log").read_text().startswith("Traceback")
    [left] = bearing(marker)
    assert left.cmdline()[1] == "-c"
    # The logs of another launch are not overwritten.
    again = CliRunner().invoke(app, ["run", "--log-dir", str(logs), str(tmp_path / "script.py")])
    assert again.exit_code == 2
    assert "holds the logs of another launch (rank-0.stderr.log)" in again.stderr


LEAVING = """
import os, subprocess, sys, time
writer = "import os; print('started', flush=True); open('ready-' + os.environ['RANK'], 'w').close()\\n"
writer += "while True: os.write(1, b'still here ' * 100)"
subprocess.Popen([sys.executable, "-c", writer, sys.argv[1]], start_new_session=True)
while not os.path.exists("ready-" + os.environ["RANK"]):
    time.sleep(0.02)
"""


EXITING = """
import os, sys
import torch
import lockstep as ls
ls.init_process_group()
wrapped = ls.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(100_000):
    wrapped(torch.randn(2, 4)).sum().backward()
    if step == 5 and os.environ["RANK"] == "1":
        sys.exit(3)
"""


def test_an_exit_is_the_first_failure_also_where_others_raise_before_the_process_has_ended(tmp_path: Path) -> None:
    # The others raise when the exiting rank leaves the group, and were quicker to end: exit code 1, worker 0 the first.
    write(tmp_path, EXITING)
    found = run(tmp_path, "--workers", "2", "--devices", "cpu", "script.py")
    assert found.returncode == 3, found.stderr
    assert "error: Worker 1 failed first: ended with exit code 3" in found.stderr
    assert found.stderr.count("] The script of rank 1 has ended") <= 1  # each rank told the same


def test_a_process_that_is_left_and_writes_on_does_not_keep_the_launcher(tmp_path: Path, marker: str) -> None:
    write(tmp_path, LEAVING)
    found = run(tmp_path, "--workers", "2", "script.py", marker, timeout=100)
    assert found.returncode == 0
    assert sorted(line[:16] for line in found.stdout.splitlines())[:2] == ["[rank 0] started", "[rank 0] still h"]
    wait_until(lambda: not bearing(marker), "the writers, whose pipes are closed now")


def test_a_worker_that_is_killed_is_reported_with_the_signal_and_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "worker").write_text(
        "#!/bin/sh\nif [ $RANK = 0 ]; then trap '' TERM; while :; do sleep 0.1; done; fi\n"
        "echo last line >&2\nyes | head -1\nkill -SEGV $$\n"
    )
    (tmp_path / "worker").chmod(0o755)
    found = run(tmp_path, "--workers", "2", "--no-python", "--grace", "0.5", "./worker")
    assert found.returncode == 128 + signal.SIGSEGV
    assert (
        "error: Worker 1 failed first: killed by SIGSEGV. The other workers are being stopped. (LS601)" in found.stderr
    )
    assert found.stdout == "[rank 1] y\n"
    assert "[rank 1] last line" in found.stderr
    # `yes` died of a closed pipe without a word: SIGPIPE is as it was.
    assert found.stderr.endswith(
        "error: Worker 1 failed first: killed by SIGSEGV (LS601)\n\n"
        "The last lines that worker 1 wrote to stderr:\nlast line\n"
    )


WAITING = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]]
subprocess.Popen(sleep)                    # as a data-loading process
subprocess.Popen(sleep, process_group=0)   # as a shell with job control would start one
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(300)
"""
FROM_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start_waiting(folder: Path, marker: str, *arguments: str, **options) -> subprocess.Popen[bytes]:
    """Start two workers that start two processes each, and return when they have."""
    write(folder, WAITING)
    command = [*options.pop("before", ()), *COMMAND, "--workers", "2", "script.py", marker, *arguments]
    process = subprocess.Popen(command, cwd=folder, **options)
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)), "the workers")
    assert len(bearing(marker)) == 1 + 2 * 3
    return process


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_nothing_survives_an_orderly_end(tmp_path: Path, marker: str, is_stubborn: bool) -> None:
    number, *extra = (signal.SIGTERM, "stubborn") if is_stubborn else (signal.SIGINT,)
    process = start_waiting(tmp_path, marker, *extra, stderr=subprocess.PIPE)
    process.send_signal(number)
    wait_until_gone(marker, process)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert err.decode().endswith("every worker has ended.\n")


def test_scripts_that_save_when_asked_to_stop_can_say_so(tmp_path: Path) -> None:
    # It was 143 whatever they said, so that no batch script could tell whether to go on.
    wait = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    write(tmp_path, wait + 'open(f"ready-{os.environ[\'RANK\']}", "w").close()\ntime.sleep(300)\n')
    process = subprocess.Popen([*COMMAND, "--workers", "2", "--grace", "20", "script.py"], cwd=tmp_path)
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), "the workers")
    process.terminate()
    assert process.wait(100) == 75


def test_nothing_survives_a_closed_terminal(tmp_path: Path, marker: str) -> None:
    master, terminal = os.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    before = [sys.executable, "-c", FROM_TERMINAL]
    process = start_waiting(tmp_path, marker, before=before, start_new_session=True, **streams)
    os.close(terminal)
    os.close(master)
    wait_until_gone(marker, process)
    assert process.wait(100) == 128 + signal.SIGHUP


@pytest.mark.parametrize("with_guardian", [False, True])
def test_nothing_survives_a_killed_launcher(tmp_path: Path, marker: str, with_guardian: bool) -> None:
    process = start_waiting(tmp_path, marker, "stubborn")
    [guardian] = [child for child in psutil.Process(process.pid).children() if "guardian" in " ".join(child.cmdline())]
    workers = [child for child in bearing(marker) if child.ppid() == process.pid]
    assert len(workers) == 2
    if with_guardian:  # then the kernel still ends the workers, though not what they have started
        guardian.kill()
    process.kill()
    process.wait()
    expected = workers if with_guardian else [*bearing(marker), guardian]
    _, alive = psutil.wait_procs(expected, timeout=GONE_SECONDS)
    assert not alive
    if not with_guardian:
        assert not bearing(marker)


MEETING = """
import os, pathlib, socket, sys, time
port, folder = int(os.environ["MASTER_PORT"]), pathlib.Path("ports")
(folder / f"{port}-{os.environ['RANK']}").touch()
while len(list(folder.iterdir())) < int(sys.argv[1]):  # until every worker of every launch is there
    time.sleep(0.1)
try:
    socket.socket().bind(("127.0.0.1", port))
except OSError:
    sys.exit()
sys.exit("the port is free for others")
"""


def test_launches_at_the_same_moment_do_not_clash(tmp_path: Path) -> None:
    write(tmp_path, MEETING)
    (tmp_path / "ports").mkdir()
    command = [*COMMAND, "--workers", "2", "script.py", "10"]
    processes = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(5)]
    assert [process.wait(50) for process in processes] == [0] * 5
    assert len({path.name.partition("-")[0] for path in (tmp_path / "ports").iterdir()}) == 5


FLOOD = """
import os, sys
rank = int(os.environ["RANK"])
for number in range(200):
    os.write(1, b"".join(b"%d %d %s\\n" % (rank, number * 100 + line, b"x" * 80) for line in range(100)))
os.write(1, b"long" * 1_000_000 + b"\\n")
os.write(2, b"\\r  1%\\r  2%\\r100%\\nbytes \\xff\\xfe and no line break")
"""


def test_a_flood_of_output_arrives_whole_line_by_line(tmp_path: Path) -> None:
    write(tmp_path, FLOOD)
    found = run(tmp_path, "--workers", "2", "script.py", text=False)
    assert found.returncode == 0
    for rank in (0, 1):
        prefix = b"[rank %d] " % rank
        lines = [bytes(line[len(prefix) :]) for line in found.stdout.splitlines() if line.startswith(prefix)]
        assert [line[:12].split()[:2] for line in lines[:20_000]] == [
            [b"%d" % rank, b"%d" % number] for number in range(20_000)
        ]
        assert b"".join(lines[20_000:]) == b"long" * 1_000_000
        errors = [line for line in found.stderr.splitlines() if line.startswith(prefix)]
        assert errors[-2:] == [prefix + b"100%", prefix + b"bytes \xff\xfe and no line break"]
    assert all(line.startswith(b"[rank ") for line in found.stdout.splitlines())


def test_output_that_nobody_reads_does_not_keep_the_launcher_from_ending(tmp_path: Path, marker: str) -> None:
    write(tmp_path, "import os\nwhile True: os.write(1, b'y' * 1000 + b'\\n')")
    reading, writing = os.pipe()
    process = subprocess.Popen([*COMMAND, "--workers", "2", "script.py", marker], cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert os.read(reading, 6) == b"[rank "
    process.terminate()
    wait_until_gone(marker, process)
    assert process.wait(100) == 128 + signal.SIGTERM
    os.close(reading)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["missing.py"], "The script missing.py does not exist; expected a Python file. For a module use -m"),
        (["."], "The script . is a directory without a __main__.py"),
        (["--no-python", "./plain"], "./plain is not an executable file"),
        (["--no-python", "-m", "x"], "-m and --no-python contradict each other"),
        (["--workers", "0", "plain"], "workers is 0, but a run needs a whole number of workers, 1 or more"),
        (["--workers", "two", "plain"], "Invalid value for '--workers'"),
        (["--unknown", "plain"], "No such option: --unknown"),
        (["--workers", "3", "--devices", "cpu:2", "plain"], "Leave one of the two out"),
        (["--devices", "99", "plain"], "asks for GPU 99"),
        (["--threads-per-worker", "0", "plain"], "Invalid value for '--threads-per-worker'"),
        (["--log-dir", "plain/logs", "plain"], "The log directory plain/logs cannot be created"),
        (["--nnodes", "2", "plain"], "starts workers on one host"),
        (["--rdzv-endpoint=node0:29400", "plain"], "It has no options for other hosts"),
        (["--master-port", "29501", "plain"], "picks the port itself"),
    ],
)
def test_a_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "plain")
    found = CliRunner().invoke(app, ["run", *arguments])
    assert found.exit_code == 2
    assert expected in " ".join(found.stderr.replace("│", "").split())
    assert "Traceback" not in found.stderr


def test_a_script_that_spawns_its_processes_itself_is_refused_where_it_was_started_several_times(
    nested: tuple["subprocess.Popen[str]", str],
) -> None:
    # It waited for half an hour: each copy's processes look for a rendezvous on a port that nobody serves.
    process, word = nested
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "the script starts its own workers" in err
    assert "Start the script once, with `python script.py` or with --workers 1" in err
    assert not bearing(word)
