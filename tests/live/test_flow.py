"""The flow of bytes: slow readers, eager writers, huge messages; memory stays bounded and nobody waits for another.

Full sizes run with --soak. Manual: "Message Flow".
"""

from __future__ import annotations

import socket

import pytest

from .client import Client, count, eventually, login, types, value
from .endpoints import Endpoint
from .messages import TEXT, bind, execute, parse, query, run, sync
from .player import sizes

MB = 1 << 20
GROWTH = 1 * MB + 512 * 1024  # what a worker may grow by: its buffers and the allocator's steps


def rows_of(kilobytes: int, rows: int) -> str:
    return f"select repeat('x', {kilobytes * 1024}) from generate_series(1, {rows})"


def warmed(relay: Endpoint) -> int:
    """The memory of a gateway that has already carried something large."""
    with login(relay.port) as client:
        client.ask(query(rows_of(64, 100)))
        client.messages.clear()
    return relay.memory()


@pytest.mark.both
@pytest.mark.parametrize("megabytes", [60, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", ["one row", "many rows"])
def test_result_to_a_slow_reader_is_not_buffered(gateway, megabytes, shape):
    relay = gateway(default_pool_size=2)
    before = warmed(relay)
    with login(relay.port, receive_buffer=16384) as slow, login(relay.port) as other:
        slow.write(query(rows_of(1024 * megabytes, 1) if shape == "one row" else rows_of(16, 64 * megabytes)))
        slow.flush(reading=False)
        received = checked = 0
        slow.socket.setblocking(True)
        slow.socket.settimeout(30)
        tail = b""
        while not tail.endswith(b"Z\0\0\0\5I"):
            data = slow.socket.recv(MB)
            received += len(data)
            tail = (tail + data)[-6:]
            if received // MB > checked:
                checked = received // MB
                assert other.value("select 1") == "1", "others wait for the slow reader"
                assert relay.memory() - before < GROWTH
        assert received > megabytes * MB
        slow.socket.setblocking(False)
        assert slow.value("select 'in step'") == "in step"
    assert relay.memory() - before < GROWTH


def test_reader_that_stops_altogether_stops_its_server_only(gateway, database):
    relay = gateway(default_pool_size=2)
    before = warmed(relay)
    with login(relay.port, receive_buffer=8192) as stopped, login(relay.port) as other:
        stopped.write(query(rows_of(16, 4000)))
        stopped.flush(reading=False)
        waiting = "select count(*) from pg_stat_activity where wait_event = 'ClientWrite'"
        eventually(lambda: database.execute(waiting).fetchone() == (1,), "PostgreSQL to wait for the reader")
        for number in range(50):
            assert other.value(f"select {number}") == str(number)
        assert relay.memory() - before < GROWTH
        stopped.reset()


@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_bind_of_many_megabytes_streams(gateway, megabytes):
    relay = gateway(default_pool_size=2)
    before = warmed(relay)
    data = bytes(megabytes * MB)
    with login(relay.port) as client, login(relay.port) as other:
        client.ask(parse("select length($1::bytea)", "big") + sync())
        peak = 0
        client.messages.clear()
        client.mark()
        client.write(bind(data, statement="big", formats=[1]) + execute() + sync())
        while not count(client.messages, "Z"):
            client.pump(0.05)
            peak = max(peak, relay.memory())
        assert other.value("select 1") == "1"
        assert [row.values for row in client.messages if row.type == "D"] == [[str(len(data)).encode()]]
    assert peak - before < 4 * MB


@pytest.mark.parametrize("rounds", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_pipeline_written_without_reading_does_not_deadlock(relay, item, database, rounds):
    # The client writes all before it reads anything: both directions fill up.
    insert = parse("insert into item values ($1, $2)", "put", [23, TEXT])
    with login(relay.port) as client:
        client.write(insert)
        for number in range(rounds):
            client.write(bind(number, "row", statement="put") + execute() + (sync() if number % 100 == 99 else b""))
        client.write(sync())
        while client.unsent:
            client.pump(1.0)  # libpq reads while it writes; the next test does not
        client.until(lambda seen: count(seen[-1:], "Z") > 0 and count(seen, "Z") == rounds // 100 + 1, 60)
    assert database.execute("select count(*) from item").fetchone() == (rounds,)


def test_large_answers_to_a_pipeline_that_is_not_read_do_not_deadlock_others(gateway):
    # Megabytes written, megabytes owed, nothing read: that client waits, nobody else does.
    relay = gateway(default_pool_size=2)
    before = warmed(relay)
    with login(relay.port, receive_buffer=8192) as greedy, login(relay.port) as other:
        greedy.write((run("select repeat('x', 100000)") + sync()) * 200 + query("select '" + "y" * 4 * MB + "'"))
        for _ in range(20):
            greedy.pump(0.01, reading=False)
        for number in range(20):
            assert other.value(f"select {number}") == str(number)
        assert relay.memory() - before < 4 * MB
        seen = greedy.until(lambda seen: count(seen, "Z") == 201, 30)
        assert count(seen, "D") == 201


@pytest.mark.parametrize("boundary", [4096, 8192, 16384, 65536, 131072])
def test_rows_around_buffer_boundaries_pass(same, boundary):
    # Results near a multiple of a buffer hung others (1.3.1, #98).
    same([[query("".join(f"select repeat('z', {size});" for size in sizes(boundary)))]], ways=["whole"])
    same(
        [[*(part for size in sizes(boundary) for part in (run(f"select repeat('z', {size})"), sync()))]],
        ways=["whole", "at random, seed 1"],
    )


def test_query_texts_around_buffer_boundaries_pass(same):
    same(
        [[query("select '" + "q" * size + "'") for boundary in (4096, 65536) for size in sizes(boundary)]],
        ways=["whole", "at random, seed 2"],
    )


def test_one_byte_segments_through_a_tiny_receive_buffer(relay):
    with login(relay.port, receive_buffer=2048) as client:
        for byte in query(rows_of(1, 500)):
            client.write(bytes([byte]))
            client.flush()
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert count(seen, "D") == 500


def test_many_clients_with_large_results_at_once(gateway):
    relay = gateway(default_pool_size=3)
    clients = [login(relay.port) for _ in range(30)]
    for client in clients:
        client.mark()
        client.write(query(rows_of(32, 20)))
        client.flush()
    for client in clients:
        seen = client.until(lambda seen: count(seen, "Z") > 0, 30)
        assert types(seen) == "T" + "D" * 20 + "CZ"
        client.close()


@pytest.mark.both
def test_clients_reset_in_the_middle_of_large_rows_leave_nothing(gateway, database):
    # Their servers come back clean: the next client gets no bytes that are not its own.
    relay = gateway(default_pool_size=3)
    for _ in range(4):
        clients = [login(relay.port, receive_buffer=8192) for _ in range(3)]
        for client in clients:
            client.write(query(rows_of(5 * 1024, 10)))
            client.flush(reading=False)
        for client in clients:
            client.pump(0.2)
            client.reset()
        assert value(relay.port, "select 'clean'") == "clean"
    relay.assert_no_leak()
    active = "select count(*) from pg_stat_activity where state = 'active' and query like 'select repeat%'"
    eventually(lambda: database.execute(active).fetchone() == (0,), "the end of queries that nobody waits for")


def test_half_closed_client_still_gets_its_answer_or_a_clean_end(relay):
    # FIN from the client behind its query, as `nc -N` sends it.
    with login(relay.port) as client:
        client.write(query("select 'last words'"))
        client.flush()
        client.socket.shutdown(socket.SHUT_WR)
        client.wait_closed()


def test_idle_clients_in_thousands_cost_little(gateway):
    relay = gateway(max_client_conn=1200)
    before = warmed(relay)
    clients: list[Client] = [login(relay.port) for _ in range(1000)]
    assert (relay.memory() - before) / 1000 < 16 * 1024
    for client in clients[::100]:
        assert client.value("select 1") == "1"
    for client in clients:
        client.close()
