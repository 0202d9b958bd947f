"""The interpreter of a worker: what the relay, the clock and the supervisor report becomes calls to the parts.

1. Every client and every server is born and ends here or in `servers`; nobody else removes one.
2. A client's request gets exactly one ErrorResponse from us, at its place in the protocol, and ReadyForQuery where
   PostgreSQL would send it; the connection is kept wherever its stream is whole.
3. Decisions are the pool's and the cycle's; what is done about them is done here.

Called by the reactor (ready, sweep) and the link (what is not the daily path of a message).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from gateway import errors
from gateway.control import (
    WORKER_SHIFT,
    Answer,
    Ask,
    CancelElsewhere,
    Configure,
    ConsoleClosed,
    ConsoleInput,
    ConsoleOutput,
    Down,
    Drain,
    Grant,
    Ready,
    View,
)
from gateway.errors import GatewayError
from gateway.wire import messages
from gateway.wire.cycle import Cycle
from gateway.wire.owed import (
    OWES_COPY_END,
    OWES_FUNCTION_CALL,
    OWES_QUERY,
    OWES_SYNC,
    SKIP,
)
from gateway.wire.startup import StartupMessage
from gateway.worker import snapshot
from gateway.worker.admission import Admission, Login
from gateway.worker.cancel import Canceler, Errand
from gateway.worker.channel import Channel
from gateway.worker.endpoint import (
    CANCEL,
    CLIENT_ACTIVE,
    CLIENT_CONSOLE,
    CLIENT_GONE,
    CLIENT_IDLE,
    CLIENT_LEAVING,
    CLIENT_LOGIN,
    CLIENT_WAITING,
    CONTROL,
    LISTENER,
    SERVER_IDLE,
    Client,
    Endpoint,
    Server,
)
from gateway.worker.link import DISCARD, DISCARD_QUERY, Link, is_known
from gateway.worker.pool import POOL_SESSION, SECOND, Pool, Verb
from gateway.worker.pools import Pools, oldest_idle
from gateway.worker.reactor import Reactor
from gateway.worker.rewrite import own_names
from gateway.worker.servers import Servers
from gateway.worker.sock import AGAIN, READ, WRITE, Buffer, accept, send_bytes

log = logging.getLogger("gateway.worker")

_SEVERITIES = (b"S", b"V")  # the fields that tell it, translated and not
LONGEST = 0x3FFFFFFE  # of a message that PostgreSQL takes (PQ_LARGE_MESSAGE_LIMIT)
_PARKING_TIME = 2 * SECOND  # for the supervisor to find a share of max_client_conn
_ACCEPTS = 64  # connections taken at once from a listener before others are served
_NUMBERS = (1 << WORKER_SHIFT) - 1
_SPARE_LOGINS = 1000  # connections in login beyond max_client_conn; the oldest silent one makes room


class Front:
    """One worker's clients and servers."""

    def __init__(self, reactor: Reactor, channel: Channel, listeners: Iterable[int], configure: Configure) -> None:
        self.reactor = reactor
        self.channel = channel
        self.index = configure.index
        self.clients: dict[int, Client] = {}
        self.logins: dict[Client, None] = {}
        self.parked: dict[
            Client, int
        ] = {}  # clients in login that wait for a larger share of max_client_conn, since when
        self.tenants: dict[int, tuple[Any, ...]] = {}
        self.draining = False
        self.drained_at = 0
        self.last_number = 0
        self.demanded_at = 0
        self.demand_due = False  # something is wanted or free that the supervisor does not know of yet
        self.pools = Pools(configure)
        self.admission = Admission(self, configure)
        self.servers = Servers(self, configure)
        self.canceler = Canceler(self)
        front = configure.settings.front
        self.link = Link(reactor, self, front.high_water_mark, front.max_packet_size, front.max_prepared_statements)
        self.listeners = [Endpoint(fd, LISTENER, 0) for fd in listeners]
        self.configure(configure)

    def start(self) -> None:
        """Begin to accept clients."""
        for listener in self.listeners:
            self.reactor.add(listener, READ)
        self.channel.send(Ready(os.getpid()))

    def configure(self, configure: Configure) -> None:
        """Take the settings, at the start and after each reload."""
        self.settings = configure.settings.front
        self.hard_limit = configure.hard_client_limit
        self.pools.configure(configure)
        self.admission.configure(configure)
        self.servers.configure(configure)
        self.client_share = self.pools.share("clients", self.settings.max_client_conn)
        self.link.high_water = self.settings.high_water_mark
        self.link.max_packet = min(self.settings.max_packet_size, LONGEST)
        self.link.rewriter.capacity = self.settings.max_prepared_statements

    # What is ready that is neither a client nor a server.

    def other_ready(self, endpoint: Endpoint, events: int) -> None:
        """Serve a listener, the channel to the supervisor, or a cancel request under way."""
        if endpoint.kind == LISTENER:
            self._accept(endpoint)
        elif endpoint.kind == CANCEL:
            assert isinstance(endpoint, Errand)
            self.canceler.ready(endpoint, events)
        elif endpoint.kind == CONTROL:
            if events & WRITE:
                self.link.writable(endpoint)
            if events & ~WRITE:
                self._control()

    def _accept(self, listener: Endpoint) -> None:
        for _ in range(_ACCEPTS):
            fd = accept(listener.fd)
            if fd < 0:
                if fd != AGAIN:
                    self._no_descriptor(fd)
                return
            client = Client(fd, self._number(), self.reactor.now)
            client.login = Login()
            self.clients[client.id] = client
            self.logins[client] = None
            self.reactor.add(client, READ)
            if len(self.logins) > _SPARE_LOGINS and len(self.clients) > self.hard_limit:
                self.forget(next(iter(self.logins)))
            self.link.client_readable(client)  # most have spoken by now
        self.reactor.again.append(listener)

    def _number(self) -> int:
        while True:
            self.last_number = self.last_number % _NUMBERS + 1
            number = (self.index + 1) << WORKER_SHIFT | self.last_number
            if number not in self.clients:
                return number

    def _no_descriptor(self, code: int) -> None:
        log.error("cannot accept a client: %s; raise the limit on open files (ulimit -n)", os.strerror(-code))
        if self.logins:
            self.forget(next(iter(self.logins)))

    def _control(self) -> None:
        records = self.channel.receive()
        if records is None:
            log.error("the supervisor is gone: draining")
            self.drain(self.settings.shutdown_timeout)
            return
        for record in records:
            self.obey(record)

    def obey(self, record: Down) -> None:
        """Do what the supervisor says."""
        match record:
            case View():
                for pool in self.pools.see(record.view):
                    self._moved(pool)
                for pool in self.pools.by_key.values():
                    if pool.waiting or pool.newcomers:
                        self.grow(pool)
            case Grant():
                self.pools.grant(record.limit, record.share)
                self.demanded_at = 0
                self.sweep(self.reactor.now)
                self.demand()
                if record.limit.kind.endswith("clients"):
                    self._unpark(self.reactor.now)
            case ConsoleOutput():
                client = self.clients.get(record.client)
                if client is not None and client.state == CLIENT_CONSOLE:
                    self.reply(client, record.data)
                    if record.close:
                        self.dismiss(client, None)
            case CancelElsewhere():
                self.canceler.cancel(record.pid, record.key)
            case Ask():
                self.channel.send(Answer(record.number, snapshot.rows(self, record.table)))
            case Drain():
                self.drain(record.timeout)
            case Configure():
                self.configure(record)

    def _moved(self, pool: Pool) -> None:
        """A pool's node is elsewhere: its servers end when they are free."""
        for server in pool.servers:
            server.retiring = True
        for server in pool.idle():
            self.servers.close(server, "the node has moved")

    def failed(self, endpoint: Endpoint, fault: Exception) -> None:
        """A fault of our own hit while an endpoint was served: end it and what it was linked to, and go on."""
        log.critical("internal error: please report it", exc_info=fault)
        self.link.assembly.start = self.link.assembly.end = 0
        client = endpoint if isinstance(endpoint, Client) else getattr(endpoint, "client", None)
        server = endpoint if isinstance(endpoint, Server) else getattr(endpoint, "server", None)
        if server is not None:
            server.broken = True
        if client is not None:
            self.dismiss(client, errors.INTERNAL())
        if server is not None and server.client is None:
            self.servers.close(server, "internal error")

    # Clients: coming, being told, going.

    def client_bytes(self, client: Client, buf: Buffer) -> int:
        """Handle what a client sent that is in login or at the console; return where the rest begins."""
        if client.state == CLIENT_LOGIN:
            return self.admission.receive(client, buf)
        if client.state == CLIENT_CONSOLE:
            self.channel.send(ConsoleInput(client.id, buf.slice(buf.start, buf.end)))
        return buf.end

    def count_in(self, client: Client, pool: Pool) -> bool:
        """Count a client against the limits on clients; raise 53300 when one of them is reached.

        Return False when other workers may have room to give: the client is parked until the supervisor has answered.
        """
        settings = pool.settings
        limits = [(self.client_share, errors.MAX_CLIENT_CONN)]
        if settings.max_db_client_connections:
            share = self.pools.share("database_clients", settings.max_db_client_connections, pool.database)
            limits.append((share, errors.MAX_DB_CLIENT_CONNECTIONS))
        user = client.login.startup.user
        if settings.max_user_client_connections:
            share = self.pools.share("user_clients", settings.max_user_client_connections, "", user)
            limits.append((share, errors.MAX_USER_CLIENT_CONNECTIONS))
        for share, error in limits:
            if share.used >= share.limit:
                share.refused += 1
                if self.pools.workers > 1 and client not in self.parked:
                    self.parked[client] = self.reactor.now
                    self.demanded_at = 0
                    self.demand()
                    return False
                self.parked.pop(client, None)
                raise error
        self.parked.pop(client, None)
        shares = tuple(share for share, _ in limits)
        for share in shares:
            share.used += 1
        pool.clients += 1
        self.tenants[client.id] = (pool, shares)
        return True

    def admitted(self, client: Client, packet: StartupMessage) -> None:
        """A client has logged in."""
        self.logins.pop(client, None)
        if self.settings.log_connections:
            log.info("client %d: login: database %s, user %s", client.id, packet.database, packet.user)

    def reply(self, client: Client, data: bytes) -> None:
        """Send bytes of our own to a client, behind what is on its way already."""
        if client.fd < 0 or not data:
            return
        sent = send_bytes(client.fd, data) if client.out is None else 0
        if sent < 0 and sent != AGAIN:
            self.forget(client)
            return
        rest = data[max(sent, 0) :]
        if rest:
            if client.out is None:
                client.out = Buffer(len(rest))
                self.reactor.want(client, client.interest | WRITE)
            client.out.extend(rest)

    def dismiss(self, client: Client, last: GatewayError | bytes | None) -> None:
        """End a client's connection, behind a last message where there is one."""
        if client.state in (CLIENT_GONE, CLIENT_LEAVING):
            return
        if isinstance(last, GatewayError):
            if self.settings.log_pooler_errors:
                log.info("client %d: %s", client.id, last.message)
            last = last.encode()
        if last is not None:
            self.reply(client, (client.login.proof if client.state == CLIENT_LOGIN else b"") + last)
        if client.fd < 0:
            return
        if client.out is not None:
            self._leave(client)
            client.state = CLIENT_LEAVING
            self.reactor.want(client, WRITE)
            return
        self.forget(client)

    def forget(self, client: Client) -> None:
        """Remove a client, now."""
        if client.state == CLIENT_GONE:
            return
        self._leave(client)
        client.state = CLIENT_GONE
        self.clients.pop(client.id, None)
        if client.fd >= 0:
            self.reactor.remove(client)
        client.inbox = client.out = None

    def _leave(self, client: Client, patient: bool = False) -> None:
        """Take a client out of all that it was part of but its connection."""
        state, server, pool = client.state, client.server, client.pool
        self.logins.pop(client, None)
        self.parked.pop(client, None)
        if state == CLIENT_CONSOLE:
            self.channel.send(ConsoleClosed(client.id))
        tenant = self.tenants.pop(client.id, None)
        if tenant is not None:
            pool, shares = tenant
            pool.clients -= 1
            pool.newcomers.pop(client, None)
            for share in shares:
                share.used -= 1
        if state == CLIENT_WAITING and server is None and pool is not None:
            pool.leave(client)
        client.state = CLIENT_LEAVING
        if server is not None:
            self.servers.leave(server, client, patient)

    def client_gone(self, client: Client, code: int) -> None:
        """A client has closed its connection, or it broke."""
        if self.settings.log_disconnections:
            log.info("client %d: gone: %s", client.id, os.strerror(-code) if code else "closed")
        self.forget(client)

    def client_left(self, client: Client) -> None:
        """A client has said that it ends; what it sent before may end by itself."""
        self._leave(client, patient=True)
        self.forget(client)

    def violation(self, client: Client, kind: int, length: int) -> None:
        """A client has sent what is no message."""
        if not is_known(kind):
            self.dismiss(client, errors.MESSAGE_TYPE(type=kind))
        elif self.settings.max_packet_size < length <= LONGEST:
            self.dismiss(client, errors.MAX_PACKET_SIZE(size=length))
        else:
            self.dismiss(client, errors.MESSAGE_LENGTH())

    def unwritable(self, endpoint: Endpoint, code: int) -> None:
        """What was kept for an endpoint cannot be sent."""
        if isinstance(endpoint, Client):
            self.forget(endpoint)
        elif isinstance(endpoint, Server):
            endpoint.out = None
            endpoint.broken = True
            self.reactor.want(endpoint, READ)
            if endpoint.client is None or endpoint.login is not None:
                self.servers.lost(endpoint, os.strerror(-code))
        else:
            endpoint.out = None

    def drained(self, endpoint: Endpoint) -> None:
        """All that was kept for an endpoint has been sent: its source may be read again."""
        if isinstance(endpoint, Client):
            if endpoint.state == CLIENT_LEAVING:
                self.forget(endpoint)
            elif endpoint.server is not None:
                self.reactor.want(endpoint.server, endpoint.server.interest | READ)
        elif isinstance(endpoint, Server) and endpoint.client is not None:
            self.reactor.want(endpoint.client, endpoint.client.interest | READ)

    # Requests that fail.

    def fail_waiting(self, client: Client, error: bytes) -> None:
        """Answer the request that a client waits with by an error; it stays, and may send another."""
        if client.pool is not None and client in client.pool.waiting:
            client.pool.leave(client)
        if client.login is not None:
            self.dismiss(client, with_severity(error, b"FATAL"))
            return
        client.state = CLIENT_IDLE
        self._fail_next(client, with_severity(error, b"ERROR"))

    def fulfil(self, client: Client) -> None:
        """Answer the next request of a client whose transaction died while nothing was asked."""
        doom, client.doom = client.doom, None
        assert doom is not None
        self._fail_next(client, doom)

    def _fail_next(self, client: Client, error: bytes) -> None:
        """Answer the request at the head of a client's inbox by an error."""
        buf = client.inbox if client.inbox is not None else self.link.scratch
        kind, size = buf.byte(buf.start), buf.int32(buf.start + 1) + 1
        self.reply(client, error)
        if kind == messages.QUERY or kind == messages.FUNCTION_CALL:
            client.passing = size
            client.discarding = DISCARD_QUERY
        else:
            client.skip_to_sync = True
        self.reactor.soon.append(client)

    def discarded(self, client: Client) -> None:
        """The rest of a message that is for nobody has come."""
        query = client.discarding == DISCARD_QUERY
        client.discarding = 0
        if query:
            self.reply(client, messages.ready_for_query(messages.IDLE))

    def fail_active(self, client: Client, error: bytes) -> None:
        """Answer everything that a client's server still owes by an error, and take the server from it."""
        server = client.server
        assert server is not None
        pool = server.pool
        blamed = messages.error_fields(error[5:])["sqlstate"] == "08P01"  # the client broke the protocol
        if server.passing or pool.mode == POOL_SESSION or client.replication or blamed:
            self.dismiss(client, None if server.passing else with_severity(error, b"FATAL"))
            return
        if client.passing:
            server.broken = True  # it has half of a message: nothing that follows would be understood
            client.discarding = DISCARD
        answers, client.skip_to_sync = self._owed_answers(server.cycle, with_severity(error, b"ERROR"))
        if not answers and not client.skip_to_sync:
            client.doom = with_severity(error, b"ERROR")  # nothing is asked: the next request gets it
        client.state = CLIENT_IDLE
        client.query_since = client.transaction_since = 0
        client.idle_since = self.reactor.now
        self.reply(client, answers)
        if client.fd >= 0 and not client.interest & READ:
            self.reactor.want(client, client.interest | READ)

    @staticmethod
    def _owed_answers(cycle: Cycle, error: bytes) -> tuple[bytes, bool]:
        """Return the answers to all that a cycle owes when it cannot be had, and whether a Sync is still to come."""
        ready = messages.ready_for_query(messages.IDLE)
        answers = []
        group_failed = False
        for kind in cycle.unanswered():
            if kind == OWES_SYNC:
                answers += [error, ready] if group_failed else [ready]
                group_failed = False
            elif kind in (OWES_QUERY, OWES_FUNCTION_CALL):
                answers += [error, ready]
            elif kind != OWES_COPY_END:
                group_failed = True
        if cycle.ignoring:
            return b"".join(answers), True  # it has had its error
        if group_failed or cycle.group_open:
            answers.append(error)
        return b"".join(answers), group_failed or cycle.group_open

    def statement_only(self, client: Client) -> None:
        """A client has opened a transaction block in statement mode."""
        self.dismiss(client, errors.STATEMENT_POOLING())

    def flush_fakes(self, client: Client, server: Server) -> None:
        """A Flush asks for answers that we make ourselves: nothing else is owed before them."""
        answers = []
        while server.cycle.fake_is_next():
            answers.append(self.link.fake(server.cycle))
        self.reply(client, b"".join(answers))

    # Servers.

    def server_bytes(self, server: Server, buf: Buffer) -> int:
        """Handle what a server sent that serves no client now; return where the rest begins."""
        return self.servers.receive(server, buf)

    def server_gone(self, server: Server, code: int) -> None:
        """A server has closed its connection, or it broke."""
        client = server.client
        if client is None or server.login is not None:
            self.servers.lost(server, os.strerror(-code) if code else "it closed the connection")
            return
        words = server.last_words
        if words is None:
            reason = os.strerror(-code) if code else "it closed the connection unexpectedly"
            words = errors.SERVER_LOST(reason=reason).encode()
        else:
            self._met(server, words)
        self.fail_active(client, words)
        server.client = client.server = None
        self.servers.lost(server, "it closed the connection")

    def _met(self, server: Server, words: bytes) -> None:
        log.info("server %d (%s): %s", server.pid, server.address, messages.error_fields(words[5:]).get("message"))

    def server_error(self, server: Server, message: bytes) -> bytes | None:
        """Look at an ErrorResponse; return None to pass it on, another in its place, or b"" to keep it back."""
        fields = messages.error_fields(message[5:])
        if fields["sqlstate"] == "0A000":
            self.link.rewriter.generation += 1  # perhaps a plan that does not fit its table any more
        if server.cycle.skip_is_next():
            server.refusal = message
        if fields.get("severity_nonlocalized", fields["severity"]) in ("FATAL", "PANIC"):
            server.last_words = message
            return b""
        if server.client is not None and b'"gateway_' in message:
            return own_names(server.client, message)
        return None

    def parameter_status(self, server: Server, body: bytes, silent: bool) -> None:
        """A server has another value of a parameter now; its client is told (the message passes on), unless silent."""
        if server.parameters is None:
            return
        name, value = messages.cstrings(body)
        server.parameters = server.parameters.having(name, value)
        client = server.client
        if client is not None and client.parameters is not None and not silent:
            client.parameters = client.parameters.having(name, value)

    def adapt(self, client: Client, server: Server) -> bool:
        """Give a server the parameters of its client; return False when the client has to wait for that."""
        pool = server.pool
        step = server.parameters.step_to(client.parameters, pool.reported)
        if step.facts and client.login is None:
            self.reply(client, step.facts)
        before, server.parameters = server.parameters, step.parameters
        client.parameters = step.parameters
        if not step.sql:
            return True
        self.link.assembly.extend(step.sql)
        server.cycle.request(OWES_QUERY | SKIP)
        server.refusal = None
        server.adapting = before
        if step.certain and client.login is None:
            return True
        client.state = CLIENT_WAITING
        self.link.to_server(server, self.link.assembly, 0, 0)
        return False

    def adapted(self, client: Client, server: Server) -> None:
        """A server has taken its client's parameters, or refused them."""
        before: Any = server.adapting
        server.adapting = None
        refusal, server.refusal = server.refusal, None
        if refusal is not None:
            server.parameters = before
        if client.state != CLIENT_WAITING:
            if refusal is not None:
                log.error("server %d (%s) refused parameters it had reported", server.pid, server.address)
                server.cycle.desynced = True
            return
        if client.login is not None:
            login = client.login
            self.link.part(client, server)
            client.state = CLIENT_LOGIN
            if refusal is not None:
                self.dismiss(client, with_severity(refusal, b"FATAL"))
                return
            self.admission.remember(login.pool, login.startup, server.parameters)
            self.admission.admit(client, server.parameters)
            return
        client.state = CLIENT_ACTIVE
        if refusal is None:
            self.reactor.soon.append(client)
            return
        client.state = CLIENT_WAITING
        self.link.part(client, server)
        self.fail_waiting(client, refusal)

    def check(self, server: Server) -> None:
        """An idle server is to be tested before it is handed out."""
        self.servers.check(server)

    def set_aside(self, server: Server) -> None:
        """A server is free, but not for clients."""
        self.servers.set_aside(server)

    def grow(self, pool: Pool) -> None:
        """Launch a server for those who wait in a pool, if it may have one; make room where a shared limit is full."""
        now = self.reactor.now
        if pool.wants_server(now):
            self.servers.connect(pool)
        elif pool.connecting == 0:
            spare = oldest_idle(iter(self.pools.by_key.values()), pool)
            if spare is not None:
                self.servers.close(spare, "its limit is needed elsewhere")
            self.demand()

    def demand(self) -> None:
        """Tell the supervisor what is wanted of the limits that hold over all workers, now and then."""
        self.demand_due = True
        if self.pools.workers > 1 and self.reactor.now - self.demanded_at >= SECOND // 100:
            self.demanded_at = self.reactor.now
            self.demand_due = False
            for demand in self.pools.demands():
                self.channel.send(demand)

    # Time.

    def sweep(self, now: int) -> None:
        """Do what time has made due."""
        for pool in list(self.pools.by_key.values()):
            for action in pool.sweep(now):
                self._act(pool, action.verb, action.who, action.why)
        self.canceler.sweep(now)
        self._sweep_clients(now)
        if self.demand_due or now - self.demanded_at >= SECOND:
            self.demand()
        self._unpark(now - _PARKING_TIME)
        if self.draining:
            self._sweep_drain(now)

    def _unpark(self, since: int) -> None:
        """Try again to let in the clients that were parked before *since*; who finds no room now is refused."""
        for client in [client for client, parked in self.parked.items() if parked <= since]:
            self.admission.again(client)

    def _act(self, pool: Pool, verb: Verb, who: Any, why: str) -> None:
        if verb is Verb.RETIRE:
            if who.state == SERVER_IDLE:
                self.servers.close(who, why)
        elif verb is Verb.LAUNCH:
            self.servers.connect(pool)
        elif verb is Verb.GIVE_UP:
            self.servers.give_up(who)
        elif verb is Verb.NOTIFY:
            who.notified = True
            self.reply(who, errors.QUERY_WAIT_NOTIFY().encode())
        elif verb is Verb.FAIL and who.state != CLIENT_GONE:
            self._time_out(who, why)

    def _time_out(self, client: Client, why: str) -> None:
        error = TIMEOUTS[why]()
        server = client.server
        if why == "query_wait_timeout":
            if client.pool is None or client.pool.address is None:
                error = errors.NO_PRIMARY()
            if client.login is not None:
                self.dismiss(client, with_severity(error.encode(), b"FATAL"))
            else:
                self.fail_waiting(client, error.encode())
        elif why == "query_timeout" and server is not None:
            self.fail_active(client, error.encode())
            self.servers.leave(server, client, patient=False)
        else:
            self.dismiss(client, error)

    def _sweep_clients(self, now: int) -> None:
        limit = int(self.settings.client_login_timeout * SECOND)
        while limit and self.logins:
            oldest = next(iter(self.logins))
            if now - oldest.connected_at < limit:
                break
            self.logins.pop(oldest)
            self.dismiss(oldest, errors.CLIENT_LOGIN_TIMEOUT())
        for pool in self.pools.by_key.values():
            limit = int(pool.settings.client_idle_timeout * SECOND)
            if limit:
                for client in list(self.clients.values()):
                    if client.pool is pool and self._is_idle(client) and now - client.idle_since >= limit:
                        self.dismiss(client, errors.CLIENT_IDLE_TIMEOUT())

    @staticmethod
    def _is_idle(client: Client) -> bool:
        """Does the client rest between two transactions, with a server of its own in session mode or without?"""
        server = client.server
        return client.state == CLIENT_IDLE or (server is not None and client.idle_since > 0 and server.cycle.is_free())

    def drain(self, timeout: float) -> None:
        """Take no new client, let each go at the end of its transaction, and all after *timeout* seconds."""
        if self.draining:
            return
        self.draining = True
        self.drained_at = self.reactor.now + int(timeout * SECOND)
        for listener in self.listeners:
            self.reactor.remove(listener)

    def _sweep_drain(self, now: int) -> None:
        late = now >= self.drained_at
        for client in list(self.clients.values()):
            if late or client.state in (CLIENT_IDLE, CLIENT_LOGIN, CLIENT_CONSOLE):
                self.dismiss(
                    client, errors.ADMIN_SHUTDOWN() if client.state != CLIENT_LOGIN else errors.SHUTTING_DOWN()
                )
        if not self.clients or late:
            for server in list(self.pools.servers()):
                self.servers.close(server, "shutting down")
            self.reactor.running = False


TIMEOUTS = {
    "query_wait_timeout": errors.QUERY_WAIT_TIMEOUT,
    "query_timeout": errors.QUERY_TIMEOUT,
    "transaction_timeout": errors.TRANSACTION_TIMEOUT,
    "idle_transaction_timeout": errors.IDLE_TRANSACTION_TIMEOUT,
}


def with_severity(message: bytes, severity: bytes) -> bytes:
    """Return an ErrorResponse with another severity: FATAL where the connection ends, ERROR where it goes on."""
    fields = [field[:1] + severity if field[:1] in _SEVERITIES else field for field in message[5:].split(b"\0")]
    return messages.message(messages.ERROR_RESPONSE, b"\0".join(fields))
