"""Short trainings in odd surroundings: the digest of an ordinary one, or one message that says what to do."""

import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torture.row import Row

_LOCKSTEP = str(Path(sysconfig.get_path("scripts")) / "lockstep")
_CONFIG = Path(__file__).parent.parent / "examples" / "digits.yaml"
_SHORT = ("epochs=2", "device_ids=cpu", "workers=2")
_SECONDS = 180
_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Surroundings:
    """A folder for one run, and the digest that an ordinary run has."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self.digest = folder, digest

    def train(self, *options: str, before: Sequence[str] = (), **variables: str) -> "subprocess.CompletedProcess[str]":
        """Train in this folder, to the end."""
        command = [*before, _LOCKSTEP, "train", str(_CONFIG), *_SHORT, *options]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )

    def begin(self, *options: str, **variables: str) -> "subprocess.Popen[str]":
        """Begin a training that takes long enough to be disturbed; return when it has a checkpoint."""
        command = [_LOCKSTEP, "train", str(_CONFIG), *_SHORT, "epochs=200", "save_every=5", *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **variables},
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + _SECONDS
        while not list(self.folder.glob("**/step-*.ckpt")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training has not begun: {process.communicate()[0][-400:]}")
            time.sleep(0.05)
        return process

    def explain(self, ended: "subprocess.CompletedProcess[str]", said: str = "") -> str:
        """Return what is wrong with a training that should have ended as an ordinary one; it may say something."""
        if ended.returncode != 0:
            return f"exit code {ended.returncode}: {ended.stderr[-300:]}"
        if self.digest not in ended.stdout:
            return "another digest"
        return "" if said in ended.stderr + ended.stdout else f"{said!r} is not in the output"


def run(row: Row, seed: int) -> None:
    """Try every surrounding once, beginning with another one for each seed."""
    with tempfile.TemporaryDirectory() as folder:
        _publish(Path(folder))
        first = Surroundings(_new(folder, "ordinary"), "").train()
        digest = next((line for line in first.stdout.splitlines() if line.startswith("digest ")), "")
        if not digest:
            row.note(f"an ordinary training failed: {first.stderr[-300:]}")
            return
        start = seed % len(_ALL)
        for try_ in (*_ALL[start:], *_ALL[:start]):
            if not row.has_time:
                return
            name = try_.__name__.removeprefix("_")
            surroundings = Surroundings(_new(folder, name), digest)
            try:
                problem = try_(surroundings)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                problem = f"{type(error).__name__}: {error}"
            row.note(f"{name}: {problem}" if problem else "")
            row.figures[name] = "as promised" if not problem else "see above"


def _publish(folder: Path) -> None:
    folder.chmod(0o755)


def _new(folder: str, name: str) -> Path:
    made = Path(folder) / name
    made.mkdir()
    made.chmod(0o777)
    return made


def _shim(where: Surroundings) -> str:
    library = where.folder.parent / "shim.so"
    if not library.exists():
        source = Path(__file__).parent / "shim.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def _clock_jumps(where: Surroundings) -> str:
    return where.explain(where.train(LD_PRELOAD=_shim(where), TORTURE_CLOCK="1"))


def _no_locks(where: Surroundings) -> str:
    return where.explain(where.train(LD_PRELOAD=_shim(where), TORTURE_NO_LOCKS="1"), "has no locks")


def _slow_disk(where: Surroundings) -> str:
    return where.explain(where.train(LD_PRELOAD=_shim(where), TORTURE_SLOW_MS="2000"))


def _shadowed_modules(where: Surroundings) -> str:
    bait = "import os\nos.write(2, b'shadowed module imported\\n')\n"
    for name in ("types", "json", "signal", "random", "typing", "socket", "torch"):
        (where.folder / f"{name}.py").write_text(bait)
    return _without_bait(where.explain(ended := where.train()), ended.stderr)


def _without_bait(problem: str, said: str) -> str:
    return "a module of the current directory was imported" if "shadowed" in said else problem


def _only_ipv6(where: Surroundings) -> str:
    script = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo && exec "$@"'
    ended = where.train(before=("unshare", "-n", "sh", "-c", script, "sh"))
    return where.explain(ended)


def _few_processes(where: Surroundings) -> str:
    # Another user, so that the processes of this one do not count: 12 processes and threads are too few.
    limited = (*_NOBODY, "sh", "-c", 'ulimit -u 12; exec "$@"', "sh")
    ended = where.train(before=limited, HOME=str(where.folder), MPLCONFIGDIR=str(where.folder))
    if ended.returncode == 0:
        return where.explain(ended)
    return "" if "Traceback" not in ended.stderr else f"a traceback: {ended.stderr[-400:]}"


def _full_disk(where: Surroundings) -> str:
    (where.folder / "small").mkdir()
    script = 'mount -t tmpfs -o size=400k tmpfs small && exec "$@"'
    ended = where.train("run_dir=small/run", "save_every=5", before=("unshare", "-m", "sh", "-c", script, "sh"))
    said = ended.stderr + ended.stdout
    if ended.returncode == 0 or "Traceback" in said or "No space left" not in said:
        return f"exit code {ended.returncode}: {said[-600:]}"
    return ""


def _read_only_home(where: Surroundings) -> str:
    (where.folder / "home").mkdir()
    script = 'mount -t tmpfs -o ro tmpfs home && exec "$@"'
    return where.explain(
        where.train(before=("unshare", "-m", "sh", "-c", script, "sh"), HOME=str(where.folder / "home"))
    )


def _time_namespace(where: Surroundings) -> str:
    """The monotonic clock is days ahead of that of the host, as in a container that was moved."""
    return where.explain(
        where.train(before=("unshare", "-T", "--fork", "--monotonic", "500000", "--boottime", "500000"))
    )


def _two_users(where: Surroundings) -> str:
    ended = where.train("run_dir=run")
    if problem := where.explain(ended):
        return problem
    other = where.train("run_dir=run", "--resume", before=_NOBODY, MPLCONFIGDIR=str(where.folder))
    said = other.stderr + other.stdout
    if other.returncode == 0 or "Traceback" in said:
        return f"exit code {other.returncode}: {said[-400:]}"
    return "" if "ermission" in said else f"no word of permissions: {said[-300:]}"


def _directory_deleted(where: Surroundings) -> str:
    process = where.begin("run_dir=run")
    shutil.rmtree(where.folder / "run", ignore_errors=True)
    shutil.rmtree(where.folder / "run", ignore_errors=True)  # what was saved meanwhile
    said = process.communicate(timeout=_SECONDS)[0]
    if process.returncode == 0 or "Traceback" in said:
        return f"exit code {process.returncode}: {said[-400:]}"
    return "" if said.count("error:") == 1 else f"not one message: {said[-400:]}"


def _disk_becomes_read_only(where: Surroundings) -> str:
    # As the kernel does after an error of the disk; `mount -o remount,ro` refuses while files are open for writing.
    switch = where.folder / "read-only"
    process = where.begin("run_dir=run", LD_PRELOAD=_shim(where), TORTURE_READ_ONLY=str(switch))
    switch.touch()
    said = process.communicate(timeout=_SECONDS)[0]
    if "Read-only" not in said or "Traceback" in said or process.returncode == 0:
        return f"exit code {process.returncode}: {said[-400:]}"
    return ""


def _hangup_before_the_first_step(where: Surroundings) -> str:
    command = [_LOCKSTEP, "train", str(_CONFIG), *_SHORT, "run_dir=run"]
    with subprocess.Popen(command, cwd=where.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + _SECONDS
        while not (where.folder / "run" / ".lock").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=_SECONDS)
    return where.explain(where.train("run_dir=run"))


_ALL: tuple[Callable[[Surroundings], str], ...] = (
    _clock_jumps,
    _no_locks,
    _slow_disk,
    _shadowed_modules,
    _directory_deleted,
    _hangup_before_the_first_step,
    _disk_becomes_read_only,
    *(
        (_only_ipv6, _few_processes, _two_users, _full_disk, _read_only_home, _time_namespace)
        if os.geteuid() == 0
        else ()
    ),
)
