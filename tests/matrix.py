"""`make matrix`: the core of the suite on several versions of Python and torch, with the package's wheel installed.

Each pair gets an environment in build/matrix, which is kept. A Python that is not installed is named in the table; on
Linux the index gives torch with CUDA for all but the pinned version, several GB for each. The line of a pair is printed
when it is known, and all of them at the end, also after Ctrl-C. Nothing takes longer than an hour.

    python tests/matrix.py                                  # the pairs of PAIRS
    python tests/matrix.py 3.12:2.11.0 3.13:newest
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
PINNED = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
NEWEST = "newest"
LIMIT_SECONDS = 3600
PAIRS = ("3.11:2.11.0", f"3.11:{PINNED}", "3.12:2.11.0", f"3.12:{NEWEST}", f"3.13:{NEWEST}", f"3.14:{NEWEST}")
CORE = (
    "tests/unit/torch_private",
    "tests/unit/reduce",
    "tests/unit/parallel/replicas/test_data_parallel_replicas.py",
    "tests/unit/parallel/test_conversion.py",
    "tests/unit/parallel/test_sync_batchnorm_local.py",
    "tests/unit/data/test_loader.py",
    "tests/unit/engine/test_trainer.py",
    "tests/unit/engine/test_compiled.py",
    "tests/unit/engine/test_schedules.py",
    "tests/process/test_ddp_parity.py",
    "tests/process/test_trainer_workers.py",
)
"""What depends on torch's and Python's version most: private names, hooks of a backward, the trainer, real workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one pair."""

    python: str
    torch: str
    result: str
    is_good: bool


def main(pairs: Sequence[str]) -> int:
    """Run the core on each pair, and print a table."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", FOLDER, ROOT])
    wheel = max(FOLDER.glob("lockstep_ddp-*.whl"), key=lambda path: path.stat().st_mtime)
    rows: list[Row] = []
    try:
        for version, _, torch in (pair.partition(":") for pair in pairs):
            rows.append(try_pair(version, torch, wheel))
            typer.echo(f"  {rows[-1].result}")
    finally:
        typer.echo(f"\n{'Python':<10}{'torch':<20}result")
        for row in rows:
            typer.echo(f"{row.python:<10}{row.torch:<20}{row.result}")
        typer.echo(f"{len(rows)} of {len(pairs)} pairs")
    return 0 if all(row.is_good for row in rows) else 1


def try_pair(version: str, torch: str, wheel: Path) -> Row:
    """Install torch and the wheel for a Python, run the core, and return what came of it."""
    python = find_python(version)
    if python is None:
        return Row(python=version, torch=torch, result="this Python was not found", is_good=True)
    folder = FOLDER / f"python{version}-torch{torch}"
    inner = folder / "bin" / "python"
    typer.echo(f"Python {version}, torch {torch}: {folder}")
    install: list[str | Path] = [inner, "-m", "pip", "install", "--quiet"]
    try:
        if not inner.exists():
            run([python, "-m", "venv", folder])
        run([*install, "torch" if torch == NEWEST else f"torch=={torch}"])
        run([*install, f"{wheel}[dev]"])
        run([*install, "--no-deps", "--force-reinstall", wheel])
    except (subprocess.SubprocessError, OSError) as error:
        return Row(python=version, torch=torch, result=f"could not be installed: {error}", is_good=False)
    found = output([inner, "-c", "import torch; print(torch.__version__)"])
    began = time.monotonic()
    log = folder / "tests.log"
    tests = [inner, "-m", "pytest", "--quiet", "--numprocesses", "2", "--dist", "loadfile", *CORE]
    status, last = 1, f"not ended after {LIMIT_SECONDS} s"
    with log.open("w", encoding="utf-8") as file, suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            tests, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=LIMIT_SECONDS
        )
        status = ended.returncode
        last = (log.read_text(encoding="utf-8").strip().splitlines() or [f"exit code {status}"])[-1].strip("= ")
    minutes = (time.monotonic() - began) / 60
    return Row(python=version, torch=found, result=f"{last} ({minutes:.0f} min; {log})", is_good=status == 0)


def find_python(version: str) -> str | None:
    """Return the interpreter of a version: python3.12 of the search path, or pyenv's."""
    found = shutil.which(f"python{version}")
    if found is not None and output([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]) == version:
        return found
    own = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(own[-1]) if own else None


def run(command: Sequence[str | Path]) -> None:
    """Run a command.

    Raises:
        subprocess.SubprocessError: It fails, or takes too long.
    """
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)


def output(command: Sequence[str | Path]) -> str:
    """Return what a command prints; empty if it fails."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS, help="PYTHON:TORCH, as 3.12:2.11.0")
    sys.exit(main(parser.parse_args().pairs))
