"""The mistakes in a config, as sentences: what pydantic has found, in the words of who wrote the config."""

import difflib
from collections.abc import Collection, Mapping

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from lockstep.runs.training_options import EarlyStoppingOptions, EMAOptions, SWAOptions

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys and values",
    "string_pattern_mismatch": "an import path of the form package.module:name",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "less_than_equal": "at most {le}",
    "model_type": "keys and values",
    "string_too_short": "some text",
}
_EXAMPLES: Mapping[str, str] = {
    "early_stopping": "{metric: val_loss, patience: 3}",
    "ema": "{decay: 0.999}",
    "swa": "{start_epoch: 5}",
}
_IMPORTED: Mapping[str, str] = {
    "model": "", "data": "", "metric": "", "finish": "", "loss": "torch.nn", "optimizer": "torch.optim"
}  # fmt: skip
"""Keys of import paths, and the module of a name without one."""
_OTHERS_WORDS: Mapping[str, str] = {
    **{name: f" Did you mean 'optimizer_args.{name}'?" for name in ("lr", "weight_decay", "momentum", "betas")},
    "learning_rate": " Did you mean 'optimizer_args.lr'?",
    "gpus": " Did you mean 'device_ids'?",
    "output_dir": " Did you mean 'run_dir'?",
    "amp": " Did you mean 'precision'?",
}
"""What other tools call a key, and what newcomers therefore type."""
_NAMES: Mapping[str, str] = {"scheduler": "constant, linear, cosine, plateau", "weights": "balanced"}
_GROUPS: Mapping[str, type[BaseModel]] = {
    "early_stopping": EarlyStoppingOptions,
    "ema": EMAOptions,
    "swa": SWAOptions,
}
_GROUP_KEYS = {key for group in _GROUPS.values() for key in group.model_fields}


def explain_mistake(details: ErrorDetails, keys: Collection[str]) -> str:
    place = [str(part) for part in details["loc"] if str(part) in _GROUP_KEYS or part == details["loc"][0]]
    name = ".".join(place)
    kind = details["type"]
    if kind == "extra_forbidden":
        *groups, last = map(str, details["loc"])
        known = _GROUPS[groups[0]].model_fields if groups else keys
        said = "" if groups else _OTHERS_WORDS.get(last, "")
        return f"there is no key {'.'.join([*groups, last])!r}.{said or _suggest(last, known)}"
    if kind == "missing":
        return f"the key {name!r} is missing."
    if kind == "value_error":
        return f"{details['ctx']['error']}."
    if name in {"callbacks", "metrics"}:
        return (
            f"{name} holds {details['input']!r}, expected a list of import paths package.module:name, each alone or "
            "with its arguments: - mine:Name, or - mine:Name: {argument: 2}."
        )
    if name == "trackers":
        return (
            f"trackers holds {details['input']!r}, expected a list of tensorboard, wandb, mlflow or import paths "
            "package.module:name, each alone or with options: - wandb, or - wandb: {mode: offline}."
        )
    if name == "device_ids":
        return (
            f"device_ids is {details['input']!r}, expected auto, auto:3, auto:3@20GiB, cpu, cpu:2, or a list of GPU "
            "numbers or UUIDs such as [0, 2]."
        )
    if name == "param_groups" and len(details["loc"]) > 1:
        return (
            f"param_groups gives {details['loc'][1]!r} {details['input']!r}, expected options of the optimizer with "
            "their values, such as {lr: 0.01}."
        )
    if name in _NAMES:
        return f"{name} is {details['input']!r}, expected {_NAMES[name]}, or an import path package.module:name."
    expected = _EXPECTED.get(kind, "").format(**details.get("ctx", {})) or details["msg"]
    given = "empty" if details["input"] is None else repr(details["input"])
    return f"{name} is {given}, expected {expected}.{_hint(name, details['input'])}"


def _hint(name: str, given: object) -> str:
    """Return what was probably meant by a value of the wrong form, as a sentence; empty if nothing is known."""
    if name in _EXAMPLES:
        return f" For example: {_EXAMPLES[name]}."
    if not isinstance(given, str) or ":" in given or name not in _IMPORTED:
        return ""
    module, _, attribute = given.rpartition(".")
    module = module or _IMPORTED[name]
    return f" Did you mean {f'{module}:{attribute}'!r}?" if module and attribute.isidentifier() else ""


def _suggest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(known)}."
