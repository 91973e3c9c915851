"""What becomes of mistakes that people make with `DistributedDataParallel`, and of scripts without one: a table.

python -m tests.mistakes [--backend shm|gloo] [--wrapper lockstep|torch] [--only NAME,...] [--jobs N] [--texts]
"""

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.mistakes.judge import GOOD, Outcome, judge
from tests.mistakes.pair import run_on_pair
from tests.mistakes.scripts import SCRIPTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__)
    parser.add_argument("--backend", choices=("shm", "gloo"), default="shm")
    parser.add_argument("--wrapper", choices=("lockstep", "torch"), default="lockstep")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="how many pairs run at a time")
    parser.add_argument("--texts", action="store_true", help="show what each rank got to read")
    given = parser.parse_args()
    parts = given.only.split(",")
    names = [name for name in SCRIPTS if any(part in name for part in parts)]
    run = partial(_run, backend=given.backend, wrapper=given.wrapper)
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = dict(zip(names, pool.map(run, names), strict=True))
    print(f"{given.wrapper} on {given.backend}")
    for name, outcome in outcomes.items():
        print(f"{outcome.verdict:12}{outcome.seconds:5.1f} s  {name.replace('_', ' ')}")
        if given.texts or outcome.verdict not in GOOD:
            _print_reports(outcome)
    for title, has_mistake in (("mistakes", True), ("correct scripts", False)):
        verdicts = Counter(
            outcome.verdict for name, outcome in outcomes.items() if (SCRIPTS[name].cause is not None) == has_mistake
        )
        counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
        print(f"{verdicts.total()} {title}: {counts}")


def _run(name: str, *, backend: str, wrapper: str) -> Outcome:
    return judge(SCRIPTS[name], run_on_pair(name, backend, wrapper))


def _print_reports(outcome: Outcome) -> None:
    for rank, report in enumerate(outcome.reports):
        print(f"    rank {rank} {report.end}")
        for message in report.messages:
            print(f"        {message.seconds:.1f} s {message.kind}: {' '.join(message.text.split())[:600]}")


if __name__ == "__main__":
    main()
