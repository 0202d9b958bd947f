"""primary_conninfo taken apart, changed and put together again: where a standby receives from.

1. Whatever libpq reads is read: key=value pairs and URIs, with several hosts; what is not about host and port is kept.
2. freeze() leads to nowhere and can be undone from the text alone, so that a gateway that dies leaves nothing unclear.

Called by health.failover (where to) and health.execute (what to write).
Manual: "Connection Strings" in libpq's chapter; "primary_conninfo".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, unquote

_PAIR = re.compile(r"\s*(?P<key>\w+)\s*=\s*(?:'(?P<quoted>(?:[^'\\]|\\.)*)'|(?P<plain>(?:[^\s'\\]|\\.)*))", re.DOTALL)
_URI = re.compile(r"postgres(?:ql)?://")

# libpq takes the last of a key that is given twice. Nobody listens there: the directory does not exist.
_FROZEN: Final = " host='/no-primary-while-the-gateway-fails-over' hostaddr=''"


def parse(text: str) -> dict[str, str]:
    """Return the parameters of a connection string; raises ValueError. Several hosts and ports stay one text each."""
    text = thaw(text)
    if _URI.match(text):
        return _parse_uri(text)
    found: dict[str, str] = {}
    at = 0
    while text[at:].strip():
        pair = _PAIR.match(text, at)
        if pair is None:
            raise ValueError(f"primary_conninfo is not understood at character {at + 1}")
        value = pair["plain"] if pair["quoted"] is None else pair["quoted"]
        found[pair["key"]] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        at = pair.end()
    return found


def build(parameters: Mapping[str, str]) -> str:
    """Return parameters as key='value' pairs."""
    return " ".join(f"{key}={_quote(value)}" for key, value in parameters.items())


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
    return (build(parse(text)) if _URI.match(text) else text) + _FROZEN


def thaw(text: str) -> str:
    """Undo freeze."""
    return text.removesuffix(_FROZEN)


def is_frozen(text: str) -> bool:
    """Does it lead to nowhere, by our doing?"""
    return text.endswith(_FROZEN)


def rouse(text: str) -> str:
    """Return a connection string that says the same in other words, so that its receiver starts again."""
    text = thaw(text)
    if _URI.match(text):
        return build(parse(text))
    return text.rstrip() if text.endswith(" ") else f"{text} "


def _parse_uri(text: str) -> dict[str, str]:
    rest = text.partition("://")[2]
    rest, _, query = rest.partition("?")
    place, _, database = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    user, _, password = login.partition(":")
    names, ports = [], []
    for item in hosts.split(","):
        name, port = (item, "") if item.endswith("]") or ":" not in item else item.rsplit(":", 1)
        names.append(unquote(name.removeprefix("[").removesuffix("]")))
        ports.append(port)
    found = {
        "user": unquote(user),
        "password": unquote(password),
        "host": ",".join(names),
        "port": ",".join(ports) if any(ports) else "",
        "dbname": unquote(database),
    }
    return {key: value for key, value in found.items() if value} | dict(parse_qsl(query, keep_blank_values=True))


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
