"""One client of the console: what it sends becomes statements to run, and what they come to becomes messages.

1. No I/O: bytes are fed, steps() yields bytes to send and statements to run; the outcome of a statement is set before
   the next step is asked for.
2. Simple and extended protocol, without parameters and transactions; values are text.
3. A request is answered by its result or by exactly one ErrorResponse; what is no message ends the connection.

Called by console.console.
Manual: "Message Flow".
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

from gateway import errors
from gateway.console.commands import Statement, parse
from gateway.console.tables import Cells
from gateway.errors import GatewayError, Severity
from gateway.wire import messages

_HEADER: Final = 5
_LONGEST: Final = 65536  # bytes of a message; there is no reason to send more
_EXTENDED: Final = frozenset(
    (messages.PARSE, messages.BIND, messages.DESCRIBE, messages.EXECUTE, messages.CLOSE, messages.FLUSH)
)
# PostgreSQL ignores what belongs to a COPY outside of one; so does the console.
_IGNORED: Final = frozenset((messages.COPY_DATA, messages.COPY_DONE, messages.COPY_FAIL))
_KNOWN: Final = _EXTENDED | _IGNORED | {messages.QUERY, messages.SYNC, messages.TERMINATE, messages.FUNCTION_CALL}
_READY: Final = messages.ready_for_query(messages.IDLE)
_NO_PARAMETERS: Final = messages.message(messages.PARAMETER_DESCRIPTION, b"\0\0")


class Result(NamedTuple):
    """What a statement came to: the tag of its CommandComplete, its rows, and a notice that goes before them."""

    tag: str
    rows: Sequence[Cells] = ()
    notice: bytes = b""


class _Portal:
    """A statement that was bound, None for an empty one, and how many rows of its result were sent."""

    __slots__ = ("result", "sent", "statement")

    def __init__(self, statement: Statement | None) -> None:
        self.statement = statement
        self.result: Result | None = None
        self.sent = 0


Steps = Generator[bytes | Statement, None, None]


class Session:
    """How far a client has come in the protocol; once it has ended, the connection closes behind the last step."""

    def __init__(self) -> None:
        self.ended = False
        self.outcome: Result | GatewayError = Result("")
        self._received = bytearray()
        self._skipping = False  # to the next Sync, after an error
        self._statements: dict[bytes, Statement | None] = {}
        self._portals: dict[bytes, _Portal] = {}

    def feed(self, data: bytes) -> None:
        """Take what the client has sent."""
        self._received += data

    def steps(self) -> Steps:
        """Yield what is to be sent and what is to be run, up to the end of the last whole message."""
        type_ = 0
        while not self.ended:
            try:
                if (message := self._next()) is None:
                    return
                type_, body = message
                if not self._skipping or type_ in (messages.SYNC, messages.TERMINATE):
                    yield from self._answer(type_, body)
            except GatewayError as error:
                self.ended = error.severity is Severity.FATAL
                self._skipping = type_ in _EXTENDED
                yield error.encode() + (b"" if self.ended or self._skipping else _READY)

    def _next(self) -> tuple[int, bytes] | None:
        """Take the next message, if it is whole; raises 08P01 for what is none."""
        received = self._received
        if received and received[0] not in _KNOWN:
            raise errors.MESSAGE_TYPE(type=received[0])
        if len(received) < _HEADER:
            return None
        length = int.from_bytes(received[1:_HEADER], "big")
        if not 4 <= length <= _LONGEST:
            raise errors.MESSAGE_LENGTH
        if len(received) <= length:
            return None
        message = received[0], bytes(received[_HEADER : length + 1])
        del received[: length + 1]
        return message

    def _answer(self, type_: int, body: bytes) -> Steps:
        match type_:
            case messages.QUERY:
                yield from self._query(body)
            case messages.PARSE:
                yield self._parse(body)
            case messages.BIND:
                yield self._bind(body)
            case messages.DESCRIBE:
                yield self._describe(body)
            case messages.EXECUTE:
                yield from self._execute(body)
            case messages.CLOSE:
                yield self._close(body)
            case messages.SYNC:
                self._skipping = False
                self._portals.clear()
                yield _READY
            case messages.FUNCTION_CALL:
                raise errors.CONSOLE_PROTOCOL
            case messages.TERMINATE:
                self.ended = True
                yield b""

    def _run(self, statement: Statement) -> Generator[bytes | Statement, None, Result]:
        yield statement
        if isinstance(self.outcome, GatewayError):
            raise self.outcome
        return self.outcome

    def _query(self, body: bytes) -> Steps:
        self._statements.pop(b"", None)
        self._portals.clear()
        [text], rest = _strings(body, 1)
        if rest:
            raise errors.MESSAGE_FORMAT
        statements = parse(_decode(text))
        if not statements:
            yield messages.EmptyQueryResponse
        for statement in statements:
            result = yield from self._run(statement)
            description = _description(statement) if statement.table else b""
            yield result.notice + description + _rows(result.rows) + messages.command_complete(result.tag)
        yield _READY

    def _parse(self, body: bytes) -> bytes:
        [name, text], types = _strings(body, 2)
        if len(types) < 2 or len(types) != 2 + 4 * int.from_bytes(types[:2], "big"):
            raise errors.MESSAGE_FORMAT
        if name and name in self._statements:
            raise errors.STATEMENT_EXISTS(name=_decode(name))
        statements = parse(_decode(text))
        if len(statements) > 1:
            raise errors.CONSOLE_COMMAND(command=_decode(text))
        self._statements[name] = statements[0] if statements else None
        return messages.ParseComplete

    def _bind(self, body: bytes) -> bytes:
        [portal, name], rest = _strings(body, 2)
        statement = self._statement(name)
        try:
            at = 2 + 2 * _uint16(rest, 0)
            if _uint16(rest, at):
                raise errors.CONSOLE_PROTOCOL(detail="There are no parameters.")
            formats = struct.unpack(f"!{_uint16(rest, at + 2)}H", rest[at + 4 :])
        except struct.error:
            raise errors.MESSAGE_FORMAT from None
        if any(formats):
            raise errors.CONSOLE_PROTOCOL(detail="Values are sent as text only.")
        self._portals[portal] = _Portal(statement)
        return messages.BindComplete

    def _describe(self, body: bytes) -> bytes:
        [name], _ = _strings(body[1:], 1)
        match body[0]:
            case messages.STATEMENT:
                return _NO_PARAMETERS + _description(self._statement(name))
            case messages.PORTAL:
                return _description(self._portal(name).statement)
        raise errors.DESCRIBE_KIND(kind=body[0])

    def _execute(self, body: bytes) -> Steps:
        [name], rest = _strings(body, 1)
        if len(rest) != 4:
            raise errors.MESSAGE_FORMAT
        portal = self._portal(name)
        if portal.statement is None:
            yield messages.EmptyQueryResponse
            return
        if portal.result is None:
            portal.result = yield from self._run(portal.statement)
        most = int.from_bytes(rest, "big", signed=True)
        rows = portal.result.rows[portal.sent : portal.sent + most if most > 0 else None]
        notice = portal.result.notice if portal.sent == 0 else b""
        portal.sent += len(rows)
        suspended = 0 < most == len(rows)
        yield (
            notice
            + _rows(rows)
            + (messages.PortalSuspended if suspended else messages.command_complete(portal.result.tag))
        )

    def _close(self, body: bytes) -> bytes:
        [name], _ = _strings(body[1:], 1)
        match body[0]:
            case messages.STATEMENT:
                self._statements.pop(name, None)
            case messages.PORTAL:
                self._portals.pop(name, None)
            case kind:
                raise errors.CLOSE_KIND(kind=kind)
        return messages.CloseComplete

    def _statement(self, name: bytes) -> Statement | None:
        if name not in self._statements:
            raise errors.STATEMENT_MISSING(name=_decode(name)) if name else errors.UNNAMED_STATEMENT_MISSING
        return self._statements[name]

    def _portal(self, name: bytes) -> _Portal:
        if name not in self._portals:
            raise errors.CONSOLE_VALUE(reason=f'portal "{_decode(name)}" does not exist')
        return self._portals[name]


def _strings(body: bytes, count: int) -> tuple[list[bytes], bytes]:
    """Take as many zero-terminated strings off a body; raises 08P01."""
    *strings, rest = body.split(b"\0", count)
    if len(strings) < count:
        raise errors.MESSAGE_STRING
    return strings, rest


def _uint16(data: bytes, at: int) -> int:
    return int(struct.unpack_from("!H", data, at)[0])


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _description(statement: Statement | None) -> bytes:
    table = statement.table if statement else None
    return messages.row_description(table.columns) if table else messages.NoData


def _rows(rows: Sequence[Cells]) -> bytes:
    return b"".join([messages.data_row([None if cell is None else str(cell) for cell in row]) for row in rows])
