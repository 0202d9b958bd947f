"""The two ends of the relay as plain records: a client, a server connection.

1. Every attribute has one owner that changes it: the link (inbox, out, passing, cycle), the pool (state), the front
   (login, cleanup, and the ends' birth and death).
2. An idle client holds no buffer; what thousands of them need is shared (pool, parameters).
3. Times are microseconds of the reactor's clock; 0 means "not now".

Used by the whole worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.wire.cycle import Cycle
from gateway.wire.messages import IDLE
from gateway.wire.parameters import Parameters
from gateway.wire.prepared import Held, Names, Statement
from gateway.worker.sock import Buffer

if TYPE_CHECKING:
    from gateway.worker.pool import Pool, Share

# Kinds of endpoint.
LISTENER = 0
CLIENT = 1
SERVER = 2
CONTROL = 3
CANCEL = 4

# States of a client.
CLIENT_LOGIN = 0  # from accept until the first ReadyForQuery
CLIENT_IDLE = 1  # between transactions, without a server
CLIENT_WAITING = 2  # wants a server
CLIENT_ACTIVE = 3  # linked to a server
CLIENT_CONSOLE = 4  # talks to the console
CLIENT_LEAVING = 5  # its last bytes are on their way
CLIENT_GONE = 6

# States of a server.
SERVER_LOGIN = 0  # from connect until the first ReadyForQuery
SERVER_IDLE = 1
SERVER_ACTIVE = 2  # linked to a client
SERVER_TESTED = 3  # runs connect_query, server_check_query, server_reset_query
SERVER_CLEANUP = 4  # its client left in the middle: cancel, roll back, keep if clean
SERVER_CANCELED = 5  # free, but a cancel request for it is on its way
SERVER_CLOSING = 6  # Terminate was sent; still counted until PostgreSQL has ended the session
SERVER_GONE = 7
SERVER_WARM = 8  # logged in to a standby, for the time when that is the primary

# Bytes of unanswered requests that are kept, to tell what became of them when their server is lost. To keep them costs
# 150 instructions a request, simple or extended (callgrind, the link between socket pairs), of 12,000 with the calls.
RECORD_SIZE = 4096

# What becomes of a client's message that is passing and is for nobody.
DISCARD = 1
DISCARD_QUERY = 2  # and ReadyForQuery is due behind it


class Endpoint:
    """A file descriptor with what has come in and what has to go out."""

    def __init__(self, fd: int, kind: int, state: int) -> None:
        self.fd = fd
        self.kind = kind
        self.state = state
        self.interest = 0  # what the reactor watches for: READ, WRITE or both
        self.passing = 0  # bytes of a message under way that are passed on unseen
        self.inbox: Buffer | None = None  # received, not understood yet
        self.out: Buffer | None = None  # understood, not sent yet


class Client(Endpoint):
    """One application's connection."""

    def __init__(self, fd: int, id: int, now: int) -> None:
        self.fd = fd
        self.kind = CLIENT
        self.state = CLIENT_LOGIN
        self.interest = 0
        self.passing = 0
        self.inbox: Buffer | None = None
        self.out: Buffer | None = None
        self.id = id  # also the process id in its BackendKeyData
        self.pool: Pool = None  # type: ignore[assignment]  # from its login on
        self.shares: tuple[Share, ...] | None = None  # of the limits that it counts against
        self.server: Server | None = None
        self.parameters: Parameters = None  # type: ignore[assignment]  # likewise
        self.statements: Names | None = None
        self.unnamed: Buffer | None = None  # body of its last Parse without a name
        self.unnamed_serial = 0  # of that Parse; 0: it has no unnamed statement
        self.deallocation: bytes | None = None  # what the Execute of its unnamed statement will deallocate
        self.key = b""  # what cancels its query, from its login on
        self.login: Any = None  # front's record of a login under way; afterwards what a console client is
        self.connected_at = now
        self.waiting_since = 0
        self.query_since = 0
        self.transaction_since = 0
        self.idle_since = now
        self.replication = False
        self.discarding = 0  # the message that is passing is for nobody (DISCARD, DISCARD_QUERY)
        self.status = IDLE  # of its transaction while it has no server: FAILED_TRANSACTION if that was lost with one
        self.losses = 0  # servers lost in a row with one request
        self.doom: bytes | None = None  # the error that its next request gets: its transaction died unasked
        self.skip_to_sync = False  # an error of ours is out: discard all up to Sync, as PostgreSQL does
        self.stalled = False  # goes on when the changes of statements under way are settled (rewrite.STALL)
        self.notified = False  # has been told that it waits

    def is_idle(self) -> bool:
        """Does the client rest between two transactions, with a server of its own in session mode or without?"""
        server = self.server
        if server is not None:
            return self.idle_since > 0 and server.login is None and server.cycle.is_free()
        return self.state == CLIENT_IDLE


class Server(Endpoint):
    """One connection to PostgreSQL."""

    def __init__(self, fd: int, id: int, pool: Pool, now: int) -> None:
        self.fd = fd
        self.kind = SERVER
        self.state = SERVER_LOGIN
        self.interest = 0
        self.passing = 0
        self.inbox: Buffer | None = None
        self.out: Buffer | None = None
        self.id = id
        self.pool = pool
        self.client: Client | None = None
        self.cycle = Cycle()
        self.parameters: Parameters = None  # type: ignore[assignment]  # from its login on
        self.statements: Held = {}
        self.generation = 0  # the rewriter's, when they were last looked through
        self.recent: list[Statement] = []  # those parsed since nothing was owed
        self.latest: Statement | None = None  # the most recently used of them
        self.unnamed_serial = 0  # whose unnamed statement it has: that client's unnamed_serial
        self.login: Any = None
        self.foreign: list[bytes] | None = None  # statements that stand on it under a client's own name
        self.node: str | None = None  # the name of the node it was connected to
        self.address: tuple[str, int] | None = None  # where that was
        self.adapting: Parameters | None = None  # what it had before a change of parameters that may be refused
        self.refusal: bytes | None = None  # the error that our own request got
        self.last_words: bytes | None = None  # the FATAL it sent
        self.farewell = ""  # the WARNING with which it announced its end
        self.record = Buffer(0)  # what its client has sent since it was owed nothing, up to RECORD_SIZE
        self.is_cut = False  # that was more
        self.answered = 0  # ReadyForQuery messages that the client has had since then
        self.told = False  # has it had anything of an answer since then?
        self.pid = 0
        self.key = b""
        self.connected_at = now
        self.state_since = now
        self.deadline = 0  # when the front gives up what it does in this state
        self.cancels = 0  # cancel requests on their way
        self.cancel_due = False  # one is to be sent when the request of ours that runs is answered
        self.retiring = False  # is closed when it is free
        self.discarding = False  # the message that is passing is for nobody
        self.below: Server | None = None  # the next one in the pool's stack of idle servers
        self.warm = False  # is on a standby: in pool.warm and counted nowhere
        self.reserve = False  # counts against reserve_pool_size
        self.broken = False  # a send failed: read its last words, then close it

    def note(self, buf: Buffer, start: int, end: int) -> int:
        """Keep what its client has sent, buf[start:end], as far as there is room for it."""
        if self.is_cut:
            return 0
        size = min(end - start, RECORD_SIZE - self.record.end)
        self.is_cut = size < end - start
        return self.record.append(buf, start, start + size)

    def forget(self) -> int:
        """All that its client has sent is answered."""
        self.record.end = self.answered = 0
        self.told = self.is_cut = False
        return 0
