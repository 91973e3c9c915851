"""Making what a config names: data, model, loss, optimizer, scheduler, callbacks, metrics."""

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from lockstep.data import ShardedLoader, Stream, as_stream, read_lengths, read_weights
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine import Loss, Metric, Trainer
from lockstep.engine.arguments import can_be_called, check_scheduler
from lockstep.engine.averaging import EMA, SWA, AveragedWeights
from lockstep.engine.callbacks import Callback, check_callback
from lockstep.engine.evaluation import MetricValues, accuracy, has_classes
from lockstep.engine.losses import SliceLoss, split_loss, times_weight
from lockstep.engine.schedules import ReduceLROnPlateau, make_schedule, parameter_groups
from lockstep.engine.state_parts import Scheduler, Stateful
from lockstep.engine.stopping import EarlyStopping, MaxSteps, MaxTime
from lockstep.engine.user_function import HINTS, find_part
from lockstep.errors import ConfigError, LockstepError
from lockstep.means import WEIGHTED_BY_TARGET, divisor_of, has_class_numbers, has_own_forward, is_weighted_by_target
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.runs.config import Config, NamedObject, parse_seconds
from lockstep.runs.importing import call_object, import_function, import_object
from lockstep.shards import derive_seed
from lockstep.torch_private.modules import tree_leaves

PLATEAU = "plateau"
"""The name of the scheduler that is a callback, because it follows a metric."""
WITHOUT_CALLBACKS: dict[str, Any] = {
    "callbacks": [],
    "early_stopping": None,
    "ema": None,
    "swa": None,
    "max_time": None,
}
"""What a config is changed to where no run is trained to its end; `max_steps` stays, on which a schedule depends."""
TEST, TRAIN = "test", "train"
_BALANCED = "balanced"
"""The name of the weights with which each class is drawn equally often."""
_KINDS: Mapping[str, tuple[type, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "optimizer": (Optimizer, "a torch.optim.Optimizer"),
}
"""What an object must be that is made of a key with `KEY_args` beside it; the others can be anything."""
_DRY_STEPS = 2
"""Steps of a dry run, and batches of each of its evaluations."""
_IGNORED = -100
"""The class number of a target that does not count, where the loss does not say it: torch's default."""
_PAIRWISE: Mapping[Callable[..., Any], type[nn.Module]] = {
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
}
"""Losses of each number of an output and the one of the target in its place, as a function, and as a module."""

Criterion = Callable[[Any, Any], Any]
"""A loss as a config names it: called with (output, target), returns what a trainer's loss does."""
Counter = Callable[[Any, Any], tuple[float, float]]
"""A metric as a config names it: called with (output, target), returns a sum and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    trainer: Trainer
    """The trainer of model, optimizer and loss; it steps the scheduler if `scheduler_interval` is "step"."""
    scheduler: Scheduler | None
    metric: Metric
    """Loss, and accuracy or the config's own metrics."""
    collection: Any
    """Metrics of torchmetrics; None without any."""
    averages: Mapping[str, AveragedWeights]
    """Averages of the weights, which are evaluated too, by the names that are put before those of the metrics."""
    train: ShardedLoader
    """Shuffled."""
    states: Mapping[str, Stateful]
    """What has a state besides the trainer, by name: the loader of a stream."""
    datasets: Mapping[str, Dataset[Any]]
    evaluated: Mapping[str, ShardedLoader]
    """The sets that are evaluated after each epoch, by name; each in order."""

    @property
    def test(self) -> ShardedLoader | None:
        found: ShardedLoader | None = choose_set(None, self.evaluated)
        return found


def build_parts(config: Config, device: torch.device) -> RunParts:
    """Construct everything that a config names (collective: every worker calls)."""
    set_deterministic(config.deterministic)
    seed_generators(derive_seed("build", config.seed))
    given, rest = split_sets("data", config.data, make_named(config, "data"))
    train_set, others = _prepare_sets(config, {TRAIN: given, **rest})
    # Seeded again, so that random numbers drawn for the data do not change the model.
    seed_generators(derive_seed("model", config.seed))
    model: nn.Module = make_named(config, "model")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model is {config.model!r}, which has no parameter that requires a gradient. (LS806)")
    model = model.to(device)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, train_set)
    criterion = build_criterion(config, device)
    metric, collection = build_metrics(config, criterion, device)
    callbacks = build_callbacks(config, optimizer, others)
    if config.dry_run:
        callbacks.append(MaxSteps(_DRY_STEPS))
    trainer = _build_trainer(config, model, optimizer, scheduler, as_loss(criterion), callbacks)
    train = _build_loader(
        config,
        train_set,
        device,
        TRAIN,
        weights=_numbers_of_samples(config, "weights", train_set, read_weights),
        lengths=_numbers_of_samples(config, "lengths", train_set, read_lengths),
    )
    held = trainer.internals.moments.callbacks
    named = dict(zip(held.names, held.all(), strict=True))  # as in a checkpoint: a second EMA is EMA-2
    return RunParts(
        trainer=trainer,
        scheduler=scheduler,
        metric=metric,
        collection=collection,
        averages={name.lower(): each for name, each in named.items() if isinstance(each, AveragedWeights)},
        train=train,
        states={"loader": train} if isinstance(train_set, Stream) else {},
        datasets=others,
        evaluated={name: _build_loader(config, each, device, name) for name, each in others.items()},
    )


def make_named(config: Config, key: str, *arguments: Any) -> Any:
    """Call what the config names under a key with these arguments and those of `KEY_args`; check what it makes."""
    path = getattr(config, key)
    made = call_object(key, import_object(key, path), *arguments, **getattr(config, f"{key}_args"))
    kind, expected = _KINDS.get(key, (object, ""))
    if not isinstance(made, kind):
        raise ConfigError(
            f"{key} is {path!r}, which made a value of type {type(made).__name__}, not {expected}. (LS806)"
        )
    return made


@contextmanager
def _refused(said: str, end: str) -> Iterator[None]:
    """Turn the TypeError or ValueError for a refused value into an error of the config, which ends with `end`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{said}: {error} {end}") from error


def _prepare_sets(config: Config, sets: Mapping[str, Dataset[Any]]) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    """Return the training set and the others, streams among them, of which a short run has a few samples."""
    found: dict[str, Dataset[Any]] = {}
    for name, each in sets.items():
        with _refused(f"data is {config.data!r}, whose {name} set cannot be used", "(LS806)"):
            found[name] = as_stream(each) or each
    train, others = found.pop(TRAIN), found
    if config.overfit is not None:
        train = first_samples(train, config.overfit * config.batch_size)
        others = dict.fromkeys(others or [TEST], train)
    if config.dry_run:
        others = {name: first_samples(each, _DRY_STEPS * config.batch_size) for name, each in others.items()}
    return train, others


def first_samples(data: Dataset[Any], number: int) -> Dataset[Any]:
    if isinstance(data, Stream):
        return data.first(number)
    sized: Any = data
    return Subset(data, range(min(number, len(sized))))


def split_sets(key: str, path: str, found: Any) -> tuple[Any, dict[str, Any]]:
    """Return the training set and the others by name; `found` is one set, (train, test), or sets by name."""
    if isinstance(found, Mapping):
        if TRAIN not in found or not all(str(name).isidentifier() for name in found):
            raise ConfigError(
                f"{key} is {path!r}, which returned sets called {', '.join(map(str, found))}; expected train and "
                "others with names like val and test. (LS806)"
            )
        return found[TRAIN], {name: each for name, each in found.items() if name != TRAIN and each is not None}
    if isinstance(found, tuple | list) and any(isinstance(part, Dataset) for part in found):
        if len(found) != 2:  # noqa: PLR2004 - (train, test)
            raise ConfigError(
                f"{key} is {path!r}, which returned {len(found)} data sets; expected (train, test), or a "
                "dictionary {'train': ..., 'val': ..., 'test': ...}. (LS806)"
            )
    elif not (isinstance(found, tuple) and len(found) == 2):  # noqa: PLR2004
        return found, {}
    train, test = found
    return train, {} if test is None else {TEST: test}


def choose_set(train: Any, others: Mapping[str, Any], data: str | None = None) -> Any:
    """Return what belongs to the set of this name; for None, and for an import path, to the `preferred_name`."""
    sets = {TRAIN: train, **others}
    name = data if data is not None and ":" not in data else preferred_name(others)
    if name not in sets:
        raise ConfigError(
            f"--data is {data!r}, which this run does not have: expected {', '.join(sets)}, or the import path of a "
            "function that returns a data set, as in mine:new. (LS814)"
        )
    return sets[name]


def preferred_name(others: Collection[str]) -> str:
    """Return the name of the test set; without one that of the first of the others, else that of the training set."""
    return TEST if TEST in others else next(iter(others), TRAIN)


def build_collate(config: Config) -> Callable[[list[Any]], Any] | None:
    if config.collate is None:
        return None
    found: Callable[[list[Any]], Any] = import_function("collate", config.collate, "a function of a list")
    return found


def _numbers_of_samples(
    config: Config, key: str, train_set: Dataset[Any], read: Callable[[Any, Dataset[Any]], Tensor]
) -> Tensor | None:
    """Return the `weights` or the `lengths` of the samples of the training set; None if the config names none.

    A run that is to overfit sees each of its samples, which are other ones than those of the function.
    """
    value = getattr(config, key)
    if config.overfit is not None or value is None:
        return None
    if isinstance(train_set, Stream):
        raise ConfigError(
            f"{key} is {value!r}, and the training set is a stream, whose samples have no index: "
            f"leave {key} out. (LS409)"
        )
    if not hasattr(train_set, "__len__"):
        return None
    with _refused(f"{key} is {value!r}, which cannot be used", "(LS806)"):
        return read(_BALANCED if value == _BALANCED else _call(key, value, train_set), train_set)


def _call(key: str, path: str, train_set: Dataset[Any]) -> Any:
    function = import_function(key, path, "a function of the training set")
    try:
        return function(train_set)
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} is {path!r}, which was called with the training set and raised {type(error).__name__}: {error}. "
            "Run with --debug to see the traceback. (LS806)"
        ) from error


def _build_trainer(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Scheduler | None,
    loss: Loss,
    callbacks: Sequence[Callback],
) -> Trainer:
    with _refused("The config cannot be used for training", "(LS805)"):
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        return Trainer(
            model,
            optimizer,
            loss=loss,
            num_shards=config.total_shards,
            seed=config.seed,
            scheduler=None if config.steps_scheduler_per_epoch else scheduler,
            precision=config.precision,
            compile=config.compile,
            track_grad_norm=config.track_grad_norm,
            max_grad_norm=config.max_grad_norm,
            nonfinite=config.nonfinite,
            exact_mean=config.exact_mean,
            verify_steps=config.first_steps_verified,
            shard_optimizer=config.shard_optimizer,
            neighbours=config.neighbours,
            balance=config.balance,
            deterministic=config.deterministic,
            on_worker_loss="continue"
            if config.continues_on({each.device.type for each in model.parameters()})
            else "stop",
            min_workers=config.min_workers,
            callbacks=callbacks,
        )


def _build_loader(
    config: Config, dataset: Dataset[Any], device: torch.device, name: str, **options: Any
) -> ShardedLoader:
    is_trained = name == TRAIN
    end = "The function returns (train, test), or (train, None). (LS806)"
    with _refused(f"data is {config.data!r}, whose {name} set cannot be used", end):
        return make_loader(
            config,
            dataset,
            shuffle=is_trained,
            drop_last=config.drop_last and is_trained,  # the others are counted whole
            persistent_workers=config.loader_workers > 0,
            pin_memory=is_asynchronous(device),
            **options,
        )


def make_loader(config: Config, dataset: Dataset[Any], **options: Any) -> ShardedLoader:
    """Return the loader of a data set, as the config says but for these options; without them in order."""
    usual: dict[str, Any] = {"shuffle": False, "num_workers": config.loader_workers}
    return ShardedLoader(
        dataset,
        batch_size=config.batch_size,
        num_shards=config.total_shards,
        seed=config.seed,
        collate_fn=build_collate(config),
        **(usual | options),
    )


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.param_groups or config.no_decay:
        with _refused("param_groups cannot be used", "(LS807)"):
            trained = parameter_groups(model, config.param_groups, no_decay=config.no_decay)
    optimizer: Optimizer = make_named(config, "optimizer", trained)
    for pattern, options in config.param_groups.items():
        unknown = [name for name in options if name not in optimizer.defaults]
        if unknown:
            raise ConfigError(
                f"param_groups gives {pattern!r} the option {', '.join(unknown)}, and {type(optimizer).__name__} has "
                f"{', '.join(optimizer.defaults)}. (LS807)"
            )
    return optimizer


def build_scheduler(config: Config, optimizer: Optimizer, train_set: Any) -> Scheduler | None:
    """Construct the scheduler, which the trainer or the loop steps; None without one, or if it is a callback."""
    if config.schedule is not None:
        if others := sorted({*config.scheduler_args} - {"final"}):
            raise ConfigError(
                f"scheduler is {config.schedule!r}, which goes over the steps of the run and takes only 'final' in "
                f"scheduler_args, not {', '.join(others)}. Torch's have its names, such as CosineAnnealingLR. (LS807)"
            )
        steps = _count_steps(config, train_set)
        with _refused(f"scheduler is {config.schedule!r}, which cannot be used", "(LS807)"):
            return make_schedule(
                optimizer, config.schedule, num_steps=steps, warmup=config.warmup, **config.scheduler_args
            )
    if config.scheduler in {None, PLATEAU}:
        return None
    scheduler: Scheduler = make_named(config, "scheduler", optimizer)
    return scheduler


def _count_steps(config: Config, train_set: Any) -> int:
    if isinstance(train_set, Stream) and train_set.steps_per_epoch is not None:
        return min(config.epochs * train_set.steps_per_epoch, config.max_steps or sys.maxsize)
    samples = train_set.num_records if isinstance(train_set, Stream) else None
    if samples is None and hasattr(train_set, "__len__"):
        samples = len(train_set)
    if samples is None and isinstance(train_set, Stream):
        if config.max_steps is not None:
            return config.max_steps
        if config.schedule == "constant" and config.warmup >= 1:
            return int(config.warmup) + 1  # the rate is constant from there on, however long the run is
        is_alone = config.schedule == "constant"
        what = "warmup, a part of the run," if is_alone else f"scheduler is {config.schedule!r}, which"
        raise ConfigError(
            f"{what} needs the number of steps, and the training set is a stream whose length is not known. Give "
            "ls.Stream the lengths of its parts or steps_per_epoch, or set max_steps"
            + ("; or give warmup a number of steps. (LS409)" if is_alone else ". (LS409)")
        )
    if samples is None:
        raise ConfigError(f"data is {config.data!r}, whose train set has no len(): a loader needs it. (LS806)")
    per_epoch = samples / config.batch_size
    steps = config.epochs * (math.floor(per_epoch) if config.drop_last else math.ceil(per_epoch))
    return min(steps, config.max_steps or steps)


def build_callbacks(config: Config, optimizer: Optimizer, evaluated: Collection[str]) -> list[Callback]:
    """Return the callbacks of a config: what averages first, then the user's own, then what looks at metrics."""
    name = preferred_name(evaluated)
    usual = "loss" if name in {TEST, TRAIN} else f"{name}_loss"
    found: list[Callback] = []
    if config.ema is not None:
        found.append(EMA(config.ema.decay))
    if config.swa is not None:
        if config.swa.start_epoch >= config.epochs:
            raise ConfigError(
                f"swa.start_epoch is {config.swa.start_epoch} and epochs is {config.epochs}: the mean would be of no "
                f"epoch. Epochs count from 0: use at most {config.epochs - 1}. (LS805)"
            )
        found.append(SWA(config.swa.start_epoch))
    for named in config.callbacks:
        found.append(build_named("callbacks", named))
        with _refused(f"callbacks names {named!r}", "(LS805)"):
            check_callback(found[-1])
    if config.scheduler == PLATEAU:
        with _refused(f"scheduler is {PLATEAU!r}, which cannot be used", "(LS807)"):
            found.append(ReduceLROnPlateau(optimizer, **{"metric": usual, **config.scheduler_args}))
    if config.early_stopping is not None:
        with _refused("early_stopping cannot be used", "(LS805)"):
            options = config.early_stopping.model_dump()
            found.append(EarlyStopping(**{**options, "metric": options["metric"] or usual}))
    if config.max_steps is not None:
        found.append(MaxSteps(config.max_steps))
    if config.max_time is not None:
        found.append(MaxTime(parse_seconds(config.max_time)))
    return found


def build_named(key: str, named: NamedObject) -> Any:
    """Import an object that a config names in a list; call it with its arguments, if it is a class or has some."""
    path, arguments = next(iter(named.items())) if isinstance(named, dict) else (named, {})
    found = import_object(key, path)
    return call_object(key, found, **arguments) if arguments or isinstance(found, type) else found


def build_criterion(config: Config, device: torch.device) -> Criterion:
    loss: Any = import_function("loss", config.loss, "a function or a class")
    arguments: Mapping[str, Any] = config.loss_args
    if isinstance(loss, partial) and not loss.args:
        loss, arguments = loss.func, {**loss.keywords, **arguments}
    if not inspect.isclass(loss):
        _check_parameters(config, loss, arguments)
    # As a module it says what it divides by.
    kind = next((module for function, module in WEIGHTED_BY_TARGET.items() if loss is function), loss)
    arguments = _with_tensors(kind, arguments, device)
    if inspect.isclass(kind):
        criterion = call_object("loss", kind, **arguments)
    else:
        criterion = partial(kind, **arguments) if arguments else kind
    if isinstance(criterion, nn.Module):
        criterion.to(device)
        _check_parameters(config, criterion.forward, {})
    is_of_torch = str(getattr(kind, "__module__", "")).startswith("torch.")
    _check_is_mean(config, criterion, is_of_torch=is_of_torch)
    if is_weighted_by_target(criterion) and not has_own_forward(criterion):
        return partial(_weighted_by_target, config.loss, criterion)
    compared = partial(_explained, config.loss, criterion) if is_of_torch else criterion
    is_pairwise = any(loss is each for each in _PAIRWISE) or isinstance(criterion, tuple(_PAIRWISE.values()))
    return _with_shapes_compared(compared) if is_pairwise else compared


def _check_parameters(config: Config, function: Any, arguments: Mapping[str, Any]) -> None:
    if not can_be_called(function, None, None, **arguments):
        raise ConfigError(
            f"loss is {config.loss!r}, which cannot be called with (output, target)"
            f"{f' and loss_args {arguments}' if arguments else ''}: its parameters are {inspect.signature(function)}. "
            "A function of your own can take apart what the model and the data yield. (LS806)"
        )


def _explained(name: str, criterion: Criterion, output: Any, target: Any) -> Any:
    """Call a loss of torch, whose errors name neither the loss nor what it was called with."""
    try:
        return criterion(output, target)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        given = [
            f"{list(each.shape)} ({each.dtype})" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            for each in (output, target)
        ]
        raise ConfigError(
            f"The loss {name} cannot be computed of the model's output, {given[0]}, and a target, {given[1]}: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. "
            f"{find_part(HINTS, error) or 'Change loss, loss_args, the model or the data.'} (LS806)"
        ) from error


def _with_tensors(loss: Any, arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return arguments with a tensor for each list of numbers where the loss takes tensors, as class weights are."""
    parameters: dict[str, inspect.Parameter] = {}
    # A class that hands its keywords on has the parameters of those above it.
    for each in reversed(loss.__mro__) if inspect.isclass(loss) else (loss,):
        with suppress(TypeError, ValueError):  # native code
            parameters.update(inspect.signature(each).parameters)
    found = dict(arguments)
    for name, value in arguments.items():
        kinds = str(parameters[name].annotation) if name in parameters else ""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and "float" not in kinds
        if "Tensor" in kinds and (is_number or isinstance(value, list)):
            with _refused(f"loss_args has {name}: {value!r}, expected numbers", "(LS806)"):
                found[name] = torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
    return found


def _check_is_mean(config: Config, criterion: Any, *, is_of_torch: bool) -> None:
    keywords: Mapping[str, Any] = criterion.keywords if isinstance(criterion, partial) else {}
    reduction = keywords.get("reduction", getattr(criterion, "reduction", "mean"))
    if is_of_torch and (reduction == "none" or keywords.get("reduce") is False):
        raise ConfigError(
            f"loss is {config.loss!r} with a loss for each sample, expected one number, their mean. Write reduction: "
            "mean in loss_args. (LS806)"
        )
    if isinstance(criterion, nn.Module):
        trained = [name for name, each in criterion.named_parameters() if each.requires_grad]
        if trained:
            raise ConfigError(
                f"loss is {config.loss!r}, which has parameters of its own ({', '.join(trained)}), and a run trains "
                "those of the model alone. Let the model have them and return what the loss needs. (LS806)"
            )
    if reduction == "sum" or keywords.get("size_average") is False:
        raise ConfigError(
            f"loss is {config.loss!r}, which adds up the losses of samples, and a run trains their mean: it is the "
            "same however a batch is divided. Write reduction: mean in loss_args, and multiply the learning rate by "
            f"the batch size, {config.batch_size}, for the same steps of SGD. (LS806)"
        )


def _weighted_by_target(name: str, criterion: Any, output: Any, target: Any) -> Any:
    """Return the mean loss with what it was divided by. [Note: means of parts] in `lockstep.means`."""
    loss = _explained(name, criterion, output, target)
    if not has_class_numbers(target):
        return loss
    return SliceLoss(loss=loss, weight=divisor_of(criterion, target), values={})


def as_loss(criterion: Criterion) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Any:
        inputs, target = input_and_target(batch)
        return criterion(model(inputs), target)

    return loss


def input_and_target(batch: Any) -> tuple[Any, Any]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):  # noqa: PLR2004
        raise ConfigError(
            f"data yields samples that collate to a {type(batch).__name__}, expected pairs (input, target). "
            "For other batches write a training loop with ls.Trainer, whose loss gets the whole batch. (LS808)"
        )
    return batch[0], batch[1]


def _with_shapes_compared(criterion: Callable[[Any, Any], Tensor]) -> Criterion:
    """Refuse an output and a target of other shapes: torch compares each of one with all of the other, and warns."""

    def compare(output: Any, target: Any) -> Tensor:
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape:
            raise ConfigError(
                f"The model returns outputs of shape {list(output.shape)} and data yields targets of shape "
                f"{list(target.shape)}. Of such shapes this loss compares each output with several targets. Let data "
                "yield targets of the shape of one output, such as target.unsqueeze(-1), or let the model return "
                "output.squeeze(-1). (LS806)"
            )
        return criterion(output, target)

    return compare


def build_metrics(config: Config, criterion: Criterion, device: torch.device) -> tuple[Metric, Any]:
    """Return loss, accuracy where it applies, and the config's functions; and its objects of torchmetrics as one."""
    counters: dict[str, Counter] = {}
    objects: list[Any] = []
    if config.metric is not None:
        counters.update(_named_counter("metric", import_object("metric", config.metric)))
    for named in config.metrics:
        made = build_named("metrics", named)
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(made, torchmetrics.Metric | torchmetrics.MetricCollection):
            objects.append(made)
            continue
        for name, counter in _named_counter("metrics", made).items():
            if name in counters or name == "loss":
                raise ConfigError(f"metrics names two metrics called {name!r}. Give the functions other names. (LS808)")
            counters[name] = counter
    function = _as_metric(criterion, counters, has_accuracy=config.metric is None and "accuracy" not in counters)
    if not objects:
        return function, None
    with _refused("metrics cannot be used together", "(LS808)"):
        return function, sys.modules["torchmetrics"].MetricCollection(objects).to(device)


def _named_counter(key: str, metric: Any) -> dict[str, Counter]:
    if not callable(metric):
        raise ConfigError(
            f"{key} names a {type(metric).__name__}, expected a function of (output, target) that returns a sum and a "
            "count, or a class of torchmetrics. (LS808)"
        )
    default = "metric" if key == "metric" else type(metric).__name__
    counter: Counter = metric
    return {getattr(metric, "__name__", default): counter}


def _as_metric(criterion: Criterion, counters: dict[str, Counter], *, has_accuracy: bool) -> Metric:
    ignored: int = _IGNORED
    if isinstance(criterion, partial) and criterion.func is _weighted_by_target:
        ignored = criterion.args[1].ignore_index

    def evaluate(model: nn.Module, batch: Any) -> MetricValues:
        inputs, target = input_and_target(batch)
        output = model(inputs)
        found = split_loss(criterion(output, target), _count_samples(target), "a slice")
        values: dict[str, tuple[float | Tensor, float | Tensor]] = {
            name: (times_weight(mean.double() if isinstance(mean, Tensor) else mean, weight), weight)
            for name, (mean, weight) in {"loss": (found.loss, found.weight), **found.values}.items()
        }
        with torch.autocast(next(model.parameters()).device.type, enabled=False):  # the trainer's is around it
            for name, counter in counters.items():
                values[name] = counter(output, target)
        if has_accuracy and has_classes(output, target):
            values["accuracy"] = accuracy(output, target, ignore_index=ignored)
        return values

    return evaluate


def _count_samples(target: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not sizes:
        raise ConfigError(
            "data yields targets without a tensor in them, expected one with the samples along dimension 0. (LS808)"
        )
    return sizes[0]
