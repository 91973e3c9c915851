"""Compiles shm.c when hatchling builds the package: into the wheel, or into the source tree for `pip install -e .`.

Where that cannot be done, for want of a C compiler say, the package is built without the library, and Lockstep uses
Gloo, as `lockstep.comm.shm.native.why_not` says then. Started as a script, this compiles into the source tree if the
library there is of another source. Why like this: docs/architecture.md, "Compiled code".
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/lockstep/comm/shm/native")
LIBRARY = FOLDER / "lockstep.shm.so"  # with a point, so that nothing takes it for a module of Python's
MACHINES = ("x86_64", "aarch64")
FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror=implicit-function-declaration"),
    # What it uses of libc has no version then, and may be that of an older one than the one here.
    "-nostdlib",
)


class CustomBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            reason = compile_in_place(root)
        else:
            # Not in the source tree, which may be read-only, or hold the library of an editable install.
            content, reason = compile_library(root / FOLDER / "shm.c")
            if content:
                self.scratch = tempfile.TemporaryDirectory()  # until the wheel is made
                built = Path(self.scratch.name, LIBRARY.name)
                built.write_bytes(content)
                build_data["force_include"][str(built)] = str(LIBRARY.relative_to("src"))
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform_tag()}"
        if reason:
            self.app.display_warning(describe(reason))


def describe(reason: str) -> str:
    return f"Built without shared memory, so workers will use Gloo: {reason}."


def compile_library(source: Path) -> tuple[bytes, str]:
    """Return the content of the library, or no bytes and why there is none."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return b"", f"it needs Linux on {' or '.join(MACHINES)}, this is {sys.platform} on {platform.machine()}"
    compiler = find_compiler()
    if not compiler:
        return b"", "there is no C compiler; install one, such as gcc, and the package again"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, LIBRARY.name)
        define = f'-DLOCKSTEP_SHM_SOURCE="{digest}"'
        command = [*compiler, *FLAGS, define, "-o", str(built), str(source), "-lgcc"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")  # noqa: S603
            content = built.read_bytes() if done.returncode == 0 else b""
        except OSError as error:
            return b"", f"{compiler[0]} could not compile {source.name} ({error.strerror})"
    if not content:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        return b"", f"{compiler[0]} could not compile {source.name} ({first})"
    # `native.load` reads the digest. Whatever follows an ELF file's tables is ignored when it is loaded.
    return content + hashlib.sha256(content).digest(), ""


def find_compiler() -> list[str]:
    """Return the command of $CC, or of the first compiler on PATH; empty if there is none."""
    given = shlex.split(os.environ.get("CC", ""))
    return given or next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [])


def compile_in_place(root: Path) -> str:
    """Replace the library in the source tree in one move, because processes may have it mapped; return why not."""
    content, reason = compile_library(root / FOLDER / "shm.c")
    try:
        if content:
            made = root / FOLDER / f"{os.getpid()}.so"
            made.write_bytes(content)
            made.replace(root / LIBRARY)
    except OSError as error:
        return f"{root / LIBRARY} cannot be written ({error.strerror})"
    return reason


def why_not_current(root: Path) -> str:
    """Return what the package says of the library in the source tree; empty if it can be used."""
    spec = importlib.util.spec_from_file_location("native", root / FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return str(native.why_not())


def platform_tag() -> str:
    # pip refuses manylinux where the libc is another one.
    return f"{'manylinux_2_17' if platform.libc_ver()[0] == 'glibc' else 'linux'}_{platform.machine()}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    if why_not_current(here) and (problem := compile_in_place(here)):
        sys.stderr.write(f"{describe(problem)}\n")
