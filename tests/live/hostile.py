"""Servers that are not PostgreSQL, or stop being it: clients get one clean error, and nobody else notices.

An impostor stands between the gateway and PostgreSQL. After each case the workers are the same processes, at rest and
without a traceback, and once PostgreSQL is back in its place a fresh client is served.

Manual: "Message Flow", "Message Formats", "SASL Authentication".
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .client import Client, count, error, eventually, login, types, value
from .endpoints import Gateway, PgBouncer
from .messages import (
    LENGTHS,
    TEXT,
    Message,
    cstring,
    message,
    startup,
)
from .servers import Impostor, Script, Visit, authentication, honest, parameter_status

USER, PASSWORD = "alice", "wonderland"
PROBES = "frank"  # a role that needs no password and that no other test logs in as
STRANGE = "select 'strange'"  # the query that the impostor answers itself
SETTINGS: dict[str, Any] = {
    "query_wait_timeout": 1.5,
    "server_login_retry": 0.2,
    "database": {"*": {"dbname": "postgres"}, "session": {"dbname": "postgres", "pool_mode": "session"}},
    "cluster": {"probe_user": PROBES, "fall": 1000},
}

OK = authentication(0)
READY = message("Z", b"I")
KEY = message("K", struct.pack("!I", 4711) + b"key!")


def row_description(name: str = "text", oid: int = TEXT) -> bytes:
    return message("T", struct.pack("!H", 1) + cstring(name) + struct.pack("!IHIhih", 0, 0, oid, -1, -1, 0))


def data_row(data: bytes) -> bytes:
    return message("D", struct.pack("!HI", 1, len(data)) + data)


def error_response(**fields: str) -> bytes:
    return message("E", b"".join(cstring(letter + text) for letter, text in fields.items()) + b"\0")


def notice(text: str) -> bytes:
    return message("N", b"SNOTICE\0VNOTICE\0C00000\0" + cstring("M" + text) + b"\0")


NOTICE = notice("by the way")
NOTIFICATION = message("A", struct.pack("!I", 4711) + b"channel\0payload\0")
STATUS = parameter_status("application_name", "impostor")
ROW = row_description() + data_row(b"strange")
DONE = message("C", b"SELECT 1\0")
ANSWER = ROW + DONE + READY


class Bench:
    """A gateway with an impostor behind it. Each case has a database, and so a pool, that nobody has asked for yet."""

    numbers = itertools.count(1)

    def __init__(self, gateway: Gateway | PgBouncer, impostor: Impostor) -> None:
        self.gateway, self.impostor = gateway, impostor
        self.port = gateway.port
        self.database = ""
        self.is_sound = True  # did every case end well?

    @contextmanager
    def playing(self, script: Script) -> Iterator[None]:
        """Play a script to the gateway's server connections; then examine the gateway, and put PostgreSQL back."""
        self.is_sound = False
        workers, logged = self.gateway.workers(), len(self.gateway.log)
        self.new_pool()
        visits = len(self.impostor.visits)
        self.impostor.script = script
        yield
        Client.close_all()
        assert len(self.impostor.visits) > visits, "the gateway has not come to the impostor"
        self.heal()
        assert self.gateway.workers() == workers, "a worker died"
        for word in ("Traceback", "internal error"):
            assert word not in self.gateway.log[logged:], self.gateway.log[logged:][-3000:]
        eventually(self.serves, "a fresh client served by a healed server")
        eventually(self.is_asleep, "the workers to sleep")
        self.gateway.assert_no_leak()
        self.impostor.hang_up()
        assert not self.impostor.faults, self.impostor.faults
        self.is_sound = True

    def new_pool(self) -> None:
        """Go on in a database that nobody has asked for yet."""
        self.database = f"pool_{next(self.numbers)}"

    def heal(self) -> None:
        """Put PostgreSQL back in its place, for new connections and instead of the old ones."""
        self.impostor.script, self.impostor.on_accept = honest, None
        self.impostor.hang_up()

    def login(self) -> Client:
        return login(self.port, user=USER, database=self.database)

    def value(self, sql: str) -> str | None:
        return value(self.port, sql, user=USER, database=self.database)

    def serves(self) -> bool:
        try:
            return self.value("select 'healed'") == "healed"
        except AssertionError:
            return False

    def refused(self) -> dict[str, str]:
        """Log in and be refused: the fields of the one error that is told before the end."""
        with Client(self.port) as client:
            client.write(startup(user=USER, database=self.database))
            seen = client.wait_closed()
            assert types(seen).lstrip("R") == "E", list(map(str, seen))
            return error(seen)

    def is_asleep(self) -> bool:
        """Do the workers wait for something to happen, instead of using the processor? proc(5)."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.gateway.workers()]
        return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def settled(client: Client) -> list[Message]:
    """What has come since the mark, up to ReadyForQuery or the end."""
    return client.until(lambda seen: count(seen, "Z") > 0)


def is_strange(seen: Message) -> bool:
    """Is it the query that the impostor answers itself?"""
    return seen.type in "QP" and b"strange" in seen.body


def answering(*parts: bytes, then: Callable[[Visit], object] = Visit.relay) -> Script:
    """Be PostgreSQL, but answer STRANGE by this, in one write, then do something else."""

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        if visit.relay(is_strange).type == "P":
            while visit.receive().type != "S":
                pass
        visit.asked = True
        visit.send(*parts)
        then(visit)

    return script


def once(script: Script) -> Script:
    """Play a script to the first connection, and be PostgreSQL to those that follow."""
    scripts = itertools.chain([script], itertools.repeat(honest))
    return lambda visit: next(scripts)(visit)


def close(visit: Visit) -> None:
    """End the connection as a process does that has died."""


ERRORS = {
    "without SQLSTATE": b"SFATAL\0VFATAL\0Mno code\0\0",
    "without message": b"SFATAL\0VFATAL\0C28000\0\0",
    "without severity": b"C28000\0Mno severity\0\0",
    "with unknown fields": b"SFATAL\0VFATAL\0C28000\0Mno\0~what\0!is\0~this\0\0",
    "with empty fields": b"S\0V\0C\0M\0\0",
    "with a short SQLSTATE": b"SFATAL\0VFATAL\0C2\0Mno\0\0",
    "of one NUL": b"\0",
    "of nothing": b"",
    "without end": b"SFATAL\0VFATAL\0C28000\0Mno end",
    "that is not UTF-8": b"SFATAL\0VFATAL\0C28000\0M\xff\xfe\0\0",
}

NO_LOGIN = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n400 Bad Request",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "SMTP": b"220 mail.example.org ESMTP\r\n",
    "MySQL": bytes.fromhex("4a0000000a") + b"8.0.36\0" + bytes(60),
    "TLS alert": bytes.fromhex("15030100020228"),
    "zeroes": bytes(4096),
    "ones": b"\xff" * 4096,
    "NoticeResponse of 2 MB": notice("x" * (2 << 20)),
    "unknown type": message("~", b"what"),
    "unknown type behind AuthenticationOk": OK + message("~", b"what"),
    "answer to a query": OK + ROW,
    "ReadyForQuery before AuthenticationOk": READY,
    "ReadyForQuery without status": OK + message("Z"),
    "ReadyForQuery of two": OK + message("Z", b"II"),
    "AuthenticationOk twice": OK + OK,
    "Authentication without a method": message("R", b"\0\0"),
    "AuthenticationMD5Password with half a salt": authentication(5, b"sa"),
    "AuthenticationSASL of nothing": authentication(10),
    "AuthenticationSASL without end": authentication(10, b"SCRAM-SHA-256"),
    "AuthenticationSASLContinue unasked": authentication(11, b"r=a,s=b,i=1"),
    "AuthenticationSASLFinal unasked": authentication(12, b"v=a"),
    "ParameterStatus without value": OK + message("S", b"name\0"),
    "ParameterStatus without end": OK + message("S", b"name\0value"),
    "BackendKeyData without key": OK + message("K", b"\0\0\0\1"),
    "BackendKeyData of 300 bytes": OK + message("K", bytes(300)),
    **{f"{kind} of length {length:#x}": OK + message(kind, b"abc\0", length) for kind in "Z~" for length in LENGTHS},
    **{f"R of length {length:#x}": message("R", b"abc\0", length) for length in LENGTHS},
}
