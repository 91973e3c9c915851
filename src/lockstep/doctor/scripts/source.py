"""A script as rules see it (its syntax tree, what names stand for, what only some ranks run), and what they report."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar, final

_RANK: Final = re.compile(
    r"(^|_)(rank|is_main|is_master|is_chief|main_process|master|gpu_id|gpu|worker_id|process_index|global_zero)(_|$)|rank$",
    re.IGNORECASE,
)
_RANK_CALLS: Final = re.compile(
    r"rank|is_main|is_master|is_chief|process_zero|process_index|on_main|on_master|global_zero", re.IGNORECASE
)
WRAPPERS: Final = ("DistributedDataParallel", "DDP")
_COLLECTIVES: Final = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("gather_into_tensor", "gather_single", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list"),
}
_IS_NUMBER: Final = re.compile(r"(rank|gpu(_id)?|process_index|worker_id)$", re.IGNORECASE)
"""Names of `_RANK` whose value is the rank, and not whether it is a certain one."""
_RANK_VARIABLES: Final = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
_ENVIRONMENT: Final = re.compile(r"(^|\.)(environ(\.get)?|getenv)$")
_NUM_RANKS: Final = 64
"""Tests of a rank are tried for so many ranks: more than any number that scripts compare one with."""
_WORLD_SIZE: Final = re.compile(
    r"(^|_)(world_?size|n_?gpus?|n_?procs?|num_?(gpus|ranks|replicas|processes))$", re.IGNORECASE
)
_OPERATORS: Final[Mapping[type, Callable[[Any, Any], Any]]] = (
    {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt}
    | {ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Add: operator.add}
    | {ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv}
    | {ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many}
)
_KNOWN_CALLS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "isinstance": lambda _: True,
}


_Node = TypeVar("_Node", bound=ast.AST)


@final
class ScriptSource:
    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = text.split("\n")  # as Python counts them: a form feed begins no line
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node

    def parts(self, *kinds: type[_Node]) -> list[_Node]:
        """Return the nodes of these kinds, anywhere in the file."""
        return parts(self.tree, *kinds)

    @cached_property
    def imported(self) -> dict[str, str]:
        """What each imported name stands for: `{"DDP": "torch.nn.parallel.DistributedDataParallel"}`."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".", maxsplit=1)[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
        return found

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in the order of their lines."""
        return sorted(self.parts(ast.Call), key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """The values that are assigned to each name or attribute, anywhere in the file, by its last part."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _note(found, target, node.value)
            elif (isinstance(node, ast.AnnAssign) and node.value is not None) or isinstance(node, ast.NamedExpr):
                _note(found, node.target, node.value)
            elif isinstance(node, ast.AugAssign):
                sum_of_both = ast.BinOp(left=node.target, op=node.op, right=node.value)
                _note(found, node.target, ast.copy_location(sum_of_both, node))
        return found

    def full_name(self, node: ast.expr) -> str:
        """Return the dotted name of a function or class, with imports resolved; empty for another expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["?", *reversed(parts)]) if parts else ""
        return ".".join([self.imported.get(node.id, node.id), *reversed(parts)])

    def is_call_of(self, node: ast.AST, *names: str) -> bool:
        """Return whether a node is a call of a function or class whose name ends in one of `names`."""
        return isinstance(node, ast.Call) and self.full_name(node.func).rpartition(".")[2] in names

    def values_of(self, node: ast.expr, depth: int = 3) -> list[ast.expr]:
        """Return the expressions that an expression may stand for: itself, or what is assigned to its name."""
        name = last_name(node)
        if isinstance(node, ast.Name | ast.Attribute) and name in self.assigned and depth:
            return [value for each in self.assigned[name] for value in self.values_of(each, depth - 1)]
        if isinstance(node, ast.IfExp):
            return [*self.values_of(node.body, depth), *self.values_of(node.orelse, depth)]
        return [node]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        for each in self.ancestors(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                return each
        return self.tree

    def mentions_rank(self, node: ast.AST, depth: int = 2) -> bool:
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute):
                name = each.id if isinstance(each, ast.Name) else each.attr
                if _RANK.search(name):
                    return True
                if depth and isinstance(each, ast.Name):
                    values = self.assigned.get(name, [])
                    if any(self.mentions_rank(value, depth - 1) for value in values if value is not node):
                        return True
            elif (isinstance(each, ast.Call) and _RANK_CALLS.search(self.full_name(each.func))) or (
                isinstance(each, ast.Constant) and each.value in _RANK_VARIABLES
            ):
                return True
        return False

    def splits_ranks(self, test: ast.expr, depth: int = 2) -> bool:
        """Return whether a test holds on some ranks of a run and not on others; what is not known here may do so.

        It is tried with the numbers of ranks. So `rank != -1`, which holds on every rank under a launcher, does not
        split them, nor does whether there is a rank at all.
        """
        if isinstance(test, ast.BoolOp):
            return any(self.splits_ranks(each, depth) for each in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.splits_ranks(test.operand, depth)
        name = last_name(test)
        if name and not _RANK.search(name):  # a flag, such as `distributed = rank >= 0`
            values = self.assigned.get(name, []) if depth else []
            return any(self.splits_ranks(each, depth - 1) for each in values if each is not test)
        if not self.mentions_rank(test, depth):
            return False
        try:
            return len({bool(self._value_on(test, rank)) for rank in range(_NUM_RANKS)}) > 1
        except (LookupError, TypeError, ValueError, ZeroDivisionError):
            return True

    def _value_on(self, node: ast.expr, rank: int, depth: int = 2) -> Any:
        """Return the value of an expression on a rank; a LookupError is raised where it is not known."""

        def value(part: ast.expr) -> Any:
            return self._value_on(part, rank, depth)

        name = last_name(node.func if isinstance(node, ast.Call) else node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return list(map(value, node.elts))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Compare):
            sides = [value(node.left), *map(value, node.comparators)]
            return all(_OPERATORS[type(each)](*pair) for each, pair in zip(node.ops, pairwise(sides), strict=True))
        if name in _KNOWN_CALLS and isinstance(node, ast.Call):
            return _KNOWN_CALLS[name](value(node.args[0]))
        return self._value_of_name(node, name, rank, depth)

    def _value_of_name(self, node: ast.expr, name: str, rank: int, depth: int) -> Any:
        environment = dict.fromkeys(_RANK_VARIABLES, str(rank))
        if _ENVIRONMENT.search(self.full_name(node)):
            return environment
        if isinstance(node, ast.Call) and _ENVIRONMENT.search(self.full_name(node.func)):
            return environment[self._value_on(node.args[0], rank)]
        if isinstance(node, ast.Subscript) and _ENVIRONMENT.search(self.full_name(node.value)):
            return environment[self._value_on(node.slice, rank)]
        if _WORLD_SIZE.search(name):
            return _NUM_RANKS
        if _IS_NUMBER.search(name):
            return rank
        values = [each for each in self.assigned.get(name, ()) if depth and self.mentions_rank(each, 0)]
        if len(values) != 1:
            raise LookupError(name)
        return self._value_on(values[0], rank, depth - 1)

    def guards(self, node: ast.AST) -> list[tuple[ast.If, bool]]:
        """Return the `if`s around a node that split the ranks, and for each whether the node is in its body."""
        found: list[tuple[ast.If, bool]] = []
        inner: ast.AST = node
        for each in self.ancestors(node):
            if isinstance(each, ast.If) and self.splits_ranks(each.test) and inner is not each.test:
                found.append((each, any(inner is statement for statement in each.body)))
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                break
            inner = each
        return found

    def early_exits(self, node: ast.AST) -> list[ast.If]:
        """Return the `if`s that split the ranks before a node, in its function, and whose body returns."""
        function = self.function_of(node)
        line = getattr(node, "lineno", 0)
        body = getattr(function, "body", [])
        return [
            each
            for each in body
            if isinstance(each, ast.If)
            and each.lineno < line
            and not any(child is node for child in ast.walk(each))
            and self.splits_ranks(each.test)
            and self._leaves(each.body[-1])
        ]

    def is_before_exit(self, node: ast.AST) -> bool:
        """Return whether the statements that a node is among end the script, or raise."""
        for each in self.ancestors(node):
            for block in (getattr(each, "body", None), getattr(each, "orelse", None)):
                if isinstance(block, list) and any(node in ast.walk(statement) for statement in block):
                    return self._leaves(block[-1]) and not isinstance(block[-1], ast.Return)
        return False

    def _leaves(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Return | ast.Raise):
            return True
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        return is_call and self.is_call_of(getattr(statement, "value", statement), "exit", "_exit", "quit")

    def is_guarded(self, node: ast.AST, depth: int = 3) -> bool:
        """Return whether only some ranks run a node: within an `if`, after a return, or in a function called so."""
        if self.guards(node) or self.early_exits(node):
            return True
        for each in self.ancestors(node):
            if isinstance(each, ast.IfExp | ast.BoolOp) and self.splits_ranks(getattr(each, "test", each)):
                return True
        function = self.function_of(node)
        if not depth or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        callers = [call for call in self.calls if last_name(call.func) == function.name]
        return bool(callers) and all(self.is_guarded(call, depth - 1) for call in callers)

    def has_no_gradients(self, node: ast.AST) -> bool:
        """Return whether a node is within `no_grad` or `inference_mode`, or in a function that is decorated so."""
        around = [item for each in self.ancestors(node) if isinstance(each, ast.With) for item in each.items]
        decorators = getattr(self.function_of(node), "decorator_list", [])
        return bool(re.search(r"no_grad|inference_mode", " ".join(map(ast.unparse, [*around, *decorators]))))

    def names_of(self, call: ast.Call) -> set[str]:
        """Return the names to which a call's result is assigned."""
        for each in self.ancestors(call):
            if isinstance(each, ast.Assign):
                return {last_name(target) for target in each.targets} - {""}
            if isinstance(each, ast.For) and each.iter is call:
                return {f"loop {each.lineno}"}
            if isinstance(each, ast.stmt):
                break
        return set()

    def trained_names(self) -> set[str]:
        """Return the names of what is looped over in loops with a backward, and of loops over a call."""
        found: set[str] = set()
        for loop in filter(has_backward, self.parts(ast.For)):
            found |= {f"loop {loop.lineno}", *names_in(loop.iter)}
        return found - {""}

    def given_for(self, function: ast.AST | None, name: str) -> set[str]:
        """Return the names that calls in this file give for a parameter of a function; itself if it is none."""
        if not isinstance(function, ast.FunctionDef):
            return {name}
        parameters = [each.arg for each in function.args.args]
        if name not in parameters:
            return {name}
        place = parameters.index(name)
        calls = [call for call in self.calls if isinstance(call.func, ast.Name) and call.func.id == function.name]
        given = [argument(call, name, place) for call in calls]
        return {last_name(each) for each in given if isinstance(each, ast.Name | ast.Attribute)} or {name}

    def is_collective(self, call: ast.Call) -> bool:
        name = self.full_name(call.func)
        owner, _, last = name.rpartition(".")
        return last in _COLLECTIVES and (owner.endswith("distributed") or owner in {"dist", "c10d"})

    def wrapped_names(self) -> dict[str, list[ast.expr]]:
        """Return the names to which a wrapper was assigned, with the calls that made it."""
        made = {
            name: [value for value in values if self.is_call_of(value, *WRAPPERS)]
            for name, values in self.assigned.items()
        }
        return {name: calls for name, calls in made.items() if calls}

    def line(self, node: ast.AST) -> str:
        """Return the first line of a node as it stands in the script, without indentation."""
        return self.lines[getattr(node, "lineno", 1) - 1].strip()


def has_backward(loop: ast.AST) -> bool:
    return any(last_name(each.func) == "backward" for each in parts(loop, ast.Call))


def last_name(node: ast.expr) -> str:
    """Return the last part of a name or attribute; empty for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """Return the names in an expression, of attributes too."""
    return {last_name(each) for each in parts(node, ast.Name, ast.Attribute)}


def parts(node: ast.AST, *kinds: type[_Node]) -> list[_Node]:
    """Return a node and the nodes in it that are of these kinds."""
    return [each for each in ast.walk(node) if isinstance(each, kinds)]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def has_unknown_arguments(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)


def with_keyword(call: ast.Call, **values: str) -> str:
    """Return a call as text with keyword arguments replaced, added, or for an empty text removed."""
    kept = [each for each in call.keywords if each.arg not in values]
    parts = [ast.unparse(each) for each in call.args]
    parts += [ast.unparse(each.value) if each.arg is None else f"{each.arg}={ast.unparse(each.value)}" for each in kept]
    parts += [f"{name}={value}" for name, value in values.items() if value]
    return f"{ast.unparse(call.func)}({', '.join(parts)})"


def argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    found = keyword(call, name)
    return call.args[place] if found is None and len(call.args) > place else found


def has_group(call: ast.Call) -> bool:
    """Return whether a call is one of a group of its own, whose ranks are not known here."""
    return keyword(call, "group") is not None or any("group" in ast.unparse(each) for each in call.args)


def owner(call: ast.Call) -> str:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _note(found: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr | None) -> None:
    if value is None:
        return
    if isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(target.elts):
            values = [value] * len(target.elts)
        for each, one in zip(target.elts, values, strict=True):
            _note(found, each, one)
    elif name := last_name(target):
        found.setdefault(name, []).append(value)


# -- What rules report -------------------------------------------------------------------------------------------------


class Level(Enum):
    MISTAKE = "mistake"
    """It trains something else than meant, fails, or waits for ever."""
    NOTE = "note"
    """It works, and is seldom meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    rule: str
    level: Level
    line: int
    text: str
    mended: str
    """The line as it should be, or the line to add."""


_MISTAKES: Final = {
    "batch-size": "A DataLoader's batch size is that of one rank, and {} says that it is that of all.",
    "collective-on-some-ranks": (
        "Only some ranks call {} here: they wait for ever, or take the others' next call for it."
    ),
    "device-ids": "{}",
    "gradients-divided": "The wrapper has averaged these gradients: divided by the number of ranks they are too small.",
    "gradients-summed": "The wrapper has averaged these gradients: their sum is too large by the number of ranks.",
    "loss-divided": "The wrapper averages over the ranks: a loss that is divided by their number is too small.",
    "map-location": "Tensors that were saved from a GPU are loaded onto the same GPU, by every rank.",
    "module-in-names": 'The saved names begin with "module.": a model that is not wrapped does not load them.',
    "norm-summed": "The gradients are the same on all ranks, and so is their norm: the sum of all is too large.",
    "no-sampler": (
        "Every rank reads all samples: an epoch is not divided over the ranks, and takes as long as with one."
    ),
    "one-device": "Every rank uses device {}.",
    "own-split": (
        "Each rank draws its own order here, so the parts overlap: one rank trains on what another one evaluates."
    ),
    "resumed-epoch": "After a resume the samples of the first epoch come in the order of another one.",
    "same-epoch": "set_epoch always gets the same number: the samples come in the same order in every epoch.",
    "saved-by-all": "Every rank writes this file: they write over each other, and a reader may find half of one.",
    "set-epoch": "set_epoch is never called: the samples come in the same order in every epoch.",
    "step-left-out": "A rank whose loss is not finite leaves the backward out, for which the others wait.",
}
_NOTES: Final = {
    "fixed-port": "A second job on this host takes the same port, and one of them ends with an error.",
    "inner-module": "A forward through .module: torch's wrapper averages no gradients then (Lockstep's does).",
    "loss-of-one-rank": "This is the loss of one rank's samples, not the mean over all ranks.",
    "one-seed": (
        "All ranks draw the same random numbers (line {}), so their samples get the same noise, masks or augmentation."
    ),
    "own-folder": "Each rank has a time of its own, so they write to different folders.",
    "padded-evaluation": "Where the samples do not divide by the ranks, some are counted twice in this evaluation.",
    "printed-by-all": "Every rank prints this line.",
    "weighted-mean": (
        "Each rank divides by the class weights of its own targets, and the mean of these means is not that over all."
    ),
}


def finding(
    rule: str, node: ast.expr | ast.stmt, mended: str, *, naming: str = "", level: Level | None = None
) -> ScriptFinding:
    """Return what a rule has found at a node; `naming` is what its text names, `level` replaces the rule's own."""
    text = {**_MISTAKES, **_NOTES}[rule].format(naming)
    usual = Level.MISTAKE if rule in _MISTAKES else Level.NOTE
    return ScriptFinding(rule=rule, level=level or usual, line=node.lineno, text=text, mended=mended)
