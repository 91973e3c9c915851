"""The config of a run: YAML in, one checked and frozen value out."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lockstep.devices import parse_request
from lockstep.errors import ConfigError, DeviceError, counted

ImportPath = Annotated[str, StringConstraints(strict=True, pattern=r"^[\w.]+:[\w.]+$")]
Kwargs = dict[str, Any]
_MAX_VALUES = 100_000
"""How many values a config may hold, aliases written out."""
_MAX_BYTES = 1 << 20
"""How long its file may be."""


class Config(BaseModel):
    """The config of `lockstep train`; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    model: ImportPath
    """Import path of the model: called with `model_args`, returns a `torch.nn.Module`."""
    model_args: Kwargs = {}
    data: ImportPath
    """Import path of the data: called with `data_args`, returns `(train, test)`; test may be None."""
    data_args: Kwargs = {}
    loss: ImportPath = "torch.nn.functional:cross_entropy"
    """Import path of the loss: a function of (output, target), or a class whose instances are such functions."""
    loss_args: Kwargs = {}
    optimizer: ImportPath = "torch.optim:AdamW"
    """Import path of the optimizer: called with the parameters and `optimizer_args`."""
    optimizer_args: Kwargs = {}
    scheduler: ImportPath | None = None
    """Import path of the learning-rate scheduler: called with the optimizer and `scheduler_args`."""
    scheduler_args: Kwargs = {}
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """How often the scheduler steps."""
    metric: ImportPath | None = None
    """Import path of a function of (output, target) that returns a sum and a count; None: accuracy, if it applies."""
    finish: ImportPath | None = None
    """Import path of a function that is called with the trained model on rank 0; what it returns is printed."""
    finish_args: Kwargs = {}
    batch_size: int = Field(default=128, ge=1)
    """Number of samples of a step, over all workers."""
    drop_last: bool = False
    """Whether an epoch of the training data ends before a last batch that is smaller than the others."""
    num_shards: int = Field(default=4, ge=1)
    """Number of parts of each batch. It belongs to the run, so the number of workers does not change the result."""
    epochs: int = Field(default=10, ge=1)
    """Passes over the training set."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the 2-norm of the gradients to this value."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of torch.autocast for model and loss; parameters keep their dtype."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does: stop the run, or skip the step."""
    balance: Literal["even", "speed"] = "even"
    """Whether shards move from slow workers to fast workers; this does not change the result."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random numbers."""
    deterministic: bool = True
    """Use only deterministic operators, so that every run has the same digest."""
    device_ids: str | list[int | str] = "auto"
    """Devices: auto, auto:3, auto:3>=20GiB, cpu, cpu:2, or a list of GPUs by nvidia-smi's index or by UUID."""
    workers: int | None = Field(default=None, ge=1)
    """Number of workers, if device_ids does not determine it."""
    on_worker_loss: Literal["continue", "stop"] = "continue"
    """What the other workers do when one is killed: continue with its shards (on the CPU of one host), or stop."""
    min_workers: int = Field(default=1, ge=1)
    """With fewer workers left the run stops."""
    threads_per_worker: int = Field(default=1, ge=1)
    """CPU threads of each worker. It belongs to the run, because it changes the last bits of a matrix product."""
    loader_workers: int = Field(default=0, ge=0)
    """Data-loading processes of each worker."""
    run_dir: str | None = Field(default=None, min_length=1)
    """The run directory, which must not exist yet, but with `resume`; None for a new numbered one under runs/."""
    resume: Literal["auto"] | None = None
    """auto: continue the run of this directory, or of this job, if there is one; for launchers that restart workers."""
    keep: int = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep."""
    keep_best: str | None = Field(default=None, min_length=1)
    """A metric of the test set, by which the best checkpoint is kept too; `-loss` if lower is better."""
    save_every: int | None = Field(default=None, ge=1)
    """Save after every so many steps too; None to save only at the end of each epoch."""
    async_save: bool = True
    """Whether checkpoints are written in the background, from a copy of the state, while the training continues."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """What happens if a checkpoint or a line of metrics cannot be written: stop the run, or warn."""

    @field_validator("device_ids", mode="before")
    @classmethod
    def _list_one_device(cls, request: object) -> object:
        """Turn the index of one GPU, which YAML reads as an integer, into a list."""
        return [request] if isinstance(request, int) and not isinstance(request, bool) else request

    @field_validator("device_ids")
    @classmethod
    def _check_devices(cls, request: str | list[int | str]) -> str | list[int | str]:
        try:
            parse_request(request)
        except DeviceError as error:
            raise ValueError(str(error).removesuffix(".")) from error
        return request

    @field_validator("keep_best")
    @classmethod
    def _check_best(cls, name: str | None) -> str | None:
        if name == "loss":
            raise ValueError(
                "keep_best is 'loss', which would keep the highest loss. Write '-loss', because lower is better"
            )
        return name

    @model_validator(mode="after")
    def _check_shards(self) -> "Config":
        if self.batch_size < (self.workers or 1):
            raise ValueError(f"batch_size is {self.batch_size}, smaller than the {self.workers} workers that share it")
        if self.batch_size < self.num_shards:
            raise ValueError(
                f"batch_size is {self.batch_size}, smaller than num_shards ({self.num_shards}): each shard needs a "
                "sample of every batch"
            )
        return self

    def check_workers(self, num_workers: int) -> None:
        """Check the number of workers that follows from the devices.

        Raises:
            ConfigError: There are more workers than shards, or fewer than `min_workers`.
        """
        if num_workers > self.num_shards:
            raise ConfigError(
                f"{num_workers} workers cannot share num_shards = {self.num_shards} shards: some would have nothing "
                f"to do. Use at most {self.num_shards} workers, or set num_shards to {num_workers} or more."
            )
        if num_workers < self.min_workers:
            raise ConfigError(
                f"min_workers is {self.min_workers}, but the run starts with {counted(num_workers, 'worker')}. Use "
                "more workers, or lower min_workers."
            )

    def to_yaml(self) -> str:
        """Return the config with every default filled in, as YAML."""
        stream = StringIO()
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        yaml.dump(self.model_dump(), stream)
        return stream.getvalue()


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply `key=value` overrides.

    Args:
        path: A YAML 1.2 file.
        overrides: `key=value`, the value as YAML; dots reach into arguments: `optimizer_args.lr=1e-3`.

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown, or a value has the wrong type. One message lists
            all mistakes.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no config file {path}. Check the path. For an example, see examples/digits.yaml."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} is longer than {_MAX_BYTES >> 20} MiB, which no config is. Check the path.")
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_kind(values)}, expected keys and values such as `batch_size: 128`.")
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, Any], source: str) -> Config:
    """Check the values of a config.

    Raises:
        ConfigError: Values are wrong. One message lists all mistakes.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        problems = list(dict.fromkeys(_explain(details) for details in error.errors(include_url=False)))
        if len(problems) == 1:
            raise ConfigError(f"{source}: {problems[0]}") from error
        raise ConfigError(
            f"{source} has {len(problems)} mistakes:\n" + "\n".join(f"  {p}" for p in problems)
        ) from error


def _check_size(root: Any, source: str) -> None:
    """Refuse a document whose aliases stand for more than a config can hold: ten lines can stand for gigabytes.

    Args:
        root: Its node; None for an empty document.
        source: What it is, for the message.

    Raises:
        ConfigError: It is larger, or contains itself.
    """
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def count(node: Any) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in under_way:
            raise ConfigError(f"{source} has a value that contains itself: the alias of an anchor is inside of it.")
        under_way.add(id(node))
        value = node.value if isinstance(node.value, list) else []
        inner = [each for entry in value for each in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = found = 1 + sum(map(count, inner))
        under_way.discard(id(node))
        return found

    num_values = count(root) if root is not None else 0
    if num_values > _MAX_VALUES:
        raise ConfigError(
            f"{source} stands for {num_values:,} values, and a config has at most {_MAX_VALUES:,}. Its aliases (*name) "
            "repeat what their anchors (&name) hold: write out what is needed."
        )


def _parse_yaml(text: str, source: str) -> Any:
    try:
        _check_size(YAML(typ="safe", pure=True).compose(text), source)
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply for a config.") from error
    except (YAMLError, ValueError) as error:  # ValueError: an invalid date
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source} is not YAML{place}: {problem}.") from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not (key and equals):
        raise ConfigError(
            f"{override!r} is not an override, expected key=value, e.g. epochs=3 or optimizer_args.lr=0.01."
        )
    *parents, last = key.split(".")
    place = values
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"The override {override!r} reaches into {parent!r}, which holds {_kind(inner)}.")
        place = inner
    place[last] = _parse_yaml(text, f"the value of {key}")


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
    "string_too_short": "some text",
}


def _explain(details: ErrorDetails) -> str:
    place = [str(part) for part in details["loc"]]
    name = place[0] if place else ""
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"there is no key {name!r}.{_suggest(name, Config.model_fields)}"
    if kind == "missing":
        return f"the key {name!r} is missing."
    if kind == "value_error":
        return f"{details['ctx']['error']}."
    if name == "device_ids":
        return (
            f"device_ids is {details['input']!r}, expected auto, auto:3, auto:3>=20GiB, cpu, cpu:2, or a list of GPU "
            "numbers or UUIDs such as [0, 2]."
        )
    expected = _EXPECTED.get(kind, "").format(**details.get("ctx", {})) or details["msg"]
    given = "empty" if details["input"] is None else repr(details["input"])
    return f"{name} is {given}, expected {expected}."


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, cast("list[str]", list(known)), n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(known)}."


def _kind(value: object) -> str:
    kinds: dict[type, str] = {type(None): "nothing", str: "text", list: "a list", dict: "keys and values"}
    return kinds.get(type(value), f"the value {value!r}")
