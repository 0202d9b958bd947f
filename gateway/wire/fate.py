"""What became of the requests that were not answered when their server was lost.

1. LOST is said only where PostgreSQL has surely undone everything, READ only of what surely changed nothing.
2. What an unfinished text, a message that is missing or a function that nobody knows may have done, it may have done.
3. A client is told of an open transaction (E) unless it was surely outside of one: outside by mistake it would go on
   and commit the half of its work; inside by mistake it only rolls back.

Called by failing. See "Message Flow" in PostgreSQL's protocol chapter for when an implicit transaction ends; quickdie
and ProcessInterrupts in its postgres.c, and SyncRepWaitForLSN, for what a server says when it ends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gateway.wire.grammar import ANYTHING, Kind, kinds, kinds_of_part
from gateway.wire.messages import (
    BIND,
    CLOSE,
    COPY_DATA,
    COPY_DONE,
    COPY_FAIL,
    DESCRIBE,
    EXECUTE,
    FAILED_TRANSACTION,
    FUNCTION_CALL,
    IDLE,
    PARSE,
    QUERY,
    SYNC,
)
from gateway.wire.owed import (
    OWES_BIND,
    OWES_CLOSE,
    OWES_COPY_END,
    OWES_DESCRIBE,
    OWES_EXECUTE,
    OWES_FUNCTION_CALL,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
)


class Outcome(enum.Enum):
    """What is known of the work that was under way."""

    UNKNOWN = "unknown"  # it may have been committed
    LOST = "lost"  # it was undone
    READ = "read"  # there was none: the client has been told nothing and may be answered by another server


class Fate(NamedTuple):
    """What became of a client's requests, and the transaction status that it is to be told."""

    outcome: Outcome
    status: int


class Loss(NamedTuple):
    """What is known when a server is lost."""

    status: int  # of the transaction, as the last ReadyForQuery told it
    owed: list[int]  # kinds of the client's requests that were not answered
    record: bytes  # the client's messages since it was owed nothing, up to some size
    is_cut: bool  # there were more
    answered: int  # ReadyForQuery messages that they have had
    told: bool  # something of their answers was passed on
    failed: bool  # the client has had the error of the first one owed, or of the group that is open
    is_fatal: bool  # the server's last words were an error: what ran was aborted, what followed was not begun
    text_of: Callable[[bytes], bytes | None]  # the text of a statement that was prepared before


class _Group:
    """What ends with one ReadyForQuery, and outside of a transaction block is a transaction of its own."""

    def __init__(self) -> None:
        self.owed: list[int] = []
        self.kinds: list[Kind] = []
        self.has_named = False  # gives a statement a name
        self.has_ended = False


_OWED = {
    QUERY: OWES_QUERY,
    FUNCTION_CALL: OWES_FUNCTION_CALL,
    SYNC: OWES_SYNC,
    PARSE: OWES_PARSE,
    BIND: OWES_BIND,
    DESCRIBE: OWES_DESCRIBE,
    EXECUTE: OWES_EXECUTE,
    CLOSE: OWES_CLOSE,
}
_CARRIES_TEXT = (OWES_QUERY, OWES_FUNCTION_CALL, OWES_PARSE, OWES_BIND)
_RUNS_AGAIN = {OWES_QUERY, OWES_PARSE, OWES_BIND, OWES_DESCRIBE, OWES_EXECUTE, OWES_SYNC}


def fate(loss: Loss) -> Fate:
    """Say what became of a client's requests."""
    groups = _unanswered(loss)
    if groups is None:
        everything = [kind for group in _groups(loss) for kind in group.kinds] + [*ANYTHING] * loss.is_cut
        is_open = loss.status != IDLE or Kind.BEGIN in everything
        return Fate(Outcome.UNKNOWN, FAILED_TRANSACTION if is_open else IDLE)
    status = _status_after(loss, groups)
    if _is_lone_read(loss, groups):
        return Fate(Outcome.READ, status)
    return Fate(Outcome.UNKNOWN if _may_have_committed(loss, groups) else Outcome.LOST, status)


def _status_after(loss: Loss, groups: list[_Group]) -> int:
    all_kinds = [kind for group in groups for kind in group.kinds]
    if all_kinds in ([Kind.COMMIT], [Kind.ROLLBACK]):
        return IDLE
    return IDLE if loss.status == IDLE and Kind.BEGIN not in all_kinds else FAILED_TRANSACTION


def _is_lone_read(loss: Loss, groups: list[_Group]) -> bool:
    if loss.told or loss.failed or loss.is_cut or loss.status != IDLE or loss.answered or len(groups) != 1:
        return False
    group = groups[0]
    is_read = group.kinds == [Kind.READ] and set(group.owed) <= _RUNS_AGAIN and group.has_ended
    # A name that the server has given, which nobody was told of, is given once.
    return is_read and (group.owed == loss.owed or not group.has_named)


def _may_have_committed(loss: Loss, groups: list[_Group]) -> bool:
    """Play what was asked on a server that may have failed anywhere, and may have come to any point of it."""
    inside, outside = loss.status != IDLE, loss.status == IDLE  # both: nobody knows
    is_aborted = loss.status == FAILED_TRANSACTION
    for number, group in enumerate(groups):
        has_failed = loss.failed and number == 0
        is_running = loss.is_fatal and number == 0
        was_outside = outside
        has_written = False
        for at, kind in enumerate(group.kinds[:-1] if is_running else group.kinds):
            is_surely_done = at == 0  # what stands before it in its group may fail, and it is skipped
            if kind is Kind.COMMIT and (has_written or (inside and not is_aborted)):
                return True
            if kind is Kind.WRITE:
                has_written = has_written or outside
            elif kind is Kind.BEGIN:
                inside, outside = True, outside and not is_surely_done
            elif kind in (Kind.COMMIT, Kind.ROLLBACK):
                inside, outside = inside and not is_surely_done, True
            if kind not in (Kind.READ, Kind.WRITE):
                is_aborted = False
        if is_running:
            return False
        if has_written and group.has_ended and not has_failed:
            return True
        outside = outside or was_outside  # a BEGIN that was cancelled leaves the next group where it stood
    return False


def _unanswered(loss: Loss) -> list[_Group] | None:
    """Return the groups that were not answered to their end, or None where that cannot be told from the record."""
    groups = _groups(loss)[loss.answered :]
    recorded = [kind for group in groups for kind in group.owed]
    owed = [kind for kind in loss.owed if kind != OWES_COPY_END]
    if not loss.is_cut:
        return groups if recorded[len(recorded) - len(owed) :] == owed else None
    # Within a group that is answered in part nobody can tell which of its messages are not in the record.
    is_whole = not loss.told or recorded[:1] == [OWES_QUERY]
    missing = owed[len(recorded) :]
    if recorded[-1:] == [OWES_PARSE] and missing[:1] == [OWES_BIND]:
        del missing[0]  # of what was parsed before it
    if not is_whole or owed[: len(recorded)] != recorded or any(kind in _CARRIES_TEXT for kind in missing):
        return None
    return groups


def _groups(loss: Loss) -> list[_Group]:
    """Read the record: what each group asks for, and what its statements are."""
    texts: dict[bytes, tuple[Kind, ...]] = {}
    portals: dict[bytes, tuple[Kind, ...]] = {}
    groups = [_Group()]
    for kind, body, is_whole in _messages(loss.record):
        if kind in (COPY_DATA, COPY_DONE, COPY_FAIL):
            if len(groups) > 1 and not groups[-1].owed and groups[-2].owed[-1] == OWES_SYNC:
                groups.pop()  # a COPY swallows the Syncs before the end of its data
                groups[-1].owed.pop()
                groups[-1].has_ended = False
            continue
        if kind not in _OWED:
            continue
        group = groups[-1]
        group.owed.append(_OWED[kind])
        if kind == QUERY:
            group.kinds += kinds(body[:-1]) if is_whole else kinds_of_part(body)
        elif kind == FUNCTION_CALL:
            group.kinds.append(Kind.WRITE)
        elif kind == PARSE:
            name, _, rest = body.partition(b"\0")
            text, end, _ = rest.partition(b"\0")
            group.has_named = group.has_named or name != b""
            texts[name] = kinds(text) if end else kinds_of_part(text, is_single=True)
        elif kind == BIND:
            portal, *names = body.split(b"\0", 2)
            portals[portal] = _prepared(loss, texts, names[0]) if len(names) == 2 else ANYTHING
        elif kind == EXECUTE:
            # A portal of an earlier group is a cursor that more rows are fetched from.
            group.kinds += portals.get(body.partition(b"\0")[0], ())
        if kind in (QUERY, FUNCTION_CALL, SYNC):
            group.has_ended = True
            groups.append(_Group())
    if loss.is_cut:
        _complete(loss, groups, portals, next(reversed(texts.values()), ANYTHING))
    return [group for group in groups if group.owed]


def _complete(
    loss: Loss, groups: list[_Group], portals: dict[bytes, tuple[Kind, ...]], parsed: tuple[Kind, ...]
) -> None:
    """Add what is known of the messages that are not in the record: their kinds, and what was *parsed* last."""
    for kind in loss.owed[sum(len(group.owed) for group in groups) :]:
        if kind == OWES_BIND:
            portals[b""] = parsed
        elif kind == OWES_EXECUTE:
            groups[-1].kinds += next(iter(portals.values())) if len(portals) == 1 else ANYTHING
        elif kind == OWES_SYNC:
            groups[-1].has_ended = True
            groups.append(_Group())


def _prepared(loss: Loss, texts: dict[bytes, tuple[Kind, ...]], name: bytes) -> tuple[Kind, ...]:
    if name not in texts:
        text = loss.text_of(name)
        texts[name] = ANYTHING if text is None else kinds(text)
    return texts[name]


def _messages(record: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yield type, body and whether it is whole, of each message of a record."""
    at = 0
    while at + 5 <= len(record):
        end = at + 1 + int.from_bytes(record[at + 1 : at + 5], "big")
        yield record[at], record[at + 5 : end], end <= len(record)
        at = max(end, at + 5)
