"""Constructing the callbacks that a config names."""

from typing import Any

from torch.optim import Optimizer

from lockstep.engine.averaging import EMA, SWA
from lockstep.engine.callbacks import Callback, check_callback
from lockstep.engine.stopping import EarlyStopping, MaxSteps, MaxTime
from lockstep.errors import ConfigError
from lockstep.runs.build_optimizer import build_plateau
from lockstep.runs.config import Config
from lockstep.runs.importing import call_object, import_object
from lockstep.runs.training_options import NamedObject, parse_seconds

WITHOUT_CALLBACKS: dict[str, Any] = {
    "callbacks": [],
    "early_stopping": None,
    "ema": None,
    "swa": None,
    "max_time": None,
}
"""What a config is changed to where no run is trained to its end; `max_steps` stays, on which a schedule depends."""


def build_callbacks(config: Config, optimizer: Optimizer) -> list[Callback]:
    """Return the callbacks of a config: what averages first, then the user's own, then what looks at metrics."""
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
    found += [_build_own(each) for each in config.callbacks]
    plateau = build_plateau(config, optimizer)
    if plateau is not None:
        found.append(plateau)
    if config.early_stopping is not None:
        try:
            found.append(
                EarlyStopping(
                    config.early_stopping.metric,
                    patience=config.early_stopping.patience,
                    min_delta=config.early_stopping.min_delta,
                    mode=config.early_stopping.mode,
                )
            )
        except ValueError as error:
            raise ConfigError(f"early_stopping cannot be used: {error} (LS805)") from error
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


def _build_own(named: NamedObject) -> Callback:
    made = build_named("callbacks", named)
    try:
        check_callback(made)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"callbacks names {named!r}: {error} (LS805)") from error
    callback: Callback = made
    return callback
