"""primary_conninfo taken apart, changed and put together again: where a standby receives from.

1. Whatever libpq reads is read: key=value pairs and URIs, with several hosts; what is not about host and port is kept.
2. freeze() leads to nowhere and can be undone from the text alone, so that a gateway that dies leaves nothing unclear.

Called by health.failover (where to) and health.execute (what to write).
Manual: "Connection Strings" in libpq's chapter; "primary_conninfo".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

_BLANKS: Final = " \t\n\r\f\v"
# A quote that is not at the start of a value, and a backslash at the end of the text, are what they are to libpq.
_PAIR = re.compile(
    r"\s*(?P<key>\w+)\s*=\s*(?:'(?P<quoted>(?:[^'\\]|\\.)*)'|(?P<plain>(?!')(?:[^\s\\]|\\.?)*))",
    re.ASCII | re.DOTALL,
)
_URI = re.compile(r"postgres(?:ql)?://")
_URI_PARTS = re.compile(
    r"(?:(?P<login>[^@/]*)@)?(?P<hosts>[^/?]*)(?:/(?P<database>[^?]*))?(?:\?(?P<query>.*))?", re.DOTALL
)

# libpq takes the last of a key that is given twice. Nobody listens there: the directory does not exist.
_FROZEN: Final = " host='/no-primary-while-the-gateway-fails-over' hostaddr=''"


def parse(text: str) -> dict[str, str]:
    """Return the parameters of a connection string; raises ValueError. Several hosts and ports stay one text each."""
    text = thaw(text)
    if _URI.match(text):
        return _parse_uri(text)
    found: dict[str, str] = {}
    at = 0
    while text[at:].strip(_BLANKS):
        pair = _PAIR.match(text, at)
        if pair is None:
            raise ValueError(f"primary_conninfo is not understood at character {at + 1}")
        value = pair["plain"] if pair["quoted"] is None else pair["quoted"]
        found[pair["key"]] = re.sub(r"\\(.?)", r"\1", value, flags=re.DOTALL)
        at = pair.end()
    return found


def build(parameters: Mapping[str, str]) -> str:
    """Return parameters as key='value' pairs."""
    return " ".join(f"{key}={_quote(value)}" for key, value in parameters.items())


@lru_cache(maxsize=64)  # it is asked with each probe
def upstream(text: str) -> tuple[str, int] | None:
    """Return host and port that a standby receives from, None when it has none or they are several."""
    try:
        parameters = parse(text)
    except ValueError:
        return None
    host = parameters.get("hostaddr") or parameters.get("host", "")
    port = parameters.get("port") or "5432"
    if not host or "," in host or not port.isdigit():
        return None
    return host, int(port)


def lead(text: str, host: str, port: int) -> str:
    """Return a connection string to another server; who logs in, and how, stays."""
    parameters = parse(text)
    parameters.pop("hostaddr", None)
    return build(parameters | {"host": host, "port": str(port)})


def freeze(text: str) -> str:
    """Return a connection string that leads to nowhere."""
    text = thaw(text)
    # After an open end libpq would take what is appended for a part of the last value.
    is_open = text.rstrip(_BLANKS).endswith(("=", "\\"))
    return (build(parse(text)) if is_open or _URI.match(text) else text) + _FROZEN


def thaw(text: str) -> str:
    """Undo freeze."""
    return text.removesuffix(_FROZEN)


def is_frozen(text: str) -> bool:
    """Does it lead to nowhere, by our doing?"""
    return text.endswith(_FROZEN)


def rouse(text: str) -> str:
    """Return a connection string that says the same in other words, so that its receiver starts again."""
    text = thaw(text)
    plain = build(parse(text))
    return plain if plain != text else f"{text} "


def _parse_uri(text: str) -> dict[str, str]:
    parts = _URI_PARTS.fullmatch(text.partition("://")[2])
    assert parts is not None  # it fits everything
    user, _, password = (parts["login"] or "").partition(":")
    names, ports = [], []
    for item in parts["hosts"].split(","):
        at = item.find("]") if item.startswith("[") else 0  # there are colons in an IPv6 address
        name, _, port = item[at:].partition(":")
        names.append(unquote(item[1:at] if at > 0 else name))
        ports.append(unquote(port))
    found = {
        "user": unquote(user),
        "password": unquote(password),
        "host": ",".join(names),
        "port": ",".join(ports),
        "dbname": unquote(parts["database"] or ""),
    }
    found = {key: value for key, value in found.items() if value}
    for item in parts["query"].split("&") if parts["query"] else []:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"primary_conninfo is not understood: {unquote(key)} has no value")
        # As JDBC has it, and libpq after it.
        key, value = ("sslmode", "require") if (key, value) == ("ssl", "true") else (unquote(key), unquote(value))
        found[key] = value
    return found


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
