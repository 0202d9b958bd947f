"""A way to the console of a running gateway, for the commands that speak to one.

1. Where it is, and who asks, comes from a URL as libpq has it, or from the gateway's own topology file.
2. A password that is not given there is PGPASSWORD, or the one in front.auth.file where that is no secret of SCRAM's.

Called by cli. Manual: "Connection URIs" in libpq's chapter.
"""

from __future__ import annotations

import os
from pathlib import Path

from gateway.session import Session, SessionError
from gateway.settings import CONSOLE_DATABASES, Settings
from gateway.supervisor.main import read_users
from gateway.topology import SettingsError, load
from gateway.wire.userlist import Secret
from health import conninfo

_TIMEOUT = 10.0  # seconds to connect and log in
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AttachError(Exception):
    """There is no way to the console; the text says why, in one sentence."""


async def attach(url: str | None, config: Path) -> Session:
    """Log in to the console of the gateway at a URL, or that a topology file describes. Raises AttachError."""
    host, port, user, password = _from_url(url) if url is not None else _from_file(config)
    try:
        return await Session.connect(host, port, user, password, CONSOLE_DATABASES[0], _TIMEOUT)
    except TimeoutError:
        raise AttachError(f"no answer from {host} port {port} within {_TIMEOUT:g} s") from None
    except OSError as error:
        raise AttachError(f"no gateway at {host} port {port}: {(error.strerror or str(error)).lower()}") from None
    except SessionError as error:
        raise AttachError(f"{host} port {port} refuses {user}: {error.message}") from None


def _from_url(url: str) -> tuple[str, int, str, str | None]:
    try:
        parameters = conninfo.parse(url)
        port = int(parameters.get("port") or "6432")
    except ValueError as error:
        raise AttachError(f"{url} is no connection string: {error}") from None
    host = parameters.get("hostaddr") or parameters.get("host") or "127.0.0.1"
    password = parameters.get("password", os.environ.get("PGPASSWORD"))
    return host, port, parameters.get("user") or "postgres", password


def _from_file(config: Path) -> tuple[str, int, str, str | None]:
    try:
        settings = load(config)
        users = read_users(settings)
    except SettingsError as error:
        raise AttachError(f"{config} cannot be used: {error.faults[0]}") from None
    if not settings.console.admin_users:
        raise AttachError(f"{config} names no console.admin_users")
    user = settings.console.admin_users[0]
    password = Secret.of((users or {}).get(user, "")).password
    return *_place(settings), user, os.environ.get("PGPASSWORD", password)


def _place(settings: Settings) -> tuple[str, int]:
    listen = settings.front.listen[0]
    return _ANYWHERE.get(listen.host, listen.host), listen.port
