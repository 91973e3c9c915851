"""Starting all workers of a launch again after one has failed. What they compute again is theirs to find out.

A script or a function that looks for its newest checkpoint continues there. A request to stop is never answered by a
restart.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from lockstep.errors import WorkerFailedError, counted
from lockstep.launch.scripts import Ending, ScriptJob, run_script

Result = TypeVar("Result")
Tell = Callable[[str], None]


def check_restarts(max_restarts: int) -> None:
    if max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts}, expected 0 or more. (LS123)")


def call_with_restarts(
    call: Callable[[], Result], max_restarts: int, may_restart: Callable[[], bool], tell: Tell
) -> Result:
    """Return what `call` returns; call it again where a worker has failed."""
    reasons: list[str] = []
    while True:
        try:
            return call()
        except WorkerFailedError as error:
            if not reasons and max_restarts == 0:
                raise
            if len(reasons) == max_restarts or not may_restart():
                raise _with_reasons(error, reasons) from error.__cause__
            reasons.append(str(error).splitlines()[0])
            tell(describe_restart(len(reasons), max_restarts, reasons[-1]))


def run_with_restarts(job: ScriptJob, tell: Tell) -> Ending:
    """Run a script, and start its workers again where one has failed. Main thread only.

    The logs of a restart are in a folder of their own, `restart-1`, in the log directory.
    """
    reasons: list[str] = []
    while True:
        folder = job.log_dir
        if folder is not None and reasons:
            folder /= f"restart-{len(reasons)}"
        ending = run_script(replace(job, log_dir=folder, num_restarts=len(reasons)))
        if not ending.is_failure or len(reasons) == job.max_restarts:
            return replace(ending, message=ending.message + _list(reasons)) if ending.is_failure else ending
        reasons.append(ending.message.splitlines()[0].removeprefix("error: "))
        tell(f"{ending.message}\n\n{describe_restart(len(reasons), job.max_restarts, reasons[-1])}")


def describe_restart(number: int, max_restarts: int, reason: str) -> str:
    return f"Starting all workers again (restart {number} of at most {max_restarts}). {reason}"


def _with_reasons(error: WorkerFailedError, reasons: list[str]) -> WorkerFailedError:
    return WorkerFailedError(f"{error}{_list(reasons)}", error.failures)


def _list(reasons: list[str]) -> str:
    if not reasons:
        return ""
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return f"\n\nAll workers were started again {counted(len(reasons), 'time')}, because before:{lines}"
