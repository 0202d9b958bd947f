"""The life of a client connection at its two ends: accepted and counted, told its last message and forgotten.

1. A client is in `by_id` from accept until its descriptor is closed; nobody else adds or removes one.
2. Whoever has something to tell a client calls reply: it goes behind what is on its way already, and never waits.
3. A connection that has not spoken costs a descriptor; when those run out, the oldest of them makes room.

Called by the front, admission, cancel and servers. Compiled with C types, because each login passes through it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gateway import errors
from gateway.control import WORKER_SHIFT, Configure, ConsoleClosed
from gateway.errors import GatewayError
from gateway.worker.admission import Login, Route
from gateway.worker.endpoint import (
    CLIENT_CONSOLE,
    CLIENT_GONE,
    CLIENT_LEAVING,
    CLIENT_WAITING,
    Client,
    Endpoint,
)
from gateway.worker.pool import SECOND, Share
from gateway.worker.sock import AGAIN, READ, WRITE, Buffer, accept, send_bytes

if TYPE_CHECKING:
    from gateway.worker.front import Front
    from gateway.worker.reactor import Reactor

log = logging.getLogger("gateway.worker")

_STORM = 4  # turns in a row with new connections, from which on they are taken many at once
_ACCEPTS = 64  # connections taken at once from a listener before others are served
_NUMBERS = (1 << WORKER_SHIFT) - 1
_SPARE_LOGINS = 1000  # connections in login beyond what the worker can hold; the oldest makes room
_PARKING_TIME = 2 * SECOND  # for the supervisor to find a share of max_client_conn


class Clients:
    """All clients of a worker."""

    def __init__(self, front: Front, reactor: Reactor, configure: Configure) -> None:
        self.front = front
        self.reactor = reactor
        self.base = (configure.index + 1) << WORKER_SHIFT
        self.by_id: dict[int, Client] = {}
        self.logins: dict[Client, None] = {}  # those in login, the oldest first
        self.parked: dict[Client, int] = {}  # those in login that wait for a larger share of a limit, since when
        self.last_number = 0
        self.accepted_in = 0  # the reactor's turn
        self.storm = 0  # turns in a row
        self.deaf: list[Endpoint] = []  # listeners that wait for a descriptor
        self.configure(configure)

    def configure(self, configure: Configure) -> None:
        """Take the settings."""
        self.settings = configure.settings.front
        self.hard_limit = configure.hard_client_limit
        self.log_connections = self.settings.log_connections
        self.log_disconnections = self.settings.log_disconnections

    def accept(self, listener: Endpoint) -> int:
        """Take a connection that has come in, or many when they come without a pause; most have spoken by now.

        To ask for one where there is none costs as much as half a login: so one is taken, and the listener asked again.
        """
        reactor = self.reactor
        self.storm = self.storm + 1 if reactor.turns == self.accepted_in + 1 else 0
        self.accepted_in = reactor.turns
        for _ in range(_ACCEPTS if self.storm >= _STORM else 1):
            fd = accept(listener.fd)
            if fd < 0:
                if fd != AGAIN:
                    self._no_descriptor(listener, fd)
                return 0
            client = Client(fd, self.number(), reactor.now)
            client.login = Login()
            self.by_id[client.id] = client
            self.logins[client] = None
            reactor.add(client, READ)
            if len(self.logins) > _SPARE_LOGINS and len(self.by_id) > self.hard_limit:
                self.forget(next(iter(self.logins)))
            reactor.link.client_readable(client)
        return 0

    def number(self) -> int:
        """Return the process id of the next client."""
        while True:
            self.last_number = self.last_number % _NUMBERS + 1
            if self.base | self.last_number not in self.by_id:
                return self.base | self.last_number

    def _no_descriptor(self, listener: Endpoint, code: int) -> None:
        log.error("cannot accept a client: %s; raise the limit on open files (ulimit -n)", os.strerror(-code))
        if self.logins:
            self.forget(next(iter(self.logins)))
        self.reactor.want(listener, 0)
        self.deaf.append(listener)

    def count_in(self, client: Client, route: Route) -> bool:
        """Count a client against the limits on clients; raise 53300 when one of them is reached.

        Return False when other workers may have room to give: the client is parked until the supervisor has answered.
        """
        for share in route.shares:
            if share.used >= share.limit:
                if self.front.pools.workers > 1 and client not in self.parked:
                    self.parked[client] = self.reactor.now
                    self.front.demand_now()
                    return False
                self.parked.pop(client, None)
                assert share.error is not None
                raise share.error
        if self.parked:
            self.parked.pop(client, None)
        for share in route.shares:
            share.used += 1
        route.pool.clients += 1
        client.shares = route.shares
        client.pool = route.pool
        return True

    def parked_for(self) -> dict[Share, int]:
        """Return how many clients are parked for a larger part of which share."""
        wishes: dict[Share, int] = {}
        for client in self.parked:
            for share in client.login.route.shares:
                if share.used >= share.limit:
                    wishes[share] = wishes.get(share, 0) + 1
        return wishes

    def unpark(self, since: int) -> None:
        """Try again to let in the clients that were parked before *since*; who finds no room now is refused."""
        for client in [client for client, parked in self.parked.items() if parked <= since]:
            self.front.admission.again(client)

    def reply(self, client: Client, data: bytes) -> int:
        """Send bytes of our own to a client, behind what is on its way already."""
        if client.fd < 0 or not data:
            return 0
        sent = send_bytes(client.fd, data) if client.out is None else 0
        if sent == len(data):
            return 0
        if sent < 0 and sent != AGAIN:
            self.forget(client)
            return 0
        rest = data[max(sent, 0) :]
        if client.out is None:
            client.out = Buffer(len(rest))
            self.reactor.want(client, client.interest | WRITE)
        client.out.extend(rest)
        return 0

    def dismiss(self, client: Client, last: GatewayError | bytes | None) -> int:
        """End a client's connection, behind a last message where there is one."""
        if client.state in (CLIENT_GONE, CLIENT_LEAVING):
            return 0
        if isinstance(last, GatewayError):
            if self.settings.log_pooler_errors:
                log.info("client %d: %s", client.id, last.message)
            last = last.encode()
        if last is not None:
            self.reply(client, (client.login.proof if client.login is not None else b"") + last)
        if client.fd < 0:
            return 0
        if client.out is not None:
            self.leave(client, False)
            self.reactor.want(client, WRITE)
            return 0
        self.forget(client)
        return 0

    def gone(self, client: Client, code: int) -> int:
        """A client has closed its connection, or it broke (code is 0 or -errno)."""
        if self.log_disconnections:
            log.info("client %d: gone: %s", client.id, os.strerror(-code) if code else "closed")
        self.forget(client)
        return 0

    def left(self, client: Client, patient: bool) -> int:
        """A client has said that it ends; what it sent together with that (*patient*) may end by itself."""
        if self.log_disconnections:
            log.info("client %d: left", client.id)
        self.leave(client, patient)
        self.forget(client)
        return 0

    def forget(self, client: Client) -> int:
        """Remove a client, now."""
        if client.state == CLIENT_GONE:
            return 0
        self.leave(client, False)
        client.state = CLIENT_GONE
        del self.by_id[client.id]
        self.reactor.remove(client)
        client.inbox = client.out = None
        return 0

    def leave(self, client: Client, patient: bool) -> int:
        """Take a client out of all that it is part of but its connection; *patient* lets its query end by itself."""
        state, server, pool = client.state, client.server, client.pool
        if state in (CLIENT_LEAVING, CLIENT_GONE):
            return 0
        client.state = CLIENT_LEAVING
        if client.login is not None:
            self.logins.pop(client, None)
            self.parked.pop(client, None)
        elif state == CLIENT_CONSOLE:
            self.front.channel.send(ConsoleClosed(client.id))
        if client.shares is not None:
            for share in client.shares:
                share.used -= 1
            client.shares = None
            pool.clients -= 1
            if pool.newcomers:
                pool.newcomers.pop(client, None)
            if state == CLIENT_WAITING and server is None:
                pool.leave(client)
        if server is not None:
            self.front.servers.leave(server, client, patient)
        return 0

    def sweep(self, now: int) -> None:
        """End the logins and the idle clients that have taken too long; listen again."""
        while self.deaf:
            self.reactor.want(self.deaf.pop(), READ)
        limit = int(self.settings.client_login_timeout * SECOND)
        while limit and self.logins:
            oldest = next(iter(self.logins))
            if now - oldest.connected_at < limit:
                break
            self.logins.pop(oldest)
            self.dismiss(oldest, errors.CLIENT_LOGIN_TIMEOUT())
        if self.parked:
            self.unpark(now - _PARKING_TIME)
        for pool in self.front.pools.all:
            limit = int(pool.settings.client_idle_timeout * SECOND)
            if limit:
                for client in list(self.by_id.values()):
                    if client.pool is pool and client.is_idle() and now - client.idle_since >= limit:
                        self.dismiss(client, errors.CLIENT_IDLE_TIMEOUT())
