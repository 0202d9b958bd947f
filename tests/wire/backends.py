"""A PostgreSQL that is not there: which messages it answers, which it skips after an error, which a COPY swallows.

It follows SocketBackend, PostgresMain and CopyGetData of PostgreSQL 18, one message at a time, as late as a test likes.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import NamedTuple

from gateway.wire import messages
from gateway.wire.owed import (
    OWES_BIND,
    OWES_CLOSE,
    OWES_COPY_END,
    OWES_DESCRIBE,
    OWES_FUNCTION_CALL,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
)

# Messages that no answer is owed for.
COPY_DATA = -1
FLUSH = -2

ANSWERS = {
    OWES_PARSE: messages.PARSE_COMPLETE,
    OWES_BIND: messages.BIND_COMPLETE,
    OWES_DESCRIBE: messages.ROW_DESCRIPTION,
    OWES_CLOSE: messages.CLOSE_COMPLETE,
    OWES_FUNCTION_CALL: messages.FUNCTION_CALL_RESPONSE,
}


class Message(NamedTuple):
    """A message to the server: an OWES_ kind, or one that is owed nothing, and what comes of it."""

    kind: int
    does: tuple[str, ...] = ("ok",)  # of each command of a Query or Execute; "error" for any message
    ours: bool = False  # the relay put it in: nobody is to see its answer
    fake: bool = False  # the relay answers it itself
    change: int | None = None  # the number of a change of prepared statements that hangs on it


class Answer(NamedTuple):
    """A message of the server; status is that of ReadyForQuery."""

    kind: int
    ours: bool
    status: int = 0


class Backend:
    """One server process: messages go into `inbox`, answers come out of `outbox`."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Answer] = deque()
        self.told: list[int] = []  # what the client is to see in all, with the answers that the relay makes
        self.changed: set[int] = set()  # the changes that were made
        self.status = messages.IDLE
        self.skipping = False  # ignore_till_sync
        self.group_open = False  # an implicit transaction has begun, and its Sync has not come
        self.copying = False  # COPY FROM STDIN reads the messages
        self.dead = False  # it ended with FATAL: the protocol was broken
        self.asked = Message(OWES_SYNC)
        self.todo: deque[str] = deque()

    def is_idle(self) -> bool:
        """Is it outside a transaction, and would what is still to be read change or answer nothing?"""
        rest = copy.copy(self)
        rest.inbox, rest.outbox, rest.todo = self.inbox.copy(), self.outbox.copy(), self.todo.copy()
        rest.told, rest.changed = [], set()
        while rest.inbox:
            rest.serve()
        return not (rest.outbox or rest.group_open or rest.skipping or rest.copying) and rest.status == messages.IDLE

    def serve(self) -> None:
        """Read one message."""
        message = self.inbox.popleft()
        if self.dead:
            return
        if self.copying:
            self._copy(message)
        elif message.kind == OWES_SYNC:
            self.skipping = self.group_open = False
            self.asked = message
            self._ready()
        elif not self.skipping and message.kind not in (FLUSH, COPY_DATA, OWES_COPY_END):
            self.asked = message
            self.group_open = message.kind not in (OWES_QUERY, OWES_FUNCTION_CALL)
            self.todo = deque(message.does)
            self._run()

    def _run(self) -> None:
        kind = self.asked.kind
        while self.todo:
            command = self.todo.popleft()
            if command == "error":
                self._fail()
                return
            if command == "copy in":
                self._tell(messages.COPY_IN_RESPONSE)
                self.copying = True
                return
            if command == "copy out":
                self._tell(messages.COPY_OUT_RESPONSE, messages.COPY_DATA, messages.COPY_DONE)
            if kind in ANSWERS:
                self._tell(ANSWERS[kind])
            elif command == "empty":
                self._tell(messages.EMPTY_QUERY_RESPONSE)
            elif command == "suspend":
                self._tell(messages.DATA_ROW, messages.PORTAL_SUSPENDED)
            else:
                self.status = {"begin": messages.IN_TRANSACTION, "commit": messages.IDLE}.get(command, self.status)
                self._tell(messages.COMMAND_COMPLETE)
        if self.asked.change is not None:
            self.changed.add(self.asked.change)
        if not self.group_open:
            self._ready()

    def _copy(self, message: Message) -> None:
        if message.kind in (COPY_DATA, OWES_COPY_END) and message.does == ("error",):
            self._fail()
        elif message.kind == OWES_COPY_END:
            self.copying = False
            self._tell(messages.COMMAND_COMPLETE)
            self._run()
        elif message.kind not in (COPY_DATA, FLUSH, OWES_SYNC):
            self.dead = True

    def _fail(self) -> None:
        ours = self.asked.ours and not self.group_open  # what fails of ours in a group is the client's to know
        self._tell(messages.ERROR_RESPONSE, ours=ours)
        self.copying = False
        if self.status == messages.IN_TRANSACTION:
            self.status = messages.FAILED_TRANSACTION
        if self.group_open:
            self.skipping = True
        else:
            self._ready()

    def _ready(self) -> None:
        self._tell(messages.READY_FOR_QUERY)

    def _tell(self, *kinds: int, ours: bool | None = None) -> None:
        hidden = self.asked.ours if ours is None else ours
        for kind in kinds:
            if not self.asked.fake:
                status = self.status if kind == messages.READY_FOR_QUERY else 0
                self.outbox.append(Answer(kind, hidden, status))
            if not hidden:
                self.told.append(kind)
