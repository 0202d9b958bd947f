"""Servers and a name service that are no more than fields, for the tests of probe and watch."""

from __future__ import annotations

import anyio

from health.probe import Row

PRIMARY: Row = ("f", "00000003000000010000000A", "1/A0000028", None, None, "7714020726602855821", "2", "0", None, None)
STANDBY: Row = ("t", None, None, "1/A0000000", "1/9FFFFFF8", "7714020726602855821", "2", "1", "streaming", "3")


class RefusalError(Exception):
    """What a server answers with, as sessions raise it."""

    def __init__(self, sqlstate: str, message: str = "no") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Server:
    """What sessions of one node do; the fields are changed while a test runs."""

    def __init__(self) -> None:
        self.row: Row = PRIMARY
        self.connecting: Exception | None = None  # what happens to a new connection
        self.checking: Exception | None = None  # ... to server_check_query
        self.telling: dict[str, Exception] = {}  # ... to a query that contains this
        self.gate: anyio.Event | None = None  # it hangs until this is set
        self.sessions: list[FakeSession] = []
        self.queries: list[str] = []
        self.where: dict[str, Exception] = {}  # ... at an address

    async def connect(self, address: str, port: int) -> FakeSession:
        if self.gate:
            await self.gate.wait()
        if error := self.where.get(address, self.connecting):
            raise error
        self.sessions.append(FakeSession(self, address))
        return self.sessions[-1]

    @property
    def connected(self) -> list[str]:
        return [session.address for session in self.sessions if not session.closed]


class FakeSession:
    def __init__(self, server: Server, address: str) -> None:
        self.server, self.address, self.closed = server, address, False
        self.broken: Exception | None = None

    async def query(self, sql: str) -> list[Row]:
        assert not self.closed
        self.server.queries.append(sql)
        if self.server.gate:
            await self.server.gate.wait()
        if self.broken:
            raise self.broken
        if "select 1" in sql and self.server.checking:
            raise self.server.checking
        if sql == "select 1":
            return [("1",)]
        for text, error in self.server.telling.items():
            if text in sql:
                raise error
        return [self.server.row if "pg_control_system" in sql else self.server.row[:5]]

    async def close(self) -> None:
        self.closed = True


class Names:
    """A name service: addresses, or the error that it raises."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.error: Exception | None = None

    async def resolve(self, host: str) -> tuple[str, ...]:
        if self.error:
            raise self.error
        return self.addresses
