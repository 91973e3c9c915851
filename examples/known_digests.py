"""Say whether the newest run under runs/ has a known digest of examples/digits.yaml; `make train` ends with this."""

import os
import sys
from pathlib import Path

from lockstep.runs.directory import read_starts
from lockstep.runs.listing import list_runs

TORCH = "2.13.0"
DIGITS = {
    "AVX512": "8f64ce9672fac814ec4f2416bf3c6fa3bc34563607ed8b0e7d7928347c666428",
    "AVX512, of Intel": "8f55f50259d4cb687c392b853b53fee7b616c9cbff64dac84ceed12a5f7be680",
    "AVX2": "6cf2f76df39c784b1909a2caa402d696a6e4d7cbe26a0a59c361b87a130f6e63",
}
"""The digest of `make train` with this torch, by what torch finds of the processor; the first is AMD's."""


def describe(digest: str, fingerprint: str) -> str:
    known = next((name for name, each in DIGITS.items() if each == digest), None)
    if known is not None:
        said = f"This digest is known: torch {TORCH} gives it on processors with {known}."
    else:
        names = ", ".join(f"{name} {each[:16]}..." for name, each in DIGITS.items())
        said = (
            f"This digest is not among the known ones of torch {TORCH} ({names}): processors of other types, and "
            f"other versions of torch, round differently. Here: {fingerprint}."
        )
    train = f"{os.path.relpath(Path(sys.executable).with_name('lockstep'))} train examples/digits.yaml"
    return (
        f"{said}\nWhat is the same everywhere: your own 1 and 3 workers end with one digest. Compare:\n"
        f"  {train} workers=1 | tail -n 1\n  {train} workers=3 | tail -n 1"
    )


if __name__ == "__main__":
    newest = next((run for run in list_runs([Path("runs")]) if run.digest), None)
    if newest is not None:
        device = next(iter(read_starts(newest.path)), {}).get("fingerprint", {})
        print(describe(str(newest.digest), f"torch {device.get('torch')}, {device.get('device')}"))
