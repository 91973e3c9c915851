"""The rules about what is computed: the order of samples, random numbers, parts of the data, gradients, losses."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from lockstep.doctor.scripts.source import (
    ScriptFinding,
    ScriptSource,
    argument,
    finding,
    has_backward,
    has_group,
    has_unknown_arguments,
    keyword,
    last_name,
    names_in,
    owner,
    parts,
    with_keyword,
)

_MASKING: Final = re.compile(
    r"[dD]ropout[123]?d?$|(^|\.)DropPath$"
    r"|transforms(\.v2)?\.(Random\w+|ColorJitter|AutoAugment|TrivialAugment\w*|AugMix)$"
)
_SEEDING_ALL: Final = {"seed_everything", "set_seed", "seed_all"}
_SEEDING: Final = {
    "torch": re.compile(r"torch(\.random|\.cuda)?\.manual_seed(_all)?$"),
    "numpy": re.compile(r"numpy\.random\.seed$"),
    "random": re.compile(r"^random\.seed$"),
}
_DRAWING: Final = {
    "torch": re.compile(
        r"torch\.(rand|randn|randint|bernoulli|normal|multinomial|poisson)(_like)?$|\.gumbel_softmax$"
        rf"|\.(normal|uniform|bernoulli|exponential|random)_$|{_MASKING.pattern}"
    ),
    "numpy": re.compile(
        r"numpy\.random\.(rand|randn|randint|random|normal|uniform|beta|binomial|choice|standard_normal)$"
    ),
    "random": re.compile(r"^random\.(random|randint|randrange|uniform|gauss|normalvariate|betavariate|choice)$"),
}
_GENERATORS: Final = re.compile(r"numpy\.random\.(default_rng|RandomState)$|^random\.Random$|torch\.Generator$")
_DRAWS_OF_ONE: Final = re.compile(
    r"^(normal|standard_normal|uniform|random|rand|randn|integers|randint|gauss|normalvariate|beta|betavariate)$"
)
_PERMUTING: Final = {
    "torch": re.compile(r"torch\.randperm$|(^|\.)random_split$"),
    "numpy": re.compile(r"numpy\.random\.(permutation|shuffle)$|(^|\.)train_test_split$"),
    "random": re.compile(r"^random\.(sample|shuffle)$"),
}
_SEEDED: Final = {
    "torch": "generator = torch.Generator().manual_seed(0)",
    "numpy": "generator = numpy.random.default_rng(0)",
    "random": "generator = random.Random(0)",
}
_OF_TORCHS_SEED: Final = re.compile(r"initial_seed|info\b.*\.seed\b")
_FORWARDS: Final = re.compile(r"^forward\w*$|^(compute|get|training|calc\w*)_loss$|^loss$|^training_step$")
_LOOKING: Final = {
    *("DataLoader", "BatchSampler", "len", "print", "hasattr", "isinstance"),
    *("enumerate", "zip", "iter", "next", "list", "tqdm", "islice", "cycle"),
}
"""Calls that do not tell a sampler its epoch."""
_COUNTING: Final = re.compile(r"def __iter__(?:(?!\n    def )[\s\S])*self\.\w*epoch \+?= ")
"""A sampler that goes on to another epoch by itself."""
_ONE_NUMBER: Final = {"1", "()", "(1,)", "[]", "[1]"}
_OF_A_SAMPLE: Final = re.compile(r"^__getitems?__$|^forward$|collate|augment|transform|^__call__$")
"""Functions that are called for each sample or batch."""
_TIMES: Final = re.compile(r"(^|\.)(now|datetime\.today|utcnow|strftime|time|time_ns|ctime|uuid[14]|token_hex)$")
_WRITING: Final = re.compile(r"^(makedirs|mkdir|save\w*|open|SummaryWriter|FileHandler|savefig|write_text)$")
_UNFINISHED: Final = re.compile(r"start|resum|skip|first|restor|begin")
"""In tests and ranges that tell a run which continues."""


# -- The order of samples ----------------------------------------------------------------------------------------------


def _check_set_epoch(source: ScriptSource) -> Iterator[ScriptFinding]:
    loop = _epoch_loop(source)
    calls = [
        call
        for call in source.calls
        if last_name(call.func) == "set_epoch" and call.args and _function_name(source, call) != "set_epoch"
    ]
    samplers = [each for each in _shuffling_samplers(source) if not _is_made_for_epoch(source, each, loop)]
    if loop is None or not (calls or samplers):
        return
    if not calls:
        name = next(iter(source.names_of(samplers[0])), "loader.sampler")
        given = next(source.ancestors(samplers[0]))
        name = f"{name}.{given.arg}" if isinstance(given, ast.keyword) else name  # of a DataLoader
        number = loop.target if isinstance(loop, ast.For) else loop.test
        number = number.left if isinstance(number, ast.Compare) else number
        yield finding("set-epoch", loop, f"{name}.set_epoch({ast.unparse(number)})  # first in the loop over epochs")
    elif not isinstance(loop, ast.For):
        return
    elif any(_changes(source, call) for call in calls):
        yield from _check_resumed_epoch(source, loop, calls)
    else:
        yield finding("same-epoch", calls[0], f"{ast.unparse(calls[0].func)}({ast.unparse(loop.target)})")


def _values_given(source: ScriptSource, name: str) -> list[ast.expr]:
    return [each.value for call in source.calls for each in call.keywords if each.arg == name]


def _shuffling_samplers(source: ScriptSource) -> list[ast.Call]:
    """Return the calls that make a sampler whose order depends on the epoch that it is told."""
    classes = [each for each in source.parts(ast.ClassDef) if "Sampler" in " ".join(map(last_name, each.bases))]
    texts = {each.name: ast.unparse(each) for each in classes}
    told = {name: text for name, text in texts.items() if re.search(r"def set_epoch|\bDistributedSampler\b", text)}
    kinds = ["DistributedSampler", *(name for name, text in told.items() if not _COUNTING.search(text))]
    return [
        call
        for call in source.calls
        if source.is_call_of(call, *kinds)
        and not (isinstance(value := keyword(call, "shuffle"), ast.Constant) and value.value is False)
        and not has_unknown_arguments(call)
        and not _is_passed_on(source, call)
    ]


def _is_passed_on(source: ScriptSource, sampler: ast.Call) -> bool:
    """Return whether a sampler is given to a function of another file, which may call set_epoch."""
    names = source.names_of(sampler)
    defined = {each.name for each in source.parts(ast.stmt) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    for call in source.calls:
        given = [*call.args, *(each.value for each in call.keywords)]
        if last_name(call.func) not in defined | _LOOKING and any(last_name(each) in names for each in given):
            return True
    return False


def _is_made_for_epoch(source: ScriptSource, sampler: ast.Call, loop: ast.For | ast.While | None) -> bool:
    """Return whether a sampler is made anew in each epoch, with a seed of the epoch's."""
    return (
        isinstance(loop, ast.For)
        and loop in source.ancestors(sampler)
        and bool(names_in(loop.target) & {name for each in sampler.keywords for name in names_in(each.value)})
    )


def _epoch_loop(source: ScriptSource) -> ast.For | ast.While | None:
    for node in source.parts(ast.While, ast.For):
        if (
            isinstance(node, ast.While)
            and isinstance(node.test, ast.Compare)
            and "epoch" in last_name(node.test.left)
            and _trains(source, node)
        ):
            return node
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            counted = ast.unparse(node.iter)
            is_range = not re.search(r"\.epoch\(", counted)  # which is the loop over batches
            is_of_epochs = node.target.id == "ep" or re.search(r"epoch", node.target.id + counted, re.IGNORECASE)
            if counted != "range(1)" and is_range and is_of_epochs:
                return node
    return None


def _changes(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether the number that `set_epoch` is given may be another one in the next call."""
    value, function = call.args[0], source.function_of(call)
    parameters = {each.arg for node in parts(function, ast.arguments) for each in node.args}
    names = names_in(value)
    if names & (parameters - {"self"}) or parts(value, ast.Call):
        return True
    for node in source.parts(ast.expr):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        is_elsewhere = isinstance(node, ast.Attribute) and source.function_of(node) is not function
        is_in_loop = any(isinstance(each, ast.For | ast.While) for each in source.ancestors(node))
        is_start = _UNFINISHED.search(last_name(node))  # which a resume sets
        if last_name(node) in names and (is_in_loop or (is_elsewhere and not is_start)):
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
    loops = list(filter(has_backward, parts(function, ast.For)))
    again = {name for each in loops if loop in source.ancestors(each) for name in names_in(each.iter)} - {"enumerate"}
    for rest in loops:  # what is left of the interrupted epoch
        if rest.lineno < loop.lineno and again & names_in(rest.iter):
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
    calls = parts(statement, ast.Call)
    called = {last_name(each.func) for each in calls if isinstance(each.func, ast.Name) or owner(each) == "self"}
    functions = [each for each in source.parts(ast.FunctionDef) if each.name in called]
    return any(map(has_backward, [statement, *functions]))


# -- Random numbers ----------------------------------------------------------------------------------------------------


def uses_trainer(source: ScriptSource) -> bool:
    """Return whether Lockstep's trainer or launcher is used; the trainer seeds each shard."""
    used = {source.full_name(call.func) for call in source.calls} | set(source.imported.values())
    return bool(used & {"lockstep.Trainer", "lockstep.ShardedLoader", "lockstep.launch"})


def _check_seeds(source: ScriptSource) -> Iterator[ScriptFinding]:
    loading = {last_name(each) for each in _values_given(source, "worker_init_fn")}
    has_workers = any(ast.unparse(each) != "0" for each in _values_given(source, "num_workers"))
    for family, call in [] if uses_trainer(source) else _calls_of(source, _DRAWING):
        if not _is_drawn_anew(source, call):
            continue
        seeds = _seeds(source, family)
        own = [each for each in seeds if _function_name(source, each) in loading]
        name = _function_name(source, call)
        others = [each for each in seeds if each not in own]
        is_of_either = name == "__call__" or (name == "forward" and own)  # loading processes or the loop may call it
        if has_workers and (is_of_either or re.search(r"__getitems?__|collate|transform", name)):
            # Loading processes are seeded from torch's generator.
            given = [part for each in own for part in _flows_in(source, each.args[0])]
            is_own = any(map(source.mentions_rank, given))
            is_torchs = not own or (not is_own and any(_OF_TORCHS_SEED.search(ast.unparse(each)) for each in given))
            loaded = _seeds(source, "torch") if is_torchs else own
            seeds = [*others, *loaded] if is_of_either else loaded
        else:
            seeds = others
        if seeds and not any(_differs_between_ranks(source, each) for each in seeds):
            seeding, number = ast.unparse(seeds[-1].func), ast.unparse(seeds[-1].args[0])
            mended = f"{seeding}({number} + rank)  # after the model is made"
            yield finding("one-seed", seeds[-1], mended, naming=str(call.lineno))
            return


def _check_own_generators(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Look for generators of the script's own that begin alike on all ranks, and draw for each sample."""
    if uses_trainer(source) or not any(map(has_backward, [source.tree])):
        return
    for made in source.calls:
        if not _GENERATORS.search(source.full_name(made.func)) or _OF_A_SAMPLE.search(_function_name(source, made)):
            continue
        names = _names_of_generator(source, made)
        seeds = [each for each in _seeds_of(source, names, made) if each.args]
        if not names or not seeds or any(_may_differ(source, each) for each in seeds):
            continue
        for call in source.calls:
            is_torchs = last_name(keyword(call, "generator") or call) in names
            is_own = _DRAWS_OF_ONE.search(last_name(call.func)) and owner(call).rpartition(".")[2] in names
            draws = is_own or (is_torchs and _DRAWING["torch"].search(source.full_name(call.func)))
            if draws and _is_for_samples(source, call):
                seed = seeds[-1]
                mended = f"{ast.unparse(seed.func)}({ast.unparse(seed.args[0])} + rank)"
                yield finding("one-seed", seed, mended, naming=str(call.lineno))
                return


def _names_of_generator(source: ScriptSource, made: ast.Call) -> set[str]:
    """Return the names of a generator, which may be made in one expression with its seed."""
    return {
        name
        for name, values in source.assigned.items()
        if any(made is each or (isinstance(each, ast.Call) and made in ast.walk(each.func)) for each in values)
    }


def _seeds_of(source: ScriptSource, names: set[str], made: ast.Call) -> list[ast.Call]:
    """Return the calls that seed a generator: that which makes it, and those of its `manual_seed` or `seed`."""
    seeding = [
        call
        for call in source.calls
        if last_name(call.func) in {"manual_seed", "seed"}
        and isinstance(call.func, ast.Attribute)
        and (last_name(call.func.value) in names or made in ast.walk(call.func.value))
    ]
    of_names = [each for name in names for each in source.assigned[name] if isinstance(each, ast.Call)]
    is_torchs = source.is_call_of(made, "Generator")
    return [*(each for each in of_names if each not in seeding and not is_torchs), *seeding]


def _may_differ(source: ScriptSource, seed: ast.Call) -> bool:
    """Return whether a generator's seed may be another one on each rank, or for each sample."""
    function = source.function_of(seed)
    own = {each.arg for each in function.args.args} if isinstance(function, ast.FunctionDef) else set()
    return (
        any(parts(each, ast.Call) or names_in(each) & own for each in seed.args)
        or any(map(source.mentions_rank, seed.args))
        or _OF_A_SAMPLE.search(_function_name(source, seed)) is not None
    )


def _is_for_samples(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call draws in what makes a sample, or many numbers in the loop that trains."""
    if _is_cut(source, call, source.names_of(call)) or _is_for_parameters(source, call):
        return False
    loops = [each for each in source.ancestors(call) if isinstance(each, ast.For | ast.While)]
    given = {each.arg for each in call.keywords}
    draws_many = bool(given & {"size", "generator"}) or len(call.args) >= 3  # noqa: PLR2004 - of NumPy the size
    return bool(_OF_A_SAMPLE.search(_function_name(source, call))) or (draws_many and any(map(has_backward, loops)))


def _calls_of(source: ScriptSource, patterns: Mapping[str, re.Pattern[str]]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls whose names match, each with the generator that it is of."""
    for family, pattern in patterns.items():
        yield from ((family, call) for call in source.calls if pattern.search(source.full_name(call.func)))


def _function_name(source: ScriptSource, node: ast.AST) -> str:
    return getattr(source.function_of(node), "name", "")


def _seeds(source: ScriptSource, family: str) -> list[ast.Call]:
    """Return the calls that seed a generator of this process."""
    defined = {node.name for node in source.parts(ast.FunctionDef)}
    found = [call for call in source.calls if call.args and last_name(call.func) in _SEEDING_ALL - defined]
    found += [call for each, call in _calls_of(source, _SEEDING) if each == family and call.args]
    used = set(map(last_name, [*(call.func for call in source.calls), *_values_given(source, "worker_init_fn")]))
    return [each for each in found if _function_name(source, each) in used | {"", "main"}] or found


def _differs_between_ranks(source: ScriptSource, seed: ast.Call) -> bool:
    """Return whether a seed is another one on each rank, or may be: in a function that other files call."""
    function, name = source.function_of(seed), _function_name(source, seed)
    own = [each.arg for each in function.args.args] if isinstance(function, ast.FunctionDef) else []
    is_for_loading = any(last_name(each) == name for each in _values_given(source, "worker_init_fn"))
    for parameter in names_in(seed.args[0]) & set(own) if not is_for_loading else ():
        calls = [call for call in source.calls if last_name(call.func) == name]
        values = [argument(call, parameter, own.index(parameter)) for call in calls]
        if not calls or any(each is not None and source.mentions_rank(each) for each in values):
            return True
    given = parts(seed.args[0], ast.Name, ast.Attribute, ast.Call)
    return any(source.mentions_rank(each) for each in given if last_name(each) not in own)


def _is_drawn_anew(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call draws for each sample or batch, many numbers, from the generator of the process."""
    name, function = source.full_name(call.func), source.function_of(call)
    given = list(map(ast.unparse, call.args))
    if keyword(call, "generator") is not None or (name.endswith((".rand", ".randn")) and {*given} <= _ONE_NUMBER):
        return False
    if _is_cut(source, call, source.names_of(call)) or _is_for_parameters(source, call):
        return False  # the samples of a step, of which each rank takes its part
    if _MASKING.search(name):
        return given[:1] not in (["0"], ["0.0"])
    callers = [each for each in source.calls if last_name(each.func) == getattr(function, "name", "-")]
    if any(_OF_A_SAMPLE.search(_function_name(source, each)) for each in (call, *callers)):
        return True
    if not name.startswith(("torch.", "?")) and keyword(call, "size") is None:
        return False  # one number for the batch: ranks may have agreed on it by their seed
    loops = [
        each for one in (call, *callers) for each in source.ancestors(one) if isinstance(each, ast.For | ast.While)
    ]
    return any(map(has_backward, loops)) or (bool(loops) and bool(callers) and has_backward(function))


def _is_for_parameters(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call draws for parameters or their gradients, which are to stay the same on all ranks."""
    around = list(source.ancestors(call))
    statement = next((each for each in around if isinstance(each, ast.stmt)), call)
    loops = [each for each in around if isinstance(each, ast.For)]
    return ".grad" in ast.unparse(statement) or any("parameters()" in ast.unparse(each.iter) for each in loops)


# -- Parts of the data -------------------------------------------------------------------------------------------------


def _check_own_split(source: ScriptSource) -> Iterator[ScriptFinding]:
    for family, call in _calls_of(source, _PERMUTING):
        last, before = last_name(call.func), [each for each in source.calls if each.lineno < call.lineno]
        is_seeded = keyword(call, "generator") is not None or keyword(call, "random_state") is not None
        if is_seeded or has_unknown_arguments(call) or source.is_guarded(call):
            continue
        known, others = _seeds(source, family), re.compile(r"(?<!manual)(?<!initial)_seed|seed_")  # of other files
        seeds = [each for each in before if each in known or others.search(last_name(each.func))]
        if seeds and not (seeds[-1].args and _differs_between_ranks(source, seeds[-1])):
            continue
        names = {last_name(call.args[0])} if last == "shuffle" and call.args else source.names_of(call)
        if (last.endswith("split") or _is_cut(source, call, names)) and not _is_sent(source, names):
            yield finding("own-split", call, f"{_SEEDED[family]}  # on every rank, for {source.line(call)}")


def _is_cut(source: ScriptSource, call: ast.Call, names: set[str]) -> bool:
    """Return whether a permutation is cut by rank, or into two parts; a batch of it is no part of the data."""
    cuts = []
    for node in source.parts(ast.Subscript):
        if source.mentions_rank(node.slice):
            made_of = _flows_in(source, node.value)
            splits = any(re.search(r"split|chunk", ast.unparse(each)) for each in made_of)
            if splits and any(call in ast.walk(each) for each in made_of):
                return True
        if isinstance(node.slice, ast.Slice):
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
    text, sizes = ast.unparse(source.tree), _world_sizes(source)
    if re.search(r"no_sync|register_comm_hook|FullyShardedDataParallel|fully_shard", text):
        return
    for call in source.calls:
        if not source.is_collective(call) or last_name(call.func) != "all_reduce" or has_group(call) or not call.args:
            continue
        operation, summed = argument(call, "op", 1), re.escape(ast.unparse(call.args[0]))
        if operation is not None and last_name(operation) != "SUM":
            continue
        flows = " ".join(map(ast.unparse, _flows_in(source, call.args[0])))
        is_divided = re.search(rf"{summed} ?(/=?|\.div_?\() ?({sizes})", text)
        if not is_divided and re.search(r"\.grad\b|clip_grad", flows) and _is_of_wrapped(source, call, flows):
            is_norm = re.search(r"norm|pow|square|\*\*", flows)
            yield finding("norm-summed" if is_norm else "gradients-summed", call, f"pass  # no {ast.unparse(call)}")


def _flows_in(source: ScriptSource, node: ast.expr, depth: int = 3) -> list[ast.expr]:
    """Return the expressions that a value is made of: what is assigned to the names in it, and in these."""
    found = [node]
    if depth:
        for name in names_in(node) - {"grad", "data"}:
            for value in source.assigned.get(name, []):
                found += _flows_in(source, value, depth - 1)
    return found


def _world_sizes(source: ScriptSource) -> str:
    """Return a pattern of what stands for the number of ranks in this file."""
    named = [name for name, values in source.assigned.items() if "get_world_size" in " ".join(map(ast.unparse, values))]
    own = "|".join(named) or "-"
    return rf"[\w.]*(?i:world_?size)\b|[\w.]*\bnum_(?:gpus|ranks|replicas)\b|(?:self\.)?(?:{own})\b"


def _is_of_wrapped(source: ScriptSource, node: ast.AST, flows: str) -> bool:
    """Return whether the gradients that flow into a node are those of a model that is wrapped."""
    function, wrapped = source.function_of(node), source.wrapped_names()
    loops = [each.iter for each in ast.walk(function) if isinstance(each, ast.For | ast.comprehension)]
    text = " ".join([flows, *(ast.unparse(value) for each in loops for value in (each, *source.values_of(each)))])
    if isinstance(function, ast.FunctionDef):
        calls = [each for each in source.calls if source.is_call_of(each, function.name)]
        text = " ".join([text, *map(ast.unparse, calls)])
    made = [each for calls in wrapped.values() for each in calls if isinstance(each, ast.Call)]
    inner = {last_name(argument) for each in made for argument in each.args[:1]}
    names = re.findall(r"(\w+)\.(?:named_)?parameters\(\)", text)
    owners = {other for name in names for other in source.given_for(function, name)}
    return bool(wrapped) and (bool(owners & {*wrapped, *inner, "module"}) or "param_groups" in text)


def _check_divided_loss(source: ScriptSource) -> Iterator[ScriptFinding]:
    text = ast.unparse(source.tree)
    if not source.wrapped_names() or re.search(r"register_comm_hook|all_reduce\([^)\n]*\.grad\b", text):
        return
    divided = re.compile(rf"( / |\.div_?\()(\(?[\w.]+ \* )?([\w.]*\.)?({_world_sizes(source)})")
    for call in source.calls:
        if last_name(call.func) == "backward" and isinstance(call.func, ast.Attribute):
            values = [call.func.value, *call.args, *source.values_of(call.func.value)]
            called = {last_name(each.func) for each in values if isinstance(each, ast.Call)} - {""}
            functions = [each for each in ast.walk(source.tree) if getattr(each, "name", "") in called]
            returned = [one.value for each in functions for one in parts(each, ast.Return)]
            texts = [ast.unparse(each) for each in [*values, *returned] if each is not None]
            # In `total / (count / world_size)` the loss is multiplied.
            if any(divided.search(re.sub(r" / \([^()]* / .*?\)", "", each)) for each in texts):
                yield finding("loss-divided", call, "loss.backward()  # of the mean over this rank's samples, as it is")


def _check_weighted_mean(source: ScriptSource) -> Iterator[ScriptFinding]:
    if not source.wrapped_names() or "mean_over_ranks" in ast.unparse(source.tree):
        return
    for call in source.calls:
        is_function = source.is_call_of(call, "cross_entropy", "nll_loss")
        reduction = keyword(call, "reduction")
        if not (is_function or source.is_call_of(call, "CrossEntropyLoss", "NLLLoss")) or source.has_no_gradients(call):
            continue
        weight = argument(call, "weight", 2 if is_function else 0)
        is_mean = reduction is None or "mean" in ast.unparse(reduction)
        if weight is not None and is_mean and not (isinstance(weight, ast.Constant) and weight.value is None):
            target = ast.unparse(call.args[1]) if is_function and len(call.args) > 1 else "targets"
            ignored = ast.unparse(keyword(call, "ignore_index") or ast.Constant(-100))
            own = f"{ast.unparse(weight)}[{target}[{target} != {ignored}]].sum()"
            total = with_keyword(call, reduction="'sum'")
            yield finding("weighted-mean", call, f"{total}  # the total, for lockstep.mean_over_ranks(total, {own})")


def _check_divided_gradients(source: ScriptSource) -> Iterator[ScriptFinding]:
    sizes, text = f"(?:{_world_sizes(source)})", ast.unparse(source.tree)
    # Who reduces gradients without the wrapper, or multiplies by the number of ranks, divides by it rightly.
    is_sum = rf"no_sync|register_comm_hook|FullyShardedDataParallel|fully_shard|\* \(?{sizes}|{sizes} \*"
    reduced = [each for each in source.calls if source.is_collective(each) and each.args]
    flows = [ast.unparse(part) for each in reduced for part in _flows_in(source, each.args[0])]
    if re.search(is_sum, text) or any("grad" in each for each in flows):
        return
    by_size = rf"(?: ?(?:/=|= [\w.]+ /|\*= 1(?:\.0)? /) ?|\.(?:div_|mul_)\((?:1(?:\.0)? / )?)(?:float)?\(?{sizes}"
    for node in source.parts(ast.Assign, ast.AugAssign, ast.Expr):
        written = ast.unparse(node)
        if re.search(rf"\.grad(?:\.data)?{by_size}", written) and _is_of_wrapped(source, node, written):
            yield finding("gradients-divided", node, f"pass  # no {written}")


def _check_inner_module(source: ScriptSource) -> Iterator[ScriptFinding]:
    wrapped = source.wrapped_names()
    for call in source.calls:
        is_forward = _FORWARDS.search(last_name(call.func)) and call.args
        called = call.func.value if isinstance(call.func, ast.Attribute) and is_forward else call.func
        is_another = isinstance(called, ast.Name) and has_backward(source.function_of(call))  # another name of it
        for inner in source.values_of(called) if is_another else [called]:
            if not (isinstance(inner, ast.Attribute) and inner.attr == "module" and last_name(inner.value) in wrapped):
                continue
            if not (source.has_no_gradients(call) or _is_frozen(source, call, last_name(inner.value))):
                mended = ast.unparse(call).replace(ast.unparse(call.func), ast.unparse(inner.value))
                yield finding("inner-module", call, mended)


def _is_frozen(source: ScriptSource, call: ast.Call, name: str) -> bool:
    """Return whether a function freezes a network, through which gradients then only pass: a critic's, say."""
    frozen = rf"\b{name}(\.module)?(\.parameters\(\):\n +\w+)?\.requires_grad|requires_grad\w*\(\W*(\w+, )*{name}\b"
    return bool(re.search(frozen, ast.unparse(source.function_of(call))))


# -- Files -------------------------------------------------------------------------------------------------------------


def _check_own_folder(source: ScriptSource) -> Iterator[ScriptFinding]:
    writing = [each for each in source.calls if _WRITING.search(last_name(each.func)) and not source.is_guarded(each)]
    given = [(set[str](), each) for call in writing for each in call.args if _is_time(source, each)]
    for name, values in source.assigned.items():
        names = {name}
        for _ in range(2):
            names |= {
                other for other, parts in source.assigned.items() if any(names & names_in(each) for each in parts)
            }
        if any(names & names_in(each) for each in writing):
            given += [(names, each) for each in values if _is_time(source, each) and not source.is_guarded(each)][:1]
    for names, value in given:
        made_of = [value, *(each for other in names for each in source.assigned.get(other, ()))]
        if not any(source.mentions_rank(each) for each in made_of) and not _is_sent(source, names):
            yield finding("own-folder", value, f"{source.line(value)}  # on rank 0, then dist.broadcast_object_list")


def _is_time(source: ScriptSource, value: ast.expr) -> bool:
    """Return whether a text is made of the present time, or of what is another one in each process."""
    names = [source.full_name(each.func) for each in parts(value, ast.Call)]
    text = ast.unparse(value)
    is_text = re.search(r"\bf['\"]|['\"] [%+] |strftime|isoformat|ctime|str\(|format\(|join\(|Path\(|token", text)
    is_date = re.search(r"%[YymjbB]", text) and not re.search(r"%[HIMSfXcsTp]", text)
    is_duration = " - " in text
    return bool(is_text) and any(map(_TIMES.search, names)) and not is_date and not is_duration


TRAINING_RULES: Final[tuple[Callable[[ScriptSource], Iterator[ScriptFinding]], ...]] = (
    *(_check_set_epoch, _check_seeds, _check_own_generators, _check_own_split, _check_sums, _check_divided_loss),
    *(_check_weighted_mean, _check_divided_gradients, _check_inner_module, _check_own_folder),
)
