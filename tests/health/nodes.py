"""PostgreSQL servers that are no more than fields, and understand what the steps of a failover ask of them."""

from __future__ import annotations

import re
from collections.abc import Callable

from health.probe import Row

from .servers import FakeSession, Server

SYSTEM = "7714020726602855821"
REFUSED = ConnectionRefusedError(111, "x")


class NodeServer(Server):
    """A node; a standby that is to receive does so when its upstream is at work."""

    def __init__(self, conninfo: str | None = None) -> None:
        super().__init__()
        self.conninfo = conninfo or ""
        self.in_recovery = conninfo is not None
        self.timeline = 1
        self.lsn = 1000
        self.upstream: NodeServer | None = None
        self.on: dict[str, Callable[[], None]] = {}  # done when a query contains this
        self.answers: dict[str, list[Row]] = {}  # what is said to such a query, in the place of the truth
        self.slots: set[str] = set()
        self.source = "configuration file"
        self.synchronous = ""
        self.row = ()

    @property
    def is_alive(self) -> bool:
        return self.connecting is None

    @property
    def streams(self) -> bool:
        frozen = "no-primary" in self.conninfo
        return self.in_recovery and not frozen and self.upstream is not None and self.upstream.is_alive

    def die(self) -> None:
        self.connecting = REFUSED
        for session in self.sessions:
            session.broken = REFUSED

    def live(self) -> None:
        self.connecting = None

    async def connect(self, address: str, port: int) -> FakeSession:
        session = await super().connect(address, port)
        self.sessions[-1] = made = NodeSession(self, session.address)
        return made

    def answer(self, sql: str) -> list[Row]:
        """What the node says to a query of a probe or of a step."""
        for text, act in self.on.items():
            if text in sql:
                act()
        for text, rows in self.answers.items():
            if text in sql:
                return rows
        if "pg_control_system" in sql:
            return [self._probed()]
        if setting := re.fullmatch(r"alter system set primary_conninfo = '(.*)'", sql, re.DOTALL):
            self.conninfo = setting[1].replace("''", "'")
            return []
        if slot := re.search(r"pg_create_physical_replication_slot\('(\w+)'", sql):
            self.slots.add(slot[1])
            return []
        if "pg_promote" in sql:
            self.in_recovery, self.timeline = False, self.timeline + 1
            return [("t",)]
        told = {
            "current_setting('primary_conninfo')": self.conninfo,
            "current_setting('primary_slot_name')": "",
            "select source": self.source,
            "backend_type = 'walreceiver'": "f" if self.streams else "t",
            "select not pg_is_in_recovery()": "f" if self.in_recovery else "t",
            "select pg_is_in_recovery()": "t" if self.in_recovery else "f",
            "pg_current_wal_lsn()": f"0/{self.lsn:X}",
            "pg_last_wal_replay_lsn() >=": "t",
            "pg_reload_conf": "t",
            "select 1": "1",
        }
        return [next((value,) for text, value in told.items() if text in sql)]

    def _probed(self) -> Row:
        lsn, streams = f"0/{self.lsn:X}", self.streams
        return (
            "t" if self.in_recovery else "f",
            None if self.in_recovery else f"{self.timeline:08X}0000000000000001",
            None if self.in_recovery else lsn,
            lsn if self.in_recovery else None,
            lsn if self.in_recovery else None,
            SYSTEM,
            str(self.timeline),
            "1" if streams else "0",
            "streaming" if streams else None,
            str(self.timeline) if streams else None,
            None,
            self.conninfo,
            "",
            self.synchronous,
            "0",
            None,
        )


class NodeSession(FakeSession):
    server: NodeServer

    async def query(self, sql: str) -> list[Row]:
        assert not self.closed
        self.server.queries.append(sql)
        if self.server.gate:
            await self.server.gate.wait()
        if self.broken:
            raise self.broken
        for text, error in self.server.telling.items():
            if text in sql:
                raise error
        return self.server.answer(sql)
