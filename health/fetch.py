"""GET over HTTP, for health.patroni.

1. Whatever fails is an OSError with a reason in words that do not repeat the URL; a redirect is a failure.
2. Nothing of the environment (proxies, .netrc) counts: a manager is reached directly.

Called by whoever makes a Follower; a module of its own because the import of httpx takes its time.
Manual: https://www.python-httpx.org/async/
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import httpx

from health.patroni import Get

_LIMIT: Final = 1 << 20  # bytes of an answer; a member takes some 300


@asynccontextmanager
async def open_http(tls: ssl.SSLContext | None = None) -> AsyncIterator[Get]:
    """Open a client for as long as the block lasts; tls is for https, the system's certificates by default."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # each request is a line at INFO
    async with httpx.AsyncClient(verify=tls or ssl.create_default_context(), trust_env=False) as client:

        async def get(url: str, timeout: float) -> bytes:
            try:
                async with client.stream("GET", url, timeout=timeout) as response:
                    return await _body(response)
            except httpx.TimeoutException:
                raise TimeoutError("no answer in time") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise OSError(_words(error)) from error

        yield get


async def _body(response: httpx.Response) -> bytes:
    if response.status_code != HTTPStatus.OK:
        raise OSError(f"HTTP status {response.status_code}")
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _LIMIT:
            raise OSError(f"answer is longer than {_LIMIT} bytes")
    return bytes(body)


def _words(error: Exception) -> str:
    """Say what the operating system said, which is at the end of the chain, else what httpx says."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case ssl.SSLCertVerificationError():
                return f"certificate verify failed: {cause.verify_message}"
            case ssl.SSLError() | socket.gaierror() if cause.strerror:  # their errno is none of the system's
                return cause.strerror.lower()
            case OSError() if cause.errno:
                return os.strerror(cause.errno).lower()  # asyncio puts the address in the place of the text
        cause = cause.__cause__ or cause.__context__  # httpcore hides the cause, not the context
    return str(error) or type(error).__name__
