"""A PostgreSQL session that is not there: what it has prepared, and its answers to the bytes of the extended protocol.

It follows exec_parse_message, exec_bind_message, exec_simple_query and prepare.c. Rows tell which statement has run.
Texts: bad ... is a syntax error; begin, commit, rollback, execute NAME, deallocate NAME | all, discard all do what they
say; all others return their own text.
"""

from __future__ import annotations

from gateway.wire import messages
from gateway.wire.messages import (
    BIND,
    CLOSE,
    DESCRIBE,
    EXECUTE,
    FAILED_TRANSACTION,
    FLUSH,
    IDLE,
    IN_TRANSACTION,
    PARSE,
    QUERY,
    STATEMENT,
    SYNC,
)


class PostgresError(Exception):
    """An ErrorResponse."""

    def __init__(self, sqlstate: str, message: str) -> None:
        self.fields = {"severity": "ERROR", "severity_nonlocalized": "ERROR", "sqlstate": sqlstate, "message": message}


class Session:
    """One server process."""

    def __init__(self) -> None:
        self.prepared: dict[bytes, bytes] = {}  # texts by name; b"" is the unnamed one
        self.portal: bytes | None = None  # the text of the unnamed one
        self.status = IDLE
        self.skipping = False
        self.rest = b""

    def receive(self, data: bytes) -> bytes:
        """Answer what has come in, as far as it is whole."""
        data, answers = self.rest + data, []
        while len(data) >= 5 and len(data) > (size := int.from_bytes(data[1:5], "big")):
            answers.append(self._answer(data[0], data[5 : size + 1]))
            data = data[size + 1 :]
        self.rest = data
        return b"".join(answers)

    def _answer(self, kind: int, body: bytes) -> bytes:
        if kind == SYNC:
            self.skipping = False
            return self._ready()
        if self.skipping or kind == FLUSH:
            return b""
        try:
            if kind == QUERY:
                self.prepared.pop(b"", None)
                return self._run(self._parsed(body[:-1])) + self._ready()
            return self._extended(kind, body)
        except PostgresError as error:
            if self.status == IN_TRANSACTION:
                self.status = FAILED_TRANSACTION
            self.skipping = kind != QUERY
            return messages.error_response(error.fields) + (b"" if self.skipping else self._ready())

    def _extended(self, kind: int, body: bytes) -> bytes:
        if kind == PARSE:
            name, text, _ = body.split(b"\0", 2)
            if not name:
                self.prepared.pop(name, None)
            self._parsed(text)
            if name in self.prepared:
                raise PostgresError("42P05", f'prepared statement "{name.decode()}" already exists')
            self.prepared[name] = text
            return messages.ParseComplete
        if kind == BIND:
            text = self._statement(body.split(b"\0", 2)[1])
            self._check(text)
            self.portal = text
            return messages.BindComplete
        if kind == EXECUTE:
            if self.portal is None:
                raise PostgresError("34000", 'portal "" does not exist')
            return self._run(self.portal)
        assert body[0] == STATEMENT
        name = body[1:-1]
        if kind == DESCRIBE:
            text = self._statement(name)
            self._check(text)
            parameters = messages.message(messages.PARAMETER_DESCRIPTION, b"\0\0")
            return parameters + messages.row_description([(text.decode(), messages.TEXT)])
        assert kind == CLOSE
        self.prepared.pop(name, None)
        return messages.CloseComplete

    def _parsed(self, text: bytes) -> bytes:
        if text.startswith(b"bad"):
            raise PostgresError("42601", f'syntax error at or near "{text.decode()}"')
        self._check(text)
        return text

    def _check(self, text: bytes) -> None:
        if self.status == FAILED_TRANSACTION and text not in (b"", b"commit", b"rollback"):
            raise PostgresError(
                "25P02", "current transaction is aborted, commands ignored until end of transaction block"
            )

    def _statement(self, name: bytes) -> bytes:
        if name not in self.prepared:
            which = f'prepared statement "{name.decode()}"' if name else "unnamed prepared statement"
            raise PostgresError("26000", f"{which} does not exist")
        return self.prepared[name]

    def _run(self, text: bytes) -> bytes:
        self._check(text)
        verb, _, name = text.partition(b" ")
        tag, row = text.upper().decode(), b""
        if verb == b"begin":
            self.status = IN_TRANSACTION
        elif verb in (b"commit", b"rollback"):
            self.status = IDLE
        elif text in (b"deallocate all", b"discard all"):
            if verb == b"discard" and self.status != IDLE:
                raise PostgresError("25001", "DISCARD ALL cannot run inside a transaction block")
            unnamed = self.prepared.get(b"")
            self.prepared = {} if unnamed is None else {b"": unnamed}
        elif verb == b"deallocate":
            self._statement(name)
            del self.prepared[name]
            tag = "DEALLOCATE"
        elif verb == b"execute":
            return self._run(self._statement(name))
        else:
            tag, row = "SELECT 1", messages.data_row([text])
        return row + messages.command_complete(tag)

    def _ready(self) -> bytes:
        if self.status == IDLE:
            self.portal = None
        return messages.ready_for_query(self.status)
