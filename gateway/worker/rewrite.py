"""Prepared statements on their way to a server: other names, and a Parse put in where the server lacks one.

1. What the client must see is said by PostgreSQL wherever PostgreSQL can say it (42P05, 26000, 25P02, 42P01): the
   requests are arranged so that its own answer is right. Only ParseComplete and CloseComplete are made here.
2. Nothing is rewritten for a client that names no statements, and nothing when the server has the right unnamed one.
3. What goes out is appended to the link's assembly; each request is noted in the server's cycle at the same time.

Called by the link, in transaction and statement mode. See "Extended Query" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

from gateway.wire.intent import ALL, deallocated
from gateway.wire.messages import CLOSE, PARSE, QUERY, Sync
from gateway.wire.messages import FAILED_TRANSACTION as FAILED
from gateway.wire.owed import (
    CHANGE,
    FAKE,
    OWES_CLOSE,
    OWES_EXECUTE,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
    SKIP,
)
from gateway.wire.prepared import AllClosed, Closed, Evicted, Injected, Named, Statement, Statements
from gateway.worker.endpoint import Client, Server
from gateway.worker.sock import Buffer

PASS_ON = 0  # nothing special: note the request and pass the message on
NOTED = 1  # the request is noted: pass the message on
PUT_OUT = 2  # the request is noted and its message, or another in its place, is in the assembly


class Rewriter:
    """Arranges what clients prepare so that any server can serve it."""

    def __init__(self, assembly: Buffer, capacity: int) -> None:
        self.assembly = assembly
        self.capacity = capacity  # max_prepared_statements: how many one server holds
        self.known = Statements()
        self.serial = 0  # of the last unnamed statement
        self.generation = 0  # counts the DDL that passed by: what was prepared before may not fit any more

    def parse(self, client: Client, server: Server, buf: Buffer, at: int, end: int) -> int:
        """Handle a whole Parse whose body is buf[at:end]."""
        name_end = buf.find_zero(at, end)
        if name_end < 0 or name_end + 1 >= end:
            return PASS_ON  # PostgreSQL says what is wrong with it
        client.deallocation = None
        if client.statements and (buf.data[name_end + 1] | 0x20) == 0x64:  # D
            return self._parse_deallocate(client, server, buf, at, end, name_end)
        if name_end == at:
            self._remember_unnamed(client, server, buf, at + 1, end)
            return PASS_ON
        self._parse_named(client, server, buf, at, end, name_end)
        return PUT_OUT

    def _remember_unnamed(self, client: Client, server: Server, buf: Buffer, at: int, end: int) -> None:
        if client.unnamed is None:
            client.unnamed = Buffer(max(end - at, 64))
        client.unnamed.start = client.unnamed.end = 0
        client.unnamed.append(buf, at, end)
        self.serial += 1
        client.unnamed_serial = server.unnamed_serial = self.serial

    def _parse_named(self, client: Client, server: Server, buf: Buffer, at: int, end: int, name_end: int) -> None:
        cycle, held = server.cycle, server.statements
        name = buf.slice(at, name_end)
        statement = self.known.of(buf.slice(name_end + 1, end))
        if client.statements is None:
            client.statements = {}
        if server.generation != self.generation:
            self.age(server)
        if name in client.statements:
            self._parse_again(server, name, buf.slice(at, end))
        elif held.get(statement) and cycle.owed() == 0 and not cycle.ignoring and cycle.status != FAILED:
            cycle.changes.append(Named(client.statements, name, statement, None))
            cycle.request(OWES_PARSE | FAKE | CHANGE)
        else:  # new, old, or not known whether PostgreSQL would take it by then: let it tell
            self._clear_way(server, statement)
            self._put_parse(statement.name, statement.body)
            cycle.changes.append(Named(client.statements, name, statement, held))
            cycle.request(OWES_PARSE | CHANGE)

    def _parse_again(self, server: Server, name: bytes, body: bytes) -> None:
        """Let PostgreSQL say that the name exists, after any other fault that it finds first."""
        self._put_parse(name, b"\0\0\0")
        server.cycle.request(OWES_PARSE | SKIP)
        self._put(PARSE, body)
        server.cycle.request(OWES_PARSE)
        server.foreign = [*(server.foreign or ()), name]

    def close_foreign(self, server: Server) -> int:
        """Close what stands on the server under a client's own name, behind the Sync that ends the failed group."""
        for name in server.foreign or ():
            self._put_close(name)
            server.cycle.request(OWES_CLOSE | SKIP)
        server.foreign = None
        self._put_sync(server)
        return 0

    def _parse_deallocate(self, client: Client, server: Server, buf: Buffer, at: int, end: int, name_end: int) -> int:
        """Handle the Parse of a statement that may deallocate others; its Execute does it (see execute)."""
        text_end = buf.find_zero(name_end + 1, end)
        assert client.statements is not None
        name = deallocated(buf.slice(name_end + 1, text_end)) if text_end >= 0 else None
        statement = client.statements.get(name) if name else None
        if name_end > at:  # named: its DEALLOCATE ALL is noticed when it was executed
            self._parse_named(client, server, buf, at, end, name_end)
            return PUT_OUT
        if name is None or (name != ALL and statement is None):
            self._remember_unnamed(client, server, buf, at + 1, end)
            return PASS_ON
        client.deallocation = name
        if statement is None:
            self._remember_unnamed(client, server, buf, at + 1, end)
            return PASS_ON
        self.ensure(server, statement)
        self._put_parse(b"", b"DEALLOCATE " + statement.name + buf.slice(text_end, end))
        client.unnamed_serial = server.unnamed_serial = 0
        server.cycle.request(OWES_PARSE)
        return PUT_OUT

    def execute(self, client: Client, server: Server) -> int:
        """Handle the Execute of a statement that deallocates others."""
        change = self._drop(client, server, client.deallocation)
        client.deallocation = None
        if change is None:
            return PASS_ON
        server.cycle.changes.append(change)
        server.cycle.request(OWES_EXECUTE | CHANGE)
        return NOTED

    def query(self, client: Client, server: Server, buf: Buffer, at: int, end: int) -> int:
        """Handle a whole Query, buf[at:end] with its zero byte, that may deallocate something."""
        name = deallocated(buf.slice(at, end - 1))
        if name is None or client.statements is None or (name != ALL and name not in client.statements):
            return PASS_ON
        verdict = NOTED
        if name != ALL:
            statement = client.statements[name]
            if statement not in server.statements:
                self.ensure(server, statement)
                if not server.cycle.group_open:
                    self._put_sync(server)
            self._put(QUERY, b"DEALLOCATE " + statement.name + b"\0")
            verdict = PUT_OUT
        change = self._drop(client, server, name)
        assert change is not None
        server.cycle.changes.append(change)
        server.cycle.request(OWES_QUERY | CHANGE)
        return verdict

    def _drop(self, client: Client, server: Server, name: bytes | None) -> AllClosed | Closed | None:
        names = client.statements
        if names is None or name is None:
            return None
        if name == ALL:
            return AllClosed(names, server.statements)
        return Closed(names, name, server.statements) if name in names else None

    def dropped_all(self, client: Client, server: Server) -> None:
        """PostgreSQL has executed DEALLOCATE ALL or DISCARD ALL; what stands behind it in the pipeline stays."""
        server.statements.clear()
        server.latest = None
        if client.statements is not None:
            client.statements.clear()
        for change in server.cycle.changes:
            change.redo()

    def close(self, client: Client, server: Server, name: bytes) -> int:
        """Handle a Close of one of the client's statements: its name goes, the server keeps the statement."""
        if client.statements is None or name not in client.statements:
            return PASS_ON
        server.cycle.changes.append(Closed(client.statements, name, None))
        server.cycle.request(OWES_CLOSE | FAKE | CHANGE)
        return PUT_OUT

    def ensure(self, server: Server, statement: Statement) -> int:
        """Make the server have the statement, and note that it was used."""
        held = server.statements
        if server.generation != self.generation:
            self.age(server)
        if held.get(statement):
            if statement is not server.latest:
                del held[statement]
                held[statement] = True
        else:
            self._clear_way(server, statement)
            self._put_parse(statement.name, statement.body)
            server.cycle.changes.append(Injected(held, statement))
            server.cycle.request(OWES_PARSE | SKIP | CHANGE)
            server.pool.server_parses += 1
        server.latest = statement
        return 0

    def age(self, server: Server) -> None:
        """Have every statement of the server prepared again before its next use."""
        server.generation = self.generation
        server.latest = None
        for statement in server.statements:
            server.statements[statement] = False

    def _clear_way(self, server: Server, statement: Statement) -> None:
        """Close the statement where the server has an old one, or the least recently used where it has no room."""
        held = server.statements
        while (statement in held or len(held) >= self.capacity) and not server.cycle.ignoring:
            doomed = statement if statement in held else next(iter(held))
            self._put_close(doomed.name)
            server.cycle.changes.append(Evicted(held, doomed))
            server.cycle.request(OWES_CLOSE | SKIP | CHANGE)

    def ensure_unnamed(self, client: Client, server: Server) -> int:
        """Make the server's unnamed statement the client's."""
        unnamed = client.unnamed
        if client.unnamed_serial and unnamed is not None:
            self._put_parse(b"", unnamed.slice(unnamed.start, unnamed.end))
            server.cycle.request(OWES_PARSE | SKIP)
        else:  # the client has none: let PostgreSQL say so rather than run somebody else's
            self._put_close(b"")
            server.cycle.request(OWES_CLOSE | SKIP)
        server.unnamed_serial = client.unnamed_serial
        return 0

    def _put(self, kind: int, body: bytes) -> None:
        self.assembly.put_byte(kind)
        self.assembly.put_int32(len(body) + 4)
        self.assembly.extend(body)

    def _put_parse(self, name: bytes, body: bytes) -> None:
        self._put(PARSE, name + b"\0" + body)

    def _put_close(self, name: bytes) -> None:
        self._put(CLOSE, b"S" + name + b"\0")

    def _put_sync(self, server: Server) -> None:
        self.assembly.extend(SYNC)
        server.cycle.request(OWES_SYNC | SKIP)


SYNC: bytes = Sync
