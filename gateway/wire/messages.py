"""The messages of the PostgreSQL protocol: their types, and the bytes of each one.

1. No other module spells a message type, status or error field as a letter.
2. A builder bears the manual's name of its message and returns it whole, length included; a message that is always the
   same is a constant, and so named. Text may be bytes, or str: UTF-8 with surrogateescape, so that names in another
   encoding survive the way there and back.
3. A parser takes a body (what follows the length) and raises ValueError when it is not what the manual says: only its
   caller knows whether a client or a server sent it.

Called by the whole of gateway.wire, by errors, and by whoever writes to a connection.
Manual: "Message Formats", "Error and Notice Message Fields".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

# What a client sends.
BIND: Final = ord("B")
CLOSE: Final = ord("C")
COPY_FAIL: Final = ord("f")
DESCRIBE: Final = ord("D")
EXECUTE: Final = ord("E")
FLUSH: Final = ord("H")
FUNCTION_CALL: Final = ord("F")
PARSE: Final = ord("P")
PASSWORD_MESSAGE: Final = ord("p")  # also GSSResponse, SASLInitialResponse and SASLResponse
QUERY: Final = ord("Q")
SYNC: Final = ord("S")
TERMINATE: Final = ord("X")

# What both send.
COPY_DATA: Final = ord("d")
COPY_DONE: Final = ord("c")

# What a server sends.
AUTHENTICATION: Final = ord("R")
BACKEND_KEY_DATA: Final = ord("K")
BIND_COMPLETE: Final = ord("2")
CLOSE_COMPLETE: Final = ord("3")
COMMAND_COMPLETE: Final = ord("C")
COPY_BOTH_RESPONSE: Final = ord("W")
COPY_IN_RESPONSE: Final = ord("G")
COPY_OUT_RESPONSE: Final = ord("H")
DATA_ROW: Final = ord("D")
EMPTY_QUERY_RESPONSE: Final = ord("I")
ERROR_RESPONSE: Final = ord("E")
FUNCTION_CALL_RESPONSE: Final = ord("V")
NEGOTIATE_PROTOCOL_VERSION: Final = ord("v")
NO_DATA: Final = ord("n")
NOTICE_RESPONSE: Final = ord("N")
NOTIFICATION_RESPONSE: Final = ord("A")
PARAMETER_DESCRIPTION: Final = ord("t")
PARAMETER_STATUS: Final = ord("S")
PARSE_COMPLETE: Final = ord("1")
PORTAL_SUSPENDED: Final = ord("s")
READY_FOR_QUERY: Final = ord("Z")
ROW_DESCRIPTION: Final = ord("T")

# The transaction status in ReadyForQuery.
IDLE: Final = ord("I")
IN_TRANSACTION: Final = ord("T")
FAILED_TRANSACTION: Final = ord("E")

# What Describe and Close name.
STATEMENT: Final = ord("S")
PORTAL: Final = ord("P")

# The request in an AuthenticationXXX message.
AUTHENTICATION_OK: Final = 0
AUTHENTICATION_CLEARTEXT_PASSWORD: Final = 3
AUTHENTICATION_MD5_PASSWORD: Final = 5
AUTHENTICATION_SASL: Final = 10
AUTHENTICATION_SASL_CONTINUE: Final = 11
AUTHENTICATION_SASL_FINAL: Final = 12

# The first word after the length of a packet that opens a connection.
PROTOCOL_3_0: Final = 3 << 16
PROTOCOL_3_2: Final = 3 << 16 | 2
CANCEL_REQUEST: Final = 1234 << 16 | 5678
SSL_REQUEST: Final = 1234 << 16 | 5679
GSSENC_REQUEST: Final = 1234 << 16 | 5680

# The one byte that answers SSLRequest and GSSENCRequest.
SSL_ACCEPTED: Final = b"S"
GSSENC_ACCEPTED: Final = b"G"
ENCRYPTION_REFUSED: Final = b"N"

# Types of the columns that the console shows: object identifiers of pg_type.
BOOL: Final = 16
INT8: Final = 20
INT4: Final = 23
TEXT: Final = 25
NUMERIC: Final = 1700

_TYPE_SIZES = {BOOL: 1, INT8: 8, INT4: 4}  # every other type that we send is of variable length, -1

_ERROR_FIELDS = {
    "severity": "S",
    "severity_nonlocalized": "V",
    "sqlstate": "C",
    "message": "M",
    "detail": "D",
    "hint": "H",
    "position": "P",
    "internal_position": "p",
    "internal_query": "q",
    "where": "W",
    "schema_name": "s",
    "table_name": "t",
    "column_name": "c",
    "data_type_name": "d",
    "constraint_name": "n",
    "file": "F",
    "line": "L",
    "routine": "R",
}
_ERROR_FIELD_NAMES = {letter: name for name, letter in _ERROR_FIELDS.items()}

_int16 = struct.Struct("!h")
_int32 = struct.Struct("!i")
_pair = struct.Struct("!ii")  # the length and code that open a packet; the code and argument of an Authentication
_header = struct.Struct("!Bi")
_column = struct.Struct("!ihihih")  # table, attribute, type, size, modifier, format


def message(type_: int, body: bytes) -> bytes:
    """Put type and length before a body."""
    return _header.pack(type_, len(body) + 4) + body


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _str(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# Messages that are the same each time.

BindComplete: Final = message(BIND_COMPLETE, b"")
CloseComplete: Final = message(CLOSE_COMPLETE, b"")
CopyDone: Final = message(COPY_DONE, b"")
EmptyQueryResponse: Final = message(EMPTY_QUERY_RESPONSE, b"")
Flush: Final = message(FLUSH, b"")
NoData: Final = message(NO_DATA, b"")
ParseComplete: Final = message(PARSE_COMPLETE, b"")
PortalSuspended: Final = message(PORTAL_SUSPENDED, b"")
Sync: Final = message(SYNC, b"")
Terminate: Final = message(TERMINATE, b"")
AuthenticationOk: Final = message(AUTHENTICATION, _int32.pack(AUTHENTICATION_OK))
AuthenticationCleartextPassword: Final = message(AUTHENTICATION, _int32.pack(AUTHENTICATION_CLEARTEXT_PASSWORD))
SSLRequest: Final = _pair.pack(8, SSL_REQUEST)
GSSENCRequest: Final = _pair.pack(8, GSSENC_REQUEST)


# What a client sends.


def startup_message(parameters: Mapping[str, str], version: int = PROTOCOL_3_0) -> bytes:
    """Open a connection; parameters hold at least the user."""
    body = b"".join([_bytes(text) + b"\0" for pair in parameters.items() for text in pair])
    return _pair.pack(len(body) + 9, version) + body + b"\0"


def cancel_request(pid: int, key: bytes) -> bytes:
    """Ask, on a connection of its own, to stop what the server process pid runs."""
    return struct.pack("!iii", len(key) + 12, CANCEL_REQUEST, pid) + key


def password_message(password: str | bytes) -> bytes:
    """Answer AuthenticationCleartextPassword or AuthenticationMD5Password."""
    return message(PASSWORD_MESSAGE, _bytes(password) + b"\0")


def sasl_initial_response(mechanism: str, response: bytes) -> bytes:
    """Choose one of the mechanisms of AuthenticationSASL and say the first word."""
    return message(PASSWORD_MESSAGE, mechanism.encode() + b"\0" + _int32.pack(len(response)) + response)


def sasl_response(response: bytes) -> bytes:
    """Answer AuthenticationSASLContinue."""
    return message(PASSWORD_MESSAGE, response)


def query(text: str | bytes) -> bytes:
    """Run text by the simple protocol."""
    return message(QUERY, _bytes(text) + b"\0")


def parse(statement: str | bytes, text: str | bytes, types: Sequence[int] = ()) -> bytes:
    """Prepare text under the name statement; types are the object identifiers of its parameters, 0 for unknown."""
    return message(
        PARSE, b"%b\0%b\0" % (_bytes(statement), _bytes(text)) + struct.pack(f"!H{len(types)}I", len(types), *types)
    )


def bind(portal: str | bytes, statement: str | bytes, values: Sequence[str | bytes | None] = ()) -> bytes:
    """Give values, as text, to a prepared statement; its result is asked for as text."""
    body = b"%b\0%b\0\0\0" % (_bytes(portal), _bytes(statement))
    return message(BIND, body + struct.pack("!H", len(values)) + _values(values) + b"\0\0")


def describe(kind: int, name: str | bytes) -> bytes:
    """Ask for the description of a STATEMENT or PORTAL."""
    return message(DESCRIBE, b"%c%b\0" % (kind, _bytes(name)))


def close(kind: int, name: str | bytes) -> bytes:
    """Forget a STATEMENT or PORTAL."""
    return message(CLOSE, b"%c%b\0" % (kind, _bytes(name)))


def execute(portal: str | bytes, max_rows: int = 0) -> bytes:
    """Run a portal; 0 rows means all."""
    return message(EXECUTE, b"%b\0" % _bytes(portal) + _int32.pack(max_rows))


# What a server sends.


def authentication_md5_password(salt: bytes) -> bytes:
    """Ask for the password hashed with a salt of 4 bytes."""
    return message(AUTHENTICATION, _int32.pack(AUTHENTICATION_MD5_PASSWORD) + salt)


def authentication_sasl(mechanisms: Iterable[str]) -> bytes:
    """Offer mechanisms, the preferred one first."""
    names = b"".join([name.encode() + b"\0" for name in mechanisms])
    return message(AUTHENTICATION, _int32.pack(AUTHENTICATION_SASL) + names + b"\0")


def authentication_sasl_continue(data: bytes) -> bytes:
    """Send the challenge of a SASL exchange."""
    return message(AUTHENTICATION, _int32.pack(AUTHENTICATION_SASL_CONTINUE) + data)


def authentication_sasl_final(data: bytes) -> bytes:
    """End a SASL exchange that went well."""
    return message(AUTHENTICATION, _int32.pack(AUTHENTICATION_SASL_FINAL) + data)


def negotiate_protocol_version(version: int, options: Sequence[str]) -> bytes:
    """Tell the newest version that is spoken, and the protocol options that are not known."""
    names = b"".join([_bytes(name) + b"\0" for name in options])
    return message(NEGOTIATE_PROTOCOL_VERSION, _pair.pack(version, len(options)) + names)


def parameter_status(name: str, value: str | bytes) -> bytes:
    """Report the value of a parameter."""
    return message(PARAMETER_STATUS, b"%b\0%b\0" % (_bytes(name), _bytes(value)))


def backend_key_data(pid: int, key: bytes) -> bytes:
    """Tell the client how to cancel: the key has 4 bytes in protocol 3.0, up to 256 in 3.2."""
    return message(BACKEND_KEY_DATA, _int32.pack(pid) + key)


def ready_for_query(status: int) -> bytes:
    """End an answer; status is IDLE, IN_TRANSACTION or FAILED_TRANSACTION."""
    return message(READY_FOR_QUERY, b"%c" % status)


def error_response(fields: Mapping[str, str]) -> bytes:
    """Report an error; the keys are those that error_fields returns."""
    return message(ERROR_RESPONSE, _fields(fields))


def notice_response(fields: Mapping[str, str]) -> bytes:
    """Report what is no error; the keys are those that error_fields returns."""
    return message(NOTICE_RESPONSE, _fields(fields))


def row_description(columns: Sequence[tuple[str, int]]) -> bytes:
    """Describe the rows that follow: name and type of each column, values as text."""
    described = [
        _bytes(name) + b"\0" + _column.pack(0, 0, oid, _TYPE_SIZES.get(oid, -1), -1, 0) for name, oid in columns
    ]
    return message(ROW_DESCRIPTION, _int16.pack(len(columns)) + b"".join(described))


def data_row(values: Sequence[str | bytes | None]) -> bytes:
    """Send one row, values as text, None for NULL."""
    return message(DATA_ROW, _int16.pack(len(values)) + _values(values))


def command_complete(tag: str) -> bytes:
    """End the result of one command."""
    return message(COMMAND_COMPLETE, tag.encode() + b"\0")


# What their bodies say.


def cstrings(body: bytes) -> list[str]:
    """Split a body that is a row of zero-terminated strings: ParameterStatus, CommandComplete, PasswordMessage, Query.

    Raises ValueError when the last one is not terminated.
    """
    *strings, rest = _str(body).split("\0")
    if rest or not strings:
        raise ValueError("string is not terminated")
    return strings


def error_fields(body: bytes) -> dict[str, str]:
    """Name the fields of an ErrorResponse or NoticeResponse; never raises.

    Severity, sqlstate and message are always there, whatever the server forgot (a missing SQLSTATE crashed a pooler
    once, CVE-2026-6666); a field that is not in the manual goes by its letter.
    """
    fields = {"severity": "ERROR", "sqlstate": "XX000", "message": ""}
    for field in _str(body).split("\0"):
        if field:
            fields[_ERROR_FIELD_NAMES.get(field[0], field[0])] = field[1:]
    return fields


def row_columns(body: bytes) -> list[tuple[str, int]]:
    """List name and type of each column of a RowDescription; raises ValueError."""
    columns = []
    position = 2
    try:
        for _ in range(_int16.unpack_from(body)[0]):
            end = body.index(0, position)
            columns.append((_str(body[position:end]), _column.unpack_from(body, end + 1)[2]))
            position = end + 1 + _column.size
    except struct.error:
        raise ValueError("row description is cut short") from None
    return columns


def row_values(body: bytes) -> list[str | None]:
    """List the values of a DataRow in text format, None for NULL; raises ValueError."""
    values: list[str | None] = []
    position = 2
    try:
        for _ in range(_int16.unpack_from(body)[0]):
            (size,) = _int32.unpack_from(body, position)
            position += 4
            values.append(None if size < 0 else _str(body[position : position + size]))
            position += max(size, 0)
    except struct.error:
        raise ValueError("data row is cut short") from None
    if position != len(body):
        raise ValueError("data row has another length than its values")
    return values


def _fields(fields: Mapping[str, str]) -> bytes:
    return _bytes("".join([f"{_ERROR_FIELDS.get(name, name)}{text}\0" for name, text in fields.items()])) + b"\0"


def _values(values: Sequence[str | bytes | None]) -> bytes:
    parts = []
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            data = _bytes(value)
            parts += _int32.pack(len(data)), data
    return b"".join(parts)
