"""The link between clients that a test plays and sessions that it makes up, on socket pairs, with nothing else around.

What the front would decide is fixed: all ends have the same parameters, nothing is launched, nothing fails of itself.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from gateway.wire import messages
from gateway.wire.parameters import Parameters
from gateway.worker.clients import Clients
from gateway.worker.endpoint import CLIENT_IDLE, Client, Endpoint, Server
from gateway.worker.front import Front
from gateway.worker.link import Link
from gateway.worker.pool import Pool
from gateway.worker.reactor import Reactor
from gateway.worker.rewrite import own_names
from gateway.worker.sock import READ, send_bytes
from tests.worker.sessions import Session
from tests.worker.worlds import idle_server, make_pool


class Replies(Clients):
    """Whoever is told something takes it."""

    def __init__(self) -> None:
        pass

    def reply(self, client: Client, data: bytes) -> int:
        assert send_bytes(client.fd, data) == len(data)
        return 0


class Quiet(Front):
    """What the link asks of the front, as far as it is not the subject."""

    def __init__(self) -> None:
        self.clients = Replies()

    def server_said(self, server: Server, message: bytes) -> bytes | None:
        if messages.error_fields(message[5:])["sqlstate"] == "0A000":
            self.link.rewriter.generation += 1
        return own_names(server.client, server, message) if server.client is not None else None

    def grow(self, pool: Pool) -> int:
        return 0


class Peer:
    """The far end of one of the relay's sockets."""

    def __init__(self, endpoint: Endpoint) -> None:
        ours, self.socket = socket.socketpair()
        for end in (ours, self.socket):
            end.setblocking(False)
        endpoint.fd = ours.detach()
        endpoint.interest = READ

    def received(self) -> bytes:
        """What has arrived."""
        with suppress(BlockingIOError):
            return self.socket.recv(1 << 20)
        return b""


class Relay:
    """Clients and servers of one pool, and the link between them."""

    def __init__(self, clients: int = 1, servers: int = 1, capacity: int = 100) -> None:
        self.front = Quiet()
        self.reactor = Reactor()
        self.link = self.front.link = Link(self.reactor, self.front, 1 << 16, 1 << 30, capacity, "t")
        self.pool = make_pool()
        parameters = Parameters.of({})
        self.servers = [idle_server(self.pool, id=number) for number in range(servers)]
        for server in self.servers:
            server.parameters = parameters
        self.clients = [Client(-1, number, 0) for number in range(clients)]
        for client in self.clients:
            client.pool, client.parameters, client.state = self.pool, parameters, CLIENT_IDLE
        self.sessions = {server: Session() for server in self.servers}
        self.peers = {endpoint: Peer(endpoint) for endpoint in (*self.servers, *self.clients)}

    def close(self) -> None:
        for endpoint, peer in self.peers.items():
            peer.socket.close()
            socket.socket(fileno=endpoint.fd).close()

    def send(self, client: Client, data: bytes) -> None:
        """Let the relay receive what a client sends."""
        self.peers[client].socket.sendall(data)
        self.link.client_readable(client)

    def sent(self, server: Server) -> bytes:
        """What the relay has sent to a server."""
        return self.peers[server].received()

    def answer(self, server: Server, data: bytes) -> None:
        """Let the relay receive what a server answers; a client that had stalled goes on."""
        if data:
            self.peers[server].socket.sendall(data)
            self.link.server_readable(server)
        soon, self.reactor.soon = self.reactor.soon, []
        for client in soon:
            self.link.resume(client)

    def settle(self) -> None:
        """Let the sessions answer until nothing is under way."""
        while sent := {server: data for server in self.sessions if (data := self.sent(server))}:
            for server, data in sent.items():
                self.answer(server, self.sessions[server].receive(data))
