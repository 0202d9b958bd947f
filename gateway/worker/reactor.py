"""The worker's loop: wait for sockets, serve those that are ready, let time pass.

1. In each turn servers come before clients (a server that died must not be handed out), and clients before all others
   (a cancel request must not overtake the query that it means).
2. Readiness is told once (EPOLLET), but for listeners. Who reads less than he asked for has read all; one who read as
   much, or whose connection has ended, is served again in the next turn.
3. A descriptor is closed at the end of the turn, so that its number cannot be another connection's within it.
4. The clock is read once a turn, after the wait; `now` is microseconds, and everybody uses it.

Run by main.py; see epoll(7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.worker.endpoint import CLIENT, LISTENER, SERVER, Endpoint
from gateway.worker.sock import DEAD, ENDED, READ, WRITE, Poller, clock, end

if TYPE_CHECKING:
    from gateway.worker.front import Front
    from gateway.worker.link import Link

SWEEP_EVERY = 100_000  # microseconds between two looks at what time has made due


class Reactor:
    """All descriptors of a worker and what is watched for on each."""

    def __init__(self) -> None:
        self.now = clock()
        self.running = True
        self.turns = 0
        self.endpoints: list[Any] = [None] * 1024  # by descriptor
        self.link: Link = None  # type: ignore[assignment]  # these three need each other: set by main
        self.front: Front = None  # type: ignore[assignment]
        self.poller = Poller()
        self.closed: list[int] = []
        self.again: list[Any] = []  # endpoints that may have more to read
        self.soon: list[Any] = []  # clients to go on with at the end of the turn
        self.sweep_at = self.now + SWEEP_EVERY

    def run(self) -> None:
        """Serve until somebody sets `running` to False."""
        while self.running:
            self.turn(SWEEP_EVERY // 1000)

    def turn(self, longest: int) -> int:
        """Wait at most *longest* milliseconds and serve what is ready."""
        poller = self.poller
        count = poller.wait(0 if self.again else longest)
        self.now = poller.now
        self.turns += 1
        clients = others = False
        for at in range(count):
            endpoint = self.endpoints[poller.ready_fds[at]]
            if endpoint is None:
                continue
            if endpoint.kind == SERVER:
                self.serve(endpoint, poller.ready_events[at])
            elif endpoint.kind == CLIENT:
                clients = True
            else:
                others = True
        if clients:
            for at in range(count):
                endpoint = self.endpoints[poller.ready_fds[at]]
                if endpoint is not None and endpoint.kind == CLIENT:
                    self.serve(endpoint, poller.ready_events[at])
        if others:
            for at in range(count):
                endpoint = self.endpoints[poller.ready_fds[at]]
                if endpoint is not None and endpoint.kind != SERVER and endpoint.kind != CLIENT:
                    self.front.other_ready(endpoint, poller.ready_events[at])
        if self.soon or self.again:
            self._resume()
        if self.now >= self.sweep_at:
            self.sweep_at = self.now + SWEEP_EVERY
            self.front.sweep(self.now)
        if self.closed:
            for fd in self.closed:
                end(fd)
            self.closed.clear()
        return count

    def _resume(self) -> None:
        clients, self.soon = self.soon, []
        for client in clients:
            if client.fd >= 0:
                try:
                    self.link.resume(client)
                except Exception as fault:
                    self.front.failed(client, fault)
        unread, self.again = self.again, []
        for endpoint in unread:
            if endpoint.fd < 0 or not endpoint.interest & READ:
                continue
            if endpoint.kind == CLIENT or endpoint.kind == SERVER:
                self.serve(endpoint, READ)
            else:
                self.front.other_ready(endpoint, READ)

    def serve(self, endpoint: Endpoint, events: int) -> int:
        try:
            if events & WRITE and endpoint.interest & WRITE:
                self.link.writable(endpoint)
            if events & DEAD and endpoint.kind == CLIENT and not endpoint.interest & READ:
                self.front.client_gone(endpoint, 0)  # type: ignore[arg-type]  # what it sent before is for nobody
                return 0
            if events & ENDED:
                self.again.append(endpoint)
            if events & ~WRITE and endpoint.fd >= 0:
                if endpoint.kind == CLIENT:
                    self.link.client_readable(endpoint)  # type: ignore[arg-type]
                else:
                    self.link.server_readable(endpoint)  # type: ignore[arg-type]
        except Exception as fault:  # a fault of ours costs this connection, not the worker
            self.front.failed(endpoint, fault)
        return 0

    def add(self, endpoint: Endpoint, interest: int) -> int:
        """Begin to watch an endpoint."""
        while endpoint.fd >= len(self.endpoints):
            self.endpoints.extend([None] * len(self.endpoints))
        self.endpoints[endpoint.fd] = endpoint
        endpoint.interest = interest
        return self.poller.watch(endpoint.fd, interest, endpoint.kind != LISTENER)

    def want(self, endpoint: Endpoint, interest: int) -> int:
        """Watch an endpoint for something else from now on."""
        if endpoint.fd >= 0 and endpoint.interest != interest:
            endpoint.interest = interest
            self.poller.change(endpoint.fd, interest, endpoint.kind != LISTENER)
        return 0

    def remove(self, endpoint: Endpoint) -> int:
        """Stop watching an endpoint and close its descriptor at the end of the turn."""
        if endpoint.fd >= 0:
            if endpoint.kind != CLIENT:  # nobody else holds a client's descriptor: its end takes it out of the set
                self.poller.forget(endpoint.fd)
            self.endpoints[endpoint.fd] = None
            self.closed.append(endpoint.fd)
            endpoint.fd = -1
        return 0
