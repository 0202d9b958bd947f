"""A small client of PostgreSQL for the supervisor's own questions: probes, secrets of users, the admin console.

1. It buffers no more than 16 MB of an answer.
2. After an error that the server reported and survived it can be used again; after any other it is closed.

Called by supervisor.clusters for probes, by attach for the commands that speak to a running gateway.
Manual: "Message Flow".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Self

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from gateway.errors import GatewayError
from gateway.wire import messages
from gateway.wire.login import ServerLogin, ServerRefused
from gateway.wire.scram import Cache

_MAX_ANSWER: Final = 16 * 1024 * 1024

Row = tuple[str | None, ...]


class SessionError(Exception):
    """The server answered with an error, or with something that is not the protocol (08P01)."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message


class Session:
    """One connection; connect() makes it. Its methods raise SessionError, or an OSError when there was no answer."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._incoming = BufferedByteReceiveStream(stream)
        self.parameters: dict[str, str] = {}
        self.columns: list[str] = []  # of the last result
        self.notices: list[str] = []  # of the last query

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        user: str,
        password: str | None = None,
        database: str = "postgres",
        timeout: float = 15.0,
        options: Mapping[str, str] | None = None,
        cache: Cache | None = None,
    ) -> Self:
        """Connect and log in.

        host is an address, a name or the directory of a unix socket; options are further startup parameters; cache
        saves the key derivation of SCRAM when the password was used before. Raises TimeoutError after timeout seconds.
        """
        with anyio.fail_after(timeout):
            session = cls(await _open(host, port))
            try:
                login = ServerLogin(
                    user,
                    password,
                    nonce=secrets.token_bytes(18),
                    cache={} if cache is None else cache,
                    encrypted=host.startswith("/"),
                )
                startup = {"user": user, "database": database, "client_encoding": "UTF8", **(options or {})}
                await session._send(messages.startup_message(startup))
                while not login.done:
                    if reply := login.receive(*await session._receive()):
                        await session._send(reply)
            except BaseException as error:
                await anyio.aclose_forcefully(session._stream)
                match error:
                    case ServerRefused():
                        raise SessionError(error.fields["sqlstate"], error.fields["message"]) from None
                    case GatewayError():
                        # 57P03 is what a client hears of a server that speaks another language; it is not starting.
                        sqlstate = "08P01" if error.sqlstate == "57P03" else error.sqlstate
                        raise SessionError(sqlstate, error.message) from None
                raise
        session.parameters = login.parameters
        return session

    async def query(self, sql: str, values: Sequence[str | None] | None = None) -> list[Row]:
        """Return all rows of sql, as text; by the extended protocol if it takes values, else by the simple one."""
        rows: list[Row] = []
        failure: SessionError | None = None
        size = 0
        self.notices = []
        try:
            await self._send(messages.query(sql) if values is None else _extended(sql, values))
            while True:
                type_, body = await self._receive()
                size += len(body)
                if size > _MAX_ANSWER:
                    raise SessionError("54000", f"answer is longer than {_MAX_ANSWER} bytes")
                match type_:
                    case messages.DATA_ROW:
                        rows.append(tuple(messages.row_values(body)))
                    case messages.ROW_DESCRIPTION:
                        self.columns = [name for name, _ in messages.row_columns(body)]
                    case messages.ERROR_RESPONSE:
                        fields = messages.error_fields(body)
                        failure = SessionError(fields["sqlstate"], fields["message"])
                    case messages.NOTICE_RESPONSE:
                        self.notices.append(messages.error_fields(body)["message"])
                    case messages.PARAMETER_STATUS:
                        name, value = messages.cstrings(body)
                        self.parameters[name] = value
                    case messages.READY_FOR_QUERY:
                        break
        except BaseException as error:
            await anyio.aclose_forcefully(self._stream)
            if failure is not None and isinstance(error, ConnectionError):
                raise failure from None  # the last words before the server closed
            if isinstance(error, ValueError):
                raise SessionError("08P01", f"answer is not understood: {error}") from None
            raise
        if failure is not None:
            raise failure
        return rows

    async def close(self) -> None:
        """Say goodbye and close; may be called twice."""
        try:
            await self._send(messages.Terminate)
        except OSError:
            pass
        finally:
            await anyio.aclose_forcefully(self._stream)

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ConnectionResetError("server closed the connection") from None

    async def _receive(self) -> tuple[int, bytes]:
        try:
            header = await self._incoming.receive_exactly(5)
            size = int.from_bytes(header[1:]) - 4
            if not 0 <= size <= _MAX_ANSWER:
                raise SessionError("08P01", f"answer is not PostgreSQL's: message of {size} bytes")
            return header[0], await self._incoming.receive_exactly(size) if size else b""
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ConnectionResetError("server closed the connection") from None


async def _open(host: str, port: int) -> ByteStream:
    if host.startswith("/"):
        return await anyio.connect_unix(f"{host}/.s.PGSQL.{port}")
    try:
        return await anyio.connect_tcp(host, port)
    except OSError as error:
        # anyio wraps what the system said, one error for each address of a name.
        cause: BaseException | None = error.__cause__
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise (cause if isinstance(cause, OSError) else error) from None


def _extended(sql: str, values: Sequence[str | None]) -> bytes:
    return b"".join(
        (
            messages.parse("", sql),
            messages.bind("", "", values),
            messages.describe(messages.PORTAL, ""),
            messages.execute(""),
            messages.Sync,
        )
    )
