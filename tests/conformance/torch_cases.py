"""PyTorch's own tests of `torch.distributed`, as a class that runs on any registered backend.

The tests are `DistributedTest._DistTestBase` of torch's `distributed_test` module, unchanged. That module looks at
the name of the backend on two occasions, and this one keeps them apart:

    while it is imported   skip conditions compare `BACKEND` with "gloo", "nccl" and "mpi"
    while a test runs      the group is made with `BACKEND`, and `get_backend()` is compared with it

A backend with a name of its own is skipped by conditions such as "only Gloo does sparse", which nobody meant for
it. So the module is imported under the name in CONFORMANCE_CONDITIONS, and `BACKEND` is set back before anything
runs: the group, and all that a test asserts about it, is of the backend under test and no other.

With a wrapper, "torch" or "lockstep", there are only the tests of DistributedDataParallel and its companions, on cuda
devices that are the CPU (see `cuda_on_cpu`), and with "lockstep" the classes are ours (see `drop_in`).

Importing this module reads the environment: BACKEND, WORLD_SIZE, INIT_METHOD, CONFORMANCE_CONDITIONS and
CONFORMANCE_WRAPPER.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.conformance import cuda_on_cpu, drop_in, stand_in
from tests.conformance.results import Outcome
from torch.nn.parallel import DistributedDataParallel

import lockstep  # noqa: F401  (registers "shm", before torch's module asks for it)

stand_in.register()

BACKEND = os.environ["BACKEND"]
CONDITIONS = os.environ.get("CONFORMANCE_CONDITIONS", BACKEND)
START = os.environ.get("CONFORMANCE_START", "forkserver")
WRAPPER = os.environ.get("CONFORMANCE_WRAPPER", "")
"""Whose classes the tests get, "torch" or "lockstep"; empty for the tests of collectives and all others."""

os.environ["BACKEND"] = CONDITIONS
with ExitStack() as stack:
    if WRAPPER:
        stack.enter_context(cuda_on_cpu.gates_open(int(os.environ["WORLD_SIZE"])))
    from torch.testing._internal.distributed import distributed_test as torch_tests

os.environ["BACKEND"] = torch_tests.BACKEND = BACKEND

LOG_LENGTH = 20_000
"""How many characters of the log of a failed test are kept."""

context: Any = get_context(START)
if START == "forkserver":
    context.set_forkserver_preload([__name__])


@contextmanager
def backend_named(name: str) -> Iterator[None]:
    """Let the running test read `name` where it reads `BACKEND`."""
    torch_tests.BACKEND = name
    try:
        yield
    finally:
        torch_tests.BACKEND = BACKEND


class ConformanceTest(torch_tests.TestDistBackend, torch_tests.DistributedTest._DistTestBase):
    """One test method, run by WORLD_SIZE workers that are started for it and end with it."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self._start_processes(worker_process)

    def run_test(self, test_name: str, parent_pipe: Connection) -> None:
        with wrapper_in_place():
            super().run_test(test_name, parent_pipe)

    def _run_uneven_inputs_test(self, test_case: Any, *args: Any, **kwargs: Any) -> None:
        if WRAPPER and test_case.name == "large_conv_model":
            # A million pixels, each of which becomes 256 channels: a GPU's work, hours of a CPU's. A corner will do.
            test_case = test_case._replace(inp=test_case.inp[..., :32, :32])
        super()._run_uneven_inputs_test(test_case, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
        # It picks the model by name of backend, has none for an unknown name, and makes no group.
        with backend_named(CONDITIONS):
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def wrapper_in_place() -> Iterator[None]:
    """Let the running test find the classes of `WRAPPER`, and the CPU where it names a GPU; nothing without one."""
    with ExitStack() as stack:
        if WRAPPER:
            wrappers = {DistributedDataParallel, drop_in.ours()["DistributedDataParallel"]}
            stack.enter_context(cuda_on_cpu.cuda_on_cpu(torch_tests, *wrappers))
        if WRAPPER == "lockstep":
            stack.enter_context(drop_in.in_place_of_torch(torch_tests))
        yield


def worker_process(*, target: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BaseProcess:
    """Return the process of one worker, not yet started."""
    # The environment is handed over: a fork server keeps that of its own start, which was another test's.
    return context.Process(target=run_worker, name=name, args=(dict(os.environ), target, args, kwargs))


def run_worker(environment: dict[str, str], target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run one worker of a test (in its own process)."""
    os.environ.update(environment)
    torch_tests.INIT_METHOD = environment["INIT_METHOD"]
    with output_to(Path(environment["CONFORMANCE_LOG"])):
        faulthandler.enable()
        # torch ends the workers of a failed or late test with this signal: where each of them stood is the finding.
        faulthandler.register(signal.SIGTERM, chain=True)
        try:
            target(*args, **kwargs)
        except Exception:
            report_early_failure(args[-1])
            raise


def report_early_failure(pipe: Connection) -> None:
    """End a worker whose group could not be made in the way in which torch ends one whose test failed."""
    # Torch does this from the start of the test method on; before it, the other workers would wait for the timeout.
    if not pipe.closed:
        pipe.send(traceback.format_exc())
        sys.exit(ConformanceTest.TEST_ERROR_EXIT_CODE)


def survey() -> dict[str, str | None]:
    """Return every test, with the reason for which the conditions skip it, if they do."""
    names = unittest.TestLoader().getTestCaseNames(ConformanceTest)
    methods = {name: getattr(ConformanceTest, name) for name in names}
    if WRAPPER:
        methods = {
            name: method for name, method in methods.items() if drop_in.concerns(method, ConformanceTest, torch_tests)
        }
    return {
        name: str(method.__unittest_skip_why__) if getattr(method, "__unittest_skip__", False) else None
        for name, method in methods.items()
    }


def run_test(test: str, log: Path) -> Outcome:
    """Run one test and say how it ended; what it and its workers write goes to `log`."""
    os.environ["CONFORMANCE_LOG"] = str(log)
    result = unittest.TestResult()
    started = time.monotonic()
    with output_to(log):
        ConformanceTest(test).run(result)  # type: ignore[no-untyped-call]
    seconds = round(time.monotonic() - started, 2)
    wrong = [*result.errors, *result.failures]
    status = "failed" if wrong else "skipped" if result.skipped else "passed"
    reason = "\n".join(text for _, text in [*wrong, *result.skipped])
    tail = log.read_text("utf-8", "replace")[-LOG_LENGTH:] if wrong else ""
    return Outcome(test=test, status=status, conditions=CONDITIONS, seconds=seconds, reason=reason, log=tail)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process writes, C++ included, to the end of a file."""
    kept = [os.dup(number) for number in (1, 2)]
    with path.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
