"""What is published: the wheel and the source distribution."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
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
    assert {name for name in ours if "__pycache__" not in name} <= names
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
