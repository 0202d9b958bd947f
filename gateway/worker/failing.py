"""Requests that fail because of us or of a server: one error for each, at its place, and ReadyForQuery where it is due.

1. A client's request gets exactly one ErrorResponse, and the client keeps its connection wherever its stream is whole.
2. A group of extended messages fails once; what follows is discarded up to its Sync, as PostgreSQL does.
3. A transaction that died while nothing was asked is told with the next request.

Called by the front, cancel and servers. See "Message Flow" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.wire import messages
from gateway.wire.cycle import Cycle
from gateway.wire.owed import OWES_COPY_END, OWES_FUNCTION_CALL, OWES_QUERY, OWES_SYNC
from gateway.worker.endpoint import CLIENT_IDLE, DISCARD, DISCARD_QUERY, Client
from gateway.worker.pool import POOL_SESSION
from gateway.worker.sock import READ

if TYPE_CHECKING:
    from gateway.worker.front import Front

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

    def discarded(self, client: Client) -> None:
        """The rest of a message that is for nobody has come."""
        is_query = client.discarding == DISCARD_QUERY
        client.discarding = 0
        if is_query:
            self.front.clients.reply(client, messages.ready_for_query(messages.IDLE))

    def active(self, client: Client, error: bytes) -> None:
        """Answer everything that a client's server still owes by an error; the caller takes the server from it."""
        server = client.server
        assert server is not None
        blamed = messages.error_fields(error[5:])["sqlstate"] == "08P01"  # the client broke the protocol
        if server.passing or server.pool.mode == POOL_SESSION or client.replication or blamed:
            self.front.clients.dismiss(client, None if server.passing else with_severity(error, b"FATAL"))
            return
        if client.passing:
            server.broken = True  # it has half of a message: nothing that follows would be understood
            client.discarding = DISCARD
        error = with_severity(error, b"ERROR")
        answers, client.skip_to_sync = owed_answers(server.cycle, error)
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


def owed_answers(cycle: Cycle, error: bytes) -> tuple[bytes, bool]:
    """Return the answers to all that a cycle owes when it cannot be had, and whether a Sync is still to come.

    A Sync that is not answered may have been a commit that failed: its client must not take it for done.
    """
    ready = messages.ready_for_query(messages.IDLE)
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


def with_severity(message: bytes, severity: bytes) -> bytes:
    """Return an ErrorResponse with another severity: FATAL where the connection ends, ERROR where it goes on."""
    fields = [field[:1] + severity if field[:1] in _SEVERITIES else field for field in message[5:].split(b"\0")]
    return messages.message(messages.ERROR_RESPONSE, b"\0".join(fields))
