"""Several hosts on one machine: network namespaces with a virtual switch between them, each with a name of its own.

A host is a process that holds a network, a host name and an /etc/hosts; when it ends, all of that is gone. Needs root
and the programs of util-linux and iproute2; `why_not` says what is missing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

_PROGRAMS = ("unshare", "nsenter", "ip", "mount", "hostname")


def why_not() -> str:
    """Return why no hosts can be made here; nothing if they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add name veth0 type veth peer name veth1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"network namespaces cannot be made here: {tried.stderr.strip()}"


@final
class Hosts:
    """Some hosts in one network, 10.77.0.0/24: number n has the address 10.77.0.<n + 1> on its interface `link<n>`.

    Args:
        folder: Where to put files.
        count: How many.
        names: Lines for the /etc/hosts of each host; those of all hosts' addresses if None. With Debian's own way,
            `"127.0.1.1 host0"`, a host's name leads nowhere from outside.
    """

    def __init__(self, folder: Path, count: int, names: Sequence[str] | None = None) -> None:
        self._switch = _hold(["--net"])
        self._hosts: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        _inside(self._switch, "ip link add name switch type bridge && ip link set switch up")
        addresses = "\n".join(f"{self.address(number)} host{number}" for number in range(count))
        resolver = folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\n")  # nobody answers, which shows at once
        for number in range(count):
            hosts_file = folder / f"hosts{number}"
            hosts_file.write_text(f"127.0.0.1 localhost\n{addresses if names is None else names[number]}\n")
            host = _hold(["--net", "--uts", "--mount"])
            self._hosts.append(host)
            _inside(
                self._switch,
                f"ip link add name port{number} type veth peer name link{number} netns {host.pid} && "
                f"ip link set port{number} master switch up",
            )
            _inside(
                host,
                f"hostname host{number} && mount --bind {hosts_file} /etc/hosts && "
                f"mount --bind {resolver} /etc/resolv.conf && ip link set lo up && "
                f"ip addr add {self.address(number)}/24 dev link{number} && ip link set link{number} up && "
                "ip route add default via 10.77.0.254",
            )

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self._started, *self._hosts, self._switch):
            process.kill()
            process.communicate()

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number + 1}"

    def limit(self, rate: str) -> None:
        """Let each host send and receive at most so much, as `tc` reads it: "1gbit"."""
        limit = f"root tbf rate {rate} burst 128kb latency 50ms"
        for number, host in enumerate(self._hosts):
            _inside(self._switch, f"tc qdisc add dev port{number} {limit}")
            _inside(host, f"tc qdisc add dev link{number} {limit}")

    def start(self, number: int, *command: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a Python command on a host, in the environment of this process without what launchers set in it."""
        process = subprocess.Popen(
            [*_enter(self._hosts[number]), sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(variables or {})},
        )
        self._started.append(process)
        return process


def _hold(spaces: list[str]) -> "subprocess.Popen[str]":
    """Return a process that holds namespaces, once it has them."""
    process = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", "echo ready; exec sleep 3600"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _enter(process: "subprocess.Popen[str]") -> list[str]:
    return ["nsenter", "--target", str(process.pid), "--net", "--uts", "--mount"]


def _inside(process: "subprocess.Popen[str]", commands: str) -> None:
    done = subprocess.run([*_enter(process), "sh", "-c", commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
