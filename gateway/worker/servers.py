"""The life of a server connection between connect and close, but for the time in which it serves a client.

1. A server is open to clients only when it is known to be clean: logged in, tested, rolled back, reset.
2. Each state other than idle and active has a deadline, and at its end the connection is closed.
3. A server that is closed counts against the limits until PostgreSQL has closed its end too, so that the sum of
   sessions never passes a limit, not even for a moment.

Called by the front and the link. See "Start-up" and "Termination" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

from gateway import errors
from gateway.control import Configure, Met
from gateway.errors import GatewayError
from gateway.tcp import keep_alive
from gateway.wire import messages
from gateway.wire.login import ClientLogin, ServerLogin, ServerRefused
from gateway.wire.owed import (
    COPY_IN,
    OWES_QUERY,
    OWES_SYNC,
)
from gateway.wire.parameters import Parameters
from gateway.wire.userlist import Secret
from gateway.worker.endpoint import (
    CLIENT_ACTIVE,
    SERVER_ACTIVE,
    SERVER_CANCELED,
    SERVER_CLEANUP,
    SERVER_CLOSING,
    SERVER_GONE,
    SERVER_IDLE,
    SERVER_LOGIN,
    SERVER_TESTED,
    SERVER_WARM,
    Client,
    Server,
)
from gateway.worker.failing import with_severity
from gateway.worker.pool import POOL_SESSION, SECOND, Pool
from gateway.worker.sock import READ, WRITE, Buffer, finish

if TYPE_CHECKING:
    from gateway.worker.front import Front

log = logging.getLogger("gateway.worker")

_PATIENT = ("57P03", "53300", "53200", "57P01", "57P02")
"""Refusals that time heals: clients go on waiting. Any other refusal of a login is told to them at once."""

_LONGEST_LOGIN = 1 << 20  # of a message during login
_TELL_EVERY = SECOND // 20  # of a node: one that ends may end all its sessions at once
_WARM_RETRY = 3.0  # seconds between two attempts to be ready on a standby that refuses
_CLOSING_TIME = 5.0  # seconds for PostgreSQL to end a session that was closed


class Servers:
    """Connects, tests, resets and closes servers."""

    def __init__(self, front: Front, configure: Configure) -> None:
        self.front = front
        self.last_id = 0
        self.told_of: dict[tuple[str, str], int] = {}  # when the supervisor was last told of a node
        self.users: dict[str, Secret] = {}
        self.configure(configure)

    def configure(self, configure: Configure) -> None:
        """Take the settings."""
        self.settings = configure.settings.front
        before = self.users
        self.users = {user: Secret.of(text) for user, text in (configure.users or {}).items()}
        for pool in self.front.pools.all:
            user = pool.settings.server_user
            if before.get(user) != self.users.get(user):
                pool.credentials = None

    # From connect to the first ReadyForQuery.

    def open(self, address: tuple[str, int]) -> int:
        """Begin to connect to an address; return the descriptor, or -errno."""
        host, port = address
        try:
            if host.startswith("/"):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                target: object = f"{host}/.s.PGSQL.{port}"
            else:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock, self.settings)
                target = (host, port)
            code = sock.connect_ex(target)  # type: ignore[arg-type]
        except OSError as error:
            return -(error.errno or errno.EIO)
        if code not in (0, errno.EINPROGRESS, errno.EAGAIN):
            sock.close()
            return -code
        return sock.detach()

    def connect(self, pool: Pool, client: Client | None = None) -> None:
        """Launch a connection for a pool, or for one client's replication."""
        address = pool.address
        if address is None:
            return
        fd = self.open(address)
        if fd < 0:
            self._failed(pool, os.strerror(-fd), "refused")
            return
        server = self._begin(pool, fd, pool.node, address, client)
        pool.add(server)
        self.front.reactor.add(server, READ | WRITE)

    def _begin(
        self, pool: Pool, fd: int, node: str | None, address: tuple[str, int], client: Client | None = None
    ) -> Server:
        now = self.front.reactor.now
        self.last_id += 1
        server = Server(fd, self.last_id, pool, now)
        server.node, server.address = node, address
        server.deadline = now + int(pool.settings.server_connect_timeout * SECOND or 15 * SECOND)
        settings = pool.settings
        parameters = {"user": settings.server_user, "database": settings.dbname, **dict(settings.startup)}
        if client is not None:
            packet = client.login.route.startup
            parameters |= packet.parameters | {"replication": packet.replication.value}
            server.client = client
            client.server = server
        server.login = self._login(pool, stays_here(address[0]))
        server.out = Buffer(512)
        server.out.extend(messages.startup_message(parameters))
        return server

    def _login(self, pool: Pool, encrypted: bool) -> ServerLogin:
        settings = pool.settings
        password, client_key, server_key = settings.password, None, None
        secret = self.users.get(settings.server_user)
        if password is None and pool.credentials is not None:
            password, client_key, server_key = pool.credentials
        elif password is None and secret is not None:
            password = secret.password
        return ServerLogin(
            settings.server_user,
            password,
            client_key,
            server_key,
            nonce=secrets.token_bytes(18),
            cache=self.front.admission.cache,
            encrypted=encrypted,
        )

    def learn(self, pool: Pool, user: str, exchange: ClientLogin) -> None:
        """Keep what a client's login has shown, for logging in to the server as the same user."""
        if user != pool.settings.server_user or pool.settings.password is not None:
            return
        secret = self.users.get(user)
        if exchange.password is not None:
            pool.credentials = (exchange.password, None, None)
        elif exchange.client_key is not None and secret is not None and secret.stored is not None:
            pool.credentials = (None, exchange.client_key, secret.stored.server_key)

    def receive(self, server: Server, buf: Buffer) -> int:
        """Handle what a server without a running client has sent; return where the rest begins."""
        while buf.start < buf.end and server.fd >= 0:
            if server.passing:
                size = min(server.passing, buf.end - buf.start)
                server.passing -= size
                buf.start += size
                continue
            if buf.end - buf.start < 5:
                break
            kind = buf.byte(buf.start)
            length = buf.int32(buf.start + 1)
            if length < 4 or (length > _LONGEST_LOGIN and server.state in (SERVER_LOGIN, SERVER_IDLE, SERVER_WARM)):
                self.lost(server, "it does not speak the PostgreSQL protocol")
                break
            if buf.end - buf.start < length + 1:
                if length > _LONGEST_LOGIN:
                    server.cycle.answer(kind)
                    server.passing = length + 1
                    continue
                break
            body = buf.slice(buf.start + 5, buf.start + length + 1)
            buf.start += length + 1
            if server.state == SERVER_LOGIN:
                self._logging_in(server, kind, body)
            else:
                self._between(server, kind, body)
            if server.client is not None and server.state == SERVER_ACTIVE:
                self.front.link.from_server(server, buf)
                return buf.end
        return buf.start

    def _logging_in(self, server: Server, kind: int, body: bytes) -> None:
        login, pool = server.login, server.pool
        try:
            answer = login.receive(kind, body)
        except ServerRefused as refusal:
            self._refused(server, refusal.fields, refusal.raw)
            return
        except GatewayError as error:
            self._refused(server, {"sqlstate": error.sqlstate, "message": error.message}, error.encode())
            return
        if answer:
            self._send(server, answer)
        if not login.done:
            return
        now = self.front.reactor.now
        server.pid, server.key = login.pid, login.key
        server.parameters = Parameters.of(login.parameters)
        server.login = None
        server.deadline = 0
        if server.warm:
            server.state, server.state_since = SERVER_WARM, now
            return
        if server.client is not None:
            pool.move(server, SERVER_ACTIVE, now)
            self._begin_replication(server, server.client)
            return
        self._open(server)

    def _open(self, server: Server) -> None:
        """A server is there: it says what clients are told of its pool, and is theirs once it is set up."""
        pool = server.pool
        pool.failure = None
        pool.retry_at = 0
        if pool.welcome is not server.parameters:
            pool.welcome = server.parameters
            pool.entries.clear()
        pool.reported = frozenset(server.parameters.values)
        if pool.settings.connect_query:
            self._test(server, pool.settings.connect_query)
        else:
            self._open_to_clients(server)

    def _begin_replication(self, server: Server, client: Client) -> None:
        pool = server.pool
        pool.reported = pool.reported or frozenset(server.parameters.values)
        client.state = CLIENT_ACTIVE
        route = client.login.route
        self.front.admission.settle(route, server.parameters)
        self.front.admission.admit(client, server.parameters, route.welcome)

    def _open_to_clients(self, server: Server) -> None:
        pool = server.pool
        server.deadline = 0
        for client in list(pool.newcomers):
            pool.newcomers.pop(client, None)
            self.front.admission.enter(client)
        self.front.link.hand_on(server, pool)
        self.front.grow(pool)

    def _refused(self, server: Server, fields: dict[str, str], raw: bytes) -> None:
        """The server does not let us in: the clients that wait learn why, unless it is a matter of time."""
        pool, client = server.pool, server.client
        sqlstate, message = fields.get("sqlstate", ""), fields.get("message", "")
        if server.warm:
            self._cool(server, message)
            return
        raw = with_severity(raw, b"FATAL")
        if client is None:
            self._failed(pool, message, sqlstate)  # first, so that its end launches no other one
        self._drop(server)
        if client is not None:
            client.server = None
            self.front.clients.dismiss(client, raw)
            return
        if sqlstate in _PATIENT:
            return
        pool.failure = raw
        for newcomer in list(pool.newcomers):
            self.front.clients.dismiss(newcomer, raw)
        if not any(other.state != SERVER_LOGIN for other in pool.servers):
            for waiting in list(pool.waiting):
                self.front.failing.waiting(waiting, raw)

    def _failed(self, pool: Pool, reason: str, what: str) -> None:
        retry = pool.settings.server_login_retry
        pool.retry_at = self.front.reactor.now + int(retry * SECOND)
        log.warning(
            "pool %s/%s: cannot connect to %s: %s; next try in %.1f s (server_login_retry)",
            pool.database,
            pool.settings.server_user,
            pool.address,
            reason,
            retry,
        )
        self._met(pool, pool.node, what)

    def met(self, server: Server, what: str = "") -> None:
        """Have the node of a server probed, because of what was met there: by default the server's end."""
        if not what:
            words = server.last_words
            what = messages.error_fields(words[5:])["sqlstate"] if words is not None else "reset"
        self._met(server.pool, server.node, what)

    def _met(self, pool: Pool, node: str | None, what: str) -> None:
        now, cluster = self.front.reactor.now, pool.settings.cluster
        if node is not None and now - self.told_of.get((cluster, node), -_TELL_EVERY) >= _TELL_EVERY:
            self.told_of[cluster, node] = now
            self.front.channel.send(Met(cluster, node, what))

    # On standbys.

    def warm_up(self, pool: Pool, node: str) -> None:
        """Launch a connection to a standby, which waits there for its promotion."""
        address = pool.standbys[node]
        fd = self.open(address)
        if fd < 0:
            pool.warm_retry_at = self.front.reactor.now + int(_WARM_RETRY * SECOND)
            return
        server = self._begin(pool, fd, node, address)
        server.warm = True
        pool.warm.append(server)
        self.front.reactor.add(server, READ | WRITE)

    def adopt(self, server: Server) -> None:
        """The node of a warm server is the primary now: its session has lived through that, and is for clients."""
        pool = server.pool
        pool.warm.remove(server)
        server.warm = False
        pool.add(server)
        if server.state == SERVER_WARM:
            if "in_hot_standby" in server.parameters.values:  # it is told with the next answer only
                server.parameters = server.parameters.having("in_hot_standby", "off")
            self._open(server)

    def _cool(self, server: Server, why: str) -> None:
        """A connection to a standby has failed: nobody waits for it, and it is tried again in a while."""
        pool = server.pool
        pool.warm_retry_at = self.front.reactor.now + int(_WARM_RETRY * SECOND)
        log.debug("pool %s/%s: standby %s: %s", pool.database, pool.settings.server_user, server.node, why)
        self._drop(server)

    # Between two clients.

    def check(self, server: Server) -> None:
        """Test a server that has idled longer than server_check_delay before it is handed out."""
        self._test(server, server.pool.settings.server_check_query)

    def _test(self, server: Server, query: str) -> None:
        now = self.front.reactor.now
        server.pool.move(server, SERVER_TESTED, now)
        server.deadline = now + int(server.pool.settings.server_connect_timeout * SECOND or 15 * SECOND)
        server.cycle.request(OWES_QUERY)
        self._send(server, messages.query(query))

    def _reset(self, server: Server) -> bool:
        """Send server_reset_query; return False when none is set."""
        query = server.pool.settings.server_reset_query
        if not query:
            return False
        self._test(server, query)
        server.statements.clear()
        server.latest = None
        server.unnamed_serial = 0
        return True

    def leave(self, server: Server, client: Client, patient: bool) -> None:
        """Take back a server whose client has gone, in whatever state; *patient* lets a query end by itself first."""
        server.client = None
        client.server = None
        server.adapting = None
        server.unnamed_serial = -1  # whose unnamed statement it has may have been decided by what was skipped
        pool, now = server.pool, self.front.reactor.now
        if server.interest & READ == 0:
            self.front.reactor.want(server, server.interest | READ)
        if client.passing and not client.discarding:
            self.close(server, "client disconnected in the middle of a message", cut=True)
        elif client.replication or server.state == SERVER_LOGIN:
            if server.cycle.owed():
                self.front.canceler.send(server)
            self.close(server, "client disconnected")
        elif server.broken or server.foreign is not None or server.last_words is not None:
            self.close(server, "connection unusable")
        elif server.cycle.is_free():
            self._clean(server)
        else:
            pool.move(server, SERVER_CLEANUP, now)
            limit = pool.settings.server_cleanup_timeout
            server.deadline = now + int(limit * SECOND)
            if server.cycle.owed() and not patient and server.cycle.copy != COPY_IN:
                self.front.canceler.send(server)
            self._clean_up(server)

    def _clean_up(self, server: Server) -> None:
        """Do the next step towards a server that is out of COPY, out of the pipeline and out of the transaction."""
        cycle = server.cycle
        if cycle.copy == COPY_IN:
            cycle.copy = 0
            self._send(server, messages.message(messages.COPY_FAIL, b"client disconnected\0"))
            if cycle.group_open:
                self._send_request(server, messages.Sync, OWES_SYNC)
        elif cycle.group_open or cycle.ignoring:
            self._send_request(server, messages.Sync, OWES_SYNC)
        elif cycle.owed():
            return
        elif cycle.status != messages.IDLE:
            self._send_request(server, messages.query("ROLLBACK"), OWES_QUERY)
        else:
            server.deadline = 0
            self._clean(server)

    def _clean(self, server: Server) -> None:
        """A server is out of its transaction: reset it where the mode asks for it, then hand it on."""
        pool = server.pool
        always = pool.settings.server_reset_query_always
        if server.state != SERVER_TESTED and (pool.mode == POOL_SESSION or always) and self._reset(server):
            return
        self.front.link.hand_on(server, pool)

    def _between(self, server: Server, kind: int, body: bytes) -> None:
        if kind == messages.PARAMETER_STATUS:
            self.front.parameter_status(server, body, True)
            if server.cycle.desynced and server.state == SERVER_IDLE:
                self.close(server, "malformed ParameterStatus")
        elif kind == messages.READY_FOR_QUERY and len(body) != 1:
            self.lost(server, "malformed ReadyForQuery")
        elif kind in (messages.NOTICE_RESPONSE, messages.NOTIFICATION_RESPONSE):
            return
        elif kind == messages.ERROR_RESPONSE:
            fields = messages.error_fields(body)
            server.cycle.answer(kind)
            if server.state == SERVER_TESTED or fields.get("severity_nonlocalized") in ("FATAL", "PANIC"):
                log.info("server %d (%s): %s", server.pid, server.address, fields.get("message"))
            if fields.get("severity_nonlocalized") in ("FATAL", "PANIC"):
                self.met(server, fields["sqlstate"])
            if server.state == SERVER_CLEANUP and not server.cycle.owed():
                self._clean_up(server)  # it skips all up to a Sync, which is ours to send now
        elif server.state in (SERVER_TESTED, SERVER_CLEANUP):
            server.cycle.answer(kind)
            if kind == messages.READY_FOR_QUERY:
                server.cycle.status = body[0]
            if server.cycle.owed():
                return
            if server.state == SERVER_CLEANUP:
                self._clean_up(server)
            elif server.cycle.is_free():
                self._open_to_clients(server)
            else:
                self.close(server, "it is not idle after connect_query, server_check_query or server_reset_query")
        elif server.state in (SERVER_IDLE, SERVER_CANCELED, SERVER_WARM):
            self.close(server, f"message type {kind} without a request")

    def _send_request(self, server: Server, message: bytes, owed: int) -> None:
        server.cycle.request(owed)
        self._send(server, message)

    def _send(self, server: Server, data: bytes) -> None:
        link = self.front.link
        link.assembly.extend(data)
        link.to_server(server, link.assembly, 0, 0)

    # The end.

    def set_aside(self, server: Server) -> None:
        """A server is free but not for clients: wait for the cancel request that is on its way, or close it."""
        if server.retiring or server.cycle.desynced or server.broken:
            self.close(server, "retired" if server.retiring else "out of step with its requests")
        else:
            server.pool.move(server, SERVER_CANCELED, self.front.reactor.now)

    def close(self, server: Server, why: str, cut: bool = False) -> None:
        """End a server's session, and wait for PostgreSQL to have ended it.

        One that has got half of a message (*cut*) would take Terminate for more of it, so the stream ends instead.
        """
        if server.state in (SERVER_CLOSING, SERVER_GONE) or server.fd < 0:
            return
        log.debug("server %d (%s): closed: %s", server.pid, server.address, why)
        if server.state == SERVER_LOGIN or server.broken or server.out is not None:
            self._drop(server)
            return
        if server.warm:
            self._send(server, messages.Terminate)
            self._drop(server)  # no limit waits for its end
            return
        now = self.front.reactor.now
        if cut:
            finish(server.fd)
        else:
            self._send(server, messages.Terminate)
        server.pool.move(server, SERVER_CLOSING, now)
        server.deadline = now + int(_CLOSING_TIME * SECOND)

    def _drop(self, server: Server) -> None:
        """Forget a server whose session has ended."""
        if server.state == SERVER_GONE:
            return
        self.front.reactor.remove(server)
        server.out = None
        if server.warm:
            server.pool.warm.remove(server)
            server.state = SERVER_GONE
            return
        server.pool.remove(server, SERVER_GONE, self.front.reactor.now)
        self.front.freed()

    def cut(self, server: Server, why: str) -> None:
        """End a server's session without a word, for nobody may answer: its node is stopped or another's standby."""
        client = server.client
        log.debug("server %d (%s): cut: %s", server.pid, server.address, why)
        server.broken = True
        if client is not None and server.login is None:
            self.front.failing.lost(client, why)
        elif client is not None:
            client.server = server.client = None
            self.front.clients.dismiss(client, errors.SERVER_CONNECT(reason=why, fatal=True))
        self._drop(server)

    def give_up(self, server: Server) -> None:
        """A server's deadline has passed."""
        state = server.state
        if server.warm:
            self._cool(server, "no answer in time (server_connect_timeout)")
        elif state == SERVER_LOGIN:
            client = server.client
            self._failed(server.pool, "no answer in time (server_connect_timeout)", "silent")
            self._drop(server)
            if client is not None:
                client.server = None
                self.front.clients.dismiss(client, errors.SERVER_CONNECT(reason="no answer in time", fatal=True))
        elif state == SERVER_CLEANUP:
            self.front.canceler.send(server)
            self.close(server, "not clean within server_cleanup_timeout")
        elif state == SERVER_TESTED:
            self.close(server, "no answer to our own query in time")
        else:
            self._drop(server)

    def lost(self, server: Server, why: str) -> None:
        """A server without a running client has closed its connection, or it broke."""
        state, pool, client = server.state, server.pool, server.client
        if state == SERVER_GONE:
            return
        if server.warm:
            self.met(server)
            self._cool(server, why)
            return
        if state == SERVER_LOGIN:
            self._failed(pool, why, "reset")
        elif state != SERVER_CLOSING:
            self.met(server)
        self._drop(server)
        if state == SERVER_LOGIN and client is not None:
            client.server = None
            self.front.clients.dismiss(client, errors.SERVER_CONNECT(reason=why, fatal=True))


def stays_here(host: str) -> bool:
    """Is it a unix socket or a loopback address, so that a password in clear text does not leave this machine?"""
    return host.startswith(("/", "127.")) or host == "::1"
