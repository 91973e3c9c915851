"""A real Slurm of two nodes on loopback: munged, slurmctld and two slurmd, with a key and a folder of their own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import final

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_DIRECTORIES = "/usr/sbin:/usr/local/sbin"
_PATIENCE = 100.0
_CONFIG = """
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=1000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no Slurm can be started here; nothing if one can."""
    missing = [name for name in _PROGRAMS if _find(name) is None]
    if missing:
        return f"a Slurm needs {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


@final
class Slurm:
    """A cluster; gone when the `with` block is."""

    def __init__(self, folder: Path) -> None:
        (folder / "state").mkdir()
        folder.chmod(0o711)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        config = folder / "slurm.conf"
        config.write_text(
            _CONFIG.format(
                host=socket.gethostname(), folder=folder, ports=_free_ports(3), cores=len(os.sched_getaffinity(0))
            )
        )
        self.variables = {"SLURM_CONF": str(config)}
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            paths = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed", "log")]
            self._start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *paths)
            self._await((folder / "munge.socket").exists, "munged does not listen")
            self._start("slurmctld", "-D")
            for node in ("node1", "node2"):
                self._start("slurmd", "-D", "-N", node)
            self._await(lambda: self._count_idle() == 2, "the nodes are not idle")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the daemons, those that were started last first."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()

    def _start(self, name: str, *arguments: str) -> None:
        found = _find(name)
        assert found is not None
        with (self._folder / f"{name}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen([found, *arguments], stdout=log, stderr=log, env={**os.environ, **self.variables})
            )

    def _count_idle(self) -> int:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.variables},
        )
        return shown.stdout.split().count("idle")

    def _await(self, is_so: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            logs = "\n".join(path.read_text(errors="replace")[-500:] for path in self._folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{failure}\n{logs}"
            time.sleep(0.05)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_DIRECTORIES}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
