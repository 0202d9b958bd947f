"""Prepared statements on their way to a server: other names, and a Parse put in where the server lacks one.

1. What the client must see is said by PostgreSQL wherever PostgreSQL can say it (42P05, 26000, 25P02, 42P01): the
   requests are arranged so that its own answer is right. Only ParseComplete and CloseComplete are made here.
2. Nothing is rewritten for a client that names no statements, and nothing when the server has the right unnamed one.
3. What goes out is appended to the link's assembly; each request is noted in the server's cycle at the same time.

Called by the link, in transaction and statement mode. See "Extended Query" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

import re

from gateway.wire.intent import Verb, mention
from gateway.wire.messages import BIND, CLOSE, DESCRIBE, FAILED_TRANSACTION, PARSE, QUERY, STATEMENT, Sync
from gateway.wire.owed import (
    CHANGE,
    FAKE,
    OWES_BIND,
    OWES_CLOSE,
    OWES_DESCRIBE,
    OWES_EXECUTE,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
    SKIP,
)
from gateway.wire.prepared import AllClosed, Closed, Evicted, Injected, Named, Statement, Statements
from gateway.worker.endpoint import Client, Server
from gateway.worker.pool import Pool
from gateway.worker.sock import Buffer

PASS_ON = 0  # nothing special: note the request and pass the message on
NOTED = 1  # the request is noted: pass the message on
PUT_OUT = 2  # the request is noted and its message, or another in its place, is in the assembly
STALL = 3  # what is right depends on an answer that is still owed: come again when it is there


class Rewriter:
    """Arranges what clients prepare so that any server can serve it."""

    def __init__(self, assembly: Buffer, capacity: int, tag: str) -> None:
        self.assembly = assembly
        self.capacity = capacity  # max_prepared_statements: how many one server holds
        self.known = Statements(tag)
        self.serial = 0  # of the last unnamed statement
        self.generation = 0  # counts the plans that did not fit any more: all before them are prepared again

    def parse(self, client: Client, server: Server, buf: Buffer, at: int, end: int) -> int:
        """Handle a whole Parse whose body is buf[at:end]."""
        name_end = buf.find_zero(at, end)
        if server.cycle.ignoring or name_end < 0 or name_end + 1 >= end:
            return PASS_ON  # PostgreSQL says what is wrong with it
        client.deallocation = None
        if name_end > at:
            return self._parse_named(client, server, buf, at, end, name_end)
        if client.statements is not None and may_mention(buf.data[name_end + 1]):
            verdict = self._parse_mention(client, server, buf.slice(at + 1, end))
            if verdict != PASS_ON:
                return verdict
        if client.unnamed is None:
            client.unnamed = Buffer(max(end - at, 64))
        client.unnamed.start = client.unnamed.end = 0
        client.unnamed.append(buf, at + 1, end)
        self.serial += 1
        client.unnamed_serial = server.unnamed_serial = self.serial
        return PASS_ON

    def _parse_named(self, client: Client, server: Server, buf: Buffer, at: int, end: int, name_end: int) -> int:
        cycle = server.cycle
        name = buf.slice(at, name_end)
        statement = self.known.of(buf.slice(name_end + 1, end), client.parameters.meaning)
        if server.cycle.is_unsettled(name, statement):
            return STALL
        if client.statements is None:
            client.statements = {}
        if name in client.statements:
            # Let PostgreSQL say that the name exists, after any other fault that it finds first.
            self._put_parse(name, b"\0\0\0")
            cycle.request(OWES_PARSE | SKIP)
            self._put(PARSE, buf.slice(at, end))
            cycle.request(OWES_PARSE)
            server.foreign = [*(server.foreign or ()), name]
        else:
            # Also where the server has it: whether it is still valid, only PostgreSQL can tell.
            self._note(server, statement)
            self._clear_way(server, statement)
            self._put_parse(statement.name, statement.body)
            cycle.changes.append(Named(client.statements, name, statement, server.statements))
            cycle.request(OWES_PARSE | CHANGE)
        return PUT_OUT

    def close_foreign(self, server: Server) -> int:
        """Close what stands on the server under a client's own name, behind the Sync that ends the failed group."""
        for name in server.foreign or ():
            self._put_close(name)
            server.cycle.request(OWES_CLOSE | SKIP)
        server.foreign = None
        self._put_sync(server)
        return 0

    def _parse_mention(self, client: Client, server: Server, body: bytes) -> int:
        """Handle a Parse without a name whose text may name a prepared statement; Execute does what it says."""
        text, _, types = body.partition(b"\0")
        found = mention(text)
        if found is None or client.statements is None:
            return PASS_ON
        everything = found.verb is Verb.DEALLOCATE_ALL and server.cycle.changes and server.cycle.boundaries
        if everything or server.cycle.is_unsettled(found.name, self._current(client, server, found.name)):
            return STALL
        statement = self._current(client, server, found.name)
        if found.verb is not Verb.EXECUTE and (statement is not None or found.verb is Verb.DEALLOCATE_ALL):
            client.deallocation = found.name
        if statement is None:
            return PASS_ON
        self.ensure(server, statement)
        self._put_parse(b"", text[: found.start] + statement.name + text[found.end :] + b"\0" + types)
        client.unnamed_serial = server.unnamed_serial = 0
        server.cycle.request(OWES_PARSE)
        return PUT_OUT

    def bind(self, client: Client, server: Server, buf: Buffer, run: int, pos: int, size: int, whole: bool) -> int:
        """Handle a Bind; return where the bytes that are passed on untouched begin, or -1 - run to come again."""
        pool: Pool = server.pool
        # After a reload that ends this, a client still has the statements that it had prepared before.
        rewrites = pool.rewrites or client.statements is not None
        if not rewrites or client.replication or server.cycle.ignoring:
            server.cycle.request(OWES_BIND)
            return run
        limit = min(pos + size, buf.end)
        portal_end = buf.find_zero(pos + 5, limit)
        name_end = buf.find_zero(portal_end + 1, limit) if portal_end >= 0 else -1
        if name_end < 0:
            if not whole:
                return -1 - run
        elif name_end == portal_end + 1:
            if client.unnamed_serial != server.unnamed_serial:
                self._spill(buf, run, pos)
                run = pos
                self.ensure_unnamed(client, server)
        else:
            statement = self._named(client, server, buf.slice(portal_end + 1, name_end))
            if client.stalled:
                return -1 - run
            if statement is not None:
                self._spill(buf, run, pos)
                self.ensure(server, statement)
                self.assembly.put_byte(BIND)
                self.assembly.put_int32(size - 1 + len(statement.name) - (name_end - portal_end - 1))
                self.assembly.append(buf, pos + 5, portal_end + 1)
                self.assembly.extend(statement.name)
                run = name_end
        server.cycle.request(OWES_BIND)
        return run

    def _named(self, client: Client, server: Server, name: bytes) -> Statement | None:
        """Return the client's statement, None where PostgreSQL is to refuse the name; while that is in doubt, stall."""
        statement = self._current(client, server, name)
        client.stalled = server.cycle.boundaries > 0 and server.cycle.is_unsettled(name, statement)
        return statement

    def _current(self, client: Client, server: Server, name: bytes) -> Statement | None:
        """Return the client's statement; one that must be parsed again is then one of the client's present settings."""
        names = client.statements
        statement = names.get(name) if names is not None else None
        if names is None or statement is None or statement.meaning == client.parameters.meaning:
            return statement
        if not server.statements.get(statement):
            statement = names[name] = self.known.of(statement.body, client.parameters.meaning)
        return statement

    def describe_or_close(
        self, client: Client, server: Server, buf: Buffer, run: int, pos: int, size: int, kind: int
    ) -> int:
        """Handle a whole Describe or Close; return where what is passed on untouched begins, or -1 - run to stall."""
        pool: Pool = server.pool
        owed = OWES_DESCRIBE if kind == DESCRIBE else OWES_CLOSE
        rewrites = pool.rewrites or client.statements is not None
        rewrites = rewrites and not client.replication and not server.cycle.ignoring
        if rewrites and size > 6 and buf.data[pos + 5] == STATEMENT:
            name_end = buf.find_zero(pos + 6, pos + size)
            if name_end == pos + 6:
                if kind == CLOSE:
                    client.unnamed_serial = server.unnamed_serial = 0
                elif client.unnamed_serial != server.unnamed_serial:
                    self._spill(buf, run, pos)
                    run = pos
                    self.ensure_unnamed(client, server)
            elif name_end > 0:
                statement = self._named(client, server, buf.slice(pos + 6, name_end))
                if client.stalled:
                    return -1 - run
                if statement is not None:
                    self._spill(buf, run, pos)
                    if kind == CLOSE:
                        self.close(client, server, buf.slice(pos + 6, name_end))
                        return pos + size
                    self.ensure(server, statement)
                    self.assembly.put_byte(DESCRIBE)
                    self.assembly.put_int32(size - 1 + len(statement.name) - (name_end - pos - 6))
                    self.assembly.put_byte(STATEMENT)
                    self.assembly.extend(statement.name)
                    run = name_end
        server.cycle.request(owed)
        return run

    def execute(self, client: Client, server: Server) -> int:
        """Handle the Execute of a statement that deallocates others."""
        name, client.deallocation = client.deallocation, None
        names = client.statements
        if server.cycle.ignoring or names is None or name is None or (name and name not in names):
            return PASS_ON
        change = Closed(names, name, server.statements) if name else AllClosed(names, server.statements)
        server.cycle.changes.append(change)
        server.cycle.request(OWES_EXECUTE | CHANGE)
        return NOTED

    def query(self, client: Client, server: Server, buf: Buffer, at: int, end: int) -> int:
        """Handle a whole Query, buf[at:end] with its zero byte, whose text may name a prepared statement."""
        text = buf.slice(at, end)
        found = mention(text[: len(text) - 1])
        names, cycle = client.statements, server.cycle
        if cycle.ignoring or cycle.status == FAILED_TRANSACTION or found is None or names is None:
            return PASS_ON
        everything = found.verb is Verb.DEALLOCATE_ALL and cycle.changes and cycle.boundaries
        if everything or cycle.is_unsettled(found.name, self._current(client, server, found.name)):
            return STALL
        if found.verb is Verb.DEALLOCATE_ALL:
            cycle.changes.append(AllClosed(names, server.statements))
            cycle.request(OWES_QUERY | CHANGE)
            return NOTED
        statement = names.get(found.name)
        if statement is None:
            return PASS_ON
        in_group = cycle.group_open
        if self.ensure(server, statement) and not in_group:
            self._put_sync(server)
        self._put(QUERY, text[: found.start] + statement.name + text[found.end :])
        if found.verb is Verb.DEALLOCATE:
            cycle.changes.append(Closed(names, found.name, server.statements))
            cycle.request(OWES_QUERY | CHANGE)
        else:
            cycle.request(OWES_QUERY)
        return PUT_OUT

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
        if client.statements is None:
            return PASS_ON
        if server.cycle.is_unsettled(name, None):
            return STALL
        if name not in client.statements:
            return PASS_ON
        server.cycle.changes.append(Closed(client.statements, name, None))
        server.cycle.request(OWES_CLOSE | FAKE | CHANGE)
        return PUT_OUT

    def ensure(self, server: Server, statement: Statement) -> bool:
        """Make the server have the statement, and note that it was used; return True when it has to be prepared."""
        held = server.statements
        if server.generation != self.generation:
            self._age(server)
        if held.get(statement):
            if statement is not server.latest:
                del held[statement]
                held[statement] = True
                server.latest = statement
            return False
        self._note(server, statement)
        self._clear_way(server, statement)
        self._put_parse(statement.name, statement.body)
        server.cycle.changes.append(Injected(held, statement))
        server.cycle.request(OWES_PARSE | SKIP | CHANGE)
        server.pool.server_parses += 1
        server.latest = statement
        return True

    def _note(self, server: Server, statement: Statement) -> None:
        """Remember what is parsed while answers are owed: one of them may tell of other settings, see reread."""
        if server.cycle.owed() == 0:
            server.recent.clear()
        server.recent.append(statement)

    def reread(self, server: Server) -> None:
        """The client has changed what texts mean: what was parsed with that under way is not what it is known as."""
        for statement in server.recent:
            if statement in server.statements:
                server.statements[statement] = False

    def _age(self, server: Server) -> None:
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

    def _spill(self, buf: Buffer, start: int, end: int) -> int:
        if start < end:
            self.assembly.append(buf, start, end)
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
        self.assembly.extend(Sync)
        server.cycle.request(OWES_SYNC | SKIP)


def may_mention(first: int) -> bool:
    """Can a text with this first byte be DEALLOCATE, DISCARD or EXECUTE, perhaps behind blanks or a comment?"""
    return (first | 0x20) in (0x64, 0x65) or first <= 0x20 or first in (0x2D, 0x2F, 0x3B)


def own_names(client: Client, server: Server, message: bytes) -> bytes:
    """Return an ErrorResponse in which the client's own names stand for ours, those that it is giving up included."""
    names = {change.statement.name: change.name for change in server.cycle.changes if change.statement and change.name}
    names |= {statement.name: name for name, statement in (client.statements or {}).items()}
    body = re.sub(rb'"(gateway_\w+_\d+)"', lambda found: b'"%b"' % names.get(found[1], found[1]), message[5:])
    return message[:1] + (len(body) + 4).to_bytes(4, "big") + body
