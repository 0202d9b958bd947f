"""The differential player: the same bytes to PostgreSQL and to the gateway give the same answers.

A script is a list of groups; a group is written in one go and then waited for. It is played to PostgreSQL once and to
the gateway in every way of cutting the bytes; each answer is compared message by message, and what the script left in
the tables too. At its end the connection must still be in step, and another client must get a server.

Called by the `same` fixture. Manual: "Message Flow".
"""

from __future__ import annotations

import difflib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import messages
from .client import DEADLINE, Client, count, login
from .messages import Message

Wrong = AssertionError


@dataclass(frozen=True, slots=True)
class Wait:
    """What a group waits for: a condition on the messages since the group began. `seconds` is how long."""

    condition: Callable[[list[Message]], bool]
    seconds: float = DEADLINE


@dataclass(frozen=True, slots=True)
class Quiet:
    """Wait until nothing has come for `seconds`; for what must *not* be answered."""

    seconds: float = 0.2


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Do not wait: the next group is written at once behind this one, and waits for the answers to both."""


Group = Sequence[bytes | Wait | Quiet | AtOnce]
Script = Sequence[Group]


def ready(times: int = 1) -> Wait:
    return Wait(lambda seen: count(seen, "Z") >= times)


def until(kind: str, times: int = 1) -> Wait:
    """Wait for so many messages of a type, say `until("G")` for CopyInResponse."""
    return Wait(lambda seen: count(seen, kind) >= times)


def closed() -> Wait:
    return Wait(lambda _: False)


def whole(data: bytes, _: random.Random) -> Iterator[bytes]:
    yield data


def byte_by_byte(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """One byte per segment; of large data only the first and last kilobyte, or it takes minutes."""
    if len(data) <= 8192:
        yield from (data[at : at + 1] for at in range(len(data)))
    else:
        yield from byte_by_byte(data[:1024], rng)
        yield data[1024:-1024]
        yield from byte_by_byte(data[-1024:], rng)


def at_random(data: bytes, rng: random.Random) -> Iterator[bytes]:
    cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randrange(1, 12))))
    yield from (data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end)


Cut = Callable[[bytes, random.Random], Iterator[bytes]]
WAYS: dict[str, tuple[Cut, int]] = {
    "whole": (whole, 0),
    "byte by byte": (byte_by_byte, 0),
    "at random, seed 1": (at_random, 1),
    "at random, seed 2": (at_random, 2),
    "at random, seed 3": (at_random, 3),
}


def play(
    port: int, script: Script, way: str = "whole", ignore: str = "", probe: bool = True, **startup: Any
) -> list[str]:
    """Play a script on a new connection; the answers, normalised, one line each. `startup` are its parameters."""
    cut, seed = WAYS[way]
    rng = random.Random(seed)
    client = login(port, **startup)
    with client:
        owed = 0
        for number, group in enumerate(script):
            owed += _owed(group)
            try:
                answered = _play_group(client, group, cut, rng, owed)
            except Wrong as wrong:
                raise Wrong(f"group {number} of the script, {way}, port {port}: {wrong}") from None
            if answered:
                owed = 0
                client.mark()
        seen = client.messages
        start = next(at for at, one in enumerate(seen) if one.type == "Z") + 1
        if probe and not client.closed:
            client.ask(messages.query("select 'in step'"))
        lines = [normalised(one, ignore) for one in seen[start:]]
        if client.closed:
            lines.append(client.closed.split(":")[0])
        else:
            client.close()
    return lines


def compare(
    direct: int,
    through: int,
    script: Script,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
    ways: Sequence[str] = tuple(WAYS),
    ignore: str = "",
    reason: str = "",
    probe: bool = True,
    **startup: Any,
) -> None:
    """Fail unless the port `through` answers the script as `direct` does, in every way of cutting it.

    `before` prepares the tables for each run and `after` returns what to compare of them. `ignore` names the letters of
    ErrorResponse fields that a case cannot compare, for a `reason`. `probe` asks one more query at the end.
    """
    assert not ignore or reason, "say why fields are not compared"

    def once(port: int, way: str) -> list[str]:
        before()
        lines = play(port, script, way, ignore, probe, **startup)
        return [*lines, f"left behind: {after()}"]

    expected = once(direct, "whole")
    for way in ways:
        _fail_unless_equal(expected, once(through, way), way)


def compare_opening(
    direct: int,
    through: int,
    data: bytes,
    *,
    single_bytes: int = 0,
    ignore: str = "FLR",
    ways: Sequence[str] = tuple(WAYS),
) -> None:
    """Fail unless both ports answer the bytes that open a connection alike, until ReadyForQuery or the end.

    `single_bytes` is how many of the first answers are the one byte of SSLRequest or GSSENCRequest. The place in
    PostgreSQL's source is not compared: the gateway answers these itself.
    """

    def once(port: int, way: str) -> list[str]:
        cut, seed = WAYS[way]
        with Client(port) as client:
            client.single_bytes = single_bytes
            for piece in cut(data, random.Random(seed)):
                client.write(piece)
                client.flush()
            seen = client.until(lambda seen: count(seen, "Z") > 0)
            return [*(normalised(one, ignore) for one in seen if one.type != "S"), client.closed.split(":")[0]]

    expected = once(direct, "whole")
    for way in ways:
        _fail_unless_equal(expected, once(through, way), way)


def normalised(seen: Message, ignore: str = "") -> str:
    """A message in words, without what differs between any two connections and without the fields to `ignore`."""
    if seen.type == "K":
        return f"BackendKeyData with a key of {len(seen.body) - 4} bytes"
    if seen.type == "A":
        return f"NotificationResponse {seen.body[4:]!r}"
    if seen.type in "EN":
        kept = (f"{key}={value!r}" for key, value in seen.fields.items() if key not in ignore)
        return " ".join((messages.NAMES[seen.type], *kept))
    return str(seen)


def _fail_unless_equal(expected: list[str], got: list[str], way: str) -> None:
    if got != expected:
        diff = difflib.unified_diff(expected, got, "PostgreSQL", f"gateway, written {way}", n=30, lineterm="")
        raise Wrong("answers differ\n" + "\n".join(diff))


def _play_group(client: Client, group: Group, cut: Cut, rng: random.Random, owed: int) -> bool:
    """Write a group and wait; false when it does not wait for its answers."""
    data = b"".join(part for part in group if isinstance(part, bytes))
    waits = [part for part in group if not isinstance(part, bytes)] or [ready(owed)]
    for piece in cut(data, rng):
        client.write(piece)
        client.flush()
    for wait in waits:
        if isinstance(wait, Quiet):
            while client.pump(wait.seconds):
                pass
        elif isinstance(wait, Wait):
            client.until(wait.condition, wait.seconds)
    return not any(isinstance(wait, AtOnce) for wait in waits)


def _owed(group: Group) -> int:
    """How many ReadyForQuery PostgreSQL owes: one for each Query, FunctionCall and Sync outside COPY."""
    data, at, owed = b"".join(part for part in group if isinstance(part, bytes)), 0, 0
    while at < len(data):
        owed += data[at : at + 1] in (b"Q", b"F", b"S")
        at += 1 + int.from_bytes(data[at + 1 : at + 5], "big")
    return owed


def sizes(boundary: int, spread: int = 2) -> list[int]:
    """Body lengths around a buffer boundary, counting the five bytes of a header too."""
    return [boundary + off for off in (*range(-spread - 5, spread - 4), *range(-spread, spread + 1))]


def binary_copy(*rows: Sequence[bytes | None], trailer: bool = True) -> bytes:
    """The data of COPY ... (format binary). Manual: "COPY", "Binary Format"."""
    data = b"PGCOPY\n\xff\r\n\0" + struct.pack("!II", 0, 0)
    for row in rows:
        data += struct.pack("!h", len(row))
        data += b"".join(struct.pack("!i", -1) if v is None else struct.pack("!i", len(v)) + v for v in row)
    return data + (struct.pack("!h", -1) if trailer else b"")
