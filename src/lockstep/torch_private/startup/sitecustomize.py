"""Python imports this when it starts, if its folder is in PYTHONPATH, where `lockstep run` puts it for all processes.

It keeps torch's store off the network. Rank 0 of torch's own `init_process_group` serves the store on every interface
of the host. Where the launcher serves none, a store at a loopback address listens there alone; and that of a world of
one, which no other process needs, nowhere.

It lets the loading processes of torch's DataLoader leave signals for the whole job to the process that they load for.
SIGTERM to every process ended them first, and their loss was an error before the script's handler could save.

A process of the script that looks for another rendezvous than that of the launch gets an error.

In a portable run it has torch compute as `lockstep.torch_private.portable` says.

And it lets a worker whose main thread has raised say so: threads may keep the process from ending.

It imports only the standard library, and nothing of torch before the script does. Then it runs the `sitecustomize` that
it hides, if there is one.
"""

import contextlib
import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    import socket

_LOOPBACK = {"localhost": ("127.0.0.1", "::1"), "127.0.0.1": ("127.0.0.1",), "::1": ("::1",)}
_BACKLOG = 2048
"""As torch's own."""
_LISTENER_SECONDS, _LOOK_SECONDS = 8.0, 0.1
_NESTED = (
    "This process was to meet others at an address that the script has chosen, where no process serves the rendezvous: "
    "the script starts its own workers, as torch.multiprocessing.spawn does, but lockstep run has started it several "
    "times. Start the script once, with `python {}` or with --workers 1; or let it call init_process_group in the "
    "process that lockstep run starts, which has RANK and WORLD_SIZE. (LS606)"
)
"""Else all would wait for half an hour: they inherit TORCHELASTIC_USE_AGENT_STORE."""


class _TorchWatch:
    @staticmethod
    def find_spec(fullname: str, path: object = None, _target: object = None) -> ModuleSpec | None:
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _keep_off_the_network(rendezvous: ModuleType) -> None:
    """Change where torch serves the store of `env://` and `tcp://`."""
    create = rendezvous._create_c10d_store

    def create_on_loopback(hostname, port, rank, world_size, timeout, use_libuv=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Do what torch's function does that this replaces, without a port that others on the network can reach."""
        is_asked = rendezvous._torchelastic_use_agent_store() and _is_of_the_script(port)
        if is_asked and not _find_listener(hostname, port):
            raise RuntimeError(_NESTED.format(sys.argv[0]))
        is_served_here = rank == 0 and use_libuv and not rendezvous._torchelastic_use_agent_store()
        if is_served_here and world_size == 1 and hostname in _LOOPBACK:
            from torch.distributed import HashStore

            store = HashStore()
            store.set_timeout(timeout)
            return store
        listener = _listen(hostname, port) if is_served_here else None
        if listener is None:
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        return rendezvous.TCPStore(
            host_name=hostname,
            port=listener.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    rendezvous._create_c10d_store = create_on_loopback  # type: ignore[attr-defined]


def _is_of_the_script(port: int) -> bool:
    """Return whether `lockstep run` serves no store at this port, though it serves one for its workers."""
    served = os.environ.get("LOCKSTEP_CHANNEL", "").rpartition(",")[2]
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("lockstep-")  # and not of a torchrun below it
    return is_ours and served not in {"", str(port)}


def _find_listener(hostname: str, port: int) -> bool:
    """Wait a moment for somebody who listens there: a launcher of the script's own, perhaps."""
    import socket
    import time

    deadline = time.monotonic() + _LISTENER_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((hostname, port), _LISTENER_SECONDS):
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _listen(hostname: str, port: int) -> "socket.socket | None":
    """Return a socket that listens on loopback; None for torch's own way: another host, or the port is taken."""
    import socket

    for address in _LOOPBACK.get(hostname, ()):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError:  # torch says so, or uses the store that this process has there already
            listener.close()
        else:
            return listener
    return None


def _report_raised() -> None:
    """Report to the launcher that the main thread of this worker has ended by an exception, and what runs on."""
    # `Settings.channel` says the same. But now it is too late to import what may import `concurrent.futures`.
    descriptor, launcher, port = (*os.environ.get("LOCKSTEP_CHANNEL", "").split(","), "", "")[:3]
    if not _has_raised() or (launcher, port) != (str(os.getppid()), os.environ.get("MASTER_PORT")):
        return
    import json
    import socket

    names = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as channel:
        # A program that ran before this one may have closed the channel, and opened something else.
        if channel.family == socket.AF_UNIX and channel.getsockname() in {"", b""}:
            channel.sendall(json.dumps({"report": "raised", "threads": names}).encode() + b"\n")


def _has_raised() -> bool:
    """Return whether the interpreter has printed an exception of the main script; others note theirs there as well."""
    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        return False
    is_module = trace.tb_frame.f_code.co_filename.startswith("<frozen runpy")  # python -m
    return is_module or trace.tb_frame.f_globals is vars(sys.modules["__main__"])


def _leave_signals_to_parent(signal_handling: ModuleType) -> None:
    """Change what a loading process does first."""
    set_handlers = signal_handling._set_worker_signal_handlers

    def set_handlers_and_ignore() -> None:
        from multiprocessing import parent_process

        set_handlers()
        parent = parent_process()
        if parent is not None:
            _module_at("processes", "ending.py").terminate_only_for(parent.pid)

    signal_handling._set_worker_signal_handlers = set_handlers_and_ignore  # type: ignore[attr-defined]


def _module_at(*path: str) -> ModuleType:
    """Load one file of Lockstep, which needs the standard library alone: the whole package takes longer to import."""
    file = os.path.join(_FOLDER, os.pardir, os.pardir, *path)  # noqa: PTH118 - pathlib is slow to import
    spec = importlib.util.spec_from_file_location(f"lockstep_{path[-1].removesuffix('.py')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_portable(_torch: ModuleType) -> None:
    if os.environ.get("LOCKSTEP_PORTABLE") == "1":
        from lockstep.torch_private.portable import replace_operators

        replace_operators()


_CHANGES = {
    "torch": _make_portable,
    "torch.distributed.rendezvous": _keep_off_the_network,
    "torch.utils.data._utils.signal_handling": _leave_signals_to_parent,
}


def _run_hidden() -> None:
    """Run the next `sitecustomize` on `sys.path`, as Python would without this one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_FOLDER = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is slow to import
sys.path[:] = [path for path in sys.path if path != _FOLDER]
sys.meta_path.insert(0, _TorchWatch())
threading._register_atexit(_report_raised)  # type: ignore[attr-defined]
_run_hidden()
