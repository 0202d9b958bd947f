"""What a server still owes: one entry per request, in the order in which they were sent.

1. Every request that PostgreSQL answers is an entry; an answer from the server is settled against the oldest entry.
   SKIP: we put the request in, nobody is to see its answer. FAKE: we did not send it, its answer is made here.
2. An error in the extended protocol drops the entries up to the next Sync, just as PostgreSQL drops the messages; with
   no Sync sent yet it ignores what follows until one is.
3. An entry may carry a change of somebody's prepared statements (CHANGE): kept when answered, undone when dropped.

Called by the link for each message of either side; see "Message Flow" in PostgreSQL's protocol chapter, and
SocketBackend and PostgresMain in its postgres.c for what is ignored when.
"""

from collections import deque
from typing import Protocol

from gateway.wire.messages import (
    BIND_COMPLETE,
    CLOSE_COMPLETE,
    COMMAND_COMPLETE,
    COPY_BOTH_RESPONSE,
    COPY_IN_RESPONSE,
    COPY_OUT_RESPONSE,
    EMPTY_QUERY_RESPONSE,
    ERROR_RESPONSE,
    NO_DATA,
    NOTIFICATION_RESPONSE,
    PARSE_COMPLETE,
    PORTAL_SUSPENDED,
    READY_FOR_QUERY,
    ROW_DESCRIPTION,
)
from gateway.wire.owed import (
    CHANGE,
    COPY_BOTH,
    COPY_IN,
    COPY_OUT,
    FAKE,
    FORWARD,
    IDLE,
    KIND,
    LOST_PARSE,
    LOST_REQUEST,
    MUTE,
    OWES_BIND,
    OWES_CLOSE,
    OWES_COPY_END,
    OWES_DESCRIBE,
    OWES_EXECUTE,
    OWES_PARSE,
    OWES_SYNC,
    SKIP,
)
from gateway.wire.prepared import Statement


class Change(Protocol):
    """A change of prepared statements that was made when the request went out."""

    @property
    def name(self) -> bytes | None:
        """The client's name that it is about, None for all of them."""

    @property
    def statement(self) -> Statement | None:
        """The statement that it is about."""

    def redo(self) -> None:
        """Make the change, again where something before it in the pipeline wiped it out."""

    def undo(self) -> None:
        """PostgreSQL refused or skipped it."""


class Cycle:
    """The requests that one server connection has not answered yet, and the state that its answers tell of."""

    def __init__(self) -> None:
        self.status = IDLE
        self.copy = 0
        self.ignoring = False  # an error came and no Sync is on its way: the server discards all but Sync
        self.group_open = False  # extended messages were sent since the last Sync
        self.desynced = False  # an answer came that no request explains; not to be used for another client
        self.special = 0  # entries in the ring that are SKIP or FAKE: while 0 all is forwarded
        self.boundaries = 0  # Sync, Query and FunctionCall in the ring: groups that end
        self.ring = bytearray(16)
        self.head = 0
        self.tail = 0
        self.mask = 15
        self.changes: deque[Change] = deque()
        self.failed = False  # the client has had the error of the request at the head; ReadyForQuery is still to come
        self.lost = 0  # what was skipped since somebody looked: LOST_REQUEST, LOST_PARSE (one that was not rewritten)

    def is_free(self) -> bool:
        """Can the server go to another client: no transaction, nothing owed, no COPY, no open group?"""
        return (
            self.head == self.tail
            and self.status == IDLE
            and self.copy == 0
            and not self.group_open
            and not self.ignoring
        )

    def owed(self) -> int:
        """How many requests have not been answered?"""
        return self.tail - self.head

    def fake_is_next(self) -> bool:
        """Is the next answer due one that we make ourselves?"""
        return self.head != self.tail and (self.ring[self.head & self.mask] & FAKE) != 0

    def skip_is_next(self) -> bool:
        """Is the next answer due one that nobody is to see?"""
        return self.head != self.tail and (self.ring[self.head & self.mask] & SKIP) != 0

    def is_muted(self) -> bool:
        """Is an error, if it comes next, one that nobody is to see?"""
        return self.head != self.tail and (self.ring[self.head & self.mask] & MUTE) != 0

    def unanswered(self) -> list[int]:
        """Return the kinds of the client's own requests that are not answered yet, in their order."""
        entries = [self.ring[at & self.mask] for at in range(self.head, self.tail)]
        return [entry & KIND for entry in entries if not entry & SKIP]

    def abandon(self) -> bool:
        """Undo what hangs on requests that will never be answered; was there a Parse without a name among them?"""
        while self.changes:
            self.changes.pop().undo()
        return any(self.ring[at & self.mask] == OWES_PARSE for at in range(self.head, self.tail))

    def request(self, entry: int) -> int:
        """Note that a request (a kind, with SKIP, FAKE, CHANGE) goes out now; a CHANGE is appended by the caller."""
        kind = entry & KIND
        if kind == OWES_SYNC:
            if self.copy == COPY_IN:
                return 0  # swallowed by the COPY
            self.group_open = False
            self.ignoring = False
        elif self.ignoring:
            if entry & CHANGE:
                self.changes.pop().undo()
            return 0
        elif kind >= OWES_PARSE:
            if kind != OWES_COPY_END:
                self.group_open = True
            elif self.copy == COPY_IN:
                self.copy = 0  # the data has ended; the answer of the COPY itself is still owed
                return 0
            elif self.head == self.tail:
                return 0
        else:
            self.group_open = False
        if self.tail - self.head > self.mask:
            self.grow()
        self.ring[self.tail & self.mask] = entry
        self.tail += 1
        if entry & (SKIP | FAKE):
            self.special += 1
        if kind <= OWES_SYNC:
            self.boundaries += 1
        return 0

    def is_unsettled(self, name: bytes, statement: Statement | None) -> bool:
        """May an answer that is owed still change what a name means, or whether the server has the statement?

        There is no such doubt within the group that is being sent: where a message fails PostgreSQL skips the rest.
        """
        if self.boundaries == 0:
            return False
        number = 0
        found = False
        for at in range(self.head, self.tail):
            entry = self.ring[at & self.mask]
            if entry & CHANGE:
                change = self.changes[number]
                number += 1
                if change.name is None or change.name == name or change.statement is statement is not None:
                    found = True
            if found and (entry & KIND) <= OWES_SYNC:
                return True
        return False

    def take_fake(self) -> int:
        """Settle the entry at the head, a FAKE, and return its kind."""
        kind = self.ring[self.head & self.mask] & KIND
        self.pop()
        return kind

    def answer(self, kind: int) -> int:
        """Settle one message of the server, given by its type; return FORWARD or SKIP."""
        if self.head == self.tail:
            return self._answer_unasked(kind)
        entry = self.ring[self.head & self.mask]
        asked = entry & KIND
        verdict = entry & SKIP
        if kind == READY_FOR_QUERY:
            if asked > OWES_SYNC:
                self.desynced = True
                return FORWARD
            self.copy = 0
            self.failed = False
            self.pop()
        elif kind == COMMAND_COMPLETE or kind == EMPTY_QUERY_RESPONSE:
            if self.copy:
                self.copy = 0
            if asked == OWES_EXECUTE:
                self.pop()
        elif kind == BIND_COMPLETE:
            self.settle(asked == OWES_BIND)
        elif kind == ROW_DESCRIPTION or kind == NO_DATA:
            if asked == OWES_DESCRIBE:
                self.pop()
        elif kind == PARSE_COMPLETE:
            self.settle(asked == OWES_PARSE)
        elif kind == CLOSE_COMPLETE:
            self.settle(asked == OWES_CLOSE)
        elif kind == PORTAL_SUSPENDED:
            self.settle(asked == OWES_EXECUTE)
        elif kind == ERROR_RESPONSE:
            if asked >= OWES_PARSE:
                verdict = FORWARD  # what failed in our Parse or Close is the client's to know
                self.fail()
            elif asked != OWES_SYNC:
                self.copy = 0
                if entry & MUTE:
                    verdict = SKIP
                if entry & CHANGE:
                    self.ring[self.head & self.mask] = entry & ~CHANGE
                    self.changes.popleft().undo()
            self.failed = verdict == FORWARD or (entry & MUTE) != 0
        elif kind == NOTIFICATION_RESPONSE:
            verdict = FORWARD
        elif kind == COPY_IN_RESPONSE:
            self.enter_copy_in()
        elif kind == COPY_OUT_RESPONSE:
            self.copy = COPY_OUT
        elif kind == COPY_BOTH_RESPONSE:
            self.copy = COPY_BOTH
        return verdict

    def settle(self, is_due: bool) -> int:
        """An answer has come that ends one request and no other, or that nobody asked for."""
        if is_due:
            return self.pop()
        self.desynced = True
        return 0

    def _answer_unasked(self, kind: int) -> int:
        if kind == READY_FOR_QUERY:
            self.desynced = True
            return SKIP
        if kind == ERROR_RESPONSE:
            self.ignoring = self.group_open
        return FORWARD

    def pop(self) -> int:
        entry = self.ring[self.head & self.mask]
        self.head += 1
        if (entry & KIND) <= OWES_SYNC:
            self.boundaries -= 1
        if entry & (SKIP | FAKE | CHANGE):
            if entry & (SKIP | FAKE):
                self.special -= 1
            if entry & CHANGE:
                self.changes.popleft()
        if self.head != self.tail and (self.ring[self.head & self.mask] & KIND) == OWES_COPY_END:
            self.drop_markers()
        return 0

    def fail(self) -> int:
        """Drop what the server will skip; undo from the newest to the oldest, for one builds on another."""
        doomed = []
        ours = (self.ring[self.head & self.mask] & SKIP) != 0
        self.copy = 0
        while self.head != self.tail:
            entry = self.ring[self.head & self.mask]
            if (entry & KIND) == OWES_SYNC:
                if ours and entry & SKIP and self.head + 1 != self.tail:  # a group of ours, for the request behind it
                    self.ring[(self.head + 1) & self.mask] |= MUTE
                break
            self.head += 1
            self.lost |= LOST_PARSE if entry == OWES_PARSE else LOST_REQUEST
            if (entry & KIND) <= OWES_SYNC:
                self.boundaries -= 1
            if entry & (SKIP | FAKE):
                self.special -= 1
            if entry & CHANGE:
                doomed.append(self.changes.popleft())
        else:
            self.ignoring = True
        for change in reversed(doomed):
            change.undo()
        return 0

    def enter_copy_in(self) -> int:
        """Forget the Syncs that the COPY swallows: those sent behind it, before the end of its data."""
        kept = []
        ended = False
        for at in range(self.head + 1, self.tail):
            entry = self.ring[at & self.mask]
            if not ended and (entry & KIND) == OWES_SYNC:
                self.boundaries -= 1
                continue
            if (entry & KIND) == OWES_COPY_END and not ended:
                ended = True
                continue
            kept.append(entry)
        # The Sync that seemed to end the group of this Execute did not.
        self.group_open = (self.ring[self.head & self.mask] & KIND) == OWES_EXECUTE
        self.tail = self.head + 1
        for entry in kept:
            self.ring[self.tail & self.mask] = entry
            self.tail += 1
            if (entry & KIND) != OWES_COPY_END:
                self.group_open = (entry & KIND) > OWES_SYNC
        if not ended:
            self.copy = COPY_IN
        return 0

    def drop_markers(self) -> int:
        """Forget ends of data that no COPY is waiting for: PostgreSQL ignores them."""
        while self.head != self.tail and (self.ring[self.head & self.mask] & KIND) == OWES_COPY_END:
            self.head += 1
        return 0

    def grow(self) -> int:
        size = self.tail - self.head
        ring = bytearray(2 * len(self.ring))
        for at in range(size):
            ring[at] = self.ring[(self.head + at) & self.mask]
        self.ring = ring
        self.head = 0
        self.tail = size
        self.mask = len(ring) - 1
        return 0
