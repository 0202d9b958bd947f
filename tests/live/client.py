"""A client that speaks bytes: sends what no driver would, and sees every message.

Writing never waits for reading and the other way round, as in PostgreSQL's own libpq. Nothing here sleeps: `until` and
`eventually` wait for a condition and fail at a deadline, with what was seen so far.

Called by the player and by tests. Manual: "Message Flow".
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import ClassVar, Self, TypeVar

from . import messages
from .messages import Message

DEADLINE = 5.0
T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Return the first true value of `condition`; fail after `deadline` seconds. `what` names it in the failure."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what}; last value {value!r}")
        time.sleep(0.01)
    return value


class Client:
    """One connection, with the messages that came in and the bytes that still have to go out."""

    everyone: ClassVar[list[Client]] = []

    def __init__(self, port: int, host: str = "127.0.0.1", receive_buffer: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE)
        try:
            self.socket.connect((host, port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.everyone.append(self)
        self.messages: list[Message] = []
        self.parameters: dict[str, str] = {}
        self.pid, self.key = 0, b""
        self.closed = ""
        self.single_bytes = 0  # so many answers to SSLRequest and GSSENCRequest are still to come: one byte, no message
        self._mark = 0
        self._out = bytearray()
        self._in = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @classmethod
    def close_all(cls) -> None:
        """Close what a test that failed left open."""
        while cls.everyone:
            cls.everyone.pop().socket.close()

    def write(self, data: bytes) -> None:
        """Queue bytes; they leave in the next `until`, `flush` or `pump`."""
        self._out += data

    def pump(self, timeout: float = 0.0, reading: bool = True) -> bool:
        """Move bytes both ways once; true when some moved. `timeout` in seconds."""
        wanted = (select.POLLIN if reading and not self.closed else 0) | (select.POLLOUT if self._out else 0)
        if not wanted:
            return False
        poll = select.poll()
        poll.register(self.socket, wanted)
        events = [event for _, event in poll.poll(timeout * 1000)]
        if not events:
            return False
        moved = False
        if self._out and events[0] & (select.POLLOUT | select.POLLERR | select.POLLHUP):
            moved |= self._send()
        if wanted & select.POLLIN and events[0] & ~select.POLLOUT:
            moved |= self._receive()
        return moved

    def flush(self, reading: bool = True, deadline: float = DEADLINE) -> None:
        """Write all that is queued; with `reading` false nothing is received meanwhile."""
        end = time.monotonic() + deadline
        while self._out:
            self.pump(0.1, reading)
            if time.monotonic() > end:
                raise AssertionError(f"{self.unsent} bytes not taken within {deadline} s")

    @property
    def unsent(self) -> int:
        """How many queued bytes have not left yet."""
        return len(self._out)

    def mark(self) -> None:
        """Forget the messages so far: conditions of `until` look at those that follow."""
        self._mark = len(self.messages)

    def until(self, condition: Callable[[list[Message]], bool], deadline: float = DEADLINE) -> list[Message]:
        """Return the messages since the mark, once `condition` holds for them or the connection is closed."""
        end = time.monotonic() + deadline
        while not condition(self.messages[self._mark :]) and not self.closed:
            self.pump(0.1)
            if time.monotonic() > end:
                seen = "\n  ".join(map(str, self.messages[self._mark :][-20:]))
                raise AssertionError(f"not answered within {deadline} s; so far:\n  {seen}")
        return self.messages[self._mark :]

    def ask(self, data: bytes, ready: int = 1, deadline: float = DEADLINE) -> list[Message]:
        """Write and read until `ready` ReadyForQuery."""
        self.mark()
        self.write(data)
        return self.until(lambda seen: count(seen, "Z") >= ready, deadline)

    def rows(self, sql: str) -> list[tuple[str | None, ...]]:
        """Run a simple query; its rows as text. An ErrorResponse is an AssertionError."""
        answer = self.ask(messages.query(sql))
        if wrong := [seen for seen in answer if seen.type == "E"]:
            raise AssertionError(str(wrong[0]))
        return [tuple(v if v is None else v.decode() for v in row.values) for row in answer if row.type == "D"]

    def value(self, sql: str) -> str | None:
        return self.rows(sql)[0][0]

    def wait_closed(self, deadline: float = DEADLINE) -> list[Message]:
        """Read until the other side closes; the messages since the mark."""
        return self.until(lambda _: False, deadline)

    def close(self, polite: bool = True) -> None:
        if polite and not self.closed:
            self.write(messages.terminate())
            self.flush(reading=False)
        self.socket.close()

    def reset(self) -> None:
        """Close with RST instead of FIN, as a crashed machine or a firewall does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _send(self) -> bool:
        try:
            sent = self.socket.send(memoryview(self._out)[: 1 << 20])
        except BlockingIOError:
            return False
        except OSError as error:
            self._out.clear()
            # Whether the end is met by a write or by a read is chance.
            self.closed = self.closed or f"closed: while writing, {error.__class__.__name__}"
            return False
        del self._out[:sent]
        return sent > 0

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError as error:
            self.closed = f"closed: {error.__class__.__name__}"
            return False
        if not data:
            self.closed = "closed" if not self._in else f"closed inside a message after {bytes(self._in[:20])!r}"
            self._out.clear()
            return False
        self._in += data
        self._frame()
        return True

    def _frame(self) -> None:
        at, buffer = 0, self._in
        while self.single_bytes and at < len(buffer):
            self.messages.append(Message(chr(buffer[at]), b"(a single byte)"))
            self.single_bytes -= 1
            at += 1
        while len(buffer) - at >= 5:
            (length,) = struct.unpack_from("!I", buffer, at + 1)
            if len(buffer) - at <= length:
                break
            self._note(Message(chr(buffer[at]), bytes(buffer[at + 5 : at + 1 + length])))
            at += 1 + length
        del buffer[:at]

    def _note(self, seen: Message) -> None:
        self.messages.append(seen)
        if seen.type == "S":
            name, value, _ = seen.body.split(b"\0")
            self.parameters[name.decode()] = value.decode()
        elif seen.type == "K":
            self.pid, self.key = struct.unpack_from("!I", seen.body)[0], seen.body[4:]


def login(
    port: int,
    *,
    user: str = "postgres",
    database: str = "postgres",
    version: tuple[int, int] = (3, 0),
    receive_buffer: int = 0,
    **parameters: str,
) -> Client:
    """Connect and log in without a password; fails when that is refused."""
    client = Client(port, receive_buffer=receive_buffer)
    client.write(messages.startup(version, user=user, database=database, **parameters))
    seen = client.until(lambda seen: count(seen, "Z") > 0 or count(seen, "E") > 0)
    if not count(seen, "Z"):
        client.socket.close()
        raise AssertionError(f"login refused: {seen[-1] if seen else client.closed}")
    client.mark()
    return client


def value(port: int, sql: str, **startup: str) -> str | None:
    """One column of one row, by a client of its own."""
    with login(port, **startup) as client:  # type: ignore[arg-type]
        answer = client.value(sql)
        client.close()
        return answer


def cancel(port: int, pid: int, key: bytes) -> None:
    """Send a CancelRequest on a connection of its own and wait until the other side closes it."""
    with Client(port) as client:
        client.write(messages.cancel_request(pid, key))
        client.wait_closed()


def count(seen: Iterable[Message], kind: str) -> int:
    return sum(one.type == kind for one in seen)


def types(seen: Iterable[Message]) -> str:
    """The type letters in order: `12TDCZ`."""
    return "".join(one.type for one in seen)


def error(seen: Iterable[Message]) -> dict[str, str]:
    """The fields of the one ErrorResponse in `seen`; fails when there is none or more than one."""
    errors = [one for one in seen if one.type == "E"]
    assert len(errors) == 1, f"expected one ErrorResponse, got {list(map(str, seen))}"
    return errors[0].fields
