"""Inboxes: what an endpoint has sent and nobody could use yet.

1. Who has nothing unread holds no block; the blocks of clients that wait are used again.

Called by the link, and by failing for what is to be sent once more.
"""

from __future__ import annotations

from typing import Any

from gateway.worker.endpoint import Client, Endpoint
from gateway.worker.sock import Buffer

SPARE_SIZE = 512  # bytes of a fresh inbox: most queries that wait for a server fit
SPARES = 64  # inboxes that are kept for the next who waits


class Inboxes:
    """The inboxes of all endpoints, and those of nobody."""

    def __init__(self) -> None:
        self.spares: list[Any] = []

    def keep(self, endpoint: Endpoint, buf: Buffer, pos: int) -> int:
        """Keep buf[pos:end] as the endpoint's inbox, or nothing where nothing is left."""
        inbox = endpoint.inbox
        if pos >= buf.end or endpoint.fd < 0:
            endpoint.inbox = None
            if inbox is not None and inbox.size == SPARE_SIZE and len(self.spares) < SPARES:
                inbox.start = inbox.end = 0
                self.spares.append(inbox)
        elif inbox is buf:
            buf.start = pos
        else:
            inbox = self.spares.pop() if self.spares else Buffer(SPARE_SIZE)
            inbox.append(buf, pos, buf.end)
            endpoint.inbox = inbox
        return 0

    def put_back(self, client: Client, sent: Buffer) -> int:
        """Put what a client has sent before what it has sent since."""
        rest, client.inbox = client.inbox, Buffer(SPARE_SIZE)
        client.inbox.append(sent, sent.start, sent.end)
        if rest is not None:
            client.inbox.append(rest, rest.start, rest.end)
        return 0
