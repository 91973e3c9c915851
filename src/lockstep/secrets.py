"""What of variables and commands may be secret, and is not shown or recorded."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
"""A variable whose name has one of these may hold a secret and is not recorded."""
_SECRET_WORDS = frozenset(
    {
        *("apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "key", "passphrase"),
        *("passwd", "password", "pat", "pwd", "secret", "secrets", "token"),
    }
)
"""An option one of whose words is one of these may hold a secret: `--api-key`, `data_args.token`."""
_OPTION = re.compile(r"(?P<name>-{0,2}[\w.-]*[\w])=(?P<value>.+)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def is_secret_variable(name: str) -> bool:
    return _SECRET.search(name) is not None


def hide_password(value: str) -> str:
    """Return a text without users and passwords in addresses."""
    return _URL_PASSWORD.sub(_HIDDEN, value)


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without what may be secret: values of such names, users in addresses."""
    shown = []
    is_value = False
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option is not None and _is_secret_name(option["name"]):
            shown.append(f"{option['name']}={_HIDDEN}")
        else:
            hides = is_value and not argument.startswith("-")
            shown.append(_HIDDEN if hides else hide_password(argument))
        is_value = option is None and argument.startswith("-") and _is_secret_name(argument)
    return shown


def hide_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what may be secret, at any depth: values of such keys, users in addresses."""
    return {name: _HIDDEN if _is_secret_name(name) else _hide_in(value) for name, value in config.items()}


def _hide_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return hide_values({str(name): each for name, each in value.items()})
    if isinstance(value, list | tuple):
        return [_hide_in(each) for each in value]
    return hide_password(value) if isinstance(value, str) else value


def _is_secret_name(name: str) -> bool:
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z]+", name.lower()))
