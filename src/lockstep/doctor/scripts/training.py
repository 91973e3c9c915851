"""The rules about what is computed: the order of samples, random numbers, gradients, losses."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from lockstep.doctor.scripts.findings import ScriptFinding, finding
from lockstep.doctor.scripts.source import ScriptSource, has_unknown_arguments, keyword, last_name, names_of

_AUGMENTING: Final = re.compile(r"transforms(\.v2)?\.(Random\w+|ColorJitter|AutoAugment|TrivialAugment\w*|AugMix)")
_SEEDING: Final = {"manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all"}


def _check_set_epoch(source: ScriptSource) -> Iterator[ScriptFinding]:
    if any(last_name(call.func) == "set_epoch" for call in source.calls):
        return
    loop = _epoch_loop(source)
    shuffling = [
        call
        for call in source.calls
        if source.is_call_of(call, "DistributedSampler")
        and not (isinstance(value := keyword(call, "shuffle"), ast.Constant) and value.value is False)
        and not has_unknown_arguments(call)
        and not _is_passed_on(source, call)
    ]
    if loop is None or not shuffling:
        return
    name = next(iter(names_of(source, shuffling[0])), "loader.sampler")
    yield finding("set-epoch", loop, f"{name}.set_epoch({ast.unparse(loop.target)})  # first in the loop over epochs")


def _is_passed_on(source: ScriptSource, sampler: ast.Call) -> bool:
    """Return whether a sampler is given to a function of another file, which may call set_epoch."""
    names = names_of(source, sampler)
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


def _check_seeds(source: ScriptSource) -> Iterator[ScriptFinding]:
    seeds = [call for call in source.calls if last_name(call.func) in _SEEDING and call.args]
    if not seeds or any(source.mentions_rank(call) for call in seeds):
        return
    names = " ".join(source.full_name(call.func) for call in source.calls)
    if _AUGMENTING.search(names):
        call = seeds[-1]
        mended = f"{ast.unparse(call.func)}({ast.unparse(call.args[0])} + rank)  # after the model is made"
        yield finding("one-seed", call, mended)


TRAINING_RULES: Final = (_check_set_epoch, _check_seeds)
