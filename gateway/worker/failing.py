"""Requests that fail because of us or of a server: one error for each, at its place, and ReadyForQuery where it is due.

1. A client's request gets exactly one ErrorResponse, and the client keeps its connection wherever its stream is whole.
2. A group of extended messages fails once; what follows is discarded up to its Sync, as PostgreSQL does.
3. A transaction that died while nothing was asked is told with the next request.
4. Whose transaction was lost stays in an aborted one, as after any error: ABORTED puts its next server there.

Called by the front, cancel and servers. See "Message Flow" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway import errors
from gateway.wire import messages
from gateway.wire.cycle import Cycle
from gateway.wire.fate import Fate, Loss, Outcome, fate
from gateway.wire.intent import ends_transaction
from gateway.wire.owed import OWES_COPY_END, OWES_FUNCTION_CALL, OWES_QUERY, OWES_SYNC
from gateway.worker.endpoint import CLIENT_ACTIVE, CLIENT_IDLE, CLIENT_WAITING, DISCARD, DISCARD_QUERY, Client, Server
from gateway.worker.pool import POOL_SESSION, POOL_STATEMENT
from gateway.worker.sock import READ

if TYPE_CHECKING:
    from gateway.worker.front import Front

ABORTED = messages.query('begin; rollback to savepoint "the_transaction_was_lost_with_its_server"')
"""Takes a session from outside of a transaction to an aborted one: the savepoint is not there."""

_MOST_LOSSES = 2  # servers lost in a row with one request that is given to another; it may be what ends them
_ENDS = ("57P01", "57P02", "08006")  # what failover_sqlstate stands for
_SEVERITIES = (b"S", b"V")  # the fields that tell it, translated and not


class Failing:
    """Answers requests by errors."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def waiting(self, client: Client, error: bytes) -> None:
        """Answer the request that a client waits with by an error; it stays, and may send another."""
        if client in client.pool.waiting:
            client.pool.leave(client)
        if client.login is not None:
            self.front.clients.dismiss(client, with_severity(error, b"FATAL"))
            return
        client.state = CLIENT_IDLE
        self.next_request(client, with_severity(error, b"ERROR"))

    def next_request(self, client: Client, error: bytes) -> None:
        """Answer the request at the head of a client's inbox by an error."""
        buf = client.inbox if client.inbox is not None else self.front.link.scratch
        kind, size = buf.byte(buf.start), buf.int32(buf.start + 1) + 1
        self.front.clients.reply(client, error)
        if kind in (messages.QUERY, messages.FUNCTION_CALL):
            client.passing = size
            client.discarding = DISCARD_QUERY
        else:
            client.skip_to_sync = True
        self.front.reactor.soon.append(client)

    def unasked(self, client: Client, error: bytes) -> None:
        """Tell a client with its next request that its transaction died; one that would end it has ended it."""
        if ends_transaction(self._next_text(client)):
            client.status = messages.IDLE
        self.next_request(client, error)

    def _next_text(self, client: Client) -> bytes:
        """Return what the request at the head of a client's inbox is to run, b"" where that is not to be seen."""
        buf = client.inbox if client.inbox is not None else self.front.link.scratch
        end = buf.start + 1 + buf.int32(buf.start + 1)
        if end > buf.end:
            return b""
        kind, body = buf.byte(buf.start), buf.slice(buf.start + 5, end)
        if kind == messages.QUERY:
            return body[:-1]
        _, _, rest = body.partition(b"\0")
        if kind == messages.PARSE:
            return rest.partition(b"\0")[0]
        if kind == messages.BIND:
            return text_of(client, rest.partition(b"\0")[0]) or b""
        return b""

    def discarded(self, client: Client) -> None:
        """The rest of a message that is for nobody has come."""
        is_query = client.discarding == DISCARD_QUERY
        client.discarding = 0
        if is_query:
            self.front.clients.reply(client, messages.ready_for_query(client.status))

    def lost(self, client: Client, reason: str) -> None:
        """Take a server that was lost from its client, and answer what it owes or let another server do that."""
        server = client.server
        assert server is not None
        if client.state == CLIENT_WAITING:
            self._wait_again(client, server, reason)
            return
        found = self._fate(client, server)
        is_for_another = self.is_for_another(client, server)
        if server.cycle.abandon():
            client.unnamed_serial = 0
            client.deallocation = None
        if is_for_another:
            self._ask_again(client, server)
            return
        words = server.last_words or errors.SERVER_LOST(reason=reason).encode()
        said = messages.error_fields(words[5:])
        if found.outcome is Outcome.UNKNOWN and said["sqlstate"] != "08P01":
            words = errors.COMMIT_UNKNOWN(reason=said["message"] if server.last_words else reason).encode()
        elif said["sqlstate"] in _ENDS and self.front.settings.failover_sqlstate:
            words = with_fields(words, {b"C": self.front.settings.failover_sqlstate.encode()})
        self.active(client, words, found.status)
        server.client = client.server = None

    def is_for_another(self, client: Client, server: Server) -> bool:
        """Is what a server that ends has not answered to be asked of another one?"""
        words = server.last_words
        if words is not None and messages.error_fields(words[5:])["sqlstate"] not in _ENDS:
            return False  # it ended because of what it was asked
        if client.losses >= _MOST_LOSSES or client.state != CLIENT_ACTIVE or client.passing or server.passing:
            return False
        if server.pool.mode == POOL_SESSION or client.replication:
            return False
        return self._fate(client, server).outcome is Outcome.READ

    def timed_out(self, client: Client, error: bytes) -> None:
        """Answer what a client's server owes by an error, and have the server taken back."""
        server = client.server
        assert server is not None
        self.active(client, error, self._fate(client, server).status)
        self.front.servers.leave(server, client, patient=False)

    def _fate(self, client: Client, server: Server) -> Fate:
        cycle = server.cycle
        found = fate(
            Loss(
                status=cycle.status,
                owed=cycle.unanswered(),
                record=server.record.slice(0, server.record.end),
                is_cut=server.is_cut,
                answered=server.answered,
                told=server.told,
                failed=cycle.failed or cycle.ignoring,
                is_fatal=server.last_words is not None,
                text_of=lambda name: text_of(client, name),
            )
        )
        return found._replace(status=messages.IDLE) if server.pool.mode == POOL_STATEMENT else found

    def _ask_again(self, client: Client, server: Server) -> None:
        """Have another server asked what this one has not answered, as if the client had just sent it."""
        server.client = client.server = None
        client.losses += 1
        self.front.link.inboxes.put_back(client, server.record)
        client.state = CLIENT_IDLE
        client.query_since = client.transaction_since = 0
        client.stalled = False
        self.front.reactor.soon.append(client)

    def _wait_again(self, client: Client, server: Server, reason: str) -> None:
        """A server was lost while it took a client's parameters: nothing of the client's own was under way."""
        server.client = client.server = None
        client.losses += 1
        client.pool.enqueue(client, self.front.reactor.now)
        if client.losses > _MOST_LOSSES:
            client.losses = 0
            self.waiting(client, errors.SERVER_LOST(reason=reason).encode())
        else:
            self.front.grow(client.pool)

    def active(self, client: Client, error: bytes, status: int) -> None:
        """Answer all that a client's server owes by an error and this status; the caller takes the server from it."""
        server = client.server
        assert server is not None
        client.losses = 0
        client.status = status
        blamed = messages.error_fields(error[5:])["sqlstate"] == "08P01"  # the client broke the protocol
        if server.passing or server.pool.mode == POOL_SESSION or client.replication or blamed:
            self.front.clients.dismiss(client, None if server.passing else with_severity(error, b"FATAL"))
            return
        if client.passing:
            server.broken = True  # it has half of a message: nothing that follows would be understood
            client.discarding = DISCARD
        error = with_severity(error, b"ERROR")
        answers, client.skip_to_sync = owed_answers(server.cycle, error, status)
        if not answers and not client.skip_to_sync:
            client.doom = error  # nothing is asked: the next request gets it
        client.state = CLIENT_IDLE
        client.query_since = client.transaction_since = 0
        client.idle_since = self.front.reactor.now
        if client.stalled:  # the answers that it waited for are these
            client.stalled = False
            self.front.reactor.soon.append(client)
        self.front.clients.reply(client, answers)
        if client.fd >= 0 and not client.interest & READ:
            self.front.reactor.want(client, client.interest | READ)


def owed_answers(cycle: Cycle, error: bytes, status: int) -> tuple[bytes, bool]:
    """Return the answers to all that a cycle owes when it cannot be had, and whether a Sync is still to come.

    A Sync that is not answered may have been a commit that failed: its client must not take it for done.
    """
    ready = messages.ready_for_query(status)
    answers = []
    group_failed = False
    is_told = cycle.failed  # of the first of them the error came, and nothing after it
    for kind in cycle.unanswered():
        if kind in (OWES_SYNC, OWES_QUERY, OWES_FUNCTION_CALL):
            answers += [ready] if is_told else [error, ready]
            group_failed = is_told = False
        elif kind != OWES_COPY_END:
            group_failed = True
    if cycle.ignoring:
        return b"".join(answers), True  # it has had its error
    if group_failed or cycle.group_open:
        answers.append(error)
    return b"".join(answers), group_failed or cycle.group_open


def text_of(client: Client, name: bytes) -> bytes | None:
    """Return the text of a statement that a client has prepared, b"" for the unnamed one, where it is known."""
    statement = (client.statements or {}).get(name)
    body = statement.body if statement is not None else None
    if not name and client.unnamed_serial and client.unnamed is not None:
        body = client.unnamed.slice(client.unnamed.start, client.unnamed.end)
    return body.partition(b"\0")[0] if body is not None else None


def with_severity(message: bytes, severity: bytes) -> bytes:
    """Return an ErrorResponse with another severity: FATAL where the connection ends, ERROR where it goes on."""
    return with_fields(message, dict.fromkeys(_SEVERITIES, severity))


def with_fields(message: bytes, values: Mapping[bytes, bytes]) -> bytes:
    """Return an ErrorResponse with other values in its fields, given by their letters, where it has them."""
    fields = [field[:1] + values.get(field[:1], field[1:]) for field in message[5:].split(b"\0")]
    return messages.message(messages.ERROR_RESPONSE, b"\0".join(fields))
