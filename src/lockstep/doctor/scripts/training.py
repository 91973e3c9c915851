"""The rules about what is computed: the order of samples, random numbers, parts of the data, gradients, losses."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from lockstep.doctor.scripts.findings import ScriptFinding, finding
from lockstep.doctor.scripts.source import (
    ScriptSource,
    argument,
    given_for,
    has_backward,
    has_group,
    has_unknown_arguments,
    is_collective,
    keyword,
    last_name,
    names_in,
    names_of,
    owner,
    with_keyword,
    wrapped_names,
)

_AUGMENTING: Final = re.compile(r"transforms(\.v2)?\.(Random\w+|ColorJitter|AutoAugment|TrivialAugment\w*|AugMix)$")
_SEEDING_ALL: Final = {"seed_everything", "set_seed", "seed_all"}
_FAMILIES: Final = ("torch", "numpy", "random")
"""The generators of a process that scripts draw from."""
_SEEDING: Final = {
    "torch": re.compile(r"torch(\.random|\.cuda)?\.manual_seed(_all)?$"),
    "numpy": re.compile(r"numpy\.random\.seed$"),
    "random": re.compile(r"random\.seed$"),
}
_DRAWING: Final = {
    "torch": re.compile(
        r"torch\.(rand|randn|randint|bernoulli|normal|multinomial|poisson)(_like)?$"
        r"|torch\.nn\.(functional\.)?(alpha_|feature_alpha_)?dropout[123]?d?$|torch\.nn\.functional\.gumbel_softmax$"
        r"|\.(normal|uniform|bernoulli|exponential|random)_$|(^|\.)DropPath$",
        re.IGNORECASE,
    ),
    "numpy": re.compile(r"numpy\.random\.(rand|randn|randint|random|normal|uniform|beta|binomial|standard_normal)$"),
    "random": re.compile(r"random\.(random|randint|randrange|uniform|gauss|normalvariate|betavariate|choice)$"),
}
_PERMUTING: Final = {
    "torch": re.compile(r"torch\.randperm$|(^|\.)random_split$"),
    "numpy": re.compile(r"numpy\.random\.(permutation|shuffle)$|(^|\.)train_test_split$"),
    "random": re.compile(r"random\.(sample|shuffle)$"),
}
_LOOKING: Final = {"DataLoader", "BatchSampler", "len", "print", "hasattr", "isinstance"}
"""Calls that do not tell a sampler its epoch."""
_OF_A_SAMPLE: Final = re.compile(r"^__getitems?__$|^forward$|collate|augment|transform|^__call__$")
"""Functions that are called for each sample or batch."""
_WORLD_SIZE: Final = re.compile(r"(^|_)(world_?size|n_?gpus?|num_?(gpus|ranks|replicas|processes))$", re.IGNORECASE)
_TIMES: Final = re.compile(r"(^|\.)(now|today|utcnow|strftime|time|time_ns|ctime|uuid[14]|token_hex)$")
_WRITING: Final = re.compile(r"^(makedirs|mkdir|save\w*|open|SummaryWriter|FileHandler|savefig|write_text)$")
_UNFINISHED: Final = re.compile(r"start|resum|skip|first|restor|load|begin")
"""In tests and ranges that tell a run which continues."""


# -- The order of samples ----------------------------------------------------------------------------------------------


def _check_set_epoch(source: ScriptSource) -> Iterator[ScriptFinding]:
    calls = [
        call
        for call in source.calls
        if last_name(call.func) == "set_epoch"
        and (call.args or call.keywords)
        and getattr(source.function_of(call), "name", "") != "set_epoch"
    ]
    loop = _epoch_loop(source)
    if loop is None:
        return
    for call in _shuffling_samplers(source):
        names = names_of(source, call)
        if not calls or all(_reaches_another(source, each, names) for each in calls):
            name = next(iter(names), "loader.sampler")
            mended = f"{name}.set_epoch({ast.unparse(loop.target)})  # first in the loop over epochs"
            yield finding("set-epoch", loop, mended)
            return
    if calls and not any(_changes(source, call) for call in calls):
        mended = f"{ast.unparse(calls[0].func)}({ast.unparse(loop.target)})"
        yield finding("same-epoch", calls[0], mended)
    elif calls:
        yield from _check_resumed_epoch(source, loop, calls)


def _reaches_another(source: ScriptSource, call: ast.Call, names: set[str]) -> bool:
    """Return whether `loader.sampler` is told, of a loader that has one of `names` as its batch sampler."""
    told = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    loaders: set[str] = set()
    for each in source.calls:
        given = keyword(each, "batch_sampler")
        if given is not None and last_name(given) in names:
            loaders |= names_of(source, each)
    return isinstance(told, ast.Attribute) and told.attr == "sampler" and last_name(told.value) in loaders


def _values_given(source: ScriptSource, name: str) -> list[ast.expr]:
    return [each.value for call in source.calls for each in call.keywords if each.arg == name]


def _shuffling_samplers(source: ScriptSource) -> list[ast.Call]:
    """Return the calls that make a sampler whose order depends on the epoch that it is told."""
    classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    told = {
        node.name
        for node in classes
        if any(last_name(base) == "DistributedSampler" or "Sampler" in last_name(base) for base in node.bases)
        and {"set_epoch", "__iter__"} & {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        and (
            any(last_name(base) == "DistributedSampler" for base in node.bases) or "def set_epoch" in ast.unparse(node)
        )
        and not _counts_by_itself(node)
    }
    return [
        call
        for call in source.calls
        if source.is_call_of(call, "DistributedSampler", *told)
        and not (isinstance(value := keyword(call, "shuffle"), ast.Constant) and value.value is False)
        and not has_unknown_arguments(call)
        and not _is_passed_on(source, call)
    ]


def _counts_by_itself(node: ast.ClassDef) -> bool:
    """Return whether a sampler's class goes on to another epoch without being told."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__iter__"]
    stores = [each for method in methods for each in ast.walk(method) if isinstance(each, ast.Attribute)]
    return any(isinstance(each.ctx, ast.Store) and "epoch" in each.attr for each in stores)


def _is_passed_on(source: ScriptSource, sampler: ast.Call) -> bool:
    """Return whether a sampler is given to a function of another file, which may call set_epoch."""
    names = names_of(source, sampler)
    defined = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for call in source.calls:
        given = [*call.args, *(each.value for each in call.keywords)]
        if last_name(call.func) not in defined | _LOOKING and any(last_name(each) in names for each in given):
            return True
    return False


def _epoch_loop(source: ScriptSource) -> ast.For | None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            counted = ast.unparse(node.iter)
            is_range = not re.search(r"\.epoch\(", counted)  # which is the loop over batches
            if counted != "range(1)" and is_range and re.search(r"epoch", node.target.id + counted, re.IGNORECASE):
                return node
    return None


def _changes(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether the number that `set_epoch` is given may be another one in the next call."""
    value = call.args[0] if call.args else call.keywords[0].value
    function = source.function_of(call)
    parameters = {each.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for each in node.args}
    names = names_in(value)
    if names & parameters or any(isinstance(each, ast.Call) for each in ast.walk(value)):
        return True
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        is_elsewhere = isinstance(node, ast.Attribute) and source.function_of(node) is not function
        is_in_loop = any(isinstance(each, ast.For | ast.While) for each in source.ancestors(node))
        if last_name(node) in names and (is_in_loop or is_elsewhere):
            return True
    return False


def _check_resumed_epoch(source: ScriptSource, loop: ast.For, calls: list[ast.Call]) -> Iterator[ScriptFinding]:
    """Look for a first epoch after a resume that `set_epoch` is not called for, or with a number from 0 on."""
    arguments = loop.iter.args if isinstance(loop.iter, ast.Call) else []
    function, number = source.function_of(loop), ast.unparse(loop.target)
    inside = [call for call in calls if loop in source.ancestors(call)]
    before = [call for call in calls if call.lineno < loop.lineno and source.function_of(call) is function]
    if not inside:
        return
    call, name = inside[0], ast.unparse(inside[0].func)
    if len(arguments) == 1 and isinstance(arguments[0], ast.BinOp) and isinstance(arguments[0].op, ast.Sub):
        first = ast.unparse(arguments[0].right)
        if _UNFINISHED.search(first) and any(ast.unparse(each) == number for each in call.args):
            yield finding("resumed-epoch", call, f"{name}({first} + {number})")
        return
    if before:
        return
    for rest in ast.walk(function):  # what is left of the interrupted epoch
        if not isinstance(rest, ast.For) or rest.lineno >= loop.lineno or not has_backward(rest):
            continue
        if not any(isinstance(each, ast.For) for each in source.ancestors(rest)):
            yield finding("resumed-epoch", rest, f"{name}(start_epoch)  # before this loop")
            return
    if len(arguments) < 2 or isinstance(arguments[0], ast.Constant):  # noqa: PLR2004 - where it begins, and ends
        return
    conditions = [
        each for each in source.ancestors(call) if isinstance(each, ast.If) and loop in source.ancestors(each)
    ]
    trained = [place for place, each in enumerate(loop.body) if _trains(source, each)]
    place = next(place for place, each in enumerate(loop.body) if call in ast.walk(each))
    is_left_out = any(_UNFINISHED.search(ast.unparse(each.test)) for each in conditions)
    if is_left_out or (trained and place > trained[0]):
        mended = f"{name}({number})  # before the first batch of each epoch, also of the resumed one"
        yield finding("resumed-epoch", call, mended)


def _trains(source: ScriptSource, statement: ast.AST) -> bool:
    """Return whether a statement runs backwards, itself or in a function of this file."""
    if has_backward(statement):
        return True
    calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
    called = {last_name(each.func) for each in calls if isinstance(each.func, ast.Name) or owner(each) == "self"}
    return any(
        isinstance(node, ast.FunctionDef) and node.name in called and has_backward(node)
        for node in ast.walk(source.tree)
    )


# -- Random numbers ----------------------------------------------------------------------------------------------------


def uses_trainer(source: ScriptSource) -> bool:
    """Return whether Lockstep's trainer or launcher is used; the trainer seeds each shard."""
    used = {source.full_name(call.func) for call in source.calls} | set(source.imported.values())
    return bool(used & {"lockstep.Trainer", "lockstep.ShardedLoader", "lockstep.launch"})


def _check_seeds(source: ScriptSource) -> Iterator[ScriptFinding]:
    if uses_trainer(source):
        return
    loading = {last_name(each) for each in _values_given(source, "worker_init_fn")}
    has_workers = any(
        not (isinstance(each, ast.Constant) and not each.value) for each in _values_given(source, "num_workers")
    )
    for family in _FAMILIES:
        for call in source.calls:
            if not _DRAWING[family].search(source.full_name(call.func)) and not (
                family == "torch" and _AUGMENTING.search(source.full_name(call.func))
            ):
                continue
            if not _is_drawn_anew(source, call):
                continue
            in_data = has_workers and re.search(r"__getitems?__|collate|transform", _function_name(source, call))
            seeds = (
                [each for each in _seeds(source, family) if _function_name(source, each) in loading] if in_data else []
            )
            if any("initial_seed" in ast.unparse(each) for each in seeds) or (in_data and not seeds):
                seeds = _seeds(source, "torch", without=loading)  # loading processes are seeded from it
            elif not seeds:
                seeds = _seeds(source, family, without=loading)
            if seeds and not any(map(partial(_differs_between_ranks, source), seeds)):
                given = seeds[-1].args[0] if seeds[-1].args else seeds[-1].keywords[0].value
                mended = f"{ast.unparse(seeds[-1].func)}({ast.unparse(given)} + rank)  # after the model is made"
                yield finding("one-seed", seeds[-1], mended, naming=str(call.lineno))
                return


def _function_name(source: ScriptSource, node: ast.AST) -> str:
    return getattr(source.function_of(node), "name", "")


def _seeds(source: ScriptSource, family: str, *, without: Iterable[str] = ()) -> list[ast.Call]:
    """Return the calls that seed a generator of this process."""
    defined = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}
    return [
        call
        for call in source.calls
        if (call.args or call.keywords)
        and (_SEEDING[family].search(source.full_name(call.func)) or last_name(call.func) in _SEEDING_ALL - defined)
        and _function_name(source, call) not in without
    ]


def _differs_between_ranks(source: ScriptSource, seed: ast.Call) -> bool:
    """Return whether a seed is another one on each rank, or may be: in a function that other files call."""
    function = source.function_of(seed)
    own = [each.arg for each in function.args.args] if isinstance(function, ast.FunctionDef) else []
    name = _function_name(source, seed)
    is_for_loading = any(last_name(each) == name for each in _values_given(source, "worker_init_fn"))
    for given in [*seed.args, *(each.value for each in seed.keywords)]:
        for parameter in names_in(given) & set(own) if not is_for_loading else ():
            calls = [call for call in source.calls if last_name(call.func) == name]
            values = [argument(call, parameter, own.index(parameter)) for call in calls]
            if not calls or any(each is not None and source.mentions_rank(each) for each in values):
                return True
        parts = [each for each in ast.walk(given) if isinstance(each, ast.expr) and last_name(each) not in own]
        if any(source.mentions_rank(each) for each in parts if isinstance(each, ast.Name | ast.Attribute | ast.Call)):
            return True
    return False


def _is_drawn_anew(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call draws for each sample or batch, many numbers, from the generator of the process."""
    name = source.full_name(call.func)
    sizes = [each.value for each in call.args if isinstance(each, ast.Constant)]
    if keyword(call, "generator") is not None or (name.endswith((".rand", ".randn")) and sizes == [1] * len(call.args)):
        return False
    if "ropout" in name.rpartition(".")[2] or name.endswith("DropPath") or _AUGMENTING.search(name):
        return not (sizes and sizes[0] == 0)
    if _OF_A_SAMPLE.search(_function_name(source, call)):
        return True
    if not name.startswith(("torch.", "?")) and keyword(call, "size") is None:
        return False  # one number for the batch: ranks may have agreed on it by their seed
    function = _function_name(source, call)
    calls = [call, *(each for each in source.calls if function and last_name(each.func) == function)]
    loops = [each for one in calls for each in source.ancestors(one) if isinstance(each, ast.For | ast.While)]
    return any(map(has_backward, loops))


# -- Parts of the data -------------------------------------------------------------------------------------------------


def _check_own_split(source: ScriptSource) -> Iterator[ScriptFinding]:
    for family in _FAMILIES:
        for call in source.calls:
            if not _PERMUTING[family].search(source.full_name(call.func)) or _is_seeded_alike(source, call, family):
                continue
            last = last_name(call.func)
            is_split = last in {"random_split", "train_test_split"}
            names = {last_name(call.args[0])} if last == "shuffle" and call.args else names_of(source, call)
            if (
                (is_split or _is_cut(source, call, names))
                and not _is_sent(source, names)
                and not source.is_guarded(call)
            ):
                yield finding("own-split", call, _with_one_seed(call, family))


def _is_seeded_alike(source: ScriptSource, call: ast.Call, family: str) -> bool:
    if any(keyword(call, name) is not None for name in ("generator", "random_state")) or has_unknown_arguments(call):
        return True
    before = [each for each in _seeds(source, family) if each.lineno < call.lineno]
    return bool(before) and not _differs_between_ranks(source, before[-1])


def _with_one_seed(call: ast.Call, family: str) -> str:
    if family == "torch":
        return with_keyword(call, generator="torch.Generator().manual_seed(0)")
    if last_name(call.func) == "train_test_split":
        return with_keyword(call, random_state="0")
    text = ast.unparse(call)
    return text.replace("random.", "random.default_rng(0)." if family == "numpy" else "random.Random(0).", 1)


def _is_cut(source: ScriptSource, call: ast.Call, names: set[str]) -> bool:
    """Return whether a permutation is cut by rank, or into two parts; a batch of it is no part of the data."""
    cuts = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            values = [node.value, *source.values_of(node.value)]
            if last_name(node.value) in names or any(call in ast.walk(value) for value in values):
                cuts.append(node.slice)
    if any(source.mentions_rank(each) for each in cuts):
        return True
    return any(each.lower is None for each in cuts) and any(each.upper is None for each in cuts)


def _is_sent(source: ScriptSource, names: set[str]) -> bool:
    """Return whether what a name stands for is sent to all ranks."""
    derived = {name for name, values in source.assigned.items() if any(names & names_in(value) for value in values)}
    return any("broadcast" in last_name(call.func) and (names | derived) & names_in(call) for call in source.calls)


# -- Gradients and losses ----------------------------------------------------------------------------------------------


def _check_sums(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Look for gradients that the wrapper has averaged, and their norms, that are added up over the ranks again."""
    text = ast.unparse(source.tree)
    if not wrapped_names(source) or re.search(r"no_sync|register_comm_hook|FullyShardedDataParallel|fully_shard", text):
        return
    for call in source.calls:
        if not is_collective(source, call) or last_name(call.func) != "all_reduce" or has_group(call) or not call.args:
            continue
        given, operation = call.args[0], argument(call, "op", 1)
        if operation is not None and last_name(operation) != "SUM":
            continue
        sources = _flows_in(source, given)
        if not any("grad" in names_in(each) or "clip_grad_norm_" in names_in(each) for each in sources):
            continue
        if _is_divided(source, given) or not _is_of_wrapped(source, call, sources):
            continue
        is_norm = any(
            {"norm", "clip_grad_norm_", "pow", "square", "get_total_norm"} & names_in(each) or "**" in ast.unparse(each)
            for each in sources
        )
        yield finding("norm-summed" if is_norm else "gradients-summed", call, f"pass  # without {ast.unparse(call)}")


def _flows_in(source: ScriptSource, node: ast.expr, depth: int = 3) -> list[ast.expr]:
    """Return the expressions that a value is made of: what is assigned to the names in it, and in these."""
    found = [node]
    if depth:
        for name in names_in(node) - {"grad", "data"}:
            for value in source.assigned.get(name, []):
                found += _flows_in(source, value, depth - 1)
    return found


def _is_divided(source: ScriptSource, node: ast.expr) -> bool:
    """Return whether what an expression names is divided by the number of ranks somewhere."""
    text = ast.unparse(node).removesuffix(".data")
    for each in ast.walk(source.tree):
        left = each.left if isinstance(each, ast.BinOp) else each.target if isinstance(each, ast.AugAssign) else None
        right = each.right if isinstance(each, ast.BinOp) else each.value if isinstance(each, ast.AugAssign) else None
        if isinstance(each, ast.Call) and last_name(each.func) in {"div", "div_", "true_divide"} and each.args:
            left, right = getattr(each.func, "value", None), each.args[0]
        elif not isinstance(getattr(each, "op", None), ast.Div):
            continue
        if (
            left is not None
            and right is not None
            and ast.unparse(left).startswith(text)
            and _is_world_size(source, right)
        ):
            return True
    return False


def _is_world_size(source: ScriptSource, node: ast.AST) -> bool:
    """Return whether an expression is the number of ranks, or a product with it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_world_size(source, node.left) or _is_world_size(source, node.right)
    if not isinstance(node, ast.expr):
        return False
    values = [node, *source.values_of(node)]
    return any(
        _WORLD_SIZE.search(last_name(each)) is not None
        or re.search(r"get_world_size|['\"]WORLD_SIZE", ast.unparse(each)) is not None
        for each in values
    )


def _is_of_wrapped(source: ScriptSource, call: ast.Call, sources: Iterable[ast.expr]) -> bool:
    """Return whether the parameters whose gradients are meant are those of a model that is wrapped."""
    wrapped = set(wrapped_names(source))
    inner = {
        last_name(made.args[0])
        for calls in wrapped_names(source).values()
        for made in calls
        if isinstance(made, ast.Call) and made.args
    }
    around = [each.iter for each in source.ancestors(call) if isinstance(each, ast.For)]
    loops = [each.iter for each in ast.walk(source.function_of(call)) if isinstance(each, ast.For | ast.comprehension)]
    for iterated in [*around, *sources, *loops]:
        for each in (iterated, *source.values_of(iterated)):
            for one in ast.walk(each):
                if isinstance(one, ast.Call) and last_name(one.func) in {"parameters", "named_parameters"}:
                    names = names_in(one) - {"parameters", "named_parameters", "self"}
                    given = {other for name in names for other in given_for(source, source.function_of(one), name)}
                    if given & (wrapped | inner | {"module"}):
                        return True
    return False


def _check_divided_loss(source: ScriptSource) -> Iterator[ScriptFinding]:
    text = ast.unparse(source.tree)
    by_hand = any(
        is_collective(source, call) and call.args and "grad" in names_in(call.args[0]) for call in source.calls
    )
    if not wrapped_names(source) or by_hand or "register_comm_hook" in text:
        return
    for call in source.calls:
        if last_name(call.func) != "backward":
            continue
        given = getattr(call.func, "value", call)
        values = [
            given,
            *source.values_of(given),
            *(call.args if last_name(given) in {"accelerator", "fabric"} else ()),
        ]
        for value in [part for each in values for part in ast.walk(each)]:
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and _is_world_size(source, value.right):
                if not _has_factor(source, value.left):
                    yield finding(
                        "loss-divided", call, ast.unparse(call).replace(ast.unparse(value), ast.unparse(value.left))
                    )
                break


def _has_factor(source: ScriptSource, node: ast.expr) -> bool:
    """Return whether an expression, or what is assigned to its name, is multiplied by the number of ranks."""
    parts = [each for value in (node, *source.values_of(node)) for each in ast.walk(value)]
    products = [each for each in parts if isinstance(each, ast.BinOp)]
    divisors = {id(each.right) for each in products if isinstance(each.op, ast.Div)}
    return any(_is_world_size(source, each) for each in products if id(each) not in divisors)


def _check_inner_module(source: ScriptSource) -> Iterator[ScriptFinding]:
    wrapped = wrapped_names(source)
    for call in source.calls:
        inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func
        if not (isinstance(inner, ast.Attribute) and inner.attr == "module" and last_name(inner.value) in wrapped):
            continue
        around = [item for each in source.ancestors(call) if isinstance(each, ast.With) for item in each.items]
        decorators = getattr(source.function_of(call), "decorator_list", [])
        if not re.search(r"no_grad|inference_mode", " ".join(map(ast.unparse, [*around, *decorators]))):
            yield finding(
                "inner-module", call, ast.unparse(call).replace(ast.unparse(call.func), ast.unparse(inner.value))
            )


# -- Files -------------------------------------------------------------------------------------------------------------


def _check_own_folder(source: ScriptSource) -> Iterator[ScriptFinding]:
    for call in source.calls:
        if not _TIMES.search(source.full_name(call.func)) or source.is_guarded(call):
            continue
        statement = next((each for each in source.ancestors(call) if isinstance(each, ast.stmt)), None)
        if not isinstance(statement, ast.Assign) or not _is_text(source, statement, call):
            continue
        names = {last_name(each) for each in statement.targets} - {""}
        for _ in range(2):
            names |= {
                name for name, values in source.assigned.items() if any(names & names_in(value) for value in values)
            }
        values = [value for name in names for value in source.assigned.get(name, ())]
        if _is_sent(source, names) or any(source.mentions_rank(each) for each in values):
            continue
        if any(
            _WRITING.search(last_name(each.func)) and names & names_in(each) and not source.is_guarded(each)
            for each in source.calls
        ):
            yield finding(
                "own-folder", statement, f"{source.line(statement)}  # on rank 0, then dist.broadcast_object_list"
            )


def _is_text(source: ScriptSource, statement: ast.Assign, call: ast.Call) -> bool:
    """Return whether a time becomes a text, and is not one to measure with."""
    if last_name(call.func) in {"strftime", "ctime", "token_hex"}:
        return True
    around = list(source.ancestors(call))
    return any(
        isinstance(each, ast.JoinedStr)
        or (
            isinstance(each, ast.Call)
            and last_name(each.func) in {"str", "format", "join", "strftime", "isoformat", "Path"}
        )
        for each in around[: around.index(statement)]
    )


TRAINING_RULES: Final[tuple[Callable[[ScriptSource], Iterator[ScriptFinding]], ...]] = (
    *(_check_set_epoch, _check_seeds, _check_own_split),
    *(_check_sums, _check_divided_loss, _check_inner_module, _check_own_folder),
)
