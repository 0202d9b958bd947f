"""Clients that do not speak the protocol, or stop speaking it: they harm nobody but themselves.

Manual: "Message Formats".
"""

from __future__ import annotations

import os
import random
import struct

import pytest

from .client import Client, count, error, eventually, login, value
from .messages import (
    LENGTHS,
    WHO,
    bind,
    cstring,
    describe_statement,
    execute,
    message,
    packet,
    parse,
    password,
    query,
    run,
    ssl_request,
    startup,
    sync,
)

CLIENT_HELLO = (
    bytes.fromhex("16030100700100006c0303")
    + bytes(32)
    + bytes.fromhex("000002c02b0100004100100e000c0a")
    + b"postgresql"
)


def assert_refused(client: Client) -> None:
    """The connection ends; at most one ErrorResponse said why, FATAL and about the protocol."""
    seen = client.wait_closed()
    if any(one.type == "E" for one in seen):
        assert (error(seen)["S"], error(seen)["C"][:2]) in (("FATAL", "08"), ("FATAL", "0A")), error(seen)
    client.socket.close()


def assert_serves(relay) -> None:
    assert value(relay.port, "select 'still here'") == "still here"


@pytest.mark.both
@pytest.mark.parametrize("length", [*LENGTHS, 4, 7, 10_005, 20 << 20])
def test_startup_packet_of_wrong_length_is_refused_at_once(relay, length):
    # No waiting for 20 MB, no allocation of them.
    with Client(relay.port) as client:
        client.write(packet(struct.pack("!HH", 3, 0) + b"user\0postgres\0\0", length))
        if length == 7:
            client.write(bytes(20))
        assert_refused(client)
    assert_serves(relay)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(CLIENT_HELLO, id="TLS client hello"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", id="SSH"),
        pytest.param(password("first"), id="password first"),
        pytest.param(query("select 1") + bytes(30), id="query first"),
        pytest.param(bytes(4096), id="zeroes"),
        pytest.param(b"\xff" * 4096, id="ones"),
    ],
)
def test_connection_that_opens_with_something_else_is_closed(relay, data):
    with Client(relay.port) as client:
        client.write(data)
        assert_refused(client)
    assert_serves(relay)


def test_password_message_before_startup_on_a_gateway_with_passwords(gateway):
    # PgBouncer 1.5.5 died of it.
    relay = gateway(auth={"type": "md5"})
    for data in (password("x"), ssl_request() + password("x")):
        with Client(relay.port) as client:
            client.single_bytes = data[:4] == ssl_request()[:4]
            client.write(data)
            assert_refused(client)


@pytest.mark.parametrize("kind", ["md5", "scram-sha-256", "password"])
def test_other_message_where_a_password_is_due_is_refused(gateway, kind):
    # SASL lengths beyond the message (CVE-2026-6664), a query instead of a password, an unknown mechanism.
    relay = gateway(auth={"type": kind})
    answers = [
        query("select 1"),
        message("p", cstring("SCRAM-SHA-256") + struct.pack("!I", 0xFFFFFFFF) + b"n,,n=,r=abc"),
        message("p", cstring("SCRAM-SHA-256") + struct.pack("!I", 0x7FFFFFFF)),
        message("p", cstring("SCRAM-SHA-256")),
        message("p", cstring("NONSENSE") + struct.pack("!I", 3) + b"n,,"),
        message("p", b"no terminator"),
        message("p", b""),
        message("p", cstring("x" * 70_000)),
        message("p", b"", length=0xFFFFFFFF),
        message("p", b"", length=0x7FFFFFFF),
        message("p", b"", length=0),
    ]
    for answer in answers:
        with Client(relay.port) as client:
            client.write(startup(user="alice", database="postgres"))
            client.until(lambda seen: count(seen, "R") > 0)
            client.mark()
            client.write(answer)
            seen = client.wait_closed()
            if any(one.type == "E" for one in seen):
                assert error(seen)["C"] in ("08P01", "28P01", "28000"), (answer[:40], error(seen))


@pytest.mark.both
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", "QPBDESHXp")
def test_message_of_wrong_length_ends_the_connection(relay, kind, length):
    with login(relay.port) as client:
        client.write(message(kind, b"abc\0", length))
        assert_refused(client)
    assert_serves(relay)


def test_message_of_enormous_length_is_not_allocated(gateway):
    # One that PostgreSQL would accept: only what has come may take memory.
    relay = gateway()
    with login(relay.port):
        before = relay.memory()
    clients = [login(relay.port) for _ in range(20)]
    for client in clients:
        client.write(message("P", b"x" * 1000, length=0x3FFFFFF0))
        client.flush()
    assert relay.memory() - before < 16 << 20
    for client in clients:
        client.reset()
    assert_serves(relay)


@pytest.mark.parametrize("kind", ["\0", "Z", "q", "1", "~"])
def test_unknown_message_type_answers_as_postgres(same, kind):
    same([[message(kind, b"abc\0"), sync()]], ignore="FLR", reason="the gateway answers this itself")


def test_startup_packet_after_login_ends_the_connection(relay):
    with login(relay.port) as client:
        client.write(startup(**WHO))
        assert_refused(client)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(message("Q", b"select 1"), id="Query without end"),
        pytest.param(message("Q", b""), id="Query without text"),
        pytest.param(message("Q", cstring("select 1") + b"more"), id="Query with more behind it"),
        pytest.param(message("P", b"name"), id="Parse name without end"),
        pytest.param(message("P", cstring("a") + b"select 1"), id="Parse text without end"),
        pytest.param(message("P", cstring("a") + cstring("select 1")), id="Parse without types"),
        pytest.param(
            message("P", cstring("a") + cstring("select 1") + b"\xff\xff"), id="Parse of 65535 types that are not there"
        ),
        pytest.param(message("P", cstring("a") + cstring("select 1") + b"\0\0more"), id="Parse with more behind it"),
        pytest.param(message("P", b""), id="Parse of nothing"),
        pytest.param(message("B", b""), id="Bind of nothing"),
        pytest.param(message("B", b"portal"), id="Bind portal without end"),
        pytest.param(message("B", b"\0statement"), id="Bind statement without end"),
        pytest.param(message("B", b"\0\0\xff\xff"), id="Bind of 65535 formats that are not there"),
        pytest.param(message("D", b""), id="Describe of nothing"),
        pytest.param(message("D", b"S"), id="Describe without name"),
        pytest.param(message("D", b"Sname"), id="Describe name without end"),
        pytest.param(message("C", b""), id="Close of nothing"),
        pytest.param(message("C", b"Sname"), id="Close name without end"),
        pytest.param(message("E", b""), id="Execute of nothing"),
        pytest.param(message("E", b"\0"), id="Execute without limit"),
        pytest.param(message("F", b""), id="FunctionCall of nothing"),
        pytest.param(message("H", b"x"), id="Flush with a body"),
    ],
)
def test_broken_body_answers_as_postgres(same, data):
    # PgBouncer ends the connection; PostgreSQL reports 08P01 and skips to Sync.
    owed = [] if data[:1] in b"QF" else [sync()]
    same([[data, *owed]], ignore="FLR", reason="the gateway reads these messages itself")
    same([[query("begin")], [data, *owed], [query("rollback")]], ignore="FLR", reason="the gateway reads these itself")


def test_sync_with_a_body_answers_as_postgres(same):
    same([[message("S", b"x")]], ignore="FLR", reason="the gateway reads these messages itself")


@pytest.mark.both
def test_random_bytes_after_login_harm_nobody_else(relay):
    rng = random.Random(7)
    kinds = b"QPBDECSHFXdcfp\0Z"
    with login(relay.port) as bystander:
        for _ in range(150):
            client = login(relay.port)
            for _ in range(rng.randrange(1, 6)):
                body = rng.randbytes(rng.randrange(0, 60))
                length = rng.choice([None, None, None, rng.randrange(0, 100)])
                client.write(message(chr(rng.choice(kinds)), body, length))
            client.pump(0.01)
            client.reset()
            assert bystander.value("select 'fine'") == "fine"


def test_random_bytes_instead_of_startup_harm_nobody_else(relay):
    rng = random.Random(8)
    for _ in range(300):
        client = Client(relay.port)
        body = rng.randbytes(rng.randrange(0, 80))
        client.write(rng.choice([body, packet(body), packet(struct.pack("!HH", 3, 0) + body)]))
        client.pump(0.01)
        client.reset()
    assert_serves(relay)


@pytest.mark.parametrize("connections", [pytest.param(2000), pytest.param(10_000, marks=pytest.mark.soak)])
def test_silent_connections_keep_nobody_out(gateway, connections):
    # They never speak; those who do are served, and the login timeout ends the others.
    relay = gateway(max_client_conn=connections + 100, client_login_timeout=2.0)
    silent = [Client(relay.port) for _ in range(connections)]
    assert_serves(relay)
    for client in silent[::7]:
        client.reset()
    assert_serves(relay)
    waiting = [client for number, client in enumerate(silent) if number % 7]
    for client in waiting:
        seen = client.wait_closed()
        assert all(one.type == "E" for one in seen)
        client.socket.close()


def test_half_a_startup_packet_is_ended_by_the_login_timeout(gateway):
    relay = gateway(client_login_timeout=1.0)
    with Client(relay.port) as nothing, Client(relay.port) as half, login(relay.port) as other:
        half.write(startup(**WHO)[:9])
        for client in (nothing, half):
            client.wait_closed()
        assert other.value("select 1") == "1"


def test_error_flood_leaves_no_open_files(gateway):
    relay = gateway()
    (worker,) = relay.workers()
    assert_serves(relay)

    def files() -> int:
        return len(os.listdir(f"/proc/{worker}/fd"))

    before = files()
    for number in range(200):
        with Client(relay.port) as client:
            client.write(
                [startup(user="nobody here", database="nowhere"), b"x" * 9, ssl_request(), bytes(8)][number % 4]
            )
            client.pump(0.01)
    eventually(lambda: files() <= before + 2, "its files closed")


def test_extended_messages_without_sync_then_silence_then_sync(relay):
    # An unfinished request costs nobody else a server for longer than its client lives.
    with login(relay.port) as client:
        client.write(parse("select 1", "a") + describe_statement("a") + bind(statement="a") + execute())
        client.flush()
    assert_serves(relay)
    with login(relay.port) as client:
        client.ask(run("select 1") + sync())
