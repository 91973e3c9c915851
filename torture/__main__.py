"""`python -m torture`: run the parts in turn, and print a table."""

import argparse
import os
import time
from collections.abc import Callable

import torch

from torture import collectives, damage, ends, environments, faults, kills, long_run, schedules, second_user, slow
from torture.row import Row

_PARTS: dict[str, tuple[float, Callable[[Row, int], None]]] = {
    "damage": (0.08, damage.run),
    "collectives": (0.12, collectives.run),
    "schedules": (0.1, schedules.run),
    "ends": (0.15, ends.run),
    "second_user": (0.05, second_user.run),
    "faults": (0.2, faults.run),
    "slow": (0.1, slow.run),
    "environments": (0.1, environments.run),
    "long_run": (0.2, long_run.run),
    "kills": (0.3, kills.run),
}
"""Each part, and its share of the time."""


def main() -> None:
    """Run what was asked for; the exit code is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all parts together")
    parser.add_argument("--only", choices=list(_PARTS), action="append", help="a part; may be given several times")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.only or list(_PARTS)
    whole = sum(_PARTS[name][0] for name in names)
    rows = []
    for name in names:
        share, part = _PARTS[name]
        began = time.monotonic()
        row = Row(name, began + 60 * options.minutes * share / whole)
        print(f"{name}: up to {options.minutes * share / whole:.1f} minutes", flush=True)
        part(row, options.seed)
        row.figures["time"] = f"{(time.monotonic() - began) / 60:.1f} min"
        rows.append(row)
        _show(row)
    print(f"\n{'part':<14} {'tried':>7} {'wrong':>6}")
    for row in rows:
        print(f"{row.name:<14} {row.num_tried:>7} {len(row.problems):>6}")
    load = os.getloadavg()[0]
    print(f"seed {options.seed}, load {load:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
    raise SystemExit(any(row.problems for row in rows))


def _show(row: Row) -> None:
    print(f"    {row.num_tried} tried, {len(row.problems)} wrong", flush=True)
    for name, value in row.figures.items():
        print(f"    {name}: {value}", flush=True)


if __name__ == "__main__":
    main()
