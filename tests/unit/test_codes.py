"""Each message that a user can get names a code, and each code has a page in both languages."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.explanations import CHINESE, all_codes, codes_in, page_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lockstep"
CODE = re.compile(r"\(LS\d{3}\)")

OTHERS_CODE = {
    "The message is one that was made with its code, on another rank or earlier": (
        "comm/generations.py: Generations.wait_for_next",
        "comm/gloo.py: GlooComparer.find_any_failed",
        "comm/shm/group.py: ShmProcessGroup.monitored_barrier.action",
        "comm/shm/peers.py: Peers._break",
        "comm/shm/rendezvous.py: _explain_first",
        "checkpoint/saver.py: Saver.__exit__",
        "cli/check.py: check",
        "drop_in/observation.py: _watch_messages.warn_and_log",
        "engine/present.py: _log",
        "engine/saving.py: raise_on_all_ranks",
        "launch/scaling.py: Scaling._resize",
        "launch/restarts.py: call_with_restarts",
        "parallel/comparison/check.py: warn_once",
    ),
    "Caught within Lockstep, which puts the text into a message with a code": (
        "channel/client.py: Channel.request, Channel._send",
        "channel/table.py: LineReader.feed",
        "channel/table.py: Table._write",
        "checkpoint/file.py: read_header, _read_tensor",
        "checkpoint/header.py: assign_offsets, encode_header, header_length, decode_header, _reject_duplicate_names",
        "checkpoint/header.py: _decode_tensor",
        "checkpoint/interop/distributed.py: _check_chunks, _check_kinds",
        "checkpoint/manifest.py: Manifest.to_json, _check_kinds",
        "checkpoint/step_files.py: peek_manifest",
        "comm/bootstrap/channel_store.py: ChannelStore._request",
        "comm/bootstrap/identity.py: expand_tasks_per_node, _not_a_list",
        "comm/bootstrap/store.py: _await_store",
        "comm/objects.py: unpack_plain, pack_plain",
        "comm/stored_values.py: _to_record, _to_value, _to_number, _to_texts",
        "doctor/scripts/source.py: ScriptSource._value_of_name",
        "data/slice_loading.py: _LoadingProcesses._lost",
        "devices/nvml.py: _explain",
        "launch/control.py: connect",
        "launch/scripts.py: run_with_restarts.run, _raise_stopped",
        "processes/host.py: open_process",
        "recording/file_format.py: parse_header",
        "recording/writing.py: private_folder",
        "recording/reading.py: _copy",
        "runs/config.py: Config._check_devices, Config._check_shards, Config._check_elastic",
        "runs/config.py: parse_seconds",
    ),
    "The operating system's, which says it better": (
        "checkpoint/atomic_write.py: atomic_write",
        "comm/shm/memory.py: _map_pages",
        "comm/shm/memory.py: open_file",
        "processes/ending.py: die_with_parent",
    ),
    "No mistake: how the training is set up": ("parallel/arguments.py: warn_of_ignored",),
    "Cannot be caused by a user": (
        "comm/shm/native/__init__.py: load",
        "reduce/plan.py: plan_buckets",
        "shards/assignment.py: split_evenly",
        "torch_private/groups.py: make_backend",
    ),
}
"""What needs no code, by reason: the file, and the functions."""

PLAIN = {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "StopIteration"}
"""What Python itself raises in the same place, and expects there."""


@functools.cache
def sources() -> Mapping[str, str]:
    return {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def modules() -> Mapping[str, ast.Module]:
    return {file: ast.parse(source) for file, source in sources().items()}


@functools.cache
def nodes(file: str) -> Sequence[ast.AST]:
    """Return all nodes of a module: a walk through them takes long."""
    return tuple(ast.walk(modules()[file]))


def last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def messages(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield each call that makes an exception with a message, warns or logs, with the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and node.args:
            name = last_name(node.func)
            is_logged = name in {"warning", "error"} and names_in(node.func) == {"_LOGGER", name}
            if is_logged or name in {"warn", "Finding"} or (name.endswith("Error") and name not in PLAIN):
                yield inside, node
        yield from messages(node, inside)


def texts(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield the texts among nodes that stand in the order of a walk, without docstrings."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node


def texts_with_code(file: str) -> Sequence[ast.Constant]:
    """Return the texts of a module that have a code in them."""
    if not CODE.search(sources()[file]):
        return ()
    return [text for text in texts(nodes(file)) if CODE.search(text.value)]


def has_code(tree: ast.AST) -> bool:
    return any(CODE.search(text.value) for text in texts(ast.walk(tree)))


@functools.cache
def own_makers(file: str) -> frozenset[str]:
    """Return the names that a module gives to functions, constants and variables that have a code in them."""
    lines = [text.lineno for text in texts_with_code(file)]
    found: set[str] = set()
    for node in nodes(file) if lines else ():
        if not isinstance(node, ast.FunctionDef | ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        if not any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines):
            continue
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(map(last_name, node.targets))
        else:
            found.add(last_name(node.target))
    return frozenset(found)


@functools.cache
def makers(file: str) -> frozenset[str]:
    """Return the names by which a module can have texts with a code: its own, those that it imports, variables."""
    found = set(own_makers(file))
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            origin = f"{node.module}.".removeprefix("lockstep.").replace(".", "/")[:-1]
            for place in (f"{origin}.py", f"{origin}/__init__.py"):
                names = {alias.name for alias in node.names}
                found |= (names & own_makers(place)) if place in modules() else set()
    for node in nodes(file) if found else ():
        if isinstance(node, ast.Assign) and found & names_in(node.value):
            found.update(map(last_name, node.targets))
    return frozenset(found)


def names_in(tree: ast.AST) -> set[str]:
    return {last_name(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}


def message_of(call: ast.Call) -> ast.expr:
    first = call.args[0]
    return call.args[1] if isinstance(first, ast.Constant) and first.value == "%s" else first


def is_made_elsewhere(message: ast.expr) -> bool:
    """Whether a message has no words of its own: those of a variable, a constant or a call."""
    parts = [part for node in ast.walk(message) if isinstance(node, ast.JoinedStr) for part in node.values]
    return not any(isinstance(part, ast.Constant) and re.search(r"\w", str(part.value)) for part in parts)


def excepted() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for entry in (entry for entries in OTHERS_CODE.values() for entry in entries):
        file, _, functions = entry.partition(": ")
        found.update((file, function) for function in functions.split(", "))
    return found


def without_code(file: str, tree: ast.AST, known: AbstractSet[str]) -> list[tuple[str, str, str]]:
    """Return the messages that neither have a code nor are made by something that is known to: file, function, text."""
    return [
        (file, function, ast.unparse(call)[:80])
        for function, call in messages(tree)
        if not has_code(call) and not (is_made_elsewhere(message_of(call)) and names_in(message_of(call)) & known)
    ]


@functools.cache
def all_without_code() -> tuple[tuple[str, str, str], ...]:
    return tuple(each for file, tree in modules().items() for each in without_code(file, tree, makers(file)))


def test_each_message_names_a_code() -> None:
    known = excepted()
    assert not [each for each in all_without_code() if each[:2] not in known]


def test_no_exception_is_left_over() -> None:
    assert not excepted() - {each[:2] for each in all_without_code()}


def test_a_message_without_a_code_is_found() -> None:
    source = "def f(x):\n    raise ValueError(f'x is {x}.')\n    warnings.warn('Odd. (LS101)', stacklevel=2)"
    assert without_code("a.py", ast.parse(source), set()) == [("a.py", "f", "ValueError(f'x is {x}.')")]


def test_each_code_ends_a_text() -> None:
    found = {text.value for file in modules() for text in texts_with_code(file)}
    assert not [text for text in found if not re.search(r"\(LS\d{3}\)$", text)]


def test_each_code_that_is_used_has_a_page_and_each_page_a_code() -> None:
    used = {code for file in modules() for text in texts(nodes(file)) for code in codes_in(text.value)}
    assert set(all_codes()) == used


def explained(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


@pytest.mark.parametrize("text", ["LS201", "ls201", "(LS201)", "201"])
def test_explain_shows_the_page(text: str) -> None:
    assert explained(text).output == page_of("LS201")


def test_explain_shows_several_pages_in_chinese() -> None:
    assert explained("LS201", "LS202", "--zh").output == f"{page_of('LS201', CHINESE)}\n{page_of('LS202', CHINESE)}"


def test_codes_that_share_a_page_show_it_once() -> None:
    assert page_of("LS905") == page_of("LS809")
    assert explained("LS905", "LS809").output == page_of("LS809")
    assert "## LS905: " in page_of("LS905")
    assert explained().output.splitlines()[-1].startswith("LS908  A worker has no GPU")


def test_explain_speaks_the_language_of_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert explained("LS201").output == page_of("LS201", CHINESE)
    assert explained("LS201", "--en").output == page_of("LS201")


def test_explain_lists_all_codes() -> None:
    lines = explained().output.splitlines()
    assert [line.partition("  ")[0] for line in lines] == all_codes()


def test_explain_names_codes_near_an_unknown_one() -> None:
    found = explained("LS299")
    assert found.exit_code == 2
    assert "LS209: " in found.output


def test_the_command_names_the_code_of_its_error() -> None:
    found = CliRunner().invoke(app, ["verify", "digits", "--workers", "two"])
    assert found.output.endswith("`lockstep explain LS821` says more.\n")
