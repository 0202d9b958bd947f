"""An impostor in PostgreSQL's place, which says what PostgreSQL never does.

1. Probes and cancel requests reach PostgreSQL untouched: what is played with is the gateway's pooled connections alone.
2. A script is a function of one Visit, that is one connection of the gateway; when it returns the connection ends.
3. A script that fails says so in `faults`; the end of the connection ends it without a word.

Called by tests/live/test_hostile_servers.py. Manual: "Message Flow", "SASL Authentication".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from .client import DEADLINE
from .messages import Message, cstring, message

CANCEL_REQUEST = struct.pack("!HH", 1234, 5678)
CHUNK = 1 << 16


class Gone(Exception):  # noqa: N818  it is no error: connections end
    """The other end has closed the connection."""


class Visit:
    """One connection of the gateway to the impostor, and behind it, once it is wanted, one to PostgreSQL."""

    def __init__(self, gateway: socket.socket, postgres: int) -> None:
        self.gateway = gateway
        self.opening = b""  # the packet that the gateway opened the connection with
        self.asked = False  # for the script: has that been asked which it is about?
        self.ended = threading.Event()
        self._postgres_port = postgres
        self._postgres: socket.socket | None = None
        self._asked = bytearray()
        self._answered = bytearray()

    @property
    def user(self) -> str:
        """The user that the gateway wants to be."""
        words = self.opening[8:].split(b"\0")
        return words[words.index(b"user") + 1].decode()

    def open(self) -> None:
        """Read the packet that opens the connection."""
        while len(self._asked) < 4 or len(self._asked) < int.from_bytes(self._asked[:4], "big"):
            self._asked += _received(self.gateway)
        size = int.from_bytes(self._asked[:4], "big")
        self.opening = bytes(self._asked[:size])
        del self._asked[:size]

    def send(self, *parts: bytes | Message) -> None:
        """Send messages to the gateway in one write, or any bytes."""
        _send(self.gateway, b"".join(part if isinstance(part, bytes) else message(*part) for part in parts))

    def receive(self, kind: str = "") -> Message:
        """Return the gateway's next message, which is not passed on; it is of this kind, or the script fails."""
        while (seen := _framed(self._asked)) is None:
            self._asked += _received(self.gateway)
        assert kind in ("", seen.type), f"the gateway sent {seen} where {kind!r} was due"
        return seen

    def welcome(self) -> list[Message]:
        """Log in to PostgreSQL as the gateway wants to, and return what it says, which is not passed on."""
        said: list[Message] = []
        _send(self.postgres, self.opening)
        while not said or said[-1].type not in "ZE":
            while (seen := _framed(self._answered)) is None:
                self._answered += _received(self.postgres)
            said.append(seen)
        return said

    def relay(self, until: Callable[[Message], bool] = lambda _: False) -> Message:
        """Pass messages on both ways; return the first of the gateway's that `until` is true of, and keep it back."""
        while True:
            while (seen := _framed(self._asked)) is not None:
                if until(seen):
                    return seen
                _send(self.postgres, message(*seen))
            while (seen := _framed(self._answered)) is not None:
                self.send(seen)
            ready, _, _ = select.select([self.gateway, self.postgres], [], [])
            if self.gateway in ready:
                self._asked += _received(self.gateway)
            if self.postgres in ready:
                self._answered += _received(self.postgres)

    def be_postgres(self) -> None:
        """Pass on every byte from the first one, and see none of them."""
        _send(self.postgres, self.opening)
        ways = {self.gateway: self.postgres, self.postgres: self.gateway}
        while True:
            for source in select.select(list(ways), [], [])[0]:
                _send(ways[source], _received(source))

    def wait_closed(self) -> None:
        """Say nothing until the gateway gives up."""
        while True:
            _received(self.gateway)

    def reset(self) -> None:
        """End the connection by RST instead of FIN."""
        self.gateway.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @property
    def postgres(self) -> socket.socket:
        """The connection to PostgreSQL, made when it is needed first."""
        if self._postgres is None:
            self._postgres = socket.create_connection(("127.0.0.1", self._postgres_port), DEADLINE)
            self._postgres.settimeout(None)
        return self._postgres

    def hang_up(self) -> None:
        """End the connection from outside its script."""
        with suppress(OSError):
            self.gateway.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End both connections."""
        self.gateway.close()
        if self._postgres is not None:
            self._postgres.close()
        self.ended.set()


Script = Callable[[Visit], object]


def honest(visit: Visit) -> None:
    """Be PostgreSQL."""
    visit.be_postgres()


class Impostor:
    """A port behind which a script is played to every pooled connection of the gateway."""

    def __init__(self, postgres: int, probes: str) -> None:
        """Stand before the PostgreSQL on this port; `probes` is the user of the connections that are left alone."""
        self.script: Script = honest
        self.on_accept: Script | None = None  # played to every connection, before a byte is read
        self.visits: list[Visit] = []  # pooled ones, the newest last; those that have ended too
        self.cancels: list[bytes] = []  # cancel requests that came
        self.faults: list[BaseException] = []
        self._postgres = postgres
        self._probes = probes
        self._running: dict[threading.Thread, Visit] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(DEADLINE)
        self._listener.close()
        self._hang_up(list(self._running))

    def psql(self, sql: str, database: str = "postgres") -> str:
        """Not for impostors: nobody asks them for the truth."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """End all pooled connections, and wait until their scripts have ended."""
        with self._lock:
            pooled = [thread for thread, visit in self._running.items() if visit in self.visits]
        self._hang_up(pooled)

    def _hang_up(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            if visit := self._running.get(thread):
                visit.hang_up()
        for thread in threads:
            thread.join(DEADLINE)

    def _accept(self) -> None:
        while True:
            try:
                gateway, _ = self._listener.accept()
            except OSError:
                return
            gateway.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visit = Visit(gateway, self._postgres)
            thread = threading.Thread(target=self._serve, args=(visit,), daemon=True)
            with self._lock:
                self._running[thread] = visit
            thread.start()

    def _serve(self, visit: Visit) -> None:
        try:
            self._play(visit)
        except (Gone, OSError):
            pass
        except BaseException as fault:
            self.faults.append(fault)
        finally:
            with self._lock:
                visit.close()
                del self._running[threading.current_thread()]

    def _play(self, visit: Visit) -> None:
        if self.on_accept is not None:
            with self._lock:
                self.visits.append(visit)
            self.on_accept(visit)
            return
        visit.open()
        if visit.opening[4:8] == CANCEL_REQUEST:
            self.cancels.append(visit.opening)
            visit.be_postgres()
        elif visit.user == self._probes:
            visit.be_postgres()
        else:
            with self._lock:
                self.visits.append(visit)
            self.script(visit)


class Scram:
    """The server's side of SCRAM-SHA-256 (RFC 5802), each part of which can be another than it should."""

    def __init__(self, visit: Visit, password: str, mechanisms: bytes = b"SCRAM-SHA-256\0\0") -> None:
        """Ask for SCRAM, and read the gateway's first word."""
        self.visit, self.password = visit, password
        visit.send(authentication(10, mechanisms))
        _, _, response = visit.receive("p").body.partition(b"\0")
        assert response[4:].startswith(b"n,,n=,r="), response
        self.bare = response[7:]
        self.nonce = self.bare[5:]

    def challenge(
        self, *, nonce: bytes | None = None, salt: bytes = b"c2FsdHNhbHQ=", iterations: bytes = b"4096"
    ) -> None:
        """Send server-first-message; the nonce is the gateway's with some more, the salt is as it is sent."""
        self.salt, self.iterations = salt, iterations
        self.first = b"r=%b,s=%b,i=%b" % (self.nonce + b"server" if nonce is None else nonce, salt, iterations)
        self.visit.send(authentication(11, self.first))

    def signature(self) -> bytes:
        """Read client-final-message; return the server-final-message that is due."""
        unproven, _, proof = self.visit.receive("p").body.rpartition(b",p=")
        salted = hashlib.pbkdf2_hmac(
            "sha256", self.password.encode(), base64.b64decode(self.salt), int(self.iterations)
        )
        signed = b"%b,%b,%b" % (self.bare, self.first, unproven)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        mask = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        assert base64.b64decode(proof) == bytes(a ^ b for a, b in zip(client_key, mask, strict=True)), "wrong proof"
        return b"v=" + base64.b64encode(hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), signed, "sha256"))


def authentication(request: int, data: bytes = b"") -> bytes:
    """Build a message of the kind AuthenticationXXX."""
    return message("R", struct.pack("!I", request) + data)


def parameter_status(name: str, value: str) -> bytes:
    """Build ParameterStatus."""
    return message("S", cstring(name) + cstring(value))


def _framed(buffer: bytearray) -> Message | None:
    """Take the first message out of a buffer, once it is whole."""
    if len(buffer) < 5:
        return None
    size = 1 + int.from_bytes(buffer[1:5], "big")
    if len(buffer) < size:
        return None
    seen = Message(chr(buffer[0]), bytes(buffer[5:size]))
    del buffer[:size]
    return seen


def _received(source: socket.socket) -> bytes:
    data = source.recv(CHUNK)
    if not data:
        raise Gone
    return data


def _send(target: socket.socket, data: bytes) -> None:
    target.sendall(data)
