"""Admission: from a client's first byte to its first ReadyForQuery.

1. Nothing is held for a client that does not speak but its descriptor, and that only for client_login_timeout.
2. Whether a database exists, or a limit is reached, is told only to those who have proven who they are.
3. A client's own parameters are tried on a server before it is admitted, once for each combination of values; the
   server's canonical values are then what the client is told.

Called by the front with what clients in state CLIENT_LOGIN send. See "Start-up" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from gateway import errors
from gateway.control import Configure, ConsoleOpened
from gateway.errors import GatewayError
from gateway.settings import CONSOLE_DATABASES
from gateway.wire import messages, startup
from gateway.wire.login import ClientLogin, Method
from gateway.wire.messages import BACKEND_KEY_DATA, AuthenticationOk
from gateway.wire.parameters import Parameters, canonical
from gateway.wire.scram import Cache, StoredKeys
from gateway.wire.startup import HEADER_SIZE, TLS_HANDSHAKE, CancelRequest, SSLRequest, StartupMessage
from gateway.wire.userlist import Secret
from gateway.worker.endpoint import CLIENT_CONSOLE, CLIENT_IDLE, CLIENT_LOGIN, Client
from gateway.worker.pool import Pool, Share
from gateway.worker.sock import Buffer

if TYPE_CHECKING:
    from gateway.worker.front import Front

log = logging.getLogger("gateway.worker")

_MOST_ROUTES = 1000  # remembered startup packets, and combinations of startup parameters per pool
_LONGEST_ROUTE = 1024  # bytes of a startup packet that is remembered
_LONGEST_ANSWER = 65536 + 16  # of a client that is asked for a password
_KEY_3_0, _KEY_3_2 = 4, 32  # bytes of a cancel key by protocol
_RANDOM = 4096


class Route:
    """What one startup packet asks for: clients of one application all send the same bytes."""

    def __init__(self, packet: StartupMessage) -> None:
        self.startup = packet
        self.user = packet.user
        self.negotiation = packet.negotiation
        self.has_long_keys = packet.protocol == messages.PROTOCOL_3_2
        self.replication = bool(packet.replication)
        self.is_learnt = False  # has a login shown how to log in to the server?
        self.pool: Pool = None  # type: ignore[assignment]  # from the first client on that has proven who it is
        self.shares: tuple[Share, ...] = ()  # of the limits that its clients count against
        self.reported: Parameters | None = None  # the pool's welcome that the next two were made from
        self.parameters: Parameters = None  # type: ignore[assignment]  # of its clients
        self.welcome = b""  # what they are told of them


class Login:
    """What is known of a client until it is admitted."""

    def __init__(self) -> None:
        self.route: Route = None  # type: ignore[assignment]  # once the startup packet has come
        self.exchange: ClientLogin | None = None
        self.proof = b""  # what ends the exchange, due before anything else that is told
        self.ssl_asked = self.gss_asked = False


class Admission:
    """Lets clients in."""

    def __init__(self, front: Front, configure: Configure) -> None:
        self.front = front
        self.cache: Cache = {}  # derived SCRAM keys
        self.fresh = Buffer(_RANDOM)  # random bytes that nobody has seen
        self.told = Buffer(1024)  # what a client is told when it is let in
        self.configure(configure)

    def configure(self, configure: Configure) -> None:
        """Take the settings."""
        self.settings = configure.settings.front
        self.console = configure.settings.console
        self.method = Method(configure.settings.front.auth.type.value)
        self.is_trust = self.method is Method.TRUST
        self.secret = configure.secret
        users = configure.users
        self.users = None if users is None else {user: Secret.of(text) for user, text in users.items()}
        self.known: dict[str, StoredKeys] = {}  # by user, of those whose password is stored as it is
        self.ignored = frozenset(self.settings.ignore_startup_parameters)
        self.routes: dict[bytes, Route] = {}

    def receive(self, client: Client, buf: Buffer) -> int:
        """Handle what a client in login has sent; return where what is not understood yet begins."""
        login: Login = client.login
        try:
            while client.state == CLIENT_LOGIN and client.fd >= 0 and buf.start < buf.end:
                start = buf.start
                if login.route is None:
                    self.packet(client, login, buf)
                elif login.exchange is not None and not login.exchange.done:
                    self._answer(client, login, login.exchange, buf)
                if buf.start == start:
                    break
        except (errors.CANCEL_LENGTH, errors.CANCEL_KEY_LENGTH):
            self.front.clients.dismiss(client, None)  # nobody waits for an answer to a cancel request
        except GatewayError as error:
            self.front.clients.dismiss(client, error)
        return buf.start

    def packet(self, client: Client, login: Login, buf: Buffer) -> int:
        """Handle the packet that opens a connection, once it is whole."""
        available = buf.end - buf.start
        if buf.byte(buf.start) == TLS_HANDSHAKE:
            return self.front.clients.dismiss(client, None)  # as PostgreSQL without TLS does
        if available < HEADER_SIZE:
            return 0
        length = buf.int32(buf.start)
        if length > available or length < 2 * HEADER_SIZE:
            startup.packet_length(buf.slice(buf.start, buf.start + 4), self.settings.max_startup_packet)
            return 0
        packet = buf.slice(buf.start, buf.start + length)
        route = self.routes.get(packet)
        if route is None:
            if packet == messages.SSLRequest and not login.ssl_asked:  # most clients begin with it
                buf.start += length
                return self._refuse_encryption(client, login, buf, True)
            startup.packet_length(packet, self.settings.max_startup_packet)
            parsed = startup.parse(packet, ssl_asked=login.ssl_asked, gss_asked=login.gss_asked)
            buf.start += length
            if not isinstance(parsed, StartupMessage):
                self._ask(client, login, buf, parsed)
                return 0
            route = Route(parsed)
            if length <= _LONGEST_ROUTE:
                if len(self.routes) >= _MOST_ROUTES:
                    self.routes.clear()
                self.routes[packet] = route
        else:
            buf.start += length
        login.route = route
        self._begin(client, login)
        return 0

    def _ask(self, client: Client, login: Login, buf: Buffer, packet: object) -> None:
        if isinstance(packet, CancelRequest):
            self.front.canceler.requested(client, packet)
        else:
            self._refuse_encryption(client, login, buf, isinstance(packet, SSLRequest))

    def _refuse_encryption(self, client: Client, login: Login, buf: Buffer, asked_ssl: bool) -> int:
        login.ssl_asked = login.ssl_asked or asked_ssl
        login.gss_asked = login.gss_asked or not asked_ssl
        self.front.clients.reply(client, b"N")
        if buf.start < buf.end:
            raise errors.DATA_BEFORE_TLS if asked_ssl else errors.DATA_BEFORE_GSS
        return 0

    def _begin(self, client: Client, login: Login) -> int:
        route = login.route
        user = route.user
        if self.front.draining:
            raise errors.SHUTTING_DOWN
        if route.negotiation:
            self.front.clients.reply(client, route.negotiation)
        if self.is_trust:
            login.proof = AuthenticationOk
            if self.users is not None and user not in self.users:
                raise errors.NO_SUCH_ROLE(user=user)
            return self.proven(client, login)
        secret = self.users.get(user) if self.users is not None else None
        login.exchange = ClientLogin(
            self.method,
            user,
            secret,
            mock_key=self.secret,
            nonce=self.random(18),
            salt=self.random(4),
            cache=self.cache,
            known=self.known,
            iterations=self.settings.auth.scram_iterations,
        )
        return self.front.clients.reply(client, login.exchange.start())

    def _answer(self, client: Client, login: Login, exchange: ClientLogin, buf: Buffer) -> int:
        if buf.end - buf.start < 5:
            return 0
        length = buf.int32(buf.start + 1)
        if not 4 <= length <= _LONGEST_ANSWER:
            raise errors.PASSWORD_LENGTH
        if buf.end - buf.start < length + 1:
            return 0
        body = buf.slice(buf.start + 5, buf.start + 1 + length)
        kind = buf.byte(buf.start)
        buf.start += length + 1
        reply = exchange.receive(kind, body)
        if exchange.done:
            login.proof = reply + AuthenticationOk
            return self.proven(client, login)
        return self.front.clients.reply(client, reply)

    def proven(self, client: Client, login: Login) -> int:
        """The client is who it says: find out whether it may have what it wants."""
        route = login.route
        if route.pool is None:
            if route.startup.fault is not None:
                raise route.startup.fault
            if route.startup.database in CONSOLE_DATABASES:
                self._open_console(client, login)
                return 0
            pool = self.front.pools.get(route.startup.database, route.startup.user)
            if pool is None:
                raise errors.NO_SUCH_DATABASE(database=route.startup.database)
            route.pool = pool
            route.shares = self.front.pools.client_shares(pool, route.startup.user)
        if client.shares is None and not self.front.clients.count_in(client, route):  # raises 53300
            return 0
        if login.exchange is not None and not route.is_learnt:
            route.is_learnt = True
            self.front.servers.learn(route.pool, route.user, login.exchange)
        if route.replication:
            client.replication = True
            self.front.servers.connect(route.pool, client)
        elif route.pool.welcome is not None:
            self.enter(client)
        else:
            self._await_server(client, route.pool)
        return 0

    def _await_server(self, client: Client, pool: Pool) -> None:
        """Nobody has been told yet what a server of this pool reports: wait for the first one."""
        now = self.front.reactor.now
        if pool.failure is not None and not pool.servers and now < pool.retry_at:
            self.front.clients.dismiss(client, pool.failure)
            return
        pool.newcomers[client] = None
        client.waiting_since = now
        self.front.grow(pool)

    def again(self, client: Client) -> None:
        """Go on with a client that was parked."""
        try:
            self.proven(client, client.login)
        except GatewayError as error:
            self.front.clients.dismiss(client, error)

    def enter(self, client: Client) -> int:
        """Give a client its parameters and let it in; where a server has to be asked first, let it wait for one."""
        login: Login = client.login
        route = login.route
        pool = route.pool
        client.waiting_since = 0
        if route.reported is not pool.welcome:
            parameters = self._resolve(route)
            if parameters is None:
                return self._try_parameters(client, pool)
            self.settle(route, parameters)
        return self.admit(client, route.parameters, route.welcome)

    def _resolve(self, route: Route) -> Parameters | None:
        """Return the parameters that a route's clients begin with, or None when a server has to be asked."""
        wanted, reported = route.startup.parameters, route.pool.welcome
        assert reported is not None
        if not wanted:
            return reported
        known = route.pool.entries.get(frozenset(wanted.items()))
        if known is not None:
            return known
        values = self._values(route)
        if any(reported.values.get(name) != values[name] for name in values if name != "application_name"):
            return None
        return Parameters.of(values)

    def _values(self, route: Route) -> dict[str, str]:
        assert route.pool.welcome is not None
        asked = {canonical(name): value for name, value in route.startup.parameters.items() if name not in self.ignored}
        return {**route.pool.welcome.values, **asked}

    def _try_parameters(self, client: Client, pool: Pool) -> int:
        """Have a server take a client's parameters, or refuse them; the front goes on when it has."""
        client.parameters = Parameters.of(self._values(client.login.route))
        server = self.front.link.acquire(client)
        if server is not None:  # it has them already
            parameters = client.parameters
            self.front.link.part(client, server)
            self.accepted(client, parameters)
        return 0

    def accepted(self, client: Client, parameters: Parameters) -> None:
        """A server has taken a client's parameters, and says what they come to: so it is for all that ask for them."""
        route = client.login.route
        entries = route.pool.entries
        if len(entries) >= _MOST_ROUTES:
            entries.clear()
        entries[frozenset(route.startup.parameters.items())] = parameters
        self.settle(route, parameters)
        self.admit(client, parameters, route.welcome)

    def refused(self, pool: Pool) -> None:
        """A server does not take what another took: let all be tried again, so that it is told at the login."""
        pool.entries.clear()
        for route in self.routes.values():
            if route.pool is pool:
                route.reported = None

    def settle(self, route: Route, parameters: Parameters) -> None:
        """Remember what a route's clients begin with, until a server reports other values."""
        route.reported = route.pool.welcome
        route.parameters = parameters
        route.welcome = parameters.welcome(route.pool.reported)

    def admit(self, client: Client, parameters: Parameters, welcome: bytes) -> int:
        """Let a client in: it is told its parameters and its cancel key, and may send queries."""
        login: Login = client.login
        route = login.route
        pool = route.pool
        clients = self.front.clients
        client.login = None
        client.parameters = parameters
        if client.server is None:
            client.state = CLIENT_IDLE
        client.idle_since = self.front.reactor.now
        if client.inbox is not None:
            self.front.reactor.soon.append(client)  # it has sent its first query already
        pool.logins += 1
        clients.logins.pop(client, None)
        if clients.log_connections:
            log.info("client %d: login: database %s, user %s", client.id, route.startup.database, route.startup.user)
        key = client.key = self.random(_KEY_3_2 if route.has_long_keys else _KEY_3_0)
        told = self.told
        told.start = told.end = 0
        told.extend(login.proof)
        told.extend(welcome)
        told.put_byte(BACKEND_KEY_DATA)
        told.put_int32(len(key) + 8)
        told.put_int32(client.id)
        told.extend(key)
        told.extend(_READY)
        return clients.reply(client, told.slice(0, told.end))

    def random(self, size: int) -> bytes:
        """Return some random bytes that nobody else gets; the kernel is asked for many at once."""
        if self.fresh.end - self.fresh.start < size:
            self.fresh.start = self.fresh.end = 0
            self.fresh.extend(secrets.token_bytes(_RANDOM))
        self.fresh.start += size
        return self.fresh.slice(self.fresh.start - size, self.fresh.start)

    def _open_console(self, client: Client, login: Login) -> None:
        packet = login.route.startup
        admin = packet.user in self.console.admin_users
        if not admin and packet.user not in self.console.stats_users:
            raise errors.CONSOLE_ACCESS(user=packet.user)
        client.login = None
        client.state = CLIENT_CONSOLE
        self.front.clients.logins.pop(client, None)
        client.key = self.random(_KEY_3_2 if login.route.has_long_keys else _KEY_3_0)
        self.front.clients.reply(client, login.proof + messages.backend_key_data(client.id, client.key))
        self.front.channel.send(ConsoleOpened(client.id, packet.user, admin))


_READY = messages.ready_for_query(messages.IDLE)
