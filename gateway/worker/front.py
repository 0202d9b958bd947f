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
import secrets
from collections.abc import Iterable
from typing import Any

from gateway import errors
from gateway.control import (
    Answer,
    Ask,
    CancelElsewhere,
    Configure,
    ConsoleInput,
    ConsoleOutput,
    Down,
    Drain,
    Grant,
    Ready,
    View,
)
from gateway.wire import messages
from gateway.wire.kinds import is_known
from gateway.wire.owed import (
    OWES_QUERY,
    SKIP,
)
from gateway.wire.parameters import Parameters
from gateway.worker import snapshot
from gateway.worker.admission import Admission
from gateway.worker.cancel import Canceler, Errand
from gateway.worker.channel import Channel
from gateway.worker.clients import Clients
from gateway.worker.endpoint import (
    CANCEL,
    CLIENT_ACTIVE,
    CLIENT_CONSOLE,
    CLIENT_GONE,
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
from gateway.worker.failing import ABORTED, Failing, with_severity
from gateway.worker.link import Link
from gateway.worker.pool import SECOND, Pool, Verb
from gateway.worker.pools import Pools, oldest_idle
from gateway.worker.reactor import Reactor
from gateway.worker.rewrite import own_names
from gateway.worker.servers import Servers
from gateway.worker.sock import READ, WRITE, Buffer

log = logging.getLogger("gateway.worker")

_DEMAND_EVERY = SECOND // 100
_FAREWELLS = ("quickdie", "SyncRepWaitForLSN")  # where PostgreSQL warns that it ends; others may raise its codes
LONGEST = 0x3FFFFFFE  # of a message that PostgreSQL takes (PQ_LARGE_MESSAGE_LIMIT)


class Front:
    """One worker's clients and servers."""

    def __init__(self, reactor: Reactor, channel: Channel, listeners: Iterable[int], configure: Configure) -> None:
        self.reactor = reactor
        self.channel = channel
        self.index = configure.index
        self.clients = Clients(self, reactor, configure)
        self.failing = Failing(self)
        self.draining = False
        self.drained_at = 0
        self.demanded_at = 0
        self.demand_due = False  # something is wanted or free that the supervisor does not know of yet
        self.pools = Pools(configure)
        self.admission = Admission(self, configure)
        self.servers = Servers(self, configure)
        self.canceler = Canceler(self)
        front = configure.settings.front
        self.link = Link(
            reactor,
            self,
            front.high_water_mark,
            front.max_packet_size,
            front.max_prepared_statements,
            secrets.token_hex(4),  # two workers, or two gateways, share no names
            front.read_buffer_size,
        )
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
        self.workers = configure.workers
        self.clients.configure(configure)
        for pool in self.pools.configure(configure):
            self._moved(pool)
        self.admission.configure(configure)
        self.servers.configure(configure)
        self.link.high_water = self.settings.high_water_mark
        self.link.max_packet = min(self.settings.max_packet_size, LONGEST)
        self.link.rewriter.capacity = self.settings.max_prepared_statements or 1  # 0: for those who have some

    # What is ready that is neither a client nor a server.

    def other_ready(self, endpoint: Endpoint, events: int) -> int:
        """Serve a listener, the channel to the supervisor, or a cancel request under way."""
        if endpoint.kind == LISTENER:
            self.clients.accept(endpoint)
        elif endpoint.kind == CANCEL:
            assert isinstance(endpoint, Errand)
            self.canceler.ready(endpoint, events)
        elif endpoint.kind == CONTROL:
            if events & WRITE:
                self.link.writable(endpoint)
            if events & ~WRITE:
                self._control()
        return 0

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
                for pool, action in self.pools.see(record.view):
                    self._act(pool, *action)
                for pool in self.pools.in_need():
                    self._serve(pool)
            case Grant():
                self.pools.grant(record.limit, record.share)
                for demand in self.pools.demands(self.clients.parked_for(), record.limit):
                    self.channel.send(demand)  # which acknowledges it
                self.freed()
                if record.limit.kind.endswith("clients"):
                    self.clients.unpark(self.reactor.now)
            case ConsoleOutput():
                client = self.clients.by_id.get(record.client)
                if client is not None and client.state == CLIENT_CONSOLE:
                    self.clients.reply(client, record.data)
                    if record.close:
                        self.clients.dismiss(client, None)
            case CancelElsewhere():
                self.canceler.cancel(record.pid, record.key)
            case Ask():
                self.channel.send(Answer(record.number, snapshot.rows(self, record.table)))
            case Drain():
                self.drain(record.timeout)
            case Configure():
                self.configure(record)

    def _serve(self, pool: Pool) -> None:
        """Give those who wait in a pool what there is, and launch what there is not."""
        now = self.reactor.now
        while pool.waiting and (server := pool.acquire(now)) is not None:
            if server.state == SERVER_IDLE:
                self.check(server)
            else:
                self.link.hand_on(server, pool)
        while pool.wants_server(now):
            self.servers.connect(pool)
        self.grow(pool)

    def _moved(self, pool: Pool) -> None:
        """A pool's node is elsewhere: its servers end when they are free."""
        for server in pool.servers:
            server.retiring = True
        for server in [*pool.idle(), *pool.warm]:
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
            self.clients.dismiss(client, errors.INTERNAL())
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

    def client_gone(self, client: Client, code: int) -> int:
        """A client has closed its connection, or it broke (code is 0 or -errno)."""
        return self.clients.gone(client, code)

    def client_left(self, client: Client, at_once: bool) -> int:
        """A client has said that it ends, *at_once* with its last request."""
        return self.clients.left(client, at_once)

    def violation(self, client: Client, kind: int, length: int) -> None:
        """A client has sent what is no message."""
        if not is_known(kind):
            self.clients.dismiss(client, errors.MESSAGE_TYPE(type=kind))
        elif self.settings.max_packet_size < length <= LONGEST:
            self.clients.dismiss(client, errors.MAX_PACKET_SIZE(size=length))
        else:
            self.clients.dismiss(client, errors.MESSAGE_LENGTH())

    def unwritable(self, endpoint: Endpoint, code: int) -> None:
        """What was kept for an endpoint cannot be sent."""
        if isinstance(endpoint, Client):
            self.clients.forget(endpoint)
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
                self.clients.forget(endpoint)
            elif endpoint.server is not None:
                self.reactor.want(endpoint.server, endpoint.server.interest | READ)
        elif isinstance(endpoint, Server) and endpoint.client is not None:
            self.reactor.want(endpoint.client, endpoint.client.interest | READ)

    def fulfil(self, client: Client) -> None:
        """Answer the next request of a client whose transaction died while nothing was asked."""
        doom, client.doom = client.doom, None
        assert doom is not None
        self.failing.unasked(client, doom)

    def discarded(self, client: Client) -> None:
        """The rest of a message that is for nobody has come."""
        self.failing.discarded(client)

    def statement_only(self, client: Client) -> None:
        """A client has opened a transaction block in statement mode."""
        self.clients.dismiss(client, errors.STATEMENT_POOLING())

    def flush_fakes(self, client: Client, server: Server) -> None:
        """A Flush asks for answers that we make ourselves: nothing else is owed before them."""
        answers = []
        while server.cycle.fake_is_next():
            answers.append(self.link.fake(server.cycle))
        server.told = True
        self.clients.reply(client, b"".join(answers))

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
        if server.last_words is not None:
            said = messages.error_fields(server.last_words[5:]).get("message")
            log.info("server %d (%s): %s", server.pid, server.address, said)
        self.servers.met(server)
        reason = os.strerror(-code) if code else "it closed the connection unexpectedly"
        self.failing.lost(client, server.farewell or reason)
        self.servers.lost(server, reason)

    def hush(self, server: Server) -> None:
        """A server ends: what it has begun to answer is not passed on where another server will answer it."""
        if server.client is not None and self.failing.is_for_another(server.client, server):
            self.link.assembly.start = self.link.assembly.end = 0

    def server_said(self, server: Server, message: bytes) -> bytes | None:
        """Look at an error or a notice; return None to pass it on, another in its place, or b"" to keep it back."""
        fields = messages.error_fields(message[5:])
        if message[0] == messages.NOTICE_RESPONSE:
            if fields["sqlstate"] not in ("57P01", "57P02") or fields.get("routine") not in _FAREWELLS:
                return None
            server.farewell = fields["message"]  # an error will follow, from us
            return b""
        if fields["sqlstate"] == "0A000":
            self.link.rewriter.generation += 1  # perhaps a plan that does not fit its table any more
        if fields["sqlstate"] == "25006":
            self.servers.met(server, "25006")
        if server.cycle.skip_is_next():
            server.refusal = message
        if fields.get("severity_nonlocalized", fields["severity"]) in ("FATAL", "PANIC"):
            server.last_words = message
            return b""
        if server.client is not None and b'"gateway_' in message:
            return own_names(server.client, server, message)
        return None

    def parameter_status(self, server: Server, body: bytes, silent: bool) -> None:
        """A server has another value of a parameter now; its client is told (the message passes on), unless silent."""
        if server.parameters is None:
            return
        try:
            name, value = messages.cstrings(body)
        except ValueError:
            server.cycle.desynced = True  # it does not speak the protocol
            return
        if name == "in_hot_standby" and value == "off" and server.parameters.values.get(name) == "on":
            self.servers.met(server, "promoted")
        server.parameters = server.parameters.having(name, value)
        client = server.client
        if client is not None and client.parameters is not None and not silent:
            before, client.parameters = client.parameters, client.parameters.having(name, value)
            if client.parameters.meaning != before.meaning:
                self.link.rewriter.reread(server)

    def adapt(self, client: Client, server: Server) -> bool:
        """Give a server the parameters of its client; return False when the client has to wait for that."""
        pool = server.pool
        step = server.parameters.step_to(client.parameters, pool.reported)
        if step.facts and client.login is None:
            self.clients.reply(client, step.facts)
            if client.fd < 0:
                return False  # it did not take them, and is gone; the server is another's by now
        before, server.parameters = server.parameters, step.parameters
        client.parameters = step.parameters
        if client.login is not None:  # what a value that it asked for comes to is told, unless it is the one there was
            there_was = {name: value for name, value in before.values.items() if name in pool.reported}
            server.parameters = Parameters.of({**step.parameters.values, **there_was})
        if not step.sql:
            return self.abort_again(client)
        self.link.assembly.extend(step.sql)
        server.cycle.request(OWES_QUERY | SKIP)
        server.unnamed_serial = 0
        server.refusal = None
        server.adapting = before
        if step.certain and client.login is None:
            return self.abort_again(client)
        client.state = CLIENT_WAITING
        self.link.to_server(server, self.link.assembly, 0, 0)
        return False

    def abort_again(self, client: Client) -> bool:
        """Have a new server where the transaction of its client is that was lost with another: aborted."""
        server = client.server
        if client.status != messages.IDLE and server is not None:
            self.link.assembly.extend(ABORTED)
            server.cycle.request(OWES_QUERY | SKIP)
            server.cycle.status = client.status
            server.unnamed_serial = 0
            client.status = messages.IDLE
        return True

    def adapted(self, client: Client, server: Server) -> None:
        """A server has taken its client's parameters, or refused them."""
        if server.cancel_due:
            server.cancel_due = False
            self.canceler.send(server)
        before: Any = server.adapting
        server.adapting = None
        refusal, server.refusal = server.refusal, None
        if refusal is not None:
            server.parameters = before
            self.admission.refused(server.pool)
        if client.state != CLIENT_WAITING:
            if refusal is not None:
                log.error("server %d (%s) refused parameters it had reported", server.pid, server.address)
                server.cycle.desynced = True
            return
        if client.login is not None:
            parameters = server.parameters
            self.link.part(client, server)
            client.state = CLIENT_LOGIN
            if refusal is not None:
                self.clients.dismiss(client, with_severity(refusal, b"FATAL"))
                return
            self.admission.accepted(client, parameters)
            return
        client.state = CLIENT_ACTIVE
        if refusal is None:
            self.reactor.soon.append(client)
            return
        client.state = CLIENT_WAITING
        self.link.part(client, server)
        self.failing.waiting(client, refusal)

    def check(self, server: Server) -> None:
        """An idle server is to be tested before it is handed out."""
        self.servers.check(server)

    def set_aside(self, server: Server) -> None:
        """A server is free, but not for clients."""
        self.servers.set_aside(server)

    def grow(self, pool: Pool) -> int:
        """Launch a server for those who wait in a pool, if it may have one; make room where a shared limit is full."""
        now = self.reactor.now
        if pool.wants_server(now):
            self.servers.connect(pool)
        elif pool.connecting == 0:
            if pool.shares:
                spare = oldest_idle(self.pools.all, pool)
                if spare is not None:
                    self.servers.close(spare, "its limit is needed elsewhere")
            self.demand()
        return 0

    def freed(self) -> None:
        """A server has gone: those who have waited longest for one may have another."""
        for pool in self.pools.in_need():
            self.grow(pool)
        self.demand()

    def demand(self) -> int:
        """Tell the supervisor what is wanted of the limits that hold over all workers, now and then."""
        self.demand_due = True
        if self.workers > 1 and self.reactor.now - self.demanded_at >= _DEMAND_EVERY:
            self.demanded_at = self.reactor.now
            self.demand_due = False
            for demand in self.pools.demands(self.clients.parked_for()):
                self.channel.send(demand)
        return 0

    def demand_now(self) -> None:
        """Tell the supervisor at once: an answer is waited for."""
        self.demanded_at = 0
        self.demand()

    # Time.

    def sweep(self, now: int) -> None:
        """Do what time has made due."""
        for pool in self.pools.sweep():
            for action in pool.sweep(now):
                self._act(pool, *action)
            for node in pool.wants_warm(now) if not self.draining else ():
                self.servers.warm_up(pool, node)
        for server in self.pools.victims(now):
            server.retiring = True
            if server.state == SERVER_IDLE:
                self.servers.close(server, "its limit is needed elsewhere")
        self.canceler.sweep(now)
        self.clients.sweep(now)
        if self.demand_due or now - self.demanded_at >= SECOND:
            self.demand()
        if self.draining:
            self._sweep_drain(now)

    def _act(self, pool: Pool, verb: Verb, who: Any, why: str) -> None:
        if verb is Verb.RETIRE:
            if who.state == SERVER_IDLE or who.warm:
                self.servers.close(who, why)
        elif verb is Verb.ADOPT:
            self.servers.adopt(who)
        elif verb is Verb.CUT:
            self.servers.cut(who, why)
        elif verb is Verb.LAUNCH:
            self.servers.connect(pool)
        elif verb is Verb.GIVE_UP:
            self.servers.give_up(who)
        elif verb is Verb.NOTIFY:
            who.notified = True
            self.clients.reply(who, errors.QUERY_WAIT_NOTIFY().encode())
        elif verb is Verb.FAIL and who.state != CLIENT_GONE:
            self._time_out(who, why)

    def _time_out(self, client: Client, why: str) -> None:
        error = TIMEOUTS[why]()
        server = client.server
        if why == "query_wait_timeout":
            if client.pool is None or client.pool.address is None or client.pool.held:
                error = errors.NO_PRIMARY()
            if client.login is not None:
                self.clients.dismiss(client, with_severity(error.encode(), b"FATAL"))
            else:
                self.failing.waiting(client, error.encode())
        elif why == "query_timeout" and server is not None:
            self.failing.timed_out(client, error.encode())
        else:
            self.clients.dismiss(client, error)

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
        for client in list(self.clients.by_id.values()):
            if late or client.is_idle() or client.state in (CLIENT_LOGIN, CLIENT_CONSOLE):
                self.clients.dismiss(
                    client, errors.ADMIN_SHUTDOWN() if client.state != CLIENT_LOGIN else errors.SHUTTING_DOWN()
                )
        if not self.clients.by_id or late:
            for server in list(self.pools.servers()):
                self.servers.close(server, "shutting down")
            self.reactor.running = False


TIMEOUTS = {
    "query_wait_timeout": errors.QUERY_WAIT_TIMEOUT,
    "query_timeout": errors.QUERY_TIMEOUT,
    "transaction_timeout": errors.TRANSACTION_TIMEOUT,
    "idle_transaction_timeout": errors.IDLE_TRANSACTION_TIMEOUT,
}
