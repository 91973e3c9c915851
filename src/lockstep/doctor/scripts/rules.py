"""The rules: what a script does that goes wrong with several ranks."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lockstep.doctor.scripts.source import (
    WRAPPERS,
    Level,
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
from lockstep.doctor.scripts.training import TRAINING_RULES, uses_trainer

_WORDS = ("DistributedDataParallel", "init_process_group", "DistributedSampler", "destroy_process_group")
_PREPARING: Final = ("prepare", "setup_dataloaders", "setup", "prepare_data_loader", "skip_first_batches")
"""Methods of Accelerate, Fabric and Ray that give a loader a sampler."""
_ONE_BY_ONE: Final = re.compile(r"iter|stream|webdataset|shard", re.IGNORECASE)
_LOADER_SAMPLER, _LOADER_BATCH_SAMPLER, _LOADER_SHUFFLE, _LOADER_BATCH_SIZE = 3, 4, 2, 1
"""Where these arguments of a DataLoader stand if they have no names."""
_PRINTS: Final = {"builtins.print", "__builtin__.print", "__builtins__.print"}
_SAVING: Final = {"save_pretrained", "save_model", "save_file"}


def check_source(text: str) -> list[ScriptFinding] | None:
    """Return what is wrong in a script, by line; None if nothing in it is data-parallel. A SyntaxError is raised."""
    source = ScriptSource(text)
    if not _is_parallel(source):
        return None
    rules = (
        *(_check_loaders, _check_evaluation, *TRAINING_RULES),
        *(_check_collectives, _check_skipped_steps, _check_saving, _check_printing, _check_names_in_checkpoints),
        *(_check_devices, _check_port),
    )
    found = [each for rule in rules for each in rule(source)]
    return sorted(found, key=lambda each: (each.line, each.rule))


def _is_parallel(source: ScriptSource) -> bool:
    imported = {name.rpartition(".")[2] for name in source.imported.values()}
    return uses_trainer(source) or bool((imported | names_in(source.tree)) & set(_WORDS))


# -- Samplers, epochs, batch sizes, evaluation -------------------------------------------------------------------------


def _check_loaders(source: ScriptSource) -> Iterator[ScriptFinding]:
    trained = source.trained_names()
    for call in source.calls:
        if source.is_call_of(call, "DataLoader") and not has_unknown_arguments(call):
            yield from _check_sampler(source, call, trained)
            yield from _check_batch_size(source, call)


def _check_sampler(source: ScriptSource, call: ast.Call, trained: set[str]) -> Iterator[ScriptFinding]:
    sampler = argument(call, "sampler", _LOADER_SAMPLER)
    if argument(call, "batch_sampler", _LOADER_BATCH_SAMPLER) is not None or _is_prepared(source, call):
        return
    shuffle = argument(call, "shuffle", _LOADER_SHUFFLE)
    shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
    names = source.names_of(call)
    dataset = call.args[0] if call.args else keyword(call, "dataset")
    if dataset is None or _differs_between_ranks(source, dataset):
        return
    if sampler is not None:
        values = source.values_of(sampler)
        plain = ("RandomSampler", "SequentialSampler", "WeightedRandomSampler", "SubsetRandomSampler")
        is_none = all(isinstance(each, ast.Constant) and each.value is None for each in values)
        if not is_none and not all(source.is_call_of(each, *plain) for each in values):
            return
        if any(source.mentions_rank(each) for each in values):
            return
    if not (shuffles or names & trained) or (not shuffles and _ONE_BY_ONE.search(ast.unparse(dataset))):
        return
    distributed = f"DistributedSampler({ast.unparse(dataset)}, shuffle={shuffles or shuffle is None})"
    yield finding("no-sampler", call, with_keyword(call, sampler=distributed, shuffle=""))


def _is_prepared(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether another library gives loaders their samplers."""
    names = source.names_of(call)
    for other in source.calls:
        if last_name(other.func) in _PREPARING and (names & names_in(other) or call in ast.walk(other)):
            return True
    return False


def _differs_between_ranks(source: ScriptSource, dataset: ast.expr) -> bool:
    """Return whether a data set is another one on each rank, or may be one that is read in order."""
    for value in [dataset, *source.values_of(dataset)]:
        if source.mentions_rank(value) or "split_dataset_by_node" in ast.unparse(value):
            return True
        if isinstance(value, ast.Call):
            for node in source.parts(ast.ClassDef):
                is_streamed = any("Iterable" in ast.unparse(base) for base in node.bases)
                if node.name == last_name(value.func) and (is_streamed or source.mentions_rank(node)):
                    return True
    return False


def _check_batch_size(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    size = argument(call, "batch_size", _LOADER_BATCH_SIZE)
    if size is None or not isinstance(size, ast.Name | ast.Attribute):
        return
    name = last_name(size)
    divided = any(parts(value, ast.BinOp) for value in source.values_of(size))
    if re.search(r"global|total|effective", name, re.IGNORECASE) and not divided:
        mended = with_keyword(call, batch_size=f"{ast.unparse(size)} // world_size")
        yield finding("batch-size", size, mended, naming=name)


def _check_evaluation(source: ScriptSource) -> Iterator[ScriptFinding]:
    evaluated = _evaluated_names(source) - source.trained_names()
    for call in source.calls:
        if not source.is_call_of(call, "DataLoader"):
            continue
        sampler = argument(call, "sampler", _LOADER_SAMPLER)
        if sampler is None or not source.names_of(call) & evaluated:
            continue
        for value in source.values_of(sampler):
            if isinstance(value, ast.Call) and source.is_call_of(value, "DistributedSampler"):
                is_said = keyword(value, "drop_last") or keyword(value, "pad")  # the latter is of our sampler
                if not is_said and not has_unknown_arguments(value):
                    # Our sampler: torch's always pads, or leaves samples out.
                    ours = f"lockstep.DistributedSampler({with_keyword(value, pad='False').partition('(')[2]}"
                    advice = "each sample on one rank; add up sums and counts, not means"
                    yield finding("padded-evaluation", value, f"{ours}  # {advice}")


def _evaluated_names(source: ScriptSource) -> set[str]:
    found: set[str] = set()
    for loop in source.parts(ast.For):
        if has_backward(loop):
            continue
        function = source.function_of(loop)
        evaluates = re.search(r"\.eval\(\)", ast.unparse(function)) and not has_backward(function)
        if evaluates or any(map(source.has_no_gradients, ast.walk(loop))):
            for name in names_in(loop.iter):
                found |= source.given_for(function, name)
    return found - {""}


# -- What one rank does and the others do not, and what all do and one should ------------------------------------------


def _check_collectives(source: ScriptSource) -> Iterator[ScriptFinding]:
    alone = [
        call for call in source.calls if source.is_collective(call) and not has_group(call) and _is_alone(source, call)
    ]
    barriers = [call for call in alone if last_name(call.func) == "barrier"]
    if len(barriers) == 2:  # noqa: PLR2004 - one for rank 0 and one for the others, around what rank 0 does first
        alone = [call for call in alone if call not in barriers]
    for call in alone:
        mended = f"{source.line(call)}  # outside of the condition, on every rank"
        yield finding("collective-on-some-ranks", call, mended, naming=last_name(call.func))


def _is_alone(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether some ranks make a call and the others, in the other branch, do not."""
    name = last_name(call.func)
    for condition, is_in_body in source.guards(call):
        other = condition.orelse if is_in_body else condition.body
        if not any(last_name(each.func) == name for part in other for each in parts(part, ast.Call)):
            return True
    return bool(source.early_exits(call)) and not source.guards(call)


def _check_skipped_steps(source: ScriptSource) -> Iterator[ScriptFinding]:
    for loop in source.parts(ast.For):
        calls = parts(loop, ast.Call)
        backward = [call.lineno for call in calls if last_name(call.func) == "backward"]
        if not backward or any(source.is_collective(call) for call in calls):
            continue
        for condition in parts(loop, ast.If):
            if (
                condition.lineno < max(backward)
                and re.search(r"isnan|isinf|isfinite", ast.unparse(condition.test))
                and isinstance(condition.body[-1], ast.Continue | ast.Break)
            ):
                mended = "dist.all_reduce(bad := (~torch.isfinite(loss)).float())  # all ranks decide by `bad`"
                yield finding("step-left-out", condition, mended)


def _check_saving(source: ScriptSource) -> Iterator[ScriptFinding]:
    for call in source.calls:
        name = source.full_name(call.func)
        is_save = name == "torch.save" or (last_name(call.func) in _SAVING and "accelerat" not in name)
        if not is_save or source.is_guarded(call):
            continue
        places = [*call.args[1 if name == "torch.save" else 0 :], *(each.value for each in call.keywords)]
        if any(source.mentions_rank(each) for each in places):
            continue  # a file of each rank's own
        if _has_parameter_guard(source, call):
            continue
        yield finding("saved-by-all", call, f"if dist.get_rank() == 0: {source.line(call)}")


def _has_parameter_guard(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call is in a function that nobody in the file calls: another module may do so on one rank."""
    function = source.function_of(call)
    return function is not source.tree and getattr(function, "name", "") not in names_in(source.tree)


def _check_printing(source: ScriptSource) -> Iterator[ScriptFinding]:
    reduces = any(source.is_collective(each) and last_name(each.func) != "barrier" for each in source.calls)
    for call in source.calls:
        # `force` is of a `print` that prints on one rank alone, which references of torchvision and DETR put into
        # builtins: it prints on all ranks, as is meant.
        if not (isinstance(call.func, ast.Name) and call.func.id == "print") or keyword(call, "force") is not None:
            continue
        loops = [each for each in source.ancestors(call) if isinstance(each, ast.For | ast.While)]
        trains = any(map(has_backward, loops))
        is_guarded = source.is_guarded(call) or _replaces_print(source)
        if trains and not is_guarded and not source.is_before_exit(call) and not source.mentions_rank(call, 1):
            yield finding("printed-by-all", call, f"if dist.get_rank() == 0: {source.line(call)}")
        elif trains and is_guarded and "loss" in names_in(call) and not reduces:
            mended = "mean = loss.detach().clone(); dist.all_reduce(mean, dist.ReduceOp.AVG)  # on every rank"
            yield finding("loss-of-one-rank", call, mended)


def _replaces_print(source: ScriptSource) -> bool:
    names = {last_name(call.func) for call in source.calls}
    return bool(names & {"setup_for_distributed", "init_distributed_mode"}) or any(
        isinstance(node.ctx, ast.Store) and source.full_name(node) in _PRINTS for node in source.parts(ast.Attribute)
    )


def _check_names_in_checkpoints(source: ScriptSource) -> Iterator[ScriptFinding]:
    wrapped = source.wrapped_names()
    saved = [
        each
        for call in source.calls
        if source.full_name(call.func) == "torch.save" and call.args
        for each in parts(call.args[0], ast.Call)
        if last_name(each.func) == "state_dict" and owner(each) in wrapped
    ]
    models = [
        call
        for call in source.calls
        if last_name(call.func) == "load_state_dict"
        and not re.search(r"optim|sched|scaler|ema", owner(call), re.IGNORECASE)
        and not re.search(r"\.state_dict\(", ast.unparse(call))  # a copy of another network
    ]
    plain = [call for call in models if not _is_wrapped(source, call, wrapped)]
    for call in saved:
        if models and not plain:
            continue  # into a wrapped model again
        name = owner(call)
        mended = ast.unparse(call).replace(f"{name}.state_dict", f"{name}.module.state_dict")
        yield finding("module-in-names", call, mended, level=None if plain else Level.NOTE)


def _is_wrapped(source: ScriptSource, call: ast.Call, wrapped: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Return whether a method is called on a wrapper: one that was made before, or in another function."""
    return any(
        made.lineno < call.lineno or source.function_of(made) is not source.function_of(call)
        for made in wrapped.get(owner(call), ())
    )


# -- Devices, ports, and where loaded tensors go -----------------------------------------------------------------------


def _check_devices(source: ScriptSource) -> Iterator[ScriptFinding]:
    for call in source.calls:
        if source.is_call_of(call, *WRAPPERS):
            yield from _check_device_ids(source, call)
        elif source.full_name(call.func) == "torch.cuda.set_device" and call.args:
            if isinstance(call.args[0], ast.Constant):
                yield finding("one-device", call, "torch.cuda.set_device(local_rank)", naming=ast.unparse(call.args[0]))
        elif source.full_name(call.func) == "torch.load":
            yield from _check_map_location(source, call)


def _check_device_ids(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    ids = keyword(call, "device_ids")
    hides_devices = any(getattr(each, "value", None) == "CUDA_VISIBLE_DEVICES" for each in ast.walk(source.tree))
    if not isinstance(ids, ast.List | ast.Tuple) or hides_devices:
        return
    mended = "[local_rank]"
    if len(ids.elts) > 1:
        text = "A rank's wrapper takes one device; several are for a model that one process divides."
    elif ids.elts and isinstance(ids.elts[0], ast.Constant):
        text = f"Every rank uses device {ast.unparse(ids.elts[0])}."
    elif ids.elts and _is_global_rank(source, ids.elts[0]):
        text = (
            "Devices are numbered on each host, and this is the rank in the whole job: on a second host there is "
            "no such device."
        )
        mended = '[int(os.environ["LOCAL_RANK"])]'
    else:
        return
    yield finding("device-ids", ids, with_keyword(call, device_ids=mended), naming=text)


def _is_global_rank(source: ScriptSource, node: ast.expr) -> bool:
    values = source.values_of(node)
    return bool(values) and all(
        ast.unparse(value) in {"int(os.environ['RANK'])", "int(os.getenv('RANK'))"}
        or (isinstance(value, ast.Call) and last_name(value.func) == "get_rank")
        for value in values
    )


def _check_map_location(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    # Whoever also loads the same file with a location chooses between the two, by the devices that there are.
    loads = [each for each in source.calls if source.full_name(each.func) == "torch.load" and each.args]
    same = [each for each in loads if call.args and ast.dump(each.args[0]) == ast.dump(call.args[0])]
    has_location = any(
        keyword(each, "map_location") is not None or len(each.args) > 1 or has_unknown_arguments(each)
        for each in [call, *same]
    )
    uses_cuda = any(node.attr == "cuda" for node in source.parts(ast.Attribute)) or any(
        isinstance(node.value, str) and node.value.startswith("cuda") for node in source.parts(ast.Constant)
    )
    if not has_location and uses_cuda and not source.is_guarded(call):
        yield finding("map-location", call, with_keyword(call, map_location='"cpu"'))


def _check_port(source: ScriptSource) -> Iterator[ScriptFinding]:
    for node in source.parts(ast.Assign):
        if not isinstance(node.value, ast.Constant):
            continue
        tests = [ast.unparse(each.test) for each in source.ancestors(node) if isinstance(each, ast.If)]
        is_port = ast.unparse(node.targets[0]).endswith("['MASTER_PORT']")
        if is_port and not any("MASTER_PORT" in each for each in tests):
            mended = f'os.environ.setdefault("MASTER_PORT", {ast.unparse(node.value)})  # torchrun sets it'
            yield finding("fixed-port", node, mended)
