"""Messages of the frontend, as bytes, and messages of the backend, in words.

Independent of gateway.wire on purpose: the bench must not believe what it examines. Every builder returns one complete
message; a wrong one is built with `message`, which takes any type, body and length.

Called by the player and by tests. Manual: "Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

INT8, INT4, TEXT = 20, 23, 25
LENGTHS = [0, 3, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF]  # that no message can have

WHO: dict[str, Any] = {"user": "postgres", "database": "postgres"}

Value = str | bytes | int | None


class Message(NamedTuple):
    """A message of the backend: its type letter and the body after the length."""

    type: str
    body: bytes

    @property
    def fields(self) -> dict[str, str]:
        """The fields of an ErrorResponse or NoticeResponse by their letter."""
        parts = self.body.split(b"\0")
        return {part[:1].decode(): part[1:].decode("utf-8", "replace") for part in parts if part}

    @property
    def values(self) -> list[bytes | None]:
        """The columns of a DataRow."""
        (count,) = struct.unpack_from("!H", self.body)
        at, columns = 2, list[bytes | None]()
        for _ in range(count):
            (length,) = struct.unpack_from("!i", self.body, at)
            at += 4
            columns.append(None if length < 0 else self.body[at : at + length])
            at += max(length, 0)
        return columns

    def __str__(self) -> str:
        name = NAMES.get(self.type, f"unknown type {self.type!r}")
        if self.type in "EN":
            return f"{name} " + " ".join(f"{key}={value!r}" for key, value in self.fields.items())
        if self.type == "D" and len(self.body) < 400:
            return f"{name} {self.values}"
        if len(self.body) > 400:
            return f"{name} {len(self.body)} bytes {self.body[:60]!r}...{self.body[-20:]!r}"
        return f"{name} {self.body!r}" if self.body else name


NAMES = {
    "R": "Authentication",
    "K": "BackendKeyData",
    "2": "BindComplete",
    "3": "CloseComplete",
    "C": "CommandComplete",
    "d": "CopyData",
    "c": "CopyDone",
    "G": "CopyInResponse",
    "H": "CopyOutResponse",
    "W": "CopyBothResponse",
    "D": "DataRow",
    "I": "EmptyQueryResponse",
    "E": "ErrorResponse",
    "V": "FunctionCallResponse",
    "v": "NegotiateProtocolVersion",
    "n": "NoData",
    "N": "NoticeResponse",
    "A": "NotificationResponse",
    "t": "ParameterDescription",
    "S": "ParameterStatus",
    "1": "ParseComplete",
    "s": "PortalSuspended",
    "Z": "ReadyForQuery",
    "T": "RowDescription",
}


def message(kind: str, body: bytes = b"", length: int | None = None) -> bytes:
    """Build a message; `length` overrides the true one, to lie about it."""
    return kind.encode() + struct.pack("!I", len(body) + 4 if length is None else length) + body


def packet(body: bytes, length: int | None = None) -> bytes:
    """Build a packet without a type, as they open a connection."""
    return struct.pack("!I", len(body) + 4 if length is None else length) + body


def cstring(text: str | bytes) -> bytes:
    return (text.encode() if isinstance(text, str) else text) + b"\0"


def startup(version: tuple[int, int] = (3, 0), **parameters: str) -> bytes:
    body = b"".join(cstring(key) + cstring(value) for key, value in parameters.items())
    return packet(struct.pack("!HH", *version) + body + b"\0")


def ssl_request() -> bytes:
    return packet(struct.pack("!HH", 1234, 5679))


def gssenc_request() -> bytes:
    return packet(struct.pack("!HH", 1234, 5680))


def cancel_request(pid: int, key: bytes) -> bytes:
    return packet(struct.pack("!HHI", 1234, 5678, pid) + key)


def query(sql: str) -> bytes:
    return message("Q", cstring(sql))


def parse(sql: str, name: str = "", oids: Sequence[int] = ()) -> bytes:
    return message("P", cstring(name) + cstring(sql) + struct.pack(f"!H{len(oids)}I", len(oids), *oids))


def bind(
    *values: Value,
    statement: str = "",
    portal: str = "",
    formats: Sequence[int] = (),
    results: Sequence[int] = (),
) -> bytes:
    return message(
        "B",
        cstring(portal)
        + cstring(statement)
        + struct.pack(f"!H{len(formats)}H", len(formats), *formats)
        + struct.pack("!H", len(values))
        + b"".join(map(_value, values))
        + struct.pack(f"!H{len(results)}H", len(results), *results),
    )


def describe_statement(name: str = "") -> bytes:
    return message("D", b"S" + cstring(name))


def describe_portal(name: str = "") -> bytes:
    return message("D", b"P" + cstring(name))


def execute(portal: str = "", rows: int = 0) -> bytes:
    return message("E", cstring(portal) + struct.pack("!I", rows))


def close_statement(name: str = "") -> bytes:
    return message("C", b"S" + cstring(name))


def close_portal(name: str = "") -> bytes:
    return message("C", b"P" + cstring(name))


def flush() -> bytes:
    return message("H")


def sync() -> bytes:
    return message("S")


def terminate() -> bytes:
    return message("X")


def password(text: str | bytes) -> bytes:
    return message("p", cstring(text))


def copy_data(data: str | bytes) -> bytes:
    return message("d", data.encode() if isinstance(data, str) else data)


def copy_done() -> bytes:
    return message("c")


def copy_fail(reason: str) -> bytes:
    return message("f", cstring(reason))


def function_call(oid: int, *values: Value) -> bytes:
    """Call a function by its oid, with arguments and result as text."""
    arguments = struct.pack("!H", len(values)) + b"".join(map(_value, values))
    return message("F", struct.pack("!IH", oid, 0) + arguments + struct.pack("!H", 0))


def run(sql: str, *values: Value, statement: str = "", oids: Sequence[int] = ()) -> bytes:
    """Parse, Bind, Describe and Execute, without a Sync: what a driver sends for one query."""
    return parse(sql, statement, oids) + bind(*values, statement=statement) + describe_portal() + execute()


def _value(value: Value) -> bytes:
    if value is None:
        return struct.pack("!i", -1)
    data = value if isinstance(value, bytes) else str(value).encode()
    return struct.pack("!i", len(data)) + data
