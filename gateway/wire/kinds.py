"""What the type of a client's message alone tells about it.

1. A type is one byte, as a number; nothing here looks into a message.

Called by the link for what is not the daily path, and by the front.
Manual: "Message Formats"; source: SocketBackend in postgres.c.
"""

from __future__ import annotations

from gateway.wire.messages import (
    BIND,
    CLOSE,
    COPY_DATA,
    COPY_DONE,
    COPY_FAIL,
    DESCRIBE,
    EXECUTE,
    FLUSH,
    FUNCTION_CALL,
    PARSE,
    QUERY,
    SYNC,
    TERMINATE,
)


def is_small(kind: int) -> bool:
    """Is it a message that carries no data, so that PostgreSQL takes it only up to 10,000 bytes?"""
    return kind in (SYNC, FLUSH, EXECUTE, DESCRIBE, CLOSE, COPY_DONE, COPY_FAIL, TERMINATE)


def is_known(kind: int) -> bool:
    """Is it the type of a message that a client may send after its login (SocketBackend in postgres.c)?"""
    return is_small(kind) or kind in (QUERY, PARSE, BIND, COPY_DATA, FUNCTION_CALL)


def needs_no_server(kind: int, size: int) -> bool:
    """Is it a message that PostgreSQL, with nothing under way, answers without doing anything?"""
    return (kind in (SYNC, FLUSH) and size == 5) or kind in (COPY_DATA, COPY_DONE, COPY_FAIL)
