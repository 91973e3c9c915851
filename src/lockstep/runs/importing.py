"""Importing the objects that a config names: `package.module:name`."""

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError, LockstepError, clause

_WITH_ARGUMENTS_BESIDE = frozenset({"model", "data", "loss", "optimizer", "scheduler", "finish"})
"""Keys of one object, whose arguments another key holds; others hold lists of objects with their arguments."""


def import_object(key: str, path: str) -> Any:
    """Import `package.module:name`; the name may have dots. `key` is what the path belongs to, for messages."""
    module_name, colon, attributes = path.partition(":")
    if not (module_name and colon and attributes):
        raise ConfigError(f"{key} is {path!r}, expected an import path of the form package.module:name. (LS804)")
    value: Any = _import_module(key, module_name)
    walked = module_name
    for attribute in attributes.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError as error:
            near = _find_similar(attribute, [name for name in dir(value) if name[0] != "_"])
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"{key} is {path!r}, but {walked!r} has no {attribute!r}.{hint} (LS804)") from error
        walked = f"{walked}.{attribute}"
    return value


def import_function(key: str, path: str, expected: str) -> Any:
    found = import_object(key, path)
    if not callable(found):
        raise ConfigError(f"{key} is {path!r}, a {type(found).__name__}, expected {expected}. (LS806)")
    return found


def _find_similar(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like `name`; one that differs in upper and lower case alone comes first."""
    same = [each for each in known if each.casefold() == name.casefold()]
    return next(iter(same or difflib.get_close_matches(name, known, n=1)), None)


def _import_module(key: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            remedy = "Modules are searched in the folder of the config file and in the installed packages."
            raise ConfigError(
                f"{key} is in module {name!r}, but there is no module {missing!r}. {remedy} (LS804)"
            ) from error
        raise ConfigError(
            f"{key} is in module {name!r}, which needs a module {missing!r} that is not installed. (LS804)"
        ) from error
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(f"{key} is in module {name!r}, which fails to import: {_line(error)}. (LS804)") from error


def call_object(key: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an object that a config names; what it raises becomes a ConfigError, except errors of Lockstep."""
    if not callable(function):
        raise ConfigError(f"{key} names a {type(function).__name__}, expected a class or a function. (LS805)")
    try:
        return function(*args, **kwargs)
    except LockstepError:
        raise
    except Exception as error:
        failed = "has failed" if key.startswith("--") else "could not be constructed"
        raise ConfigError(
            f"{key} {failed}: {_line(error)}. {_given(key, function, kwargs)}{_accepted(function, kwargs)}"
            "Run with --debug to see the traceback. (LS805)"
        ) from error


def _given(key: str, function: Any, kwargs: Mapping[str, Any]) -> str:
    """Return with which arguments of a config an object was called, as a sentence, and where these are."""
    given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "nothing"
    if key in _WITH_ARGUMENTS_BESIDE:
        return f"It was called with {key}_args: {given}. "
    if key.startswith("--"):
        return ""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} was called with {given}; arguments are given as in - mine:{name}: {{argument: 2}}. "


def _accepted(function: Any, given: Mapping[str, Any]) -> str:
    """Return which arguments a function takes, as a sentence, if it was given others; else nothing."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C, without a signature
        return ""
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or set(given) <= set(parameters):
        return ""
    return f"It takes {', '.join(parameters) or 'no arguments'}. "


def _line(error: Exception) -> str:
    text = clause(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
