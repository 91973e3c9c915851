"""The house holds: imports point down its floors, pure modules have no effects, one file reads the environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "lockstep"

FLOORS = (
    "errors",
    "settings",
    "events",
    "torch_private",
    "compiler",
    "processes",
    "devices",
    "shards",
    "comm",
    "launch",
    "reduce",
    "parallel",
    "data",
    "checkpoint",
    "engine",
    "elastic",
    "runs",
    "doctor",
    "report",
    "recipes",
    "cli",
)
"""From the ground up: a room may import from its own floor and from those before it."""

PURE = (
    "lockstep.devices.choose",
    "lockstep.devices.describe",
    "lockstep.devices.placement",
    "lockstep.devices.request",
    "lockstep.devices.visible",
    "lockstep.comm.bootstrap.identity",
    "lockstep.comm.bootstrap.node_list",
    "lockstep.comm.segments",
    "lockstep.shards.assignment",
    "lockstep.shards.seeds",
    "lockstep.shards.tree",
    "lockstep.reduce.plan",
    "lockstep.reduce.status",
    "lockstep.data.order",
    "lockstep.data.cursor",
    "lockstep.checkpoint.interop.fit",
    "lockstep.checkpoint.header",
    "lockstep.checkpoint.manifest",
    "lockstep.checkpoint.interop.names",
    "lockstep.checkpoint.interop.locate",
    "lockstep.runs.changes",
    "lockstep.runs.retention",
    "lockstep.launch.environment",
    "lockstep.launch.lines",
)
EFFECTS = {
    *("asyncio", "datetime", "io", "os", "pathlib", "random", "select", "selectors", "shutil", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "torch.cuda", "torch.distributed"),
}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports, wherever in the file: deferred and TYPE_CHECKING imports count."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES or name in EFFECTS else str(node.module)


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in MODULES} - {None} <= set(FLOORS)


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) is not None])
def test_imports_point_down(module: str) -> None:
    here = FLOORS.index(str(room(module)))
    for imported in imports(MODULES[module]):
        if imported.split(".")[0] == "lockstep":
            target = room(imported)
            assert target is not None, f"{module} imports the front door"
            assert FLOORS.index(target) <= here, f"{module} imports {imported}, which is on a floor above"


def test_modules_form_no_cycle() -> None:
    graph = {module: {name for name in imports(path) if name in MODULES} for module, path in MODULES.items()}
    settled: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in settled:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            settled.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_have_no_effects(module: str) -> None:
    path = MODULES[module]
    assert not {name for name in imports(path) if name in EFFECTS or name.split(".")[0] in EFFECTS}
    names = {node.id for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "input"}


def test_only_settings_touches_the_environment() -> None:
    for module, path in MODULES.items():
        attributes = {
            node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)
        }
        if module != "lockstep.settings":
            assert not attributes & {"environ", "getenv", "putenv"}, f"{module} touches the environment"


def test_no_module_is_named_for_nothing() -> None:
    assert not {part for module in MODULES for part in module.split(".")} & EMPTY_NAMES


def test_every_room_explains_itself() -> None:
    for module, path in MODULES.items():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        assert docstring, f"{module} has no docstring"


def test_nothing_in_the_package_imports_a_test_library() -> None:
    for module, path in MODULES.items():
        assert not {name.split(".")[0] for name in imports(path)} & {"unittest", "pytest"}, module
