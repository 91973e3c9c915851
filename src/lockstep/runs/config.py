"""The config of a run: YAML in, one checked and frozen value out. Needs no torch."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from lockstep.devices import parse_request
from lockstep.errors import ConfigError, DeviceError, clause, counted, missing_extra
from lockstep.launch.restarts import USUAL_RESPAWNS

try:
    from pydantic import (
        BaseModel,
        ConfigDict,
        Field,
        StringConstraints,
        ValidationError,
        ValidationInfo,
        field_validator,
        model_validator,
    )
    from pydantic_core import ErrorDetails
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
except ModuleNotFoundError as error:  # trackers in a loop of one's own, which the command has not started
    raise missing_extra(error) from error

ImportPath = Annotated[str, StringConstraints(strict=True, pattern=r"^[\w.]+:[\w.]+$")]
NamedObject = ImportPath | Annotated[dict[ImportPath, dict[str, Any]], Field(min_length=1, max_length=1)]
"""An import path, or one with arguments: `mine:Freeze`, or `{mine:Freeze: {until_epoch: 2}}`."""
TrackerName = Annotated[str, StringConstraints(strict=True, pattern=r"^(tensorboard|wandb|mlflow|[\w.]+:[\w.]+)$")]
NamedTracker = TrackerName | Annotated[dict[TrackerName, dict[str, Any]], Field(min_length=1, max_length=1)]
"""A tracker by its name or import path, alone or with options: `tensorboard`, or `{wandb: {mode: offline}}`."""
Kwargs = dict[str, Any]
_OTHER_NAMES = {"devices": "device_ids"}
"""Keys by what commands and `launch` call them."""
_MAX_BYTES = 1 << 20
"""How long its file may be."""
_MAX_VALUES = 100_000
"""How many values a config may hold, aliases written out."""
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class OptionGroup(BaseModel):
    """A key of a config that holds keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EarlyStoppingOptions(OptionGroup):
    """When the run ends before its last epoch."""

    metric: str | None = None
    """A metric of an evaluation; None for the loss of the test set, without one that of the first of the others."""
    patience: int = Field(default=3, ge=1)
    """How many evaluations in a row without an improvement end the run."""
    min_delta: float = Field(default=0.0, ge=0)
    """By how much a value must be better."""
    mode: Literal["min", "max"] | None = None
    """Whether a lower value is better or a higher one; None to conclude it from the metric's name."""


class EMAOptions(OptionGroup):
    """The exponential moving average of the weights."""

    decay: float = Field(default=0.999, ge=0, lt=1)
    """How much of the average stays in each step."""


class SWAOptions(OptionGroup):
    """The mean of the weights at the ends of epochs."""

    start_epoch: int = Field(ge=0)
    """The first epoch, counted from 0, whose end is in the mean."""


class Config(BaseModel):
    """The config of `lockstep train`; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    model: ImportPath
    """Import path of the model: called with `model_args`, returns a `torch.nn.Module`."""
    model_args: Kwargs = {}
    data: ImportPath
    """Import path of the data: called with `data_args`, returns `(train, test)`, test may be None; or them by name."""
    data_args: Kwargs = {}
    loss: ImportPath = "torch.nn.functional:cross_entropy"
    """Import path of the loss: a function of (output, target), or a class whose instances are such functions; or a name
    of torch's, such as mse."""
    loss_args: Kwargs = {}
    optimizer: ImportPath = "torch.optim:AdamW"
    """Import path of the optimizer: called with the parameters and `optimizer_args`; or a name of torch's: sgd."""
    optimizer_args: Kwargs = {}
    param_groups: dict[str, Kwargs] = {}
    """Options of the optimizer by patterns of parameter names."""
    no_decay: bool = False
    """Whether biases and parameters of normalizations have weight_decay 0."""
    scheduler: ImportPath | Literal["constant", "linear", "cosine", "plateau"] | None = None
    """Import path of the learning-rate scheduler, called with the optimizer and `scheduler_args`; or a name."""
    scheduler_args: Kwargs = {}
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """How often the scheduler steps; one with a name steps per step, and plateau per evaluation."""
    warmup: float = Field(default=0.0, ge=0)
    """Steps in which the learning rate grows at first, or a part of the run; for a scheduler with a name, or none."""
    metric: ImportPath | None = None
    """Import path of a function of (output, target) that returns a sum and a count; None: accuracy, if it applies."""
    metrics: list[NamedObject] = []
    """Further metrics: functions as `metric`, or classes of torchmetrics, alone or as `{path: arguments}`."""
    finish: ImportPath | None = None
    """Import path of a function that is called with the trained model on rank 0; what it returns is printed."""
    finish_args: Kwargs = {}
    batch_size: int = Field(default=128, ge=1)
    """Number of samples of a step, over all workers."""
    drop_last: bool = False
    """Whether an epoch of the training data ends before a last batch that is smaller than the others."""
    weights: ImportPath | Literal["balanced"] | None = None
    """Import path of a function of the training set that returns how often to draw each sample; or a name."""
    collate: ImportPath | None = None
    """Import path of a function that makes a batch of a list of samples; None: torch's `default_collate`."""
    lengths: ImportPath | None = None
    """Import path of a function of the training set that returns the length of each sample: similar ones in a batch."""
    num_shards: int = Field(default=4, ge=1)
    """Number of parts of each batch. It belongs to the run, so the number of workers does not change the result. Where
    it is not set, a run begins with one that fits its workers: `with_shards`."""
    accumulate: int = Field(default=1, ge=1)
    """By how much the number of parts is multiplied, to use less memory: gradients of the parts are added."""
    epochs: int = Field(default=10, ge=1)
    """Passes over the training set."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the 2-norm of the gradients to this value."""
    track_grad_norm: bool = False
    """Record the 2-norm of the gradient in each step."""
    compile: bool | str = False
    """Whether torch.compile compiles the model, or with which backend."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of torch.autocast for model and loss; parameters keep their dtype."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does: stop the run, or skip the step."""
    exact_mean: bool = True
    """Whether to refuse a loss that is not a mean over samples, whose gradient depends on `num_shards`."""
    first_steps_verified: int = Field(default=3, ge=0)
    """In how many steps after the first one shards are computed once more; see `Trainer`'s `verify_steps`."""
    audit: bool = False
    """Whether the bits of each step are logged, so that `lockstep audit` can take any of them again and compare."""
    shard_optimizer: bool = False
    """Whether each worker holds a part of the optimizer's state alone, and updates that part of the parameters."""
    neighbours: int = Field(default=1, ge=0)
    """How many further workers hold each part, so that it is not lost with a worker; for `shard_optimizer`."""
    balance: Literal["even", "speed"] = "even"
    """Whether shards move from slow workers to fast workers; this does not change the result."""
    callbacks: list[NamedObject] = []
    """Import paths of callbacks, or `{path: arguments}`: classes of `lockstep.Callback`."""
    early_stopping: EarlyStoppingOptions | None = None
    """End the run when a metric does not become better any more."""
    ema: EMAOptions | None = None
    """Keep an exponential moving average of the weights, which is evaluated and saved as well."""
    swa: SWAOptions | None = None
    """Keep the mean of the weights at the ends of epochs, which is evaluated and saved as well."""
    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many steps."""
    max_time: str | float | None = None
    """End the run after this time: seconds, or 90m, 1h30m, 2d. It goes on counting when the run is resumed."""
    dry_run: bool = False
    """Take two steps, evaluate two batches of each set, save, and end; `lockstep train --dry-run` sets it."""
    overfit: int | None = Field(default=None, ge=1)
    """Train on so many batches alone, and evaluate on them: a model that can learn fits them."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random numbers."""
    deterministic: bool = True
    """Use only deterministic operators, so that every run has the same digest."""
    portable: bool = False
    """Whether the bits are the same on every x86-64 processor: on CPUs, in one thread of each worker, more slowly."""
    device_ids: str | list[int | str] = "auto"
    """Devices: auto, auto:3, auto:3@20GiB, cpu, cpu:2, or a list of GPUs by nvidia-smi's index or by UUID."""
    workers: int | None = Field(default=None, ge=1)
    """Number of workers, if device_ids does not determine it."""
    on_worker_loss: Literal["continue", "stop"] | None = None
    """What the other workers do when one is killed: continue with its shards, the default on CPUs; or stop, on GPUs."""
    min_workers: int = Field(default=1, ge=1)
    """With fewer workers left the run stops."""
    respawn: int | None = Field(default=None, ge=0)
    """How often a lost worker is replaced, at most, in `respawn_minutes`; true for 3 times. Without it none is, and
    killed loading processes are started anew 3 times; with 0 they are not either."""
    respawn_minutes: float = Field(default=10.0, gt=0)
    """The time in which replacements are counted, in minutes."""
    spares: int = Field(default=0, ge=0)
    """How many more workers wait, with everything imported and built, to replace a lost one."""
    evict_after: float | None = Field(default=None, gt=0)
    """Kill a worker that hangs for so many seconds while others wait for it; they continue without it."""
    threads_per_worker: int = Field(default=1, ge=1)
    """CPU threads of each worker. It belongs to the run, because it changes the last bits of a matrix product."""
    loader_workers: int = Field(default=0, ge=0)
    """Data-loading processes of each worker."""
    run_dir: str | None = Field(default=None, min_length=1)
    """The run directory, which must not exist yet, but with `resume`; None for a new numbered one under runs/."""
    resume: Literal["auto"] | None = None
    """auto: `--resume auto`, which continues the run of this directory, or of this job, if there is one."""
    keep: int = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep."""
    keep_best: str | None = Field(default=None, min_length=1)
    """A metric of any set that is evaluated, by which the best checkpoint is kept too. Whether lower or higher is
    better follows from its name, or it is higher; a - before it says lower."""
    save_every: int | None = Field(default=None, ge=1)
    """Save after every so many steps too; None to save only at the end of each epoch."""
    report: bool = True
    """Whether a page about the run is written at its end: report.html in the run directory."""
    save_code: bool = True
    """Whether changes of the config's folder that git has not committed are saved in the run directory, as a patch."""
    trackers: list[NamedTracker] = []
    """Where else the metrics are shown: tensorboard, wandb, mlflow or import paths, each alone or with options."""
    async_save: bool = True
    """Whether checkpoints are written in the background, from a copy of the state, while the training continues."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """What happens if a checkpoint or a line of metrics cannot be written: stop the run, or warn."""

    @field_validator("loss", "optimizer", "scheduler", mode="before")
    @classmethod
    def _find_torchs_name(cls, given: object, info: ValidationInfo) -> object:
        return find_torchs_name(str(info.field_name), given) or given if isinstance(given, str) else given

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
            raise ValueError(clause(error)) from error
        return request

    @field_validator("respawn", mode="before")
    @classmethod
    def _count_respawns(cls, given: object) -> object:
        return given * USUAL_RESPAWNS if isinstance(given, bool) else given

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, text: str | float | None) -> str | float | None:
        if text is not None:
            parse_seconds(text)
        return text

    @model_validator(mode="after")
    def _check_shards(self) -> "Config":
        if self.batch_size < (self.workers or 1):
            raise ValueError(f"batch_size is {self.batch_size}, smaller than the {self.workers} workers that share it")
        if self.batch_size < self.total_shards:
            times = f" times accumulate ({self.accumulate})" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size is {self.batch_size}, smaller than num_shards ({self.num_shards}){times}: each shard "
                "needs a sample of every batch"
            )
        if self.warmup and self.schedule is None:
            raise ValueError(
                f"warmup is for a scheduler that is constant, linear or cosine, and scheduler is {self.scheduler!r}. "
                "Leave it out, and make the warm-up a part of that scheduler"
            )
        return self

    @property
    def total_shards(self) -> int:
        return self.num_shards * self.accumulate

    @property
    def schedule(self) -> Literal["constant", "linear", "cosine"] | None:
        """The name of the schedule; None for a scheduler by import path, or none."""
        if self.scheduler in {"constant", "linear", "cosine"}:
            return cast("Literal['constant', 'linear', 'cosine']", self.scheduler)
        return "constant" if self.warmup and self.scheduler is None else None

    @property
    def steps_scheduler_per_epoch(self) -> bool:
        """Whether the scheduler steps at the end of each epoch, rather than in each step."""
        return self.schedule is None and self.scheduler_interval == "epoch"

    @model_validator(mode="after")
    def _check_elastic(self) -> "Config":
        if self.on_worker_loss == "stop" and (self.respawn or self.spares):
            name = "respawn" if self.respawn else "spares"
            raise ValueError(
                f"{name} is {getattr(self, name)}, but on_worker_loss is 'stop': a lost worker ends the run, so none "
                "is replaced. Use on_worker_loss: continue"
            )
        return self

    def continues_on(self, device_types: Collection[str]) -> bool:
        """Return whether the others continue when a worker on these types of devices is killed."""
        return self.on_worker_loss == "continue" or (self.on_worker_loss is None and {"cpu"}.issuperset(device_types))

    @property
    def most_workers(self) -> int:
        """How many workers can have a shard, at most."""
        return self.num_shards if "num_shards" in self.model_fields_set else self.batch_size // self.accumulate

    def with_shards(self, num_workers: int, *, is_said: bool) -> "Config":
        """Return the config of a new run, without `num_shards` with a multiple of its workers, 4 or more.

        Where the number of workers `is_said`, up to 4 have 4 shards: their results can be compared with each other.
        """
        usual = self.num_shards
        if "num_shards" in self.model_fields_set or (is_said and num_workers <= usual):
            return self
        fitting = num_workers * -(-usual // num_workers)
        return self.model_copy(update={"num_shards": fitting}) if fitting <= self.most_workers else self

    def check_workers(self, num_workers: int) -> None:
        if num_workers > self.num_shards:
            raise ConfigError(
                f"{num_workers} workers cannot share num_shards = {self.num_shards} shards: some would have nothing "
                f"to do. Use at most {counted(self.num_shards, 'worker')}, or in a new run set num_shards to "
                f"{num_workers} or more. (LS809)"
            )
        if num_workers < self.min_workers:
            raise ConfigError(
                f"min_workers is {self.min_workers}, but the run starts with {counted(num_workers, 'worker')}. Use "
                "more workers, or lower min_workers. (LS809)"
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
    """Read a config file and apply `key=value` overrides; one ConfigError lists all mistakes."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no config file {path}. Check the path. For an example, see examples/digits.yaml. (LS801)"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        hint = "" if path.is_file() and isinstance(error, OSError) else " For a checkpoint: lockstep checkpoint --help."
        raise ConfigError(f"The config file {path} cannot be read: {error}.{hint} (LS801)") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} is longer than {_MAX_BYTES >> 20} MiB, which no config is. Check the path. (LS801)")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_kind(values)}, expected keys and values such as `batch_size: 128`. (LS801)")
    if "device_ids" not in values:
        values = {_OTHER_NAMES.get(name, name): value for name, value in values.items()}
    apply_overrides(values, overrides)
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, Any], source: str) -> Config:
    """Check the values of a config; one ConfigError lists all mistakes."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        problems = list(
            dict.fromkeys(explain_mistake(details, Config.model_fields) for details in error.errors(include_url=False))
        )
        if len(problems) == 1:
            raise ConfigError(f"{source}: {problems[0]} (LS802)") from error
        raise ConfigError(
            f"{source} has {len(problems)} mistakes:\n" + "\n".join(f"  {p}" for p in problems) + " (LS802)"
        ) from error


def placement_overrides(values: Mapping[str, Any], workers: int | None, devices: str | None) -> list[str]:
    """Return the overrides that `--workers` and `--devices` stand for; `values` are those of the config."""
    if devices is not None:
        return [f"device_ids={devices}", "workers=" + ("null" if workers is None else str(workers))]
    if workers is None:
        return []
    given = values.get("device_ids", "auto")
    counted_anew = [] if isinstance(given, list) else [f"device_ids={re.sub(r':[0-9]+', '', str(given), count=1)}"]
    return [*counted_anew, f"workers={workers}"]


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Replace values of a config by `key=value` overrides, in place; `optimizer_args.lr=0.1` reaches into arguments."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise ConfigError(
                f"{override!r} is not an override, expected key=value, e.g. epochs=3 or optimizer_args.lr=0.01. (LS803)"
            )
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"The override {override!r} reaches into {parent!r}, which holds {_kind(inner)}. (LS803)"
                )
            place = inner
        place[last if parents else _OTHER_NAMES.get(last, last)] = parse_yaml(text, f"the value of {key}")


def _kind(value: object) -> str:
    kinds: dict[type, str] = {type(None): "nothing", str: "text", list: "a list", dict: "keys and values"}
    return kinds.get(type(value), f"the value {value!r}")


def parse_yaml(text: str, source: str) -> Any:
    try:
        _check_size(YAML(typ="safe", pure=True).compose(text), source)
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply for a config. (LS801)") from error
    except (YAMLError, ValueError) as error:  # ValueError: an invalid date
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source} is not YAML{place}: {problem}. (LS801)") from error


def _check_size(root: Any, source: str) -> None:
    """Refuse a document whose aliases stand for more than a config can hold: ten lines can stand for gigabytes."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def count(node: Any) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in under_way:
            raise ConfigError(
                f"{source} has a value that contains itself: the alias of an anchor is inside of it. (LS801)"
            )
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
            "repeat what their anchors (&name) hold: write out what is needed. (LS801)"
        )


def parse_seconds(text: str | float) -> float:
    """Return the seconds of a number, or of a text such as "90m", "1h30m" or "2d"; ValueError for anything else."""
    seconds: float = 0
    if isinstance(text, str):
        found = _TIME.fullmatch(text.replace(" ", ""))
        if found is not None:
            seconds = sum(int(number or 0) * unit for number, unit in zip(found.groups(), _UNITS.values(), strict=True))
    elif not isinstance(text, bool):
        seconds = float(text)
    if not seconds > 0:
        raise ValueError(f"max_time is {text!r}, expected seconds, or a time with units such as 90m, 1h30m or 2d")
    return seconds


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
_IMPORTED = frozenset({"model", "data", "metric", "finish", "loss", "optimizer"})
"""Keys of import paths alone."""
TORCHS_NAMES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "torch.optim": "Adam AdamW SGD Adadelta Adafactor Adagrad Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop "
        "SparseAdam"
    },
    "loss": {
        "torch.nn": "CrossEntropyLoss BCELoss BCEWithLogitsLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss "
        "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PoissonNLLLoss SmoothL1Loss "
        "SoftMarginLoss "
        # Refused when they are made, with what they take besides.
        "CTCLoss CosineEmbeddingLoss GaussianNLLLoss MarginRankingLoss TripletMarginLoss",
        "torch.nn.functional": "cross_entropy binary_cross_entropy binary_cross_entropy_with_logits",
    },
    "scheduler": {
        "torch.optim.lr_scheduler": "StepLR MultiStepLR ExponentialLR CosineAnnealingLR CosineAnnealingWarmRestarts "
        "OneCycleLR CyclicLR PolynomialLR ConstantLR LinearLR"
    },
}
"""Names that stand for themselves without a module: of what is called as a config calls it, without functions."""
_LEFT_OUT: Mapping[str, str] = {"loss": "loss", "scheduler": "lr"}
"""With what torch's names end, which need not be written."""
_IN_PARTS = (
    " Its batches become one step of larger ones: multiply batch_size by it. To use as little memory as with it, set "
    "accumulate to it too: that cuts a batch into so many more parts."
)
_OTHERS_WORDS: Mapping[str, str] = {
    **{name: f" Did you mean 'optimizer_args.{name}'?" for name in ("lr", "weight_decay", "momentum", "betas")},
    "learning_rate": " Did you mean 'optimizer_args.lr'?",
    "gpus": " Did you mean 'device_ids'?",
    "num_workers": " Did you mean 'workers', the processes that train, or 'loader_workers', those that load data?",
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps"), _IN_PARTS),
    "output_dir": " Did you mean 'run_dir'?",
    "amp": " Did you mean 'precision'?",
}
"""What other tools call a key, and what newcomers therefore type."""
_PATHS = "import paths package.module:name, each alone or with "
_WITH_ARGUMENTS = f"a list of {_PATHS}its arguments: - mine:Name, or - mine:Name: {{argument: 2}}"
_PATH = ", or an import path package.module:name"
_FORMS: Mapping[str, str] = {
    "scheduler": f"constant, linear, cosine, plateau, a name of torch's such as StepLR{_PATH}",
    "weights": f"balanced{_PATH}",
    "callbacks": _WITH_ARGUMENTS,
    "metrics": _WITH_ARGUMENTS,
    "trackers": f"a list of tensorboard, wandb, mlflow or {_PATHS}options: - wandb, or - wandb: {{mode: offline}}",
    "device_ids": "auto, auto:3, auto:3@20GiB, cpu, cpu:2, or a list of GPU numbers or UUIDs such as [0, 2]",
}
"""What keys hold that are not of one kind."""
_GROUPS: Mapping[str, type[BaseModel]] = {
    "early_stopping": EarlyStoppingOptions,
    "ema": EMAOptions,
    "swa": SWAOptions,
}
_GROUP_KEYS = {key for group in _GROUPS.values() for key in group.model_fields}


def explain_mistake(details: ErrorDetails, keys: Collection[str]) -> str:
    """Return a mistake that pydantic has found as a sentence, in the words of who wrote the config."""
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
    if name == "param_groups" and len(details["loc"]) > 1:
        return (
            f"param_groups gives {details['loc'][1]!r} {details['input']!r}, expected options of the optimizer with "
            "their values, such as {lr: 0.01}."
        )
    if name in _FORMS:
        verb = "holds" if isinstance(Config.model_fields[name].default, list) else "is"
        return f"{name} {verb} {details['input']!r}, expected {_FORMS[name]}.{_hint(name, details['input'])}"
    expected = _EXPECTED.get(kind, "").format(**details.get("ctx", {})) or details["msg"]
    if name in TORCHS_NAMES:
        expected += f", or a name of torch's such as {next(iter(TORCHS_NAMES[name].values())).partition(' ')[0]}"
    given = "empty" if details["input"] is None else repr(details["input"])
    return f"{name} is {given}, expected {expected}.{_hint(name, details['input'])}"


def _hint(name: str, given: object) -> str:
    """Return what was probably meant by a value of the wrong form, as a sentence; empty if nothing is known."""
    if name in _EXAMPLES:
        return f" For example: {_EXAMPLES[name]}."
    if name == "weights" and isinstance(given, list):
        return f" It is for samples. Weights of the classes in the loss: loss_args: {{weight: {given}}}."
    if not isinstance(given, str) or ":" in given or name not in {*_IMPORTED, *TORCHS_NAMES}:
        return ""
    module, _, attribute = given.rpartition(".")
    if module and attribute.isidentifier():
        return f" Did you mean {f'{module}:{attribute}'!r}?"
    known = _torchs_names(name)
    near = difflib.get_close_matches(_plain(given), known, n=1)
    return f" Did you mean {known[near[0]].partition(':')[2]!r}?" if near else ""


def find_torchs_name(key: str, given: str) -> str | None:
    """Return the import path that a name of torch's stands for, whatever its case and underscores; None for others."""
    if key == "scheduler" and given.casefold() in _FORMS[key].split(", "):
        return given.casefold()
    known, plain = _torchs_names(key), _plain(given)
    return known.get(plain) or known.get(plain + _LEFT_OUT.get(key, ""))


def _torchs_names(key: str) -> dict[str, str]:
    modules = TORCHS_NAMES.get(key, {})
    return {_plain(name): f"{module}:{name}" for module, names in modules.items() for name in names.split()}


def _plain(name: str) -> str:
    return name.replace("_", "").casefold()


def _suggest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(known)}."
