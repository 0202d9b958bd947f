"""The worker's end of the socket pair that joins it to the supervisor.

1. It never blocks: what the supervisor does not read now is kept and sent later.
2. When the supervisor is gone the channel says so once; the worker then drains.

Called by the front; the records are those of gateway.control.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.control import Down, Records, Up, encode
from gateway.worker.endpoint import CONTROL, Endpoint
from gateway.worker.sock import AGAIN, READ, WRITE, Buffer, send_bytes

if TYPE_CHECKING:
    from gateway.worker.reactor import Reactor


class Channel:
    """Sends records up and yields the records that come down."""

    def __init__(self, reactor: Reactor, fd: int) -> None:
        self.reactor = reactor
        self.endpoint = Endpoint(fd, CONTROL, 0)
        self._records = Records(Down)
        self._received = Buffer(65536)
        reactor.add(self.endpoint, READ)

    def send(self, record: Up) -> None:
        """Send a record, now or when there is room."""
        endpoint = self.endpoint
        if endpoint.fd < 0:
            return
        data = encode(record)
        sent = send_bytes(endpoint.fd, data) if endpoint.out is None else 0
        if sent < 0 and sent != AGAIN:
            return  # the reading side will notice
        rest = data[max(sent, 0) :]
        if rest:
            if endpoint.out is None:
                endpoint.out = Buffer(len(rest))
                self.reactor.want(endpoint, READ | WRITE)
            endpoint.out.extend(rest)

    def receive(self) -> Iterator[Down] | None:
        """Return the records that have come, or None when the supervisor is gone."""
        buf = self._received
        buf.start = buf.end = 0
        while (count := buf.recv(self.endpoint.fd, 65536)) > 0:
            pass
        if count != AGAIN and buf.end == 0:
            self.reactor.remove(self.endpoint)
            return None
        if count != AGAIN:
            self.reactor.again.append(self.endpoint)  # the end is told when all before it was heard
        return self._records.feed(buf.slice(0, buf.end))  # type: ignore[return-value]

    def wait(self) -> list[Down]:
        """Wait for the next records, at the start, when nothing else is to be done; raises ConnectionError."""
        select.select([self.endpoint.fd], [], [])
        records = self.receive()
        if records is None:
            raise ConnectionError("the supervisor is gone")
        return list(records)
