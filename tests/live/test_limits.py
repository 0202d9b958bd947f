"""Limits: never more servers than allowed, never fewer than possible, first come first served.

What PostgreSQL sees counts, sampled from pg_stat_activity while clients do their worst.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest

from .client import Client, count, error, eventually, login, value
from .endpoints import Endpoint
from .messages import WHO, query, startup

pytestmark = pytest.mark.usefixtures("pooler")

SERVERS = """
select count(*) from pg_stat_activity
where backend_type = 'client backend' and usename = any(%s) and datname = 'postgres'
"""


@contextmanager
def sampled(postgres, *users: str, fresh: bool = True) -> Iterator[Callable[[], int]]:
    """Sample how many servers the users have together, without a pause; the function returns the highest number so far.

    A fresh gateway has none yet: those of an earlier one have to end first.

    Not for postgres: the bench and the gateway's probe log in as postgres, too.
    """
    stop, highest = threading.Event(), [0]

    dsn = f"host=127.0.0.1 port={postgres.port} user=postgres dbname=postgres application_name=bench"
    with psycopg.connect(dsn, autocommit=True) as connection:

        def sample() -> None:
            while not stop.is_set():
                highest[0] = max(highest[0], servers(connection, *users))

        if fresh:
            eventually(lambda: not servers(connection, *users), "the end of an earlier gateway's servers")
        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield lambda: highest[0]
        finally:
            stop.set()
            thread.join()


def servers(database, *users: str) -> int:
    """How many backends the users have in the database postgres."""
    return int(database.execute(SERVERS, (list(users),)).fetchone()[0])


def storm(port: int, clients: int, queries: int, sql: str = "select pg_sleep(0.002)") -> None:
    """So many clients at once, each with so many queries; every one must be answered."""
    connections = [login(port, user="alice") for _ in range(clients)]
    for _ in range(queries):
        for client in connections:
            client.mark()
            client.write(query(sql))
            client.flush()
        for client in connections:
            seen = client.until(lambda seen: count(seen, "Z") > 0, 30)
            assert count(seen, "E") == 0, list(map(str, seen))
    for client in connections:
        client.close()


@pytest.mark.both
@pytest.mark.parametrize("workers", [1, 2])
def test_pool_size_is_never_exceeded(gateway, postgres, workers):
    relay = gateway(workers=workers, default_pool_size=4)
    with sampled(postgres, "alice") as highest:
        storm(relay.port, 40, 10)
    assert 1 <= highest() <= 4


def test_pool_size_is_never_exceeded_while_clients_and_servers_die(gateway, postgres, database):
    relay = gateway(workers=2, default_pool_size=4)
    kill = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'alice' and datname = 'postgres'"
    with sampled(postgres, "alice") as highest:
        for _ in range(6):
            clients = [login(relay.port, user="alice") for _ in range(20)]
            for number, client in enumerate(clients):
                client.write(query("select pg_sleep(0.01)"))
                client.flush()
                if number % 5 == 0:
                    client.reset()
            database.execute(kill)
            for number, client in enumerate(clients):
                if number % 5:
                    client.until(lambda seen: count(seen, "Z") > 0 or count(seen, "E") > 0)
                    client.close()
    assert highest() <= 4


@pytest.mark.parametrize("workers", [1, 2])
def test_pool_capacity_does_not_shrink_after_many_hand_overs(gateway, workers):
    # Servers that got lost one by one: in the end a pool of three must still run three at once.
    relay = gateway(workers=workers, default_pool_size=3)
    storm(relay.port, 30, 10, "select 1")
    clients = [login(relay.port, user="alice") for _ in range(3)]
    for client in clients:
        client.ask(query("begin"))
        assert client.value("select 1") == "1"
    for client in clients:
        client.close()


def test_waiting_clients_are_served_first_in_first_out(pool_of_one):
    with login(pool_of_one.port) as holder:
        holder.ask(query("begin"))
        waiting = [login(pool_of_one.port) for _ in range(10)]
        for number, client in enumerate(waiting):
            client.mark()
            client.write(query(f"insert into item values ({1000 + number}, clock_timestamp()::text)"))
            client.flush()
            # It must be in the queue before the next one writes.
            eventually(partial(is_queued, pool_of_one, number + 1), "a place in the queue")
        holder.ask(query("truncate item"))
        holder.ask(query("commit"))
        for client in waiting:
            client.until(lambda seen: count(seen, "Z") > 0)
            client.close()
        order = [row[0] for row in holder.rows("select id from item order by name")]
        assert order == [str(1000 + number) for number in range(10)]


def is_queued(relay: Endpoint, clients: int) -> bool:
    """Tell whether so many clients wait for a server."""
    pools = relay.console("show pools")
    return bool(sum(row["cl_waiting"] for row in pools if row["database"] == "postgres") == clients)


@pytest.mark.parametrize("workers", [1, 2])
def test_max_db_connections_holds_over_all_users(gateway, postgres, workers):
    relay = gateway(workers=workers, default_pool_size=5, max_db_connections=3)
    with sampled(postgres, "alice", "bob") as highest:
        clients = [login(relay.port, user=user) for user in ("alice", "bob") * 10]
        for _ in range(3):
            for client in clients:
                client.mark()
                client.write(query("select pg_sleep(0.002)"))
                client.flush()
            for client in clients:
                assert count(client.until(lambda seen: count(seen, "Z") > 0, 30), "E") == 0
        for client in clients:
            client.close()
    assert 1 <= highest() <= 3


@pytest.mark.parametrize("workers", [1, 2])
def test_max_client_conn_refuses_with_53300(gateway, workers):
    relay = gateway(workers=workers, max_client_conn=10)
    clients = [login(relay.port) for _ in range(10)]
    try:
        for _ in range(3):
            with Client(relay.port) as refused:
                refused.write(startup(**WHO))
                fields = error(refused.wait_closed())
                assert (fields["C"], fields["S"]) == ("53300", "FATAL")
                assert "max_client_conn" in fields["M"] + fields.get("H", "")
        clients.pop().close()
        eventually(lambda: _login_works(relay.port), "a place for another client")
    finally:
        for client in clients:
            client.close()


def test_max_client_conn_does_not_lock_the_console_out(gateway):
    relay = gateway(max_client_conn=3)
    clients = [login(relay.port) for _ in range(3)]
    assert relay.console("show pools")
    for client in clients:
        client.close()


def test_max_client_limits_of_database_and_user_name_themselves(gateway):
    for setting in ("max_db_client_connections", "max_user_client_connections"):
        relay = gateway(**{setting: 2})
        with login(relay.port), login(relay.port), Client(relay.port) as third:
            third.write(startup(**WHO))
            fields = error(third.wait_closed())
            assert fields["C"] == "53300"
            assert setting in fields["M"] + fields.get("H", "")


def test_pool_size_of_database_and_user_override_the_default(gateway, postgres):
    relay = gateway(default_pool_size=1, database={"shop": {"pool_size": 3}}, user={"alice": {"pool_size": 2}})
    for database, user, size in (("shop", "postgres", 3), ("postgres", "alice", 2), ("postgres", "postgres", 1)):
        clients = [login(relay.port, database=database, user=user) for _ in range(size + 1)]
        for client in clients[:size]:
            client.ask(query("begin"))
        clients[size].write(query("select 'late'"))
        clients[size].flush()
        assert not clients[size].pump(0.2), f"more than {size} servers for {user} on {database}"
        for client in clients:
            client.close()


def test_reserve_pool_serves_who_waited_too_long(gateway, postgres):
    relay = gateway(default_pool_size=1, reserve_pool_size=1, reserve_pool_timeout=0.3)
    with login(relay.port) as holder, login(relay.port) as waiting:
        holder.ask(query("begin"))
        assert waiting.value("select 'from the reserve'") == "from the reserve"


def test_min_pool_size_keeps_servers_ready(gateway, database):
    relay = gateway(default_pool_size=5, min_pool_size=3)
    assert value(relay.port, "select 1", user="alice") == "1"
    with login(relay.port, user="alice"):
        eventually(lambda: servers(database, "alice") == 3, "three servers ready")


def test_idle_servers_are_closed_after_server_idle_timeout(gateway, database):
    relay = gateway(default_pool_size=5, server_idle_timeout=0.5)
    storm(relay.port, 5, 2)
    eventually(lambda: servers(database, "alice") == 0, "no servers left")
    assert value(relay.port, "select 1", user="alice") == "1"


def test_servers_are_replaced_after_server_lifetime(gateway):
    relay = gateway(server_lifetime=0.5)
    with login(relay.port) as client:
        first = client.value("select pg_backend_pid()")
        eventually(lambda: client.value("select pg_backend_pid()") != first, "another server")


def _login_works(port: int) -> bool:
    try:
        login(port).close()
    except AssertionError:
        return False
    return True


def test_worker_without_descriptors_goes_on_and_takes_the_next_client_when_one_leaves(gateway):
    relay = gateway(default_pool_size=1)
    (worker,) = relay.workers()
    first = login(relay.port)
    assert first.value("select 1") == "1"
    open_files = len(os.listdir(f"/proc/{worker}/fd"))
    hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (open_files + 1, hard))
    second, third = login(relay.port), Client(relay.port)
    third.write(startup(user="postgres", database="postgres"))
    third.flush()
    eventually(lambda: "cannot accept a client: Too many open files" in relay.log, "the refusal in the log")
    began = time.monotonic()
    for number in range(20):
        assert first.value(f"select {number}, pg_sleep(0.01)") == str(number)
    most = 10 * (time.monotonic() - began) + 10
    assert relay.log.count("cannot accept") <= most, "between two tries it waits for its next look at the clock"
    second.close()
    third.until(lambda seen: count(seen, "Z") > 0)
    assert third.value("select 3") == "3"
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (hard, hard))
