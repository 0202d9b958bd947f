"""Cancel requests: from the client that asks to the one query that it means.

1. A key names a client, never a server: what is cancelled is what that client waits for or runs at this moment.
2. A server that a cancel request is on its way to goes to nobody else until PostgreSQL has closed that connection,
   which it does after the signal was sent: a cancel cannot hit the next client.
3. Whoever asks is held until then, so that a returned PQcancel means what it does with PostgreSQL.

Called by admission (a request came in), by the front (one from another worker, and an end that is ready) and by
servers (a client left in the middle). See "Canceling Requests in Progress" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import TYPE_CHECKING

from gateway import errors
from gateway.control import WORKER_SHIFT, CancelElsewhere
from gateway.wire import messages
from gateway.wire.startup import CancelRequest
from gateway.worker.endpoint import (
    CANCEL,
    CLIENT_ACTIVE,
    CLIENT_WAITING,
    SERVER_CANCELED,
    Client,
    Endpoint,
    Server,
)
from gateway.worker.pool import SECOND
from gateway.worker.sock import AGAIN, READ, WRITE, Buffer

if TYPE_CHECKING:
    from gateway.worker.front import Front


class Errand(Endpoint):
    """A connection to a server that carries one cancel request, and the client connections that wait for it."""

    def __init__(self, fd: int, server: Server, deadline: int) -> None:
        super().__init__(fd, CANCEL, 0)
        self.server = server
        self.deadline = deadline
        self.askers: list[Client] = []


class Canceler:
    """Finds who is meant, and tells the server."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.errands: dict[Server, Errand] = {}

    def requested(self, asker: Client, request: CancelRequest) -> None:
        """Handle a cancel request of a connection of ours."""
        if request.pid >> WORKER_SHIFT != self.front.index + 1:
            self.front.channel.send(CancelElsewhere(request.pid, request.key))
        elif not self.cancel(request.pid, request.key, asker):
            self.front.clients.dismiss(asker, None)
            return
        else:
            return
        self.front.clients.dismiss(asker, None)

    def cancel(self, pid: int, key: bytes, asker: Client | None = None) -> bool:
        """Cancel what the client with this key waits for or runs; return True when *asker* is to be held."""
        client = self.front.clients.by_id.get(pid)
        if client is None:
            return False
        if not client.key or not compare_digest(client.key, key):
            return False
        server = client.server
        if client.state == CLIENT_WAITING and server is None:
            self.front.failing.waiting(client, errors.QUERY_CANCELED().encode())
        elif client.state == CLIENT_ACTIVE and server is not None and server.cycle.owed() > 0:
            if server.cycle.skip_is_next():
                server.cancel_due = True  # it would hit our own request, a change of parameters perhaps
            else:
                return self.send(server, asker)
        return False

    def send(self, server: Server, asker: Client | None = None) -> bool:
        """Send a cancel request for what the server runs now; return False when there is nothing to send."""
        if not server.key or server.address is None:
            return False
        errand = self.errands.get(server)
        if errand is None:
            settings = server.pool.settings
            now = self.front.reactor.now
            fd = self.front.servers.open(server.address)
            if fd < 0:
                return False
            errand = self.errands[server] = Errand(fd, server, now + int(settings.cancel_wait_timeout * SECOND))
            server.cancels += 1
            request = messages.cancel_request(server.pid, server.key)
            errand.out = Buffer(len(request))
            errand.out.extend(request)
            self.front.reactor.add(errand, READ | WRITE)
        if asker is not None:
            errand.askers.append(asker)
        return True

    def ready(self, errand: Errand, events: int) -> None:
        """Go on with an errand whose connection is ready."""
        if errand.out is not None and events & WRITE:
            sent = errand.out.send(errand.fd, errand.out.start, errand.out.end)
            if sent == AGAIN:
                return
            if sent < 0:
                self.finish(errand)
                return
            errand.out = None
            self.front.reactor.want(errand, READ)
        scratch = Buffer(64)
        if scratch.recv(errand.fd, 64) != AGAIN:
            self.finish(errand)

    def finish(self, errand: Errand) -> None:
        """End an errand: the server is free for others again."""
        server = errand.server
        self.errands.pop(server, None)
        self.front.reactor.remove(errand)
        server.cancels -= 1
        for asker in errand.askers:
            self.front.clients.dismiss(asker, None)
        if server.state == SERVER_CANCELED:
            self.front.link.hand_on(server, server.pool)

    def sweep(self, now: int) -> None:
        """End the errands that take longer than cancel_wait_timeout; what a late one would hit is closed."""
        for errand in [errand for errand in self.errands.values() if now >= errand.deadline]:
            if errand.server.state == SERVER_CANCELED:
                errand.server.retiring = True
            self.finish(errand)
