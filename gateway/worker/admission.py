"""Admission: from a client's first byte to its first ReadyForQuery.

1. Nothing is held for a client that does not speak but its descriptor, and that only for client_login_timeout.
2. Whether a database exists, or a limit is reached, is told only to those who have proven who they are.
3. A client's own parameters are tried on a server before it is admitted, once for each combination of values; the
   server's canonical values are then what the client is told.

Called by the front with what clients in state CLIENT_LOGIN send. See "Start-up" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING

from gateway import errors
from gateway.control import Configure, ConsoleOpened
from gateway.errors import GatewayError
from gateway.settings import CONSOLE_DATABASES
from gateway.wire import messages, startup
from gateway.wire.login import ClientLogin, Method
from gateway.wire.parameters import Parameters, canonical
from gateway.wire.scram import Cache
from gateway.wire.startup import CancelRequest, SSLRequest, StartupMessage
from gateway.wire.userlist import Secret
from gateway.worker.endpoint import CLIENT_CONSOLE, CLIENT_IDLE, CLIENT_LOGIN, Client
from gateway.worker.pool import Pool
from gateway.worker.sock import Buffer

if TYPE_CHECKING:
    from gateway.worker.front import Front

_MOST_ENTRIES = 1000  # remembered combinations of startup parameters per pool
_LONGEST_ANSWER = 65536 + 16  # of a client that is asked for a password
_KEY_3_0, _KEY_3_2 = 4, 32


class Login:
    """What is known of a client until it is admitted."""

    __slots__ = ("exchange", "gss_asked", "pool", "proof", "ssl_asked", "startup")

    def __init__(self) -> None:
        self.ssl_asked = self.gss_asked = False
        self.startup: StartupMessage | None = None
        self.exchange: ClientLogin | None = None
        self.pool: Pool | None = None
        self.proof = b""  # what ends the exchange, due before anything else that is told


class Admission:
    """Lets clients in."""

    def __init__(self, front: Front, configure: Configure) -> None:
        self.front = front
        self.cache: Cache = {}  # derived SCRAM keys
        self.configure(configure)

    def configure(self, configure: Configure) -> None:
        """Take the settings."""
        self.settings = configure.settings.front
        self.console = configure.settings.console
        self.method = Method(configure.settings.front.auth.type.value)
        self.secret = configure.secret
        users = configure.users
        self.users = None if users is None else {user: Secret.of(text) for user, text in users.items()}
        self.ignored = frozenset(self.settings.ignore_startup_parameters)

    def receive(self, client: Client, buf: Buffer) -> int:
        """Handle what a client in login has sent; return where what is not understood yet begins."""
        try:
            while client.state == CLIENT_LOGIN and client.fd >= 0 and buf.start < buf.end:
                start = buf.start
                login: Login = client.login
                if login.startup is None:
                    self._packet(client, login, buf)
                elif login.exchange is not None and not login.exchange.done:
                    self._answer(client, login, login.exchange, buf)
                if buf.start == start:
                    break
        except (errors.CANCEL_LENGTH, errors.CANCEL_KEY_LENGTH):
            self.front.dismiss(client, None)  # nobody waits for an answer to a cancel request
        except GatewayError as error:
            self.front.dismiss(client, error)
        return buf.start

    def _packet(self, client: Client, login: Login, buf: Buffer) -> None:
        available = buf.end - buf.start
        if buf.byte(buf.start) == startup.TLS_HANDSHAKE:
            self.front.dismiss(client, None)  # as PostgreSQL without TLS does
            return
        if available < startup.HEADER_SIZE:
            return
        length = startup.packet_length(
            buf.slice(buf.start, buf.start + startup.HEADER_SIZE), self.settings.max_startup_packet
        )
        if available < length:
            return
        packet = startup.parse(
            buf.slice(buf.start, buf.start + length), ssl_asked=login.ssl_asked, gss_asked=login.gss_asked
        )
        buf.start += length
        if isinstance(packet, StartupMessage):
            login.startup = packet
            self._begin(client, login, packet)
        elif isinstance(packet, CancelRequest):
            self.front.canceler.requested(client, packet)
        else:
            asked_ssl = isinstance(packet, SSLRequest)
            login.ssl_asked |= asked_ssl
            login.gss_asked |= not asked_ssl
            self.front.reply(client, b"N")
            if buf.start < buf.end:
                raise errors.DATA_BEFORE_TLS if asked_ssl else errors.DATA_BEFORE_GSS

    def _begin(self, client: Client, login: Login, packet: StartupMessage) -> None:
        if self.front.draining:
            raise errors.SHUTTING_DOWN
        if packet.negotiation:
            self.front.reply(client, packet.negotiation)
        user = packet.user
        if self.method is Method.TRUST:
            login.proof = messages.AuthenticationOk
            if self.users is not None and user not in self.users:
                raise errors.NO_SUCH_ROLE(user=user)
            self._authenticated(client, login, packet)
            return
        secret = self.users.get(user) if self.users is not None else None
        login.exchange = ClientLogin(
            self.method,
            user,
            secret,
            mock_key=self.secret,
            nonce=secrets.token_bytes(18),
            salt=secrets.token_bytes(4),
            cache=self.cache,
            iterations=self.settings.auth.scram_iterations,
        )
        self.front.reply(client, login.exchange.start())

    def _answer(self, client: Client, login: Login, exchange: ClientLogin, buf: Buffer) -> None:
        if buf.end - buf.start < 5:
            return
        length = buf.int32(buf.start + 1)
        if not 4 <= length <= _LONGEST_ANSWER:
            raise errors.PASSWORD_LENGTH
        if buf.end - buf.start < length + 1:
            return
        body = buf.slice(buf.start + 5, buf.start + 1 + length)
        kind = buf.byte(buf.start)
        buf.start += length + 1
        reply = exchange.receive(kind, body)
        if exchange.done:
            assert login.startup is not None
            login.proof = reply + messages.AuthenticationOk
            self._authenticated(client, login, login.startup)
        elif reply:
            self.front.reply(client, reply)

    def _authenticated(self, client: Client, login: Login, packet: StartupMessage) -> None:
        """The client is who it says: find out whether it may have what it wants."""
        if packet.fault is not None:
            raise packet.fault
        if packet.database in CONSOLE_DATABASES:
            self._open_console(client, login, packet)
            return
        pool = self.front.pools.get(packet.database, packet.user)
        if pool is None:
            raise errors.NO_SUCH_DATABASE(database=packet.database)
        if not self.front.count_in(client, pool):
            return
        login.pool = pool
        if login.exchange is not None:
            self.front.servers.learn(pool, packet.user, login.exchange)
        if packet.replication:
            client.replication = True
            self.front.servers.connect(pool, client)
        elif pool.welcome is None:
            if pool.failure is not None and not pool.servers and self.front.reactor.now < pool.retry_at:
                self.front.servers.refuse(client, pool.failure)
                return
            pool.newcomers[client] = None
            client.waiting_since = self.front.reactor.now
            self.front.grow(pool)
        else:
            self.enter(client)

    def again(self, client: Client) -> None:
        """Go on with a client that was parked."""
        login: Login = client.login
        assert login.startup is not None
        try:
            self._authenticated(client, login, login.startup)
        except GatewayError as error:
            self.front.dismiss(client, error)

    def enter(self, client: Client) -> None:
        """Give a client its parameters and let it in; where a server has to be asked first, let it wait for one."""
        login: Login = client.login
        pool, packet = login.pool, login.startup
        assert pool is not None
        assert packet is not None
        assert pool.welcome is not None
        client.waiting_since = 0
        wanted = packet.parameters
        if not wanted:
            self.admit(client, pool.welcome)
            return
        key = frozenset(wanted.items())
        known = pool.entries.get(key)
        if known is not None:
            self.admit(client, known)
            return
        values = dict(pool.welcome.values)
        asked = False
        for name, value in wanted.items():
            if name in self.ignored:
                continue
            name = canonical(name)
            if name != "application_name" and values.get(name) != value:
                asked = True
            values[name] = value
        parameters = Parameters.of(values)
        if not asked:
            self.remember(pool, packet, parameters)
            self.admit(client, parameters)
            return
        client.pool = pool
        client.parameters = parameters
        server = self.front.link.acquire(client)
        if server is not None:  # nothing was to be asked after all
            self.front.link.part(client, server)
            self.admit(client, parameters)

    def remember(self, pool: Pool, packet: StartupMessage, parameters: Parameters) -> None:
        """Remember what a combination of startup parameters comes to."""
        if len(pool.entries) >= _MOST_ENTRIES:
            pool.entries.clear()
        pool.entries[frozenset(packet.parameters.items())] = parameters

    def admit(self, client: Client, parameters: Parameters) -> None:
        """Let a client in: it is told its parameters and its cancel key, and may send queries."""
        login: Login = client.login
        pool, packet = login.pool, login.startup
        assert pool is not None
        assert packet is not None
        client.login = None
        client.pool = pool
        client.parameters = parameters
        if client.server is None:
            client.state = CLIENT_IDLE
        client.idle_since = self.front.reactor.now
        if client.inbox is not None:
            self.front.reactor.soon.append(client)  # it has sent its first query already
        pool.logins += 1
        self.front.admitted(client, packet)
        self.front.reply(
            client,
            login.proof
            + parameters.welcome(pool.reported)
            + messages.backend_key_data(client.id, self.cancel_key(client, packet.protocol))
            + _READY,
        )

    def cancel_key(self, client: Client, protocol: int = messages.PROTOCOL_3_2) -> bytes:
        """Return a client's secret key, derived so that none has to be kept: 32 bytes, with protocol 3.0 four."""
        size = _KEY_3_2 if protocol == messages.PROTOCOL_3_2 else _KEY_3_0
        return blake2b(b"%d %d" % (client.id, client.connected_at), key=self.secret, digest_size=32).digest()[:size]

    def _open_console(self, client: Client, login: Login, packet: StartupMessage) -> None:
        admin = packet.user in self.console.admin_users
        if not admin and packet.user not in self.console.stats_users:
            raise errors.CONSOLE_ACCESS(user=packet.user)
        client.login = None
        client.state = CLIENT_CONSOLE
        key = messages.backend_key_data(client.id, self.cancel_key(client, packet.protocol))
        self.front.admitted(client, packet)
        self.front.reply(client, login.proof + key)
        self.front.channel.send(ConsoleOpened(client.id, packet.user, admin))


_READY = messages.ready_for_query(messages.IDLE)
