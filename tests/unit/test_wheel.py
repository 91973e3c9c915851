"""What is published: the wheel and the source distribution."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling")

import hatch_build

from lockstep.comm.shm import native

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / hatch_build.FOLDER / "shm.c"
NEEDS_COMPILER = pytest.mark.skipif(not hatch_build.find_compiler(), reason="there is no C compiler here")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    code = f"import hatchling.build as b; b.build_wheel({str(folder)!r}); b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_what_is_imported_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("lockstep_ddp-*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = wheel.read(metadata).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"lockstep", "lockstep_command", metadata.split("/")[0]}
    package = ROOT / "src" / "lockstep"
    ours = {f"lockstep/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name and not name.endswith(".so")} <= names
    assert {"lockstep/py.typed", "lockstep/examples/digits.yaml", "lockstep/examples/text.yaml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Name: lockstep-ddp\n" in described
    assert "Requires-Python: >=3.11\n" in described
    assert "Requires-Dist: torch>=2.11\n" in described


def test_a_wheel_can_be_built_from_the_source_distribution(built: Path) -> None:
    with tarfile.open(next(built.glob("lockstep_ddp-*.tar.gz"))) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(built / "unpacked", filter="data")
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "src/lockstep/__init__.py"} <= inner
    assert {"Makefile", "constraints.txt", "docs/config.md", "tests/unit/test_wheel.py"} <= inner  # it can be tested
    assert not any(name.startswith(("build", ".venv")) or "__pycache__" in name for name in inner)
    source = next((built / "unpacked").iterdir())
    code = f"import hatchling.build as b; b.build_wheel({str(built / 'unpacked')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    with (
        zipfile.ZipFile(next(built.glob("*.whl"))) as direct,
        zipfile.ZipFile(next((built / "unpacked").glob("*.whl"))) as again,
    ):
        assert sorted(direct.namelist()) == sorted(again.namelist())


@NEEDS_COMPILER
def test_a_wheel_with_the_library_is_for_every_python_and_libc_of_its_machine(built: Path) -> None:
    [wheel] = built.glob("lockstep_ddp-*.whl")
    assert "-py3-none-manylinux_2_17_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(str(hatch_build.LIBRARY.relative_to("src")))
    assert b"GLIBC_" not in library
    assert b"libc.so" not in library


def test_without_a_compiler_the_wheel_is_pure_and_one_line_says_so(tmp_path: Path) -> None:
    code = f"import hatchling.build as b; b.build_wheel({str(tmp_path)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)
    [line] = done.stderr.decode().splitlines()
    assert "Built without shared memory, so workers will use Gloo: there is no C compiler" in line
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@NEEDS_COMPILER
def test_the_source_compiles_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{hatch_build.find_compiler()[0]} -Werror")
    assert hatch_build.compile_library(SOURCE)[1] == ""


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler could not compile shm.c (No such file or directory)"),
        ("sh -c 'echo In: >&2; echo 3: error: no >&2; exit 1'", "sh could not compile shm.c (3: error: no)"),
        ("false", "false could not compile shm.c (exit code 1)"),
        ("true", "true could not compile shm.c (No such file or directory)"),
    ],
)
def test_a_compiler_that_fails_is_a_reason_and_no_error(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler)
    content, said = hatch_build.compile_library(SOURCE)
    assert (content, said) == (b"", reason)
    (tmp_path / hatch_build.FOLDER).mkdir(parents=True)
    shutil.copy(SOURCE, tmp_path / hatch_build.FOLDER)
    assert hatch_build.compile_in_place(tmp_path) == said
    assert not (tmp_path / hatch_build.LIBRARY).exists()


# -- What is loaded of it ----------------------------------------------------------------------------------------------


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda _library, _source: None, ""),
        (lambda library, _source: library.unlink(), "the package was installed without a working C compiler; .* pip "),
        (lambda library, _source: library.write_bytes(b""), "lockstep.shm.so is damaged; .* pip install "),
        (lambda library, _source: os.truncate(library, 6000), "lockstep.shm.so is damaged; .* pip install "),
        (lambda library, _source: flip(library), "lockstep.shm.so is damaged; .* pip install "),
        (lambda library, _source: replace(library, b"text"), "lockstep.shm.so cannot be loaded: file too short"),
        (lambda library, _source: (library.unlink(), library.mkdir()), "lockstep.shm.so cannot be read: Is a dir"),
        (lambda _library, source: source.write_text("int x;"), "lockstep.shm.so was compiled from another shm.c; .*"),
        (lambda _library, source: source.unlink(), ""),
    ],
    ids=["good", "missing", "empty", "cut", "flipped", "foreign", "folder", "stale", "no-source"],
)
def test_only_the_library_of_this_source_is_loaded(harm: Any, reason: str, tmp_path: Path) -> None:
    library, source = tmp_path / hatch_build.LIBRARY, tmp_path / hatch_build.FOLDER / "shm.c"
    source.parent.mkdir(parents=True)
    shutil.copy(SOURCE, source)
    assert hatch_build.compile_in_place(tmp_path) == ""
    assert [path.name for path in source.parent.glob("*.so")] == [library.name]
    harm(library, source)
    loaded, said = native._find(library.parent)
    assert (loaded is None) == bool(said) == bool(reason)
    assert re.match(reason, said)


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[0x1000] ^= 1
    library.write_bytes(content)


def replace(library: Path, content: bytes) -> None:
    library.write_bytes(content + hashlib.sha256(content).digest())
