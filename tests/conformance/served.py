"""One of torch's tests at a time, in a process that stays: importing torch's tests takes longer than running one.

    with TorchTests(selection, "gloo", folder) as torch_tests:
        outcome = torch_tests.run("test_barrier")

`python -m tests.conformance.served` is that process: it reads names of tests, one per line, and writes their outcomes.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final

from tests.conformance.results import Outcome
from tests.conformance.torch_distributed import Selection, environment, run_test

ROOT = Path(__file__).parents[2]


@final
class TorchTests:
    """Runs torch's tests by name, under the skip conditions of one backend; nothing that they start outlives it.

    Args:
        selection: How to run them; its patterns and jobs do not matter.
        conditions: The backend that skip conditions see.
        folder: For the files of the tests.
    """

    def __init__(self, selection: Selection, conditions: str, folder: Path) -> None:
        self._selection = selection
        self._conditions = conditions
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, test: str) -> Outcome:
        """Run a test; after one that does not end, such as one that pytest has interrupted, there is a new process."""
        process = self._process or self._start()
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{test}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"the process of torch's tests ended:\n{(self._folder / 'log').read_text()}"
        except BaseException:
            _kill(process)
            raise
        self._process = process
        return Outcome(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            _kill(self._process)

    def _start(self) -> "subprocess.Popen[str]":
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.served", str(self._folder)],
                cwd=ROOT,
                env={**os.environ, **environment(self._selection, self._conditions, self._folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )


def _kill(process: "subprocess.Popen[Any]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):  # what a dead process did not read
                stream.close()


def main(folder: Path) -> None:
    """Answer each line with the outcome of the test of that name."""
    for line in sys.stdin:
        test = line.strip()
        outcome = run_test(test, folder / f"{test}.log")
        print(json.dumps(asdict(outcome)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
