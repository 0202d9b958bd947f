"""What changes under a running gateway: its files, where its nodes are, and what its servers report.

Who is connected stays, whoever waits is answered, and a faulty file changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

import pytest

from gateway.embedded import Cluster, PostgresNode, free_ports

from .client import Client, count, error, eventually, login, types, value
from .endpoints import ADMIN_PASSWORD, topology
from .messages import WHO, bind, close_statement, execute, parse, query, run, startup, sync
from .test_faults import terminate_backends
from .test_limits import sampled, servers

pytestmark = pytest.mark.usefixtures("pooler")

ADMIN = {"postgres": ADMIN_PASSWORD}
NOWHERE = f"{'x' * 64}.invalid"  # a name that cannot be, so that no name server has to be asked
SHOP: dict[str, Any] = {"user": "alice", "database": "shop"}


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest) -> Iterator[PostgresNode]:
    """Another PostgreSQL, with the users and databases of the first."""
    with Cluster(version=request.config.getoption("--postgres"), standbys=0) as cluster:
        cluster.primary.psql("create role alice login superuser; create database shop")
        yield cluster.primary


def text_of(relay, postgres, *databases: str, more: str = "", **settings: Any) -> str:
    """A topology with these databases and no others; `more` is added to it."""
    tables = {name: settings.pop(name, {}) for name in databases}
    text = topology(postgres.port, relay.port, database=tables, **settings)
    return text.replace('[database."*"]', "[database.unused]") + more


def reload(relay, text: str) -> None:
    """Have the gateway take a topology, and wait until every worker has."""
    reloaded = relay.log.count("reloaded ")
    relay.config.write_text(text)
    relay.reload()
    eventually(lambda: relay.log.count("reloaded ") > reloaded, "the reload")
    relay.console("show pools")  # for which each worker is asked, behind its settings


def cluster_of(name: str, port: int, host: str = "127.0.0.1") -> str:
    """A cluster of one node, and a database of that name in it."""
    return f"""
[cluster.{name}]
probe_interval = 0.2
probe_user = "postgres"
[[cluster.{name}.node]]
name = "{name}"
host = "{host}"
port = {port}
[database.{name}]
cluster = "{name}"
dbname = "postgres"
"""


def node_at(node: PostgresNode, host: str = "127.0.0.1") -> list[dict[str, Any]]:
    """The node pg1, wherever it is now."""
    return [{"name": "pg1", "host": host, "port": node.port}]


def refusal(port: int, **who: Any) -> dict[str, str]:
    """The error that a login ends in; it is FATAL."""
    with Client(port) as client:
        client.write(startup(**who))
        fields = error(client.wait_closed())
        assert fields["S"] == "FATAL"
        return fields


def answer(client: Client) -> list[Any]:
    """Wait for the answer to a query that was written: a row, or one error. Notices do not count."""
    seen = [one for one in client.until(lambda seen: count(seen, "Z") > 0 or count(seen, "E") > 0) if one.type != "N"]
    assert count(seen, "D") + count(seen, "E") == 1, list(map(str, seen)) or client.closed
    return seen


def everywhere(relay, **who: Any) -> None:
    """Have every worker know what a server reports: its first client has to wait for one."""
    clients = list[Client]()

    def seen() -> bool:
        clients.append(login(relay.port, **who))
        rows = relay.console("show clients")
        return len({row["worker"] for row in rows}) == len(relay.workers())

    eventually(seen, "a client in every worker")
    for client in clients:
        client.close()


def waiting(relay, who: dict[str, Any], clients: int) -> list[Client]:
    """Clients that wait for the only server, each with a query."""
    made = [login(relay.port, **who) for _ in range(clients)]
    for client in made:
        client.mark()
        client.write(query("select inet_server_port()"))
        client.flush()
    eventually(lambda: cl_waiting(relay, who["database"]) == clients, "the queue")
    return made


def cl_waiting(relay, database: str) -> int:
    return sum(int(row["cl_waiting"]) for row in relay.console("show pools") if row["database"] == database)


def port_of(client: Client) -> int:
    """The port of the PostgreSQL that a client is served by."""
    return int(client.value("select inet_server_port()") or 0)


def node(relay, name: str = "pg1") -> dict[str, Any]:
    return next(row for row in relay.console("show nodes") if row["name"] == name)


# Databases that come and go.


def test_reload_adds_a_database_of_a_dead_node_others_go_on_and_it_is_served_once_up(gateway, postgres, other):
    relay = gateway(query_wait_timeout=0.5, server_login_retry=0.1)
    other.stop()
    try:
        with login(relay.port) as idle, login(relay.port, user="alice") as busy:
            busy.ask(query("begin"))
            text = text_of(relay, postgres, "postgres", query_wait_timeout=0.5, server_login_retry=0.1)
            reload(relay, text + cluster_of("late", other.port))
            for _ in range(3):
                assert refusal(relay.port, user="alice", database="late")["C"] in ("57P03", "53300")
                assert idle.value("select 1") == "1"
                assert busy.value("select 1") == "1"
            assert types(busy.ask(query("commit"))) == "CZ"
            other.start()
            eventually(lambda: logs_in(relay.port, user="alice", database="late"), "the late database")
            assert value(relay.port, "select inet_server_port()", user="alice", database="late") == str(other.port)
            assert port_of(idle) == postgres.port
    finally:
        other.start()


def test_reload_that_adds_a_cluster_leaves_the_servers_of_others_alone(gateway, postgres, other):
    # Idle servers were closed, because every cluster was watched anew and for a moment had no address.
    relay = gateway()
    with login(relay.port) as client:
        before = client.value("select pg_backend_pid()")
        reload(relay, text_of(relay, postgres, "postgres", more=cluster_of("late", other.port)))
        assert value(relay.port, "select inet_server_port()", database="late") == str(other.port)
        assert client.value("select pg_backend_pid()") == before


def test_database_removed_new_clients_are_refused_and_those_in_it_go_on(gateway, postgres):
    relay = gateway(default_pool_size=2)
    with login(relay.port, **SHOP) as idle, login(relay.port, **SHOP) as busy:
        busy.ask(query("begin"))
        reload(relay, text_of(relay, postgres, "postgres", default_pool_size=2))
        assert refusal(relay.port, **SHOP)["C"] == "3D000"
        assert busy.value("select 'in a transaction'") == "in a transaction"
        assert idle.value("select 'between two'") == "between two"
        reload(relay, text_of(relay, postgres, "postgres", "shop", default_pool_size=2))
        with login(relay.port, **SHOP) as new:
            assert new.value("select 'new'") == "new"
        assert types(busy.ask(query("commit"))) == "CZ"
        for client in (idle, busy):
            assert client.value("select 'still there'") == "still there"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("comes_back", [False, True], ids=["removed", "removed and added"])
def test_database_removed_while_clients_wait_in_its_pool_each_is_answered(gateway, postgres, comes_back, workers):
    relay = gateway(workers=workers)
    everywhere(relay, **SHOP)
    with login(relay.port, **SHOP) as holder:
        holder.ask(query("begin"))
        queue = waiting(relay, SHOP, 4)
        reload(relay, text_of(relay, postgres, "postgres", workers=workers))
        if comes_back:
            reload(relay, text_of(relay, postgres, "postgres", "shop", workers=workers))
            queue += waiting_more(relay, SHOP, 2, 6)
        assert types(holder.ask(query("commit"))) == "CZ"
        for client in queue:
            assert count(answer(client), "D") == 1
            client.close()


def waiting_more(relay, who: dict[str, Any], clients: int, together: int) -> list[Client]:
    """Clients that came after the others; they may have to wait for their login, too."""
    made = [Client(relay.port) for _ in range(clients)]
    for client in made:
        client.write(startup(**who) + query("select inet_server_port()"))
        client.flush()
    eventually(lambda: cl_waiting(relay, who["database"]) == together, "the queue")
    for client in made:
        while not client.closed and not count(client.messages, "Z"):
            client.pump(0.1)
        client.mark()
    return made


@pytest.mark.parametrize("ends", ["commit", "reset"])
def test_database_removed_while_a_client_is_in_a_transaction_the_pool_keeps_its_size(
    gateway, postgres, database, item, ends
):
    relay = gateway(default_pool_size=1, database={"sales": {"dbname": "postgres"}})
    who: dict[str, Any] = {"user": "alice", "database": "sales"}
    with sampled(postgres, "alice") as highest, login(relay.port, **who) as holder:
        holder.ask(query("begin; insert into item values (1, 'kept')"))
        for _ in range(3):
            reload(relay, text_of(relay, postgres, "postgres"))
            reload(relay, text_of(relay, postgres, "postgres", "sales", sales={"dbname": "postgres"}))
            with Client(relay.port) as new:
                new.write(startup(**who) + query("select 1"))
                new.flush()
                eventually(lambda: cl_waiting(relay, "sales") == 1 or new.pump(), "the queue")
        if ends == "commit":
            assert types(holder.ask(query("commit"))) == "CZ"
        else:
            holder.reset()
        assert value(relay.port, "select count(*) from item", **who) == ("1" if ends == "commit" else "0")
    assert highest() == 1


def test_database_that_changes_its_user_clients_that_wait_are_answered(gateway, postgres):
    # A pool that another had taken the place of was swept no more: who waited in it did so for ever.
    relay = gateway(database={"shop": {"user": "bob"}})
    with login(relay.port, **SHOP) as holder:
        holder.ask(query("begin"))
        queue = waiting(relay, SHOP, 2)
        reload(relay, text_of(relay, postgres, "postgres", "shop"))
        bob = Client(relay.port)
        bob.write(startup(user="bob", database="shop"))  # his pool is the next by that name
        bob.flush()
        eventually(lambda: cl_waiting(relay, "shop") >= 1 or bob.pump(), "bob")
        assert types(holder.ask(query("commit"))) == "CZ"
        for client in queue:
            answer(client)
            client.close()
        bob.until(lambda seen: count(seen, "Z") > 0)
        assert bob.value("select current_user") == "bob"
        bob.close()


def test_database_that_changes_its_user_who_waits_is_timed_out_at_the_latest(gateway, postgres):
    relay = gateway(database={"shop": {"user": "bob"}}, query_wait_timeout=1.0)
    with login(relay.port, **SHOP) as holder:
        holder.ask(query("begin"))
        queue = waiting(relay, SHOP, 1)
        reload(relay, text_of(relay, postgres, "postgres", "shop", query_wait_timeout=1.0))
        assert refusal(relay.port, user="bob", database="shop")["C"] == "53300"  # the holder has the only server
        assert error(answer(queue[0]))["C"] == "53300"
        assert types(holder.ask(query("commit"))) == "CZ"
        assert holder.value("select 'still there'") == "still there"


def test_database_that_changes_its_name_on_the_server_is_followed_between_transactions(gateway, postgres):
    relay = gateway(database={"sales": {"dbname": "shop"}})
    with login(relay.port, database="sales") as client:
        assert client.value("select current_database()") == "shop"
        client.ask(query("begin"))
        reload(relay, text_of(relay, postgres, "postgres", "sales", sales={"dbname": "postgres"}))
        assert client.value("select current_database()") == "shop"
        client.ask(query("commit"))
        assert client.value("select current_database()") == "postgres"


# Nodes that move.


@pytest.mark.parametrize("workers", [1, 2])
def test_node_moved_clients_follow_between_transactions(gateway, postgres, other, workers):
    relay = gateway(workers=workers)
    everywhere(relay, user="alice", database="postgres")
    idle = [login(relay.port, user="alice") for _ in range(4)]
    for client in idle:
        assert port_of(client) == postgres.port
        client.ask(parse("select inet_server_port()", "where") + sync())
    with login(relay.port, user="alice") as holder:
        holder.ask(query("begin"))
        queue = waiting(relay, {"user": "alice", "database": "postgres"}, 3)
        reload(relay, text_of(relay, postgres, "postgres", nodes=node_at(other), workers=workers))
        assert port_of(holder) == postgres.port  # to the end of its transaction
        assert types(holder.ask(query("commit"))) == "CZ"
        for client in queue:
            assert [row.values for row in answer(client) if row.type == "D"] == [[str(other.port).encode()]]
            client.close()
        assert port_of(holder) == other.port
    for client in idle:
        seen = client.ask(bind(statement="where") + execute() + sync())
        assert [row.values for row in seen if row.type == "D"] == [[str(other.port).encode()]]
        client.close()


def test_node_moved_no_server_stays_at_the_old_place(gateway, postgres, other, database):
    relay = gateway(default_pool_size=4)
    clients = [login(relay.port, user="alice") for _ in range(4)]
    for client in clients:
        client.ask(query("begin"))
    reload(relay, text_of(relay, postgres, "postgres", nodes=node_at(other), default_pool_size=4))
    for client in clients:
        client.ask(query("commit"))
    eventually(lambda: servers(database, "alice") == 0, "the end of the old servers")
    for client in clients:
        assert port_of(client) == other.port
        client.close()


def test_node_moved_to_and_fro_under_load_no_client_gets_an_error(gateway, postgres, other):
    relay = gateway(default_pool_size=3, workers=2)
    places = cycle([node_at(other), node_at(postgres, "localhost"), node_at(other, "localhost"), node_at(postgres)])
    with clients_at_work(relay, 4) as done:
        for place in [next(places) for _ in range(8)]:
            reload(relay, text_of(relay, postgres, "postgres", nodes=place, default_pool_size=3, workers=2))
            eventually(lambda: value(relay.port, "select inet_server_port()") == str(place[0]["port"]), "the move")  # noqa: B023
            before = list(done)
            eventually(lambda: all(now > then for now, then in zip(done, before, strict=True)), "more work")  # noqa: B023


@contextmanager
def clients_at_work(relay, threads: int, **who: Any) -> Iterator[list[int]]:
    """Clients that connect, query in transactions and with prepared statements, and disconnect; none may fail.

    Yields how many connections each has finished.
    """
    stop, failures, done = threading.Event(), list[BaseException](), [0] * threads

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                with relay.connect(user="alice", **who) as connection:
                    connection.prepare_threshold = 0
                    for turn in range(5):
                        assert connection.execute("select %s::int", [turn]).fetchone() == (turn,)
                    with connection.transaction():
                        first = connection.execute("select pg_backend_pid()").fetchone()
                        assert connection.execute("select pg_backend_pid()").fetchone() == first
                done[number] += 1
        except BaseException as failure:
            failures.append(failure)
            done[number] = 1 << 30

    workers = [threading.Thread(target=work, args=[number]) for number in range(threads)]
    for thread in workers:
        thread.start()
    try:
        yield done
    finally:
        stop.set()
        for thread in workers:
            thread.join()
    assert not failures, failures


@pytest.mark.parametrize("after", [{"pool_mode": "session"}, {"max_prepared_statements": 0}], ids=str)
def test_statements_kept_no_longer_those_prepared_before_are_still_there(gateway, postgres, after):
    # The client's name was sent to a server that has the statement by another.
    relay = gateway()
    with login(relay.port) as client:
        client.ask(parse("select 'before'", "s") + sync())
        reload(relay, text_of(relay, postgres, "postgres", **after))
        assert run_statement(client, "s") == b"before"


@pytest.mark.parametrize("between", [{"pool_mode": "session"}, {"max_prepared_statements": 0}], ids=str)
def test_statements_kept_again_a_name_never_means_what_it_meant_before(gateway, postgres, between):
    # What was closed and prepared anew while statements were not kept was not known afterwards: the old one ran.
    relay = gateway()
    with login(relay.port) as client:
        client.ask(parse("select 'old'", "s") + sync())
        reload(relay, text_of(relay, postgres, "postgres", **between))
        assert types(client.ask(close_statement("s") + parse("select 'new'", "s") + sync())) == "31Z"
        reload(relay, text_of(relay, postgres, "postgres"))
        assert run_statement(client, "s") in (b"new", "26000")


def run_statement(client: Client, name: str) -> bytes | str | None:
    """What a statement returns, or the SQLSTATE that it fails with."""
    seen = client.ask(bind(statement=name) + execute() + sync())
    return error(seen)["C"] if count(seen, "E") else next(row.values[0] for row in seen if row.type == "D")


# Reloads under load.


def test_reload_of_all_kinds_of_changes_thirty_times_in_a_storm_of_clients(gateway, postgres, other):
    relay = gateway(default_pool_size=3, workers=2)
    variants: list[dict[str, Any]] = [
        {"default_pool_size": 1},
        {"database": {"postgres": {"pool_size": 5}}, "more": cluster_of("late", other.port)},
        {"user": {"alice": {"pool_size": 2}}, "max_db_connections": 4},
        {"cluster": {"fall": 5}, "server_lifetime": 0.1, "min_pool_size": 2},
        {"auth": {"type": "trust", "scram_iterations": 5000}, "more": cluster_of("dead", free_ports(1)[0])},
        {"max_user_connections": 2, "max_client_conn": 100, "query_wait_notify": 0.0},
    ]
    with clients_at_work(relay, 4) as done:
        for number, variant in zip(range(30), cycle(variants), strict=False):
            settings = {"workers": 2, **variant}
            more = str(settings.pop("more", ""))
            relay.config.write_text(topology(postgres.port, relay.port, **settings) + more)
            relay.reload()
            if number % 3 == 0:
                relay.console("reload")  # two at once
            assert value(relay.port, "select 1") == "1"
        before = list(done)
        eventually(lambda: all(now > then for now, then in zip(done, before, strict=True)), "more work")
    assert "Traceback" not in relay.log
    assert relay.log.count("reloaded ") >= 10  # signals that come while one is served are one


# What servers report.


def test_parameter_changed_at_the_server_new_clients_are_told_the_new_value(gateway, postgres, database):
    relay = gateway()
    with login(relay.port, user="alice") as old:
        before = old.value("show timezone")
        assert before != "Asia/Tokyo"
        database.execute("alter system set timezone to 'Asia/Tokyo'")
        database.execute("select pg_reload_conf()")
        try:
            eventually(lambda: value(postgres.port, "show timezone") == "Asia/Tokyo", "the reload")
            terminate_backends(database, "usename = 'alice'")
            assert value(relay.port, "select 1", user="alice") == "1"  # by a server that was connected since
            with login(relay.port, user="alice") as new:
                assert new.parameters["TimeZone"] == "Asia/Tokyo"
                assert new.value("show timezone") == "Asia/Tokyo"
            assert old.value("show timezone") == old.parameters["TimeZone"]
        finally:
            database.execute("alter system reset timezone")
            database.execute("select pg_reload_conf()")
            eventually(lambda: value(postgres.port, "show timezone") == before, "the reload back")


@pytest.mark.parametrize("asked", [{}, {"application_name": "app"}, {"DateStyle": "German, DMY"}], ids=str)
def test_parameter_of_the_database_changed_show_says_what_a_client_was_told(gateway, database, asked):
    # Also to the first client after the change, which is let in before there is a server again.
    relay = gateway()
    who: dict[str, Any] = {"user": "alice", "database": "shop", **asked}
    assert value(relay.port, "show timezone", **who) != "Asia/Tokyo"
    database.execute("alter database shop set timezone to 'Asia/Tokyo'")
    try:
        terminate_backends(database, "datname = 'shop'")
        for number in range(3):
            with login(relay.port, **who) as client:
                assert client.value("show timezone") == client.parameters["TimeZone"]
                assert number == 0 or client.parameters["TimeZone"] == "Asia/Tokyo"
                assert client.value("show datestyle") == client.parameters["DateStyle"]
    finally:
        database.execute("alter database shop reset timezone")


def test_parameter_changed_servers_of_both_values_in_one_pool_show_says_what_a_client_was_told(gateway, database):
    relay = gateway(default_pool_size=2)
    who: dict[str, Any] = {"user": "alice", "database": "shop"}
    with login(relay.port, **who) as old, login(relay.port, **who) as holder:
        old.ask(query("begin"))
        database.execute("alter database shop set timezone to 'Asia/Tokyo'")
        try:
            assert holder.value("show timezone") == holder.parameters["TimeZone"]  # by a new server
            old.ask(query("commit"))
            for _ in range(4):
                with login(relay.port, **who) as new:
                    new.ask(query("begin"))
                    for client in (old, holder, new):
                        if client is not new:
                            client.ask(query("select 1"))
                        assert client.value("show timezone") == client.parameters["TimeZone"]
                    new.ask(query("commit"))
                    assert new.parameters["TimeZone"] == "Asia/Tokyo"
        finally:
            database.execute("alter database shop reset timezone")


# Hosts by name.


def test_node_by_name_is_resolved_and_served(gateway, postgres, database):
    relay = gateway(nodes=node_at(postgres, "localhost"))
    assert value(relay.port, "select inet_server_port()") == str(postgres.port)
    row = node(relay)
    assert (row["host"], row["role"], row["status"]) == ("localhost", "primary", "up")
    assert "127.0.0.1" in row["addresses"]


def test_node_by_a_name_that_does_not_exist_clients_get_57p03_and_the_log_says_why(gateway, postgres):
    # Not a hang, not an end of the gateway; once the name is right, all is well.
    relay = gateway(nodes=node_at(postgres, NOWHERE), query_wait_timeout=0.5)
    eventually(lambda: f"pg1 is unknown, misconfigured: {NOWHERE}" in relay.log.replace("primary,", "unknown,"), "log")
    for _ in range(2):
        assert refusal(relay.port, **WHO)["C"] == "57P03"
    reload(relay, text_of(relay, postgres, "postgres", nodes=node_at(postgres, "localhost"), query_wait_timeout=5))
    assert value(relay.port, "select 1") == "1"


def test_node_moved_to_a_name_that_does_not_exist_clients_get_57p03_and_stay(gateway, postgres):
    relay = gateway(query_wait_timeout=0.5)
    with login(relay.port) as client, login(relay.port) as busy:
        busy.ask(query("begin"))
        reload(relay, text_of(relay, postgres, "postgres", nodes=node_at(postgres, NOWHERE), query_wait_timeout=0.5))
        assert busy.value("select 'to its end'") == "to its end"
        assert types(busy.ask(query("commit"))) == "CZ"
        for request in (query("select 1"), run("select 1") + sync()):
            seen = [one for one in client.ask(request) if one.type != "N"]
            assert (types(seen), error(seen)["C"]) == ("EZ", "57P03")
        reload(relay, text_of(relay, postgres, "postgres", query_wait_timeout=5))
        assert client.value("select 'again'") == "again"


def logs_in(port: int, **who: Any) -> bool:
    with suppress(AssertionError):
        login(port, **who).close()
        return True
    return False
