"""Cancel: it reaches the query it was meant for, and never anybody else's.

Manual: "Canceling Requests in Progress".
"""

from __future__ import annotations

import asyncio
import struct
import threading

import asyncpg
import psycopg
import pytest

from .client import Client, cancel, count, error, eventually, login, types, value
from .endpoints import frozen
from .messages import WHO, cancel_request, copy_data, packet, query, run, startup, sync

SLEEP = "select pg_sleep(30)"


def running(database, what: str = "pg_sleep") -> None:
    """Wait until PostgreSQL runs such a query."""
    text = "select count(*) from pg_stat_activity where state = 'active' and query like %s and pid <> pg_backend_pid()"
    eventually(lambda: database.execute(text, (f"%{what}%",)).fetchone() != (0,), f"{what} to run")


def assert_cancelled(client: Client) -> None:
    seen = client.until(lambda seen: count(seen, "Z") > 0)
    assert error(seen)["C"] == "57014", error(seen)
    assert client.value("select 'usable'") == "usable"


@pytest.mark.both
@pytest.mark.parametrize("version", [(3, 0), (3, 2)], ids=["3.0", "3.2"])
@pytest.mark.parametrize("request_", [query(SLEEP), run(SLEEP) + sync()], ids=["simple", "extended"])
def test_cancel_running_query_ends_it_with_57014(relay, database, version, request_):
    with login(relay.port, version=version) as client:
        client.mark()
        client.write(request_)
        client.flush()
        running(database)
        cancel(relay.port, client.pid, client.key)
        assert_cancelled(client)


def test_cancel_in_transaction_aborts_the_transaction(same, relay, database):
    with login(relay.port) as client:
        client.ask(query("begin"))
        client.mark()
        client.write(query(SLEEP))
        client.flush()
        running(database)
        cancel(relay.port, client.pid, client.key)
        assert error(client.until(lambda seen: count(seen, "Z") > 0))["C"] == "57014"
        assert error(client.ask(query("select 1")))["C"] == "25P02"
        assert types(client.ask(query("rollback"))) == "CZ"


def test_cancel_in_copy_out_ends_it(relay):
    with login(relay.port) as client:
        client.mark()
        client.write(query("copy (select repeat('x', 9000), pg_sleep(0.01) from generate_series(1, 10000)) to stdout"))
        client.until(lambda seen: count(seen, "d") > 0)
        cancel(relay.port, client.pid, client.key)
        assert_cancelled(client)


def test_cancel_in_copy_in_ends_it(relay, item, items):
    with login(relay.port) as client:
        client.mark()
        client.write(query("copy item from stdin") + copy_data("1\tone\n"))
        client.until(lambda seen: count(seen, "G") > 0)
        cancel(relay.port, client.pid, client.key)
        client.write(copy_data("2\ttwo\n"))
        assert_cancelled(client)
    assert items() == []


@pytest.mark.both
def test_cancel_of_idle_client_puts_nothing_on_its_connection(relay):
    # A stray ReadyForQuery shifted every later result by one (#141, #223).
    with login(relay.port) as client:
        for number in range(20):
            cancel(relay.port, client.pid, client.key)
            assert client.value(f"select {number}") == str(number)
        assert not client.pump(0.1)


def test_cancel_of_idle_client_in_transaction_changes_nothing(relay):
    with login(relay.port) as client:
        client.ask(query("begin"))
        cancel(relay.port, client.pid, client.key)
        assert client.value("select 1") == "1"
        assert types(client.ask(query("commit"))) == "CZ"


@pytest.mark.both
def test_cancel_after_the_server_moved_to_another_client_hits_nobody(pool_of_one, database):
    # The cancel of A arrives when its query is over and B has the server (#38, #245, #717).
    with login(pool_of_one.port) as one, login(pool_of_one.port) as two:
        one.value("select 1")
        two.mark()
        two.write(query("select pg_sleep(0.5), 'mine'"))
        two.flush()
        running(database)
        for _ in range(10):
            cancel(pool_of_one.port, one.pid, one.key)
        seen = two.until(lambda seen: count(seen, "Z") > 0)
        assert types(seen) == "TDCZ", list(map(str, seen))


def test_cancel_storm_on_a_shared_server_hits_only_its_own_client(pool_of_one):
    # One server, short queries, cancels without end: the bystander never sees an error.
    stop = threading.Event()
    with login(pool_of_one.port) as victim, login(pool_of_one.port) as bystander:

        def storm() -> None:
            while not stop.is_set():
                cancel(pool_of_one.port, victim.pid, victim.key)

        threads = [threading.Thread(target=storm) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(300):
                victim.mark()
                victim.write(query("select pg_sleep(0.001)"))
                victim.flush()
                assert bystander.value(f"select {number}") == str(number)
                seen = victim.until(lambda seen: count(seen, "Z") > 0)
                assert all(one.fields["C"] == "57014" for one in seen if one.type == "E")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        victim.mark()
        assert victim.value("select 'fine'") == "fine"


def test_cancel_while_queued_ends_the_waiting_query(pool_of_one):
    # #1222, #1314: the client waits for a server, there is nothing on PostgreSQL's side to cancel.
    with login(pool_of_one.port) as holder, login(pool_of_one.port) as waiting:
        holder.ask(query("begin"))
        for request in (query("select 'never'"), run("select 'never'") + run("select 'nor this'") + sync()):
            waiting.mark()
            waiting.write(request)
            waiting.flush()
            cancel(pool_of_one.port, waiting.pid, waiting.key)
            seen = waiting.until(lambda seen: count(seen, "Z") > 0)
            assert (error(seen)["C"], types(seen)) == ("57014", "EZ")
        assert types(holder.ask(query("commit"))) == "CZ"
        assert waiting.value("select 'next'") == "next"


def test_cancel_does_not_overtake_its_query(pool_of_one):
    # All of it has come when the worker looks, and the connection of who asks is the first that it is told of.
    with login(pool_of_one.port) as holder, login(pool_of_one.port) as waiting, Client(pool_of_one.port) as asker:
        holder.ask(query("begin"))
        waiting.mark()
        request = cancel_request(waiting.pid, waiting.key)
        with frozen(pool_of_one):
            for client, data in ((asker, request[:1]), (waiting, query("select 'never'")), (asker, request[1:])):
                client.write(data)
                client.flush()
        asker.wait_closed()
        assert error(waiting.until(lambda seen: count(seen, "Z") > 0))["C"] == "57014"
        holder.ask(query("commit"))


@pytest.mark.both
def test_cancel_with_wrong_secret_is_ignored(relay, database):
    with login(relay.port) as client:
        client.mark()
        client.write(query("select pg_sleep(0.5), 'done'"))
        client.flush()
        running(database)
        wrong = bytes(byte ^ 1 for byte in client.key)
        for key in (wrong, b"\0" * len(client.key), client.key + b"\0" * 28, client.key[:3]):
            cancel(relay.port, client.pid, key)
        cancel(relay.port, client.pid + 1, client.key)
        assert types(client.until(lambda seen: count(seen, "Z") > 0)) == "TDCZ"


@pytest.mark.parametrize("length", [0, 1, 4, 31, 32, 33, 255, 256, 257, 5000])
def test_cancel_with_key_of_any_length_harms_nobody(relay, length):
    with Client(relay.port) as client:
        client.write(cancel_request(12345, b"k" * length))
        assert client.wait_closed() == []
    assert value(relay.port, "select 1") == "1"


def test_cancel_request_cut_short_or_followed_by_more_harms_nobody(relay):
    # #904, #928, #846: the process ended.
    with login(relay.port) as victim:
        whole = cancel_request(victim.pid, victim.key)
        cuts = [whole[:4], whole[:8], whole[:11], whole[:-1], whole + b"more" * 100, whole + whole]
        cuts += [packet(struct.pack("!HH", 1234, 5678)), whole + startup(**WHO)]
        for data in cuts:
            client = Client(relay.port)
            client.write(data)
            client.pump(0.05)
            client.reset()
        assert victim.value("select 1") == "1"


def test_cancel_keys_differ_from_client_to_client(relay):
    clients = [login(relay.port, version=(3, number % 2 * 2)) for number in range(50)]
    assert len({(client.pid, client.key) for client in clients}) == 50
    assert len({client.key for client in clients}) == 50
    for client in clients:
        client.close()


@pytest.mark.both
def test_cancel_reaches_the_client_whatever_worker_it_arrives_at(gateway, database):
    relay = gateway(workers=2, default_pool_size=4)
    with login(relay.port) as one, login(relay.port, version=(3, 2)) as two:
        for _ in range(6):
            for client in (one, two):
                client.mark()
                client.write(query(SLEEP))
                client.flush()
                running(database)
                cancel(relay.port, client.pid, client.key)
                assert_cancelled(client)


def test_cancel_then_settings_of_both_clients_stand(pool_of_one):
    # A cancel during the replay of SET left a client with the settings of another (#298).
    stop = threading.Event()
    with login(pool_of_one.port) as one, login(pool_of_one.port) as two:
        one.ask(query("set timezone to 'Asia/Tokyo'"))
        two.ask(query("set timezone to 'America/Lima'"))

        def storm() -> None:
            while not stop.is_set():
                cancel(pool_of_one.port, one.pid, one.key)

        thread = threading.Thread(target=storm)
        thread.start()
        try:
            for _ in range(200):
                seen = one.ask(query("show timezone"))
                assert [row.values for row in seen if row.type == "D"] in ([[b"Asia/Tokyo"]], [])
                assert two.value("show timezone") == "America/Lima"
        finally:
            stop.set()
            thread.join()


def test_cancel_of_a_client_that_left_is_ignored(relay):
    with login(relay.port) as client:
        pid, key = client.pid, client.key
    with login(relay.port) as other:
        for _ in range(5):
            cancel(relay.port, pid, key)
            assert other.value("select 1") == "1"


def test_cancel_by_psycopg_and_asyncpg_interrupts(relay, database):
    def cancel_when_running(connection: psycopg.Connection) -> None:
        running(database)
        connection.cancel_safe(timeout=5)

    with relay.connect() as connection:
        thread = threading.Thread(target=cancel_when_running, args=[connection])
        thread.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute(SLEEP)
        thread.join()
        assert connection.execute("select 1").fetchone() == (1,)

    async def interrupted() -> object:
        connection = await asyncpg.connect(host="127.0.0.1", port=relay.port, user="postgres", database="postgres")
        try:
            with pytest.raises(asyncio.TimeoutError):
                await connection.execute(SLEEP, timeout=0.2)
            return await connection.fetchval("select 1")
        finally:
            await connection.close()

    assert asyncio.run(interrupted()) == 1
