"""Rules about samplers, epochs, batch sizes and evaluation."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from lockstep.doctor.scripts.source import (
    Level,
    ScriptFinding,
    ScriptSource,
    has_backward,
    has_unknown_arguments,
    keyword,
    last_name,
    with_keyword,
)

_PREPARING: Final = ("prepare", "setup_dataloaders", "setup", "prepare_data_loader", "skip_first_batches")
"""Methods of Accelerate, Fabric and Ray that give a loader a sampler."""
_ONE_BY_ONE: Final = re.compile(r"iter|stream|webdataset|shard", re.IGNORECASE)
_LOADER_SAMPLER, _LOADER_BATCH_SAMPLER, _LOADER_SHUFFLE, _LOADER_BATCH_SIZE = 3, 4, 2, 1
"""Where these arguments of a DataLoader stand if they have no names."""


def check_data(source: ScriptSource) -> Iterator[ScriptFinding]:
    trained = _trained_names(source)
    for call in source.calls:
        if source.is_call_of(call, "DataLoader") and not has_unknown_arguments(call):
            yield from _check_sampler(source, call, trained)
            yield from _check_batch_size(source, call)
    yield from _check_set_epoch(source)
    yield from _check_evaluation(source)


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    found = keyword(call, name)
    return call.args[place] if found is None and len(call.args) > place else found


def _check_sampler(source: ScriptSource, call: ast.Call, trained: set[str]) -> Iterator[ScriptFinding]:
    sampler = _argument(call, "sampler", _LOADER_SAMPLER)
    if _argument(call, "batch_sampler", _LOADER_BATCH_SAMPLER) is not None or _is_prepared(source, call):
        return
    shuffle = _argument(call, "shuffle", _LOADER_SHUFFLE)
    shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
    names = _names_of(source, call)
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
    yield ScriptFinding(
        rule="no-sampler",
        level=Level.MISTAKE,
        line=call.lineno,
        text="Every rank reads all samples: an epoch is not divided over the ranks, and takes as long as with one.",
        mended=with_keyword(
            call,
            sampler=f"DistributedSampler({ast.unparse(dataset)}, shuffle={shuffles or shuffle is None})",
            shuffle="",
        ),
    )


def _names_of(source: ScriptSource, call: ast.Call) -> set[str]:
    """Return the names to which a call's result is assigned."""
    for each in source.ancestors(call):
        if isinstance(each, ast.Assign):
            return {last_name(target) for target in each.targets} - {""}
        if isinstance(each, ast.For) and each.iter is call:
            return {f"loop {each.lineno}"}
        if isinstance(each, ast.stmt):
            break
    return set()


def _trained_names(source: ScriptSource) -> set[str]:
    """Return the names of what is looped over in loops with a backward, and of loops over a call."""
    found: set[str] = set()
    for loop in ast.walk(source.tree):
        if isinstance(loop, ast.For) and has_backward(loop):
            found.add(f"loop {loop.lineno}")
            found.update(last_name(each) for each in ast.walk(loop.iter) if isinstance(each, ast.Name | ast.Attribute))
    return found - {""}


def _is_prepared(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether another library gives loaders their samplers."""
    names = _names_of(source, call)
    for other in source.calls:
        if last_name(other.func) in _PREPARING:
            inside = {last_name(each) for each in ast.walk(other) if isinstance(each, ast.Name | ast.Attribute)}
            if names & inside or call in ast.walk(other):
                return True
    return False


def _differs_between_ranks(source: ScriptSource, dataset: ast.expr) -> bool:
    """Return whether a data set is another one on each rank, or may be one that is read in order."""
    for value in [dataset, *source.values_of(dataset)]:
        if source.mentions_rank(value) or "split_dataset_by_node" in ast.unparse(value):
            return True
        if isinstance(value, ast.Call):
            name = last_name(value.func)
            classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef) and node.name == name]
            for node in classes:
                if any("Iterable" in ast.unparse(base) for base in node.bases) or source.mentions_rank(node):
                    return True
    return False


def _check_batch_size(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    size = _argument(call, "batch_size", _LOADER_BATCH_SIZE)
    if size is None or not isinstance(size, ast.Name | ast.Attribute):
        return
    name = last_name(size)
    divided = any(isinstance(each, ast.BinOp) for value in source.values_of(size) for each in ast.walk(value))
    if re.search(r"global|total|effective", name, re.IGNORECASE) and not divided:
        yield ScriptFinding(
            rule="batch-size",
            level=Level.MISTAKE,
            line=size.lineno,
            text=f"A DataLoader's batch size is that of one rank, and {name} says that it is that of all.",
            mended=with_keyword(call, batch_size=f"{ast.unparse(size)} // world_size"),
        )


def _samplers(source: ScriptSource) -> list[ast.Call]:
    return [call for call in source.calls if source.is_call_of(call, "DistributedSampler")]


def _check_set_epoch(source: ScriptSource) -> Iterator[ScriptFinding]:
    if any(last_name(call.func) == "set_epoch" for call in source.calls):
        return
    loop = _epoch_loop(source)
    shuffling = [
        call
        for call in _samplers(source)
        if not (isinstance(value := keyword(call, "shuffle"), ast.Constant) and value.value is False)
        and not has_unknown_arguments(call)
        and not _is_passed_on(source, call)
    ]
    if loop is None or not shuffling:
        return
    name = next(iter(_names_of(source, shuffling[0])), "loader.sampler")
    yield ScriptFinding(
        rule="set-epoch",
        level=Level.MISTAKE,
        line=loop.lineno,
        text="set_epoch is never called: the samples come in the same order in every epoch.",
        mended=f"{name}.set_epoch({ast.unparse(loop.target)})  # first in the loop over epochs",
    )


def _is_passed_on(source: ScriptSource, sampler: ast.Call) -> bool:
    """Return whether a sampler is given to a function of another file, which may call set_epoch."""
    names = _names_of(source, sampler)
    defined = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for call in source.calls:
        given = [*call.args, *(each.value for each in call.keywords)]
        is_elsewhere = last_name(call.func) not in {*defined, "DataLoader", "len", "print"}
        if is_elsewhere and any(last_name(each) in names for each in given):
            return True
    return False


def _epoch_loop(source: ScriptSource) -> ast.For | None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            counted = ast.unparse(node.iter)
            if counted != "range(1)" and re.search(r"epoch", node.target.id + counted, re.IGNORECASE):
                return node
    return None


def _check_evaluation(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Yield loaders of evaluations that a DistributedSampler pads."""
    evaluated = _evaluated_names(source) - _trained_names(source)
    for call in source.calls:
        if not source.is_call_of(call, "DataLoader"):
            continue
        sampler = _argument(call, "sampler", _LOADER_SAMPLER)
        if sampler is None or not _names_of(source, call) & evaluated:
            continue
        for value in source.values_of(sampler):
            if isinstance(value, ast.Call) and source.is_call_of(value, "DistributedSampler"):
                drops = keyword(value, "drop_last")
                if drops is None and not has_unknown_arguments(value):
                    yield ScriptFinding(
                        rule="padded-evaluation",
                        level=Level.NOTE,
                        line=value.lineno,
                        text="Where the samples do not divide by the ranks, some are counted twice in this evaluation.",
                        mended=f"{_with_own_name(with_keyword(value, pad='False'))}  # each sample on one rank; "
                        "add up sums and counts, not means",
                    )


def _with_own_name(call: str) -> str:
    """Return a call with our sampler in the place of torch's, which always pads or leaves samples out."""
    return f"lockstep.DistributedSampler({call.partition('(')[2]}"


def _evaluated_names(source: ScriptSource) -> set[str]:
    """Return the names of what is looped over without gradients."""
    found: set[str] = set()
    for loop in ast.walk(source.tree):
        if not isinstance(loop, ast.For) or has_backward(loop):
            continue
        around = [each for each in source.ancestors(loop) if isinstance(each, ast.With)]
        inside = [each for each in ast.walk(loop) if isinstance(each, ast.With)]
        withs = " ".join(ast.unparse(item) for each in (*around, *inside) for item in each.items)
        function = source.function_of(loop)
        decorated = " ".join(map(ast.unparse, getattr(function, "decorator_list", [])))
        if re.search(r"no_grad|inference_mode", withs + decorated):
            for each in ast.walk(loop.iter):
                if isinstance(each, ast.Name | ast.Attribute):
                    found |= _given_for(source, function, last_name(each))
    return found - {""}


def _given_for(source: ScriptSource, function: ast.AST | None, name: str) -> set[str]:
    """Return the names that calls in this file give for a parameter of a function; the name itself if it is none."""
    if not isinstance(function, ast.FunctionDef):
        return {name}
    parameters = [each.arg for each in function.args.args]
    if name not in parameters:
        return {name}
    place = parameters.index(name)
    calls = [call for call in source.calls if isinstance(call.func, ast.Name) and call.func.id == function.name]
    given = [_argument(call, name, place) for call in calls]
    return {last_name(each) for each in given if isinstance(each, ast.Name | ast.Attribute)} or {name}
