"""Importing the objects that a config names: `package.module:name`."""

import difflib
import importlib
from typing import Any

from lockstep.errors import ConfigError, LockstepError


def import_object(key: str, path: str) -> Any:
    """Import an object by its import path.

    Args:
        key: Its config key, for messages.
        path: `package.module:name`; the name may have dots (`module:Class.method`).

    Raises:
        ConfigError: The path has another form, the module does not exist or fails to import, or it has no such name.
    """
    module_name, colon, attributes = path.partition(":")
    if not (module_name and colon and attributes):
        raise ConfigError(f"{key} is {path!r}, expected an import path of the form package.module:name.")
    value: Any = _import_module(key, module_name)
    walked = module_name
    for attribute in attributes.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError as error:
            near = difflib.get_close_matches(attribute, [name for name in dir(value) if name[0] != "_"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key} is {path!r}, but {walked!r} has no {attribute!r}.{hint}") from error
        walked = f"{walked}.{attribute}"
    return value


def _import_module(key: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            remedy = "Modules are searched in the folder of the config file and in the installed packages."
            raise ConfigError(f"{key} is in module {name!r}, but there is no module {missing!r}. {remedy}") from error
        raise ConfigError(
            f"{key} is in module {name!r}, which needs a module {missing!r} that is not installed."
        ) from error
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(f"{key} is in module {name!r}, which fails to import: {_line(error)}.") from error


def call_object(key: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an object that a config names, with the arguments from the config.

    Raises:
        ConfigError: It is not callable, or it raised an exception, which is chained.
    """
    if not callable(function):
        raise ConfigError(f"{key} names a {type(function).__name__}, expected a class or a function.")
    try:
        return function(*args, **kwargs)
    except LockstepError:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "nothing"
        raise ConfigError(
            f"{key} could not be constructed: {_line(error)}. It was called with {key}_args: {given}. "
            "Run with --debug to see the traceback."
        ) from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
