"""Run PyTorch's own tests of `torch.distributed` on a backend, and write down how each ended.

    python -m tests.conformance.torch_distributed --backend gloo --conditions gloo mpi --output gloo.json
    python -m tests.conformance.torch_distributed --backend shm --output plain.json
    python -m tests.conformance.torch_distributed --backend shm --conditions shm gloo mpi --compare gloo.json

From the repository's root, on CPU. The tests are torch's, assertions included; see `torch_cases` for how they are
loaded. Backends: "gloo", "shm", "standin" (Gloo under a name that torch does not know), or any other that torch or
Lockstep registers.

Torch skips many tests by name of backend: "only Gloo supports timeouts", "only MPI supports all_to_all". With
`--conditions shm gloo mpi` a test is run under the first of these names whose conditions let it run. Only the skip
conditions see that name; the group is always of the backend under test. Without `--conditions` they see the backend's
own name, as when BACKEND is simply set.

With `--compare`, failures that are failures in the other run too are no reason for exit status 1.

Workers are forked from a server that has imported torch. With `--start fork` the process that runs the test is the
server, which is sooner ready for a few tests. With `--start spawn` each begins from nothing, as under torch's own
runner: the same tests, ten times as long.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

from tests.conformance import results
from tests.conformance.results import Outcome, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    backend: str
    world_size: int
    conditions: tuple[str, ...]
    patterns: tuple[str, ...]
    jobs: int
    timeout_seconds: int
    start: str
    wrapper: str = ""
    """Whose DistributedDataParallel the tests get, "torch" or "lockstep"; see `torch_ddp`."""

    def chooses(self, test: str) -> bool:
        return any(fnmatch(test, pattern) for pattern in self.patterns)


def survey() -> dict[str, str | None]:
    """Return the tests and why they are skipped (in a process of the pool)."""
    from tests.conformance import torch_cases

    return torch_cases.survey()


def run_test(test: str, log: Path) -> Outcome:
    """Run one test (in a process of the pool)."""
    from tests.conformance import torch_cases

    return torch_cases.run_test(test, log)


def environment(selection: Selection, conditions: str, folder: Path) -> dict[str, str]:
    """Return the variables that torch's tests, and `torch_cases`, read."""
    return {
        "BACKEND": selection.backend,
        "WORLD_SIZE": str(selection.world_size),
        "TEMP_DIR": str(folder),
        "TMPDIR": str(folder),
        # Each test gets a file of its own later; this says only which kind, which skip conditions ask for.
        "INIT_METHOD": f"file://{folder}/init",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(selection.timeout_seconds),
        "CONFORMANCE_CONDITIONS": conditions,
        "CONFORMANCE_START": selection.start,
        "CONFORMANCE_WRAPPER": selection.wrapper,
        "CUDA_VISIBLE_DEVICES": "",
        # More workers than cores: intra-op threads would only wait for each other.
        "OMP_NUM_THREADS": "1",
    }


def run_under(selection: Selection, conditions: str, done: set[str], folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of each chosen test that is not done, those that `conditions` skip first."""
    os.environ.update(environment(selection, conditions, folder))
    # A test that crashes takes its workers with it, never the process of the pool, which only waits for them.
    with ProcessPoolExecutor(selection.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.submit(survey).result()
        chosen = {test: why for test, why in found.items() if selection.chooses(test) and test not in done}
        for test, why in chosen.items():
            if why is not None:
                yield Outcome(test=test, status="skipped", conditions=conditions, reason=why)
        runs = [pool.submit(run_test, test, folder / f"{test}.log") for test, why in chosen.items() if why is None]
        for run in as_completed(runs):
            yield run.result()


def run_all(selection: Selection, folder: Path) -> Results:
    """Run the selection, printing a line per test that was run."""
    outcomes: dict[str, Outcome] = {}
    for conditions in selection.conditions:
        ran = {test for test, outcome in outcomes.items() if outcome.ran}
        for outcome in run_under(selection, conditions, ran, folder):
            outcomes[outcome.test] = results.after(outcome, outcomes.get(outcome.test))
            if outcome.ran:
                print(f"{outcome.status:8} {results.describe(outcome)}", flush=True)  # noqa: T201
    return Results(
        backend=selection.backend,
        world_size=selection.world_size,
        conditions=selection.conditions,
        start=selection.start,
        outcomes=results.in_order(outcomes.values()),
    )


def parse(arguments: Sequence[str]) -> tuple[Selection, Path | None, Path | None]:
    """Return what to run, where to write it, and what to compare it with."""
    parser = argparse.ArgumentParser(prog="torch_distributed", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--conditions", nargs="+", metavar="BACKEND", help="names that skip conditions see, in order")
    parser.add_argument("--tests", nargs="+", default=["*"], metavar="PATTERN", help="names, with * and ?")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a test")
    parser.add_argument("--start", choices=["fork", "forkserver", "spawn"], default="forkserver")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, help="JSON file of another run")
    given = parser.parse_args(arguments)
    selection = Selection(
        backend=given.backend,
        world_size=given.world_size,
        conditions=tuple(given.conditions or [given.backend]),
        patterns=tuple(given.tests),
        jobs=given.jobs,
        timeout_seconds=given.timeout,
        start=given.start,
    )
    return selection, given.output, given.compare


def main(arguments: Sequence[str]) -> int:
    selection, output, compare = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        found = run_all(selection, Path(folder))
    return report(found, output, compare)


def report(found: Results, output: Path | None, compare: Path | None) -> int:
    """Print the table, write the file and compare with the other, where they are given; return the exit status."""
    print(results.table(found))  # noqa: T201
    if output is not None:
        results.save(found, output)
    if compare is None:
        return 1 if found.count("failed") else 0
    regressions = results.regressions(found, results.load(compare))
    for outcome in regressions:
        print(f"failed here, not there: {results.describe(outcome)}")  # noqa: T201
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
