"""The packages of the project: imports point down, pure modules have no effects, one file reads the environment."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "lockstep"

LAYERS = (
    "version",
    "errors",
    "explanations",
    "secrets",
    "settings",
    "events",
    "torch_private",
    "processes",
    "held_objects",
    "recording",
    "doctor",
    "channel",
    "devices",
    "shards",
    "audit_facts",
    "comm",
    "means",
    "launch",
    "reduce",
    "parallel",
    "data",
    "checkpoint",
    "sharding",
    "plugins",
    "drop_in",
    "engine",
    "runs",
    "report",
    "recipes",
    "cli",
    "__main__",
)
"""Packages, and modules beside them, from the lowest: one may import from itself and from those before it."""

PURE = (
    "lockstep.devices.choose",
    "lockstep.devices.request",
    "lockstep.comm.bootstrap.identity",
    "lockstep.comm.calls",
    "lockstep.comm.nccl_defects",
    "lockstep.comm.segments",
    "lockstep.comm.shm.file_layout",
    "lockstep.recording.file_format",
    "lockstep.audit_facts",
    "lockstep.sharding.pieces",
    "lockstep.shards.assignment",
    "lockstep.shards.tree",
    "lockstep.reduce.plan",
    "lockstep.parallel.comparison.check",
    "lockstep.data.order",
    "lockstep.checkpoint.header",
    "lockstep.checkpoint.manifest",
    "lockstep.checkpoint.interop.names",
    "lockstep.checkpoint.interop.locate",
    "lockstep.runs.changes",
    "lockstep.launch.membership",
    "lockstep.channel.table",
    "lockstep.doctor.diagnosis",
    "lockstep.doctor.scripts.observed",
)
EFFECTS = {
    *("asyncio", "datetime", "io", "os", "pathlib", "random", "select", "selectors", "shutil", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "torch.cuda", "torch.distributed"),
}
PRIVATE_NAMES = "lockstep.torch_private"
"""The package that alone may use names which torch does not promise."""
PYTHONS_NAMES = {
    "_Unpickler",
    "_abc_caches_clear",
    "_config",
    "_current_frames",
    "_exit",
    "_getframe",
    "_is_owned",
    "_replace",
}
"""Attributes of Python's own library: of pickle, abc, multiprocessing, sys, os, an RLock and a named tuple."""
NAMES_IN_FILES = {
    "lockstep.checkpoint.interop.distributed": {"_get_layout"},
    "lockstep.checkpoint.interop.names": {"_orig_mod"},
    "lockstep.checkpoint.interop.pickled": {"torch._utils._rebuild_nested_tensor"},
    "lockstep.checkpoint.interop.recognize": {"_metadata"},
    "*": {"_make"},  # of a named tuple
}
"""Names that stand in other people's files, or are documented, by module."""
BY_NAME = {"attrgetter", "methodcaller", "getattr", "hasattr", "setattr", "delattr"}
"""Functions that take an attribute's name as text."""
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The starters are copied for users, and import what users import.
MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "starter" not in path.parts}


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


@functools.cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parse(module)))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return what a module imports, wherever in the file: deferred and TYPE_CHECKING imports count."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES or name in EFFECTS else str(node.module))
    return frozenset(found)


def layer(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_package_has_a_layer() -> None:
    assert {layer(module) for module in MODULES} - {None} <= set(LAYERS)


def upward_imports(module: str) -> Iterator[str]:
    """Yield the modules of the project that a module imports and that are not below it, nor in its own package."""
    here = LAYERS.index(str(layer(module)))
    for imported in imports(module):
        if imported.split(".")[0] == "lockstep":
            target = layer(imported)
            if target is None or LAYERS.index(target) > here:  # None: the package itself, which imports all others
                yield imported


def test_imports_point_down() -> None:
    found = {module: list(upward_imports(module)) for module in MODULES if layer(module) is not None}
    assert not {module: upward for module, upward in found.items() if upward}


def test_modules_form_no_cycle() -> None:
    graph = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in finished:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_have_no_effects(module: str) -> None:
    assert not {name for name in imports(module) if name in EFFECTS or name.split(".")[0] in EFFECTS}
    names = {node.id for node in nodes(module) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "input"}


def test_only_settings_touches_the_environment() -> None:
    # A start-up hook reads one variable when its process ends, and can import nothing of ours then.
    allowed = {"lockstep.settings", "lockstep.torch_private.startup.sitecustomize"}
    for module in MODULES:
        attributes = {node.attr for node in nodes(module) if isinstance(node, ast.Attribute)}
        if module not in allowed:
            assert not attributes & {"environ", "getenv", "putenv"}, f"{module} touches the environment"


def test_warnings_point_at_the_users_line() -> None:
    # A number of frames points into Lockstep, or into a library that calls it, once a function is put between.
    fixed = re.compile(r"stacklevel=\d")
    assert not [name for name, path in MODULES.items() if fixed.search(path.read_text())]


def test_no_module_is_named_for_nothing() -> None:
    assert not {part for module in MODULES for part in module.split(".")} & EMPTY_NAMES


def shared_class_names(trees: Mapping[str, Iterable[ast.AST]]) -> dict[str, list[str]]:
    """Return the names that several classes have, with their modules; `_Foo` and `Foo` are one name."""
    modules: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in tree:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name.lstrip("_"), []).append(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_two_classes_have_one_name() -> None:
    # What `lockstep init` copies becomes a user's module.
    own = [module for module in MODULES if not module.startswith("lockstep.cli.starter.")]
    found = shared_class_names({module: nodes(module) for module in own})
    assert not found, f"several classes have one name; rename all but one: {found}"


def test_a_shared_class_name_is_found() -> None:
    sources = {"a": "class Foo: ...", "b": "if True:\n    class _Foo: ...", "c": "class Bar:\n    class Foos: ..."}
    trees = {module: ast.walk(ast.parse(source)) for module, source in sources.items()}
    assert shared_class_names(trees) == {"Foo": ["a", "b"]}


def test_every_module_explains_itself() -> None:
    assert not [module for module in MODULES if not ast.get_docstring(parse(module))]


def test_nothing_in_the_package_imports_a_test_library() -> None:
    for module in MODULES:
        assert not {name.split(".")[0] for name in imports(module)} & {"unittest", "pytest"}, module


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@functools.cache
def names_of_torch() -> frozenset[str]:
    """Return the private names in `PRIVATE_NAMES`: its attributes, imports and texts."""
    found = set()
    for module in MODULES:
        if module.startswith(PRIVATE_NAMES):
            for node in nodes(module):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.alias):
                    found.update(node.name.split("."))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return frozenset(name for name in found if is_private(name) and name.isidentifier())


def defined_names(tree: Iterable[ast.AST]) -> set[str]:
    """Return the names that a module gives to its own functions, classes and attributes of its own objects."""
    found = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def private_attributes(tree: Iterable[ast.AST], allowed: set[str]) -> Iterator[str]:
    for node in tree:
        if not isinstance(node, ast.Attribute) or is_own(node.value):
            continue
        if is_private(node.attr) and node.attr not in allowed:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def private_imports(tree: Iterable[ast.AST]) -> Iterator[str]:
    for node in tree:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if any(map(is_private, (origin + alias.name).split("."))):
                    yield f"line {node.lineno}: import of {origin}{alias.name}"


def private_texts(tree: Iterable[ast.AST], allowed: set[str], defined: set[str]) -> Iterator[str]:
    """Yield texts that are private names: those of torch anywhere, others where an attribute's name is expected."""
    for node in tree:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names_torch = node.value in names_of_torch() or PRIVATE_PATH.fullmatch(node.value)
            if names_torch and node.value not in allowed:
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Call) and last_name(node.func) in BY_NAME:
            texts = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            for name in texts - allowed - defined:
                if isinstance(name, str) and is_private(name):
                    yield f"line {node.lineno}: {ast.unparse(node)}"


def last_name(function: ast.expr) -> str | None:
    """Return `name` of `name`, `a.name` and `a.b().name`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def private_uses(module: str, tree: Sequence[ast.AST]) -> list[str]:
    """Return where a module uses private names that are not its own."""
    defined = defined_names(tree)
    return [
        *private_attributes(tree, PYTHONS_NAMES | (defined - names_of_torch())),
        *private_imports(tree),
        *private_texts(tree, NAMES_IN_FILES["*"] | NAMES_IN_FILES.get(module, set()), defined),
    ]


def test_private_names_are_used_in_one_package() -> None:
    found = {name: private_uses(name, nodes(name)) for name in MODULES if not name.startswith(PRIVATE_NAMES)}
    found = {name: uses for name, uses in found.items() if uses}
    assert not found, f"private names; give them a public one in {PRIVATE_NAMES}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._storage_Use_Count(1)",
        "torch._foreach_add_(a, b)",
        "import torch._dynamo",
        "from torch.utils._pytree import tree_leaves",
        "from torch.nn.parallel.distributed import _find_tensors",
        "from lockstep.reduce.slot import _place",
        "list(module._modules)",
        "class A:\n    def f(self, module):\n        self._buffers = {}\n        return module._buffers",
        "class A(B):\n    def _check_comm_hook(self, hook):\n        super()._check_comm_hook(hook)",
        "f = attrgetter('_anything')",
        "f = operator.attrgetter('_version')",
        "getattr(module, '_anything', None)",
        "vars(module)['_parameters']",
        "sys.modules.get('torch._dynamo.config')",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert private_uses("lockstep.anything", tuple(ast.walk(ast.parse(source))))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self):\n        self._x = 1\n\ndef f(a: A):\n    return a._x",
        "class A:\n    def f(self):\n        return self._turn",
        "a.__dict__",
        '"""What `torch._C` has."""',
        "os._exit(1)",
        "getattr(type(value), '_make', tuple)",
    ],
)
def test_names_of_ones_own_are_not(source: str) -> None:
    assert not private_uses("lockstep.anything", tuple(ast.walk(ast.parse(source))))
