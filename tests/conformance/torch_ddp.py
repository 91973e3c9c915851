"""Run PyTorch's own tests of DistributedDataParallel with our class in place of torch's, and write down how each ended.

    python -m tests.conformance.torch_ddp --wrapper torch --output ddp-torch.json
    python -m tests.conformance.torch_ddp --wrapper lockstep --output ddp-lockstep.json --compare ddp-torch.json

From the repository's root, on the CPU; two or three minutes each. The first run is the baseline, the truth about what
can run here: torch's class in the same surroundings. The second ends with status 0 when nothing fails that did not
fail in the first, and lists what does. For a few tests, by name, in seconds:

    python -m tests.conformance.torch_ddp --wrapper lockstep --start fork --tests test_ddp_inference 'test_ddp_uneven*'

The tests are those of torch's `distributed_test` that name DistributedDataParallel, SyncBatchNorm or
DistributedSampler, themselves or through what they call. `drop_in` says under which names ours takes torch's place;
`cuda_on_cpu` lets those run that are gated on GPUs and need none. There are two workers, and four for a test that
asks for more than two. `left_out` is the list of those that are not asked of our class, with the reason of each; the
baseline runs them too, and `--all` runs them with ours.

The group is Gloo's, as the tests expect; `--backend shm` runs them over shared memory, under Gloo's skip conditions.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance import results, torch_distributed
from tests.conformance.left_out import LEFT_OUT
from tests.conformance.results import Outcome, Results
from tests.conformance.torch_distributed import Selection

CONDITIONS = "gloo"
"""The backend that skip conditions see: the one of those that run on a CPU for which torch tests this class."""
WORLD_SIZES = (2, 4)
"""A test runs with the first of these that is not too small for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    selection: Selection
    everything: bool
    """Whether those that are left out run as well."""
    output: Path | None
    """Where to write the outcomes."""
    compare: Path | None
    """Outcomes of another run: what failed there too is no reason for exit status 1."""

    @property
    def left_out(self) -> set[str]:
        asks_ours = self.selection.wrapper == "lockstep" and not self.everything
        return {test for test in LEFT_OUT if self.selection.chooses(test)} if asks_ours else set()


def outcomes(order: Order, folder: Path) -> Iterator[Outcome]:
    """Yield an outcome per chosen test, and one more for each world size that was too small for it before."""
    for test in order.left_out:
        yield Outcome(test=test, status="skipped", conditions=CONDITIONS, reason=str(LEFT_OUT[test]))
    done = order.left_out
    for world_size in WORLD_SIZES:
        selection = replace(order.selection, world_size=world_size)
        found = []
        for outcome in torch_distributed.run_under(selection, CONDITIONS, done, folder):
            found.append(outcome)
            yield outcome
        if all(outcome.ran for outcome in found):
            return
        done = done | {outcome.test for outcome in found if outcome.ran}


def run_all(order: Order, folder: Path) -> Results:
    """Run what is ordered, printing a line per test that was run."""
    found: dict[str, Outcome] = {}
    for outcome in outcomes(order, folder):
        found[outcome.test] = outcome
        if outcome.ran:
            print(f"{outcome.status:8} {results.describe(outcome)}", flush=True)  # noqa: T201
    return Results(
        backend=order.selection.backend,
        world_size=WORLD_SIZES[0],
        conditions=(CONDITIONS,),
        start=order.selection.start,
        outcomes=results.in_order(found.values()),
    )


def parse(arguments: Sequence[str]) -> Order:
    parser = argparse.ArgumentParser(prog="torch_ddp", description=__doc__.splitlines()[0])
    parser.add_argument("--wrapper", required=True, choices=["lockstep", "torch"], help="whose class the tests get")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--tests", nargs="+", default=["*"], metavar="PATTERN", help="names, with * and ?")
    parser.add_argument("--all", action="store_true", help="run also what is left out for our class")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a test")
    parser.add_argument("--start", choices=["fork", "forkserver", "spawn"], default="forkserver")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, help="JSON file of another run")
    given = parser.parse_args(arguments)
    selection = Selection(
        backend=given.backend,
        world_size=WORLD_SIZES[0],
        conditions=(CONDITIONS,),
        patterns=tuple(given.tests),
        jobs=given.jobs,
        timeout_seconds=given.timeout,
        start=given.start,
        wrapper=given.wrapper,
    )
    return Order(selection=selection, everything=given.all, output=given.output, compare=given.compare)


def main(arguments: Sequence[str]) -> int:
    order = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        found = run_all(order, Path(folder))
    return torch_distributed.report(found, order.output, order.compare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
