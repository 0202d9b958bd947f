"""One pool: the server connections and the waiting clients of one database, user and node.

1. Pure decisions: values and `now` in, a server, a client or a list of actions out; nobody is called back.
2. Idle servers are taken last in, first out, so that those not needed grow old; clients are served first in, first out.
3. A server counts against every share (pool, database, user) from the moment it is launched until PostgreSQL has ended
   its session; a share is this worker's part of a limit that holds over all workers.

Called by the link (acquire, release) and the front (the rest). Names and defaults are PgBouncer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.worker.endpoint import (
    CLIENT_WAITING,
    SERVER_ACTIVE,
    SERVER_CANCELED,
    SERVER_IDLE,
    SERVER_LOGIN,
    Client,
    Server,
)

if TYPE_CHECKING:
    from gateway.errors import GatewayError
    from gateway.settings import PoolSettings
    from gateway.wire.parameters import Parameters

POOL_TRANSACTION = 0
POOL_SESSION = 1
POOL_STATEMENT = 2
MODES = {"transaction": POOL_TRANSACTION, "session": POOL_SESSION, "statement": POOL_STATEMENT}

UNLIMITED = 1 << 30
MOST_CONNECTING = 2  # connects under way at once in one pool: enough to fill it fast, too few to flood a server
SECOND = 1_000_000


class Share:
    """This worker's part of one limit: how much it may use, how much it does."""

    def __init__(self, limit: int, error: type[GatewayError] | None = None) -> None:
        self.limit = limit
        self.error = error  # what a client is told that it refuses
        self.used = 0


class Verb(Enum):
    """What a sweep asks the front to do."""

    RETIRE = "retire"  # close this server, when it is free
    CUT = "cut"  # end this server at once, whatever it does
    ADOPT = "adopt"  # the node of this warm server is the primary now
    FAIL = "fail"  # end this client's wait, query or session with the error
    NOTIFY = "notify"  # tell this client that it waits
    LAUNCH = "launch"  # open a server connection
    GIVE_UP = "give up"  # what this server does (login, test, cleanup, closing) takes too long


class Action(NamedTuple):
    """One thing that a sweep asks for."""

    verb: Verb
    who: Client | Server | None
    why: str


class Pool:
    """Servers and waiting clients of one (database, user, node)."""

    def __init__(self, settings: PoolSettings, share: Share, reserve: Share, shares: tuple[Share, ...]) -> None:
        self.database = settings.database
        self.user = settings.user
        self.node: str | None = None  # the name of the node to be on, once the view has told
        self.address: tuple[str, int] | None = None  # where to connect to; None: nowhere now
        self.welcome: Parameters | None = None  # what a fresh server reports
        self.reported: frozenset[str] = frozenset()  # the parameters that a server reports at all
        self.share = share
        self.reserve = reserve
        self.shares = shares  # limits over several pools: of the database, of the user
        self.servers: list[Server] = []
        self.warm: list[Server] = []  # those on standbys, which are counted nowhere
        self.standbys: dict[str, tuple[str, int]] = {}  # names and addresses of the nodes to have some on
        self.warm_retry_at = 0
        self.top: Server | None = None  # the idle server used last, on top of the others (Server.below)
        self.waiting: deque[Client] = deque()
        self.newcomers: dict[Client, None] = {}  # clients in login that wait for the first server's welcome
        self.entries: dict[frozenset[tuple[str, str]], Parameters] = {}  # what startup parameters came to
        self.credentials: Any = None  # what logs in to a server: learnt from clients, see servers.learn
        self.connecting = 0
        self.clients = 0
        self.retry_at = 0
        self.failure: bytes | None = None  # the ErrorResponse with which servers refuse us since the last success
        self.paused = False
        self.held = False  # the primary is about to be another: no transaction begins
        self.removed = False  # from the settings: those who are in it may finish
        self.xact_count = self.query_count = self.received = self.sent = 0
        self.xact_time = self.query_time = self.wait_time = self.assignments = 0
        self.client_parses = self.server_parses = self.binds = self.logins = 0
        self.configure(settings)

    def configure(self, settings: PoolSettings) -> None:
        """Take (other) settings; limits are the shares' business."""
        self.settings = settings
        self.mode = MODES[settings.pool_mode]
        self.round_robin = settings.server_round_robin
        self.rewrites = self.mode != POOL_SESSION and settings.max_prepared_statements > 0
        delay = settings.server_check_delay
        self.check_delay = int(delay * SECOND) if settings.server_check_query else 0

    def acquire(self, now: int) -> Server | None:
        """Return an idle server, now active, or None. One that must be checked first comes in state idle."""
        server = self.top
        if server is None or self.paused or self.held:
            return None
        if self.round_robin:
            while server.below is not None:
                server = server.below
            self._take(server)
        else:
            self.top = server.below
            server.below = None
        if self.check_delay == 0 or now - server.state_since < self.check_delay:
            server.state = SERVER_ACTIVE
            server.state_since = now
        return server

    def move(self, server: Server, state: int, now: int) -> int:
        """Put a server into another state; the only place that keeps the idle list and the count of connects."""
        if server.state == SERVER_IDLE:
            self._take(server)
        elif server.state == SERVER_LOGIN:
            self.connecting -= 1
        server.state = state
        server.state_since = now
        if state == SERVER_IDLE:
            if server.cancels:
                server.state = SERVER_CANCELED
            else:
                server.below = self.top
                self.top = server
        return 0

    def _take(self, server: Server) -> None:
        """Take a server out of the idle ones, wherever it lies."""
        above = self.top
        if above is server:
            self.top = server.below
        while above is not None and above is not server:
            if above.below is server:
                above.below = server.below
            above = above.below
        server.below = None

    def idle(self) -> list[Server]:
        """Return the idle servers, the one longest idle first."""
        servers = []
        server = self.top
        while server is not None:
            servers.append(server)
            server = server.below
        return servers[::-1]

    def add(self, server: Server) -> None:
        """Count a server that is being connected, or that was warm."""
        self.servers.append(server)
        self.connecting += server.state == SERVER_LOGIN
        server.reserve = self.share.used >= self.share.limit
        for share in (self.reserve if server.reserve else self.share, *self.shares):
            share.used += 1

    def remove(self, server: Server, state: int, now: int) -> None:
        """Count a server no longer: PostgreSQL has ended its session."""
        self.move(server, state, now)
        self.servers.remove(server)
        for share in (self.reserve if server.reserve else self.share, *self.shares):
            share.used -= 1

    def enqueue(self, client: Client, now: int) -> int:
        """Let a client wait for a server."""
        client.state = CLIENT_WAITING
        client.waiting_since = now
        self.waiting.append(client)
        return 0

    def next_waiting(self, now: int) -> Client | None:
        """Return the client that has waited longest, and count its wait; None while the pool is paused or held."""
        if not self.waiting or self.paused or self.held:
            return None
        client = self.waiting.popleft()
        self.wait_time += now - client.waiting_since
        client.waiting_since = 0
        client.notified = False
        return client

    def leave(self, client: Client) -> None:
        """Take a client out of the queue."""
        self.waiting.remove(client)
        client.waiting_since = 0
        client.notified = False

    def has_room(self, now: int) -> bool:
        """May one more server be launched, as far as the limits go?"""
        for share in self.shares:
            if share.used >= share.limit:
                return False
        if self.share.used < self.share.limit:
            return True
        if not self.waiting or self.reserve.used >= self.reserve.limit:
            return False
        oldest: Client = self.waiting[0]
        return now - oldest.waiting_since >= self.settings.reserve_pool_timeout * SECOND

    def wants_server(self, now: int) -> bool:
        """Is a server to be launched now: somebody waits, nothing stands against it?"""
        return (
            len(self.waiting) + (len(self.newcomers) > 0) > self.connecting
            and self.connecting < MOST_CONNECTING
            and now >= self.retry_at
            and self.address is not None
            and not self.paused
            and not self.held
            and self.has_room(now)
        )

    def sweep(self, now: int) -> list[Action]:
        """Return what time has made due in this pool."""
        settings, actions = self.settings, []
        lifetime = settings.server_lifetime * SECOND
        idle_limit = settings.server_idle_timeout * SECOND
        for server in self.servers:
            if server.deadline and now >= server.deadline:
                actions.append(Action(Verb.GIVE_UP, server, "timeout"))
            elif lifetime and now - server.connected_at >= lifetime and not server.retiring:
                server.retiring = True
                if server.state == SERVER_IDLE:
                    actions.append(Action(Verb.RETIRE, server, "server lifetime over"))
            elif server.client is not None:
                actions += self._sweep_active(server.client, server, now)
        if idle_limit and len(self.servers) > settings.min_pool_size:
            spare = len(self.servers) - settings.min_pool_size
            for server in self.idle()[:spare]:
                if now - server.state_since >= idle_limit:
                    actions.append(Action(Verb.RETIRE, server, "server idle timeout"))
        actions += self._sweep_warm(now)
        actions += self._sweep_waiting(now)
        if self.wants_server(now) or (
            len(self.servers) < settings.min_pool_size
            and (self.clients or settings.forced_user)
            and self.connecting == 0
            and now >= self.retry_at
            and self.address is not None
            and self.has_room(now)
        ):
            actions.append(Action(Verb.LAUNCH, None, "needed"))
        return actions

    def is_used(self) -> bool:
        """Has it clients, or had it until lately?"""
        return (self.clients > 0 or len(self.servers) > 0) and not self.removed

    def wants_warm(self, now: int) -> list[str]:
        """Return the standbys to which a connection is to be launched."""
        if not self.is_used() or now < self.warm_retry_at:
            return []
        nodes = [server.node for server in self.warm]
        return [name for name in self.standbys if nodes.count(name) < self.settings.warm_pool_size]

    def _sweep_warm(self, now: int) -> Iterator[Action]:
        settings, nodes = self.settings, [server.node for server in self.warm]
        lifetime, idle_limit = settings.server_lifetime * SECOND, settings.server_idle_timeout * SECOND
        for server in self.warm:
            if self.is_used():
                server.state_since = now
            if server.deadline and now >= server.deadline:
                yield Action(Verb.GIVE_UP, server, "timeout")
            elif lifetime and now - server.connected_at >= lifetime:
                yield Action(Verb.RETIRE, server, "server lifetime over")
            elif self.removed or (idle_limit and now - server.state_since >= idle_limit):
                yield Action(Verb.RETIRE, server, "server idle timeout")
            elif nodes.count(server.node) > settings.warm_pool_size:
                nodes.remove(server.node)
                yield Action(Verb.RETIRE, server, "warm_pool_size")

    def _sweep_active(self, client: Client, server: Server, now: int) -> list[Action]:
        settings = self.settings
        for limit, since, why in (
            (settings.query_timeout, client.query_since, "query_timeout"),
            (settings.transaction_timeout, client.transaction_since, "transaction_timeout"),
        ):
            if limit and since and now - since >= limit * SECOND:
                return [Action(Verb.FAIL, client, why)]
        limit = settings.idle_transaction_timeout
        if limit and client.idle_since and server.cycle.status != 0x49 and now - client.idle_since >= limit * SECOND:
            return [Action(Verb.FAIL, client, "idle_transaction_timeout")]
        return []

    def _sweep_waiting(self, now: int) -> list[Action]:
        settings, actions = self.settings, []
        limit = settings.query_wait_timeout * SECOND
        notify = settings.query_wait_notify * SECOND
        for client in [*self.newcomers, *self.waiting]:
            waited = now - client.waiting_since
            if limit and waited >= limit:
                actions.append(Action(Verb.FAIL, client, "query_wait_timeout"))
            elif notify and waited >= notify and not client.notified:
                actions.append(Action(Verb.NOTIFY, client, "query_wait_notify"))
            elif waited < notify or not notify:
                break
        return actions
