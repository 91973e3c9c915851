"""`launch`: call a function in several new processes, and return what it returned in each.

launcher                                            worker r
--------                                            --------
1 serve the store, over a channel to each worker
2 start the process, send the task           ->     join the group, call the function
3 wait for reports and exits                 <-     report: result or failure
4 after the first failure: wait a moment for an earlier one, then terminate, and later kill, the other workers
5 end the processes that workers have started: each worker leads a session (see sessions.py)
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from lockstep.devices import DeviceRequest, Placement, parse_request, place_workers
from lockstep.devices.choose import CPU
from lockstep.devices.request import Auto, Cpu
from lockstep.errors import DeviceError, GroupError, counted
from lockstep.launch.continuation import Continuation
from lockstep.launch.environment import is_in_ipython
from lockstep.launch.functions import NUM_DESCRIPTORS_PER_WORKER, FunctionWorker, FunctionWorkers
from lockstep.launch.messages import Report, Run, WorkerTask, load_result, pack_call
from lockstep.launch.rendezvous import reserved_port
from lockstep.launch.restarts import (
    FIXED,
    CallToStart,
    Elastic,
    StartAgain,
    call_with_restarts,
)
from lockstep.launch.scaling import RunningLaunch
from lockstep.launch.sessions import check_current_directory, check_descriptors
from lockstep.launch.signals import SignalForwarding, sigint_held_back
from lockstep.launch.supervision import Supervision
from lockstep.launch.template import WorkerTemplate
from lockstep.launch.worker_pool import Stopping, open_pool
from lockstep.processes.ending import exit_quickly
from lockstep.processes.host import keep_freed_memory
from lockstep.processes.stop_signals import StopRequest
from lockstep.recording import new_recording
from lockstep.settings import read_settings

if TYPE_CHECKING:
    from lockstep.comm import World
    from lockstep.comm.bootstrap.identity import WorldVariables

_LOGGER = logging.getLogger("lockstep")


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    devices: DeviceRequest | Placement = None,
    force: bool = False,
    threads_per_worker: int = 1,
    portable: bool = False,
    seed: int = 0,
    max_restarts: int = 0,
    elastic: Elastic | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(run, *args, **kwargs)` in each of several new processes; return what each returned.

        def main(run: ls.Run, rate: float) -> str:
            ...
            return trainer.digest()

        digests = ls.launch(main, 1e-3, workers=2)

    When the function begins, each worker has joined the default process group, its GPU, if any, is the current device,
    and its global generators are seeded with the same number. A worker sees its own GPU only, as "cuda:0". `run` is a
    `Run`. The function may be local, or come from a script or a notebook cell: it is sent by value, so no
    `if __name__ == "__main__"` is needed.

    Workers ignore Ctrl-C: it interrupts the caller, which stops them. SIGTERM is forwarded to the workers. It ends
    those that have no handler for it, and then the caller too. Where workers handle it, save and return, `launch`
    returns. A second SIGTERM ends all processes at once.

    In a process that torchrun, srun, mpirun or another launcher has started as one of several workers, no process is
    started: each worker calls the function itself, and each returns the results of all of them (collective).

    Args:
        function: What to run.
        args: Its positional arguments after `run`; anything that can be pickled.
        workers: How many; on as many GPUs if there are any, else on the CPU.
        devices: `"auto"`, `"auto:3"`, `"auto:3@20GiB"` (of free memory), `"cpu"`, `"cpu:2"`, or GPUs by the numbers
            that nvidia-smi shows or by UUID, such as `[0, 2, 5]` (`[[0, 1], [2, 3]]` for two per worker); None for
            `"auto"`. Or a placement, which is used as it is.
        force: Take GPUs that other processes use, too.
        threads_per_worker: CPU threads of torch's operators in each worker. It is not derived from the number of
            workers, because it changes the last bits of results.
        portable: Compute on CPUs so that results have the same bits on every x86-64 processor, with one thread in each
            worker, whatever `threads_per_worker` says. It costs speed: `docs/same-bits.md` has a table.
        seed: Seed of the global generators (Python, NumPy, torch) when the function begins, the same in each worker.
        max_restarts: After a worker has failed and the others could not continue: how often all are started again, at
            most. Each restart is reported with its reason. A function that loads its newest checkpoint continues there.
        elastic: How lost workers are replaced, where trainers have `on_worker_loss="continue"` and the function calls
            `Trainer.join()`; None not to replace any.
        kwargs: Keyword arguments of the function.

    Returns:
        One result per worker, in rank order. Where the run has continued without lost workers, or some have left, only
        those that have returned are in it; one line names the others. A worker that is killed after it has returned
        counts as returned.

    Raises:
        DeviceError: `workers` is not 1 or more, or devices do not exist or are not free.
        WorkerFailedError: A worker raised, exited, or was killed by a signal and the others could not continue. The
            message names the first one, with its traceback. The others are stopped.
        TypeError: The function or an argument cannot be pickled.
        UsageError: This process may not open enough descriptors for so many workers; or the current directory was
            deleted.
    """
    if max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts}, expected 0 or more. (LS123)")
    settings = LaunchSettings(
        workers=workers,
        devices=devices,
        force=force,
        threads_per_worker=threads_per_worker,
        portable=portable,
        seed=seed,
        max_restarts=max_restarts,
        elastic=FIXED if elastic is None else elastic,
    )
    launcher_variables = find_launcher()
    if launcher_variables is not None:
        return run_here(
            lambda run: function(run, *args, **kwargs),
            launcher_variables,
            workers=workers,
            devices=devices,
            threads=threads_per_worker,
            portable=portable,
            seed=seed,
        )
    return call_on_workers(function, args, kwargs, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The options of `launch`; see there."""

    workers: int | None = None
    devices: DeviceRequest | Placement = None
    force: bool = False
    threads_per_worker: int = 1
    portable: bool = False
    seed: int = 0
    max_restarts: int = 0
    elastic: Elastic = FIXED
    recording: Path | None = None
    """The folder where the workers record what they do; None for one in the private folder."""
    start_again: StartAgain | None = None
    """How all are started again where some were lost and the others cannot continue; None for never."""
    template: WorkerTemplate | None = None
    """What workers are forked of; None to make one where it is of use."""
    needs_every_result: bool = True
    """Whether a line at the end names lost workers whose results are missing; not where all return the same."""
    stop: StopRequest | None = None
    """The launcher forwards it as a signal. A worker's function must call `handle_stop_signals`; until then the signal
    is blocked, so that it ends no worker that is still importing. None for functions that handle no signals."""


def call_on_workers(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: LaunchSettings
) -> list[Any]:
    """Do what `launch` does in a process that no other launcher has started as a worker."""
    check_current_directory()
    placement = place_workers(settings.devices, workers=settings.workers, force=settings.force)
    check_descriptors(len(placement.devices), NUM_DESCRIPTORS_PER_WORKER)
    call = pack_call(function, args, kwargs)
    forwarding, again, stop = SignalForwarding(), settings.start_again, settings.stop
    with ExitStack() as stack:
        template = settings.template
        if template is None:
            template = make_template(
                stack,
                placement,
                threads=settings.threads_per_worker,
                portable=settings.portable,
                seed=settings.seed,
                replaces=settings.elastic != FIXED or settings.max_restarts > 0,
            )
        reports = call_with_restarts(
            lambda attempt: _call_once(attempt, settings, forwarding, template),
            CallToStart(placement=placement, call=call),
            most=settings.max_restarts,
            tell=_LOGGER.warning,
            may_restart=lambda: not (forwarding.is_requested or (stop is not None and stop.is_made)),
            after_loss=None if again is None else partial(again.after, settings.elastic.limit),
        )
    return [load_result(report) for report in reports]


def make_template(
    stack: ExitStack,
    placement: Placement,
    *,
    threads: int,
    portable: bool,
    seed: int = 0,
    replaces: bool,
    modules: Sequence[str] = (),
) -> WorkerTemplate | None:
    """Return what workers are forked of, which begins to import at once; None where that has no use.

    `stack` ends it. `replaces`: workers may be started later, in place of others.
    """
    if sys.platform != "linux" or CPU not in placement.devices or (len(placement.devices) == 1 and not replaces):
        return None
    with sigint_held_back():
        template = WorkerTemplate(seed=seed, threads=threads, portable=portable, modules=modules)
        stack.callback(template.close)
    return template


def _call_once(
    attempt: CallToStart, settings: LaunchSettings, forwarding: SignalForwarding, template: WorkerTemplate | None
) -> list[Report]:
    """Start the workers and wait for them; all have ended when this returns."""
    devices = attempt.placement.devices
    if template is not None:
        template.is_usable()  # where Ctrl-C still interrupts
    with ExitStack() as stack:
        stack.enter_context(forwarding)
        reserved = stack.enter_context(reserved_port())
        recording = new_recording(settings.recording)
        first = WorkerTask(
            worker=0,
            rank=0,
            world_size=len(devices),
            device="",
            master_port=reserved.getsockname()[1],
            threads=settings.threads_per_worker,
            is_portable=settings.portable,
            seed=settings.seed,
            parent_pid=os.getpid(),
            argv=tuple(sys.argv),
            is_from_ipython=is_in_ipython(),
            recording="" if recording is None else str(recording.absolute()),
            folder="",
            capacity=read_settings().recording().capacity,
            call=attempt.call,
        )
        starter = FunctionWorkers(first, template, reserved.fileno(), can_stop=settings.stop is not None)
        stack.callback(starter.close)
        stack.push(_exit_quickly_after_failure)
        stopping = Stopping(
            # Workers that handle SIGTERM as a request would not end by it.
            first=SIGTERM if settings.stop is None else SIGKILL,
            is_hurried=_sleep,
            tell=_LOGGER.warning,
        )
        pool = stack.enter_context(open_pool(starter, stopping, recording=recording, world_size=len(devices)))
        pids = {number: pool.start(number, device).pid for number, device in enumerate(devices)}
        if settings.stop is None:
            forwarding.begin(pool.terminate, pool.was_terminated)
        else:
            settings.stop.add_listener(pool.ask_to_stop)
        running = RunningLaunch(
            pool=pool,
            continuation=Continuation(pool.server, pids),
            elastic=settings.elastic,
            force=settings.force,
            needs_every_result=settings.needs_every_result,
        )
        returned = Supervision(running).wait()
        starter.let_exit(len(pool.workers))
        pool.wait_for_exits()
    return [each.report for each in returned if isinstance(each, FunctionWorker) and each.report is not None]


def _exit_quickly_after_failure(kind: type[BaseException] | None, *_error: object) -> None:
    """After a failure the caller ends, as a rule, and somebody may wait for that."""
    if kind is not None:
        exit_quickly()


def _sleep(seconds: float) -> bool:
    """Wait, and return False, never to kill at once: a second Ctrl-C raises KeyboardInterrupt here instead."""
    time.sleep(seconds)
    return False


def find_launcher() -> "WorldVariables | None":
    """Return another launcher's variables about this worker, if it started this process as one of several workers."""
    settings = read_settings()
    if settings.is_launched() or not (settings.launchers() or "torch.distributed" in sys.modules):
        return None
    from lockstep.comm import launched_world

    return launched_world()


def run_here(
    call: Callable[[Run], Any],
    launcher: "WorldVariables",
    *,
    workers: int | None,
    devices: DeviceRequest | Placement,
    threads: int,
    portable: bool,
    seed: int,
) -> list[Any]:
    """Call `call` in this process, which another launcher has started: torchrun, srun, mpirun, a PyTorchJob, Ray Train.

    Each worker runs the script and comes here. Collective: all join the world; returns the results in rank order. torch
    is imported here and below: where no other launcher is, the caller of `launch` may do without it.
    """
    import torch

    from lockstep.comm import report_failure
    from lockstep.devices.transfer import current_accelerator
    from lockstep.processes.reproducibility import seed_generators
    from lockstep.torch_private.portable import make_portable

    if portable:
        on_accelerator = torch.accelerator.current_accelerator() if _uses_accelerator(devices) else None
        make_portable(on_accelerator or torch.device("cpu"))
        threads = 1
    world = join_started(devices)
    _check_request(workers, devices, world.world_size, launcher.launcher)
    accelerator = current_accelerator() if _uses_accelerator(devices) else None
    torch.set_num_threads(threads)
    seed_generators(seed)
    try:
        result = call(
            Run(
                rank=world.rank,
                world_size=world.world_size,
                local_rank=_read_local_rank(launcher),
                device=accelerator or torch.device("cpu"),
            )
        )
    except BaseException as error:
        report_failure(error)
        raise
    return world.gather_objects(result)


def join_started(devices: DeviceRequest | Placement) -> "World":
    """Join the workers that another launcher has started, on the requested kind of device (collective)."""
    import torch

    from lockstep.comm import join_world

    uses_accelerator = _uses_accelerator(devices)
    if not uses_accelerator:
        keep_freed_memory()
    return join_world(None if uses_accelerator else torch.device("cpu"))


def _read_local_rank(launcher: "WorldVariables") -> int:
    if launcher.local_rank is not None and not launcher.local_rank.isdecimal():
        raise GroupError(
            f"LOCAL_RANK is {launcher.local_rank!r}, expected a number from 0 to LOCAL_WORLD_SIZE - 1. (LS102)"
        )
    return int(launcher.local_rank or 0)


def _uses_accelerator(devices: DeviceRequest | Placement) -> bool:
    """Return whether workers train on this host's accelerator; one without a backend, such as MPS, is not used."""
    import torch

    from lockstep.comm.bootstrap.process_group import choose_backend

    is_cpu = not isinstance(devices, Placement) and isinstance(parse_request(devices), Cpu)
    return not is_cpu and choose_backend() != choose_backend(torch.device("cpu"))


def _check_request(workers: int | None, devices: DeviceRequest | Placement, world_size: int, launcher: str) -> None:
    started = f"{launcher} started {counted(world_size, 'worker')} already"
    if workers is not None and workers != world_size:
        raise DeviceError(
            f"workers is {workers}, but {started}. Leave workers out, and give {launcher} the number of "
            "workers. (LS123)"
        )
    request = devices if isinstance(devices, Placement) else parse_request(devices)
    if not isinstance(request, Auto | Cpu) or request.count not in {None, world_size}:
        raise DeviceError(
            f"devices is {devices!r}, but {started}, and each uses the GPU whose number is its local rank. Use auto or "
            "cpu. To choose GPUs, set CUDA_VISIBLE_DEVICES. (LS123)"
        )
