"""What the supervisor and its workers tell each other, and how a record becomes bytes on their socket pair.

1. Every record is declared here, in one of the unions Down and Up; the other end decodes nothing else.
2. A record is a 4-byte big-endian length and msgpack. Both ends are the same program, so there is no version.
3. Either side goes on with what it last heard while the other is slow.

Used by supervisor.main and worker.channel, which never import each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.settings import Settings
from health.view import ClusterView

WORKER_SHIFT = 24
"""A client's process id is (its worker + 1) << WORKER_SHIFT | a number, so that a cancel request finds its way."""

_LENGTH = 4


class Limit(msgspec.Struct, frozen=True):
    """What a limit is about: connections of a pool, a database, a user; clients of all, a database, a user."""

    kind: str  # pool, reserve, database, user, clients, database_clients, user_clients
    database: str = ""
    user: str = ""


# Downwards.


class Configure(msgspec.Struct, tag=True, frozen=True):
    """The settings, at the start and after each reload."""

    settings: Settings
    users: dict[str, str] | None  # stored passwords by user, from auth.file; None when there is none
    index: int  # of this worker
    workers: int
    secret: bytes  # of the gateway while it runs: for the mock login of unknown users
    hard_client_limit: int  # what RLIMIT_NOFILE allows this worker


class View(msgspec.Struct, tag=True, frozen=True):
    """A cluster as it is now."""

    view: ClusterView


class Grant(msgspec.Struct, tag=True, frozen=True):
    """This worker's share of a limit from now on."""

    limit: Limit
    share: int


class ConsoleOutput(msgspec.Struct, tag=True, frozen=True):
    """Bytes for a console client."""

    client: int
    data: bytes
    close: bool = False


class CancelElsewhere(msgspec.Struct, tag=True, frozen=True):
    """A cancel request for a client of another worker: its process id and key as the client sent them."""

    pid: int
    key: bytes


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question for rows of a table: pools, clients, servers, clusters."""

    number: int
    table: str


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Take no new client, end each as its transaction ends, and all after so many seconds."""

    timeout: float


Down = Configure | View | Grant | ConsoleOutput | CancelElsewhere | Ask | Drain

# Upwards.


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker serves."""

    pid: int


class Demand(msgspec.Struct, tag=True, frozen=True):
    """How much of a limit a worker uses, and how much it would."""

    limit: Limit
    budget: int  # the whole limit, as the worker read it in the settings; 0: it has not had to
    share: int  # what it may use now, which acknowledges a grant
    used: int
    wanted: int


class Met(msgspec.Struct, tag=True, frozen=True):
    """What the relay met in passing that says something about a node."""

    cluster: str
    node: str
    what: str  # refused, reset, silent, promoted, or a SQLSTATE


class ConsoleOpened(msgspec.Struct, tag=True, frozen=True):
    """A client has logged in to the console."""

    client: int
    user: str
    admin: bool


class ConsoleInput(msgspec.Struct, tag=True, frozen=True):
    """Bytes from a console client."""

    client: int
    data: bytes


class ConsoleClosed(msgspec.Struct, tag=True, frozen=True):
    """A console client has gone."""

    client: int


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The rows that an Ask was for."""

    number: int
    rows: list[dict[str, object]]


Up = Ready | Demand | Met | ConsoleOpened | ConsoleInput | ConsoleClosed | CancelElsewhere | Answer

_encoder = msgspec.msgpack.Encoder()


def encode(record: Down | Up) -> bytes:
    """Return a record as it travels."""
    body = _encoder.encode(record)
    return len(body).to_bytes(_LENGTH, "big") + body


class Records:
    """Turns received bytes into the records of one direction."""

    def __init__(self, union: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Down | Up]:
        """Yield the records that are whole now."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._bytes[:_LENGTH], "big")
            if len(self._bytes) < end:
                return
            record = self._decoder.decode(self._bytes[_LENGTH:end])
            del self._bytes[:end]
            yield record


def first_share(budget: int, workers: int, index: int) -> int:
    """Return the share of a limit that a worker may use before any was granted: together they are the whole."""
    return budget // workers + (index < budget % workers)
