"""Rules about what one rank does and the others do not, and about what all do and one should."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lockstep.doctor.scripts.source import (
    WRAPPERS,
    Level,
    ScriptFinding,
    ScriptSource,
    has_backward,
    keyword,
    last_name,
)

_COLLECTIVES: Final = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("gather_into_tensor", "gather_single", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list"),
}
_SAVING: Final = {"save_pretrained", "save_model", "save_file"}
_AUGMENTING: Final = re.compile(r"transforms(\.v2)?\.(Random\w+|ColorJitter|AutoAugment|TrivialAugment\w*|AugMix)")
_SEEDING: Final = {"manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all"}


def check_ranks(source: ScriptSource) -> Iterator[ScriptFinding]:
    yield from _check_collectives(source)
    yield from _check_skipped_steps(source)
    yield from _check_saving(source)
    yield from _check_printing(source)
    yield from _check_names_in_checkpoints(source)
    yield from _check_seeds(source)


def _is_collective(source: ScriptSource, call: ast.Call) -> bool:
    name = source.full_name(call.func)
    owner, _, last = name.rpartition(".")
    return last in _COLLECTIVES and (owner.endswith("distributed") or owner in {"dist", "c10d"})


def _check_collectives(source: ScriptSource) -> Iterator[ScriptFinding]:
    alone = [
        call
        for call in source.calls
        if _is_collective(source, call) and not _has_group(call) and _is_alone(source, call)
    ]
    barriers = [call for call in alone if last_name(call.func) == "barrier"]
    if len(barriers) == 2:  # noqa: PLR2004 - one for rank 0 and one for the others, around what rank 0 does first
        alone = [call for call in alone if call not in barriers]
    for call in alone:
        name = last_name(call.func)
        yield ScriptFinding(
            rule="collective-on-some-ranks",
            level=Level.MISTAKE,
            line=call.lineno,
            text=f"Only some ranks call {name} here: they wait for ever, or take the others' next call for it.",
            mended=f"{source.line(call)}  # outside of the condition, on every rank",
        )


def _has_group(call: ast.Call) -> bool:
    """Return whether a call is one of a group of its own, whose ranks are not known here."""
    return keyword(call, "group") is not None or any("group" in ast.unparse(each) for each in call.args)


def _is_alone(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether some ranks make a call and the others, in the other branch, do not."""
    name = last_name(call.func)
    for condition, is_in_body in source.guards(call):
        other = condition.orelse if is_in_body else condition.body
        if not any(
            isinstance(each, ast.Call) and last_name(each.func) == name for part in other for each in ast.walk(part)
        ):
            return True
    return bool(source.early_exits(call)) and not source.guards(call)


def _check_skipped_steps(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Yield steps that a rank leaves out by itself, because its own loss is not finite."""
    for loop in ast.walk(source.tree):
        if not isinstance(loop, ast.For):
            continue
        calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)]
        backward = [call.lineno for call in calls if last_name(call.func) == "backward"]
        if not backward or any(_is_collective(source, call) for call in calls):
            continue
        for condition in ast.walk(loop):
            if (
                isinstance(condition, ast.If)
                and condition.lineno < max(backward)
                and re.search(r"isnan|isinf|isfinite", ast.unparse(condition.test))
                and isinstance(condition.body[-1], ast.Continue | ast.Break)
            ):
                yield ScriptFinding(
                    rule="step-left-out",
                    level=Level.MISTAKE,
                    line=condition.lineno,
                    text="A rank whose loss is not finite leaves the backward out, for which the others wait.",
                    mended="dist.all_reduce(bad := (~torch.isfinite(loss)).float())  # all ranks decide by `bad`",
                )


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
        yield ScriptFinding(
            rule="saved-by-all",
            level=Level.MISTAKE,
            line=call.lineno,
            text="Every rank writes this file: they write over each other, and a reader may find half of one.",
            mended=f"if dist.get_rank() == 0: {source.line(call)}",
        )


def _has_parameter_guard(source: ScriptSource, call: ast.Call) -> bool:
    """Return whether a call is in a function that nobody in the file calls: another module may do so on one rank."""
    function = source.function_of(call)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    named = any(
        isinstance(node, ast.Name | ast.Attribute) and last_name(node) == function.name
        for node in ast.walk(source.tree)
    )
    return not named


def _check_printing(source: ScriptSource) -> Iterator[ScriptFinding]:
    for call in source.calls:
        if not (isinstance(call.func, ast.Name) and call.func.id == "print"):
            continue
        loops = [each for each in source.ancestors(call) if isinstance(each, ast.For | ast.While)]
        trains = any(map(has_backward, loops))
        if trains and not source.is_guarded(call) and not source.mentions_rank(call, 1):
            yield ScriptFinding(
                rule="printed-by-all",
                level=Level.NOTE,
                line=call.lineno,
                text="Every rank prints this line.",
                mended=f"if dist.get_rank() == 0: {source.line(call)}",
            )
        elif trains and source.is_guarded(call) and _prints_own_loss(source, call):
            yield ScriptFinding(
                rule="loss-of-one-rank",
                level=Level.NOTE,
                line=call.lineno,
                text="This is the loss of one rank's samples, not the mean over all ranks.",
                mended="mean = loss.detach().clone(); dist.all_reduce(mean, dist.ReduceOp.AVG)  # on every rank",
            )


def _prints_own_loss(source: ScriptSource, call: ast.Call) -> bool:
    reduces = any(_is_collective(source, each) and last_name(each.func) != "barrier" for each in source.calls)
    return not reduces and re.search(r"\bloss\b.*item\(\)|\bloss\b", ast.unparse(call)) is not None


def _check_names_in_checkpoints(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Yield checkpoints of the wrapper's state, whose names begin with `module.`, that a plain model is to load."""
    wrapped = _wrapped_names(source)
    saved = [
        each
        for call in source.calls
        if source.full_name(call.func) == "torch.save" and call.args
        for each in ast.walk(call.args[0])
        if isinstance(each, ast.Call) and last_name(each.func) == "state_dict" and _owner(each) in wrapped
    ]
    models = [
        call
        for call in source.calls
        if last_name(call.func) == "load_state_dict"
        and not re.search(r"optim|sched|scaler|ema", _owner(call), re.IGNORECASE)
    ]
    plain = [call for call in models if not _is_wrapped(source, call, wrapped)]
    for call in saved:
        if models and not plain:
            continue  # into a wrapped model again
        name = _owner(call)
        yield ScriptFinding(
            rule="module-in-names",
            level=Level.MISTAKE if plain else Level.NOTE,
            line=call.lineno,
            text='The saved names begin with "module.": a model that is not wrapped does not load them.',
            mended=f"{ast.unparse(call).replace(f'{name}.state_dict', f'{name}.module.state_dict')}",
        )


def _owner(call: ast.Call) -> str:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _wrapped_names(source: ScriptSource) -> dict[str, list[ast.expr]]:
    """Return the names to which a wrapper was assigned, with the calls that made it."""
    made = {
        name: [value for value in values if source.is_call_of(value, *WRAPPERS)]
        for name, values in source.assigned.items()
    }
    return {name: calls for name, calls in made.items() if calls}


def _is_wrapped(source: ScriptSource, call: ast.Call, wrapped: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Return whether a method is called on a wrapper: one that was made before, or in another function."""
    return any(
        made.lineno < call.lineno or source.function_of(made) is not source.function_of(call)
        for made in wrapped.get(_owner(call), ())
    )


def _check_seeds(source: ScriptSource) -> Iterator[ScriptFinding]:
    """Yield seeds that are the same on all ranks, where samples are augmented at random."""
    seeds = [call for call in source.calls if last_name(call.func) in _SEEDING and call.args]
    if not seeds or any(source.mentions_rank(call) for call in seeds):
        return
    names = " ".join(source.full_name(call.func) for call in source.calls)
    if _AUGMENTING.search(names):
        call = seeds[-1]
        yield ScriptFinding(
            rule="one-seed",
            level=Level.NOTE,
            line=call.lineno,
            text="All ranks draw the same random numbers, so their samples are augmented alike.",
            mended=f"{ast.unparse(call.func)}({ast.unparse(call.args[0])} + rank)  # after the model is made",
        )
