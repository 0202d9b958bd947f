"""Servers and clients that die: one error for whoever it concerns, and nothing for anybody else.

Manual: "Server Signaling Functions", appendix "PostgreSQL Error Codes", class 57.
"""

from __future__ import annotations

import psycopg
import pytest

from .client import Client, count, error, eventually, login, types, value
from .messages import WHO, copy_data, parse, query, run, startup, sync

OURS = "backend_type = 'client backend' and application_name <> 'bench' and pid <> pg_backend_pid()"


SLEEP = "select pg_sleep(30)"


def terminate_backends(database, more: str = "true") -> None:
    """pg_terminate_backend for every server connection but the bench's own, and wait until they are gone."""
    pids = [pid for (pid,) in database.execute(f"select pid from pg_stat_activity where {OURS} and {more}").fetchall()]
    database.execute("select pg_terminate_backend(pid, 5000) from unnest(%s::int[]) as pid", (pids,))


def leave(client: Client, how: str) -> None:
    """End a connection by Terminate, by RST, or by FIN alone."""
    if how == "reset":
        client.reset()
    else:
        client.close(polite=how == "terminate")


@pytest.mark.both
def test_server_terminated_while_idle_is_not_noticed(pooler, gateway, database):
    # 57P01 on a pooled connection is nobody's answer; the next query gets a server that lives.
    relay = gateway(default_pool_size=2, pool_mode="transaction")
    with login(relay.port) as client:
        for number in range(10):
            assert client.value(f"select {number}") == str(number)
            terminate_backends(database)


@pytest.mark.parametrize("block", ["", "begin"], ids=["alone", "in a block"])
def test_sql_execute_of_a_statement_that_cannot_be_prepared_again_gets_one_error(gateway, database, block):
    database.execute("create table doomed (id int)")
    with login(gateway(server_check_delay=0.0).port) as client:
        client.ask(parse("select id from doomed", "a") + sync())
        terminate_backends(database)
        database.execute("drop table doomed")
        if block:
            client.ask(query(block))
        answer = client.ask(query("execute a"))
        assert types(answer) == "EZ"
        assert error(answer)["C"] == "42P01"
        assert types(client.ask(query("rollback")))[-1] == "Z"


def test_all_servers_terminated_while_many_clients_idle_nobody_notices(pooler, gateway, database):
    relay = gateway(default_pool_size=5)
    clients = [login(relay.port) for _ in range(20)]
    for client in clients:
        client.write(query("select pg_sleep(0.01)"))
        client.flush()
    for client in clients:
        client.until(lambda seen: count(seen, "Z") > 0)
    terminate_backends(database)
    for client in clients:
        client.mark()
        assert client.value("select 'unharmed'") == "unharmed"
        client.close()


@pytest.mark.both
def test_server_terminated_in_transaction_gives_one_error_and_keeps_the_client(gateway, database):
    # Exactly one ErrorResponse; a second one broke pipelines in libpq.
    relay = gateway()
    with login(relay.port) as client:
        client.ask(query("begin"))
        client.value("select 1")
        terminate_backends(database)
        seen = client.ask(query("select 2"))
        assert error(seen)["C"] in ("57P01", "08006", "08003")
        if not client.closed:
            client.ask(query("rollback"))
            assert client.value("select 'a new transaction'") == "a new transaction"
    assert value(relay.port, "select 1") == "1"


@pytest.mark.parametrize("request_", [query(SLEEP), run(SLEEP) + run("select 2") + sync()], ids=["simple", "extended"])
def test_server_terminated_during_query_gives_one_error(gateway, database, request_):
    relay = gateway(default_pool_size=2)
    with login(relay.port) as client, login(relay.port) as other:
        client.mark()
        client.write(request_)
        client.flush()
        sleeping = (
            f"select count(*) from pg_stat_activity where {OURS} and query like '%pg_sleep(30)%' and state = 'active'"
        )
        eventually(lambda: database.execute(sleeping).fetchone() == (1,), "the query to run")
        terminate_backends(database, "query like '%pg_sleep(30)%'")
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert error(seen)["C"] == "57P01"
        assert types(seen)[-1] in "EZ"
        assert other.value("select 1") == "1"


def test_server_killed_in_copy_gives_one_error(gateway, database, item):
    relay = gateway()
    with login(relay.port) as client:
        client.mark()
        client.write(query("copy item from stdin") + copy_data("1\tone\n"))
        client.until(lambda seen: count(seen, "G") > 0)
        terminate_backends(database)
        client.write(copy_data("2\ttwo\n" * 100))
        error(client.until(lambda seen: count(seen, "E") > 0))
    assert value(relay.port, "select count(*) from item") == "0"


def test_idle_in_transaction_timeout_of_postgres_reaches_the_client_as_25p03(gateway):
    relay = gateway()
    with login(relay.port) as client:
        # PostgreSQL tells it at once and closes; a client whose connection is kept is told with its next request.
        client.ask(query("begin; set local idle_in_transaction_session_timeout to '200ms'"))
        eventually(lambda: "idle-in-transaction timeout" in relay.log, "the server to end the session")
        seen = client.ask(query("select 1"))
        assert (error(seen)["C"], error(seen)["S"], count(seen, "Z")) == ("25P03", "ERROR", 1)
        client.ask(query("rollback"))
        assert client.value("select 'kept'") == "kept"
    assert value(relay.port, "select 1") == "1"


@pytest.mark.both
@pytest.mark.parametrize("how", ["terminate", "reset", "fin"])
def test_client_gone_in_transaction_rolls_back_and_frees_the_server(relay, item, items, how):
    for number in range(30):
        client = login(relay.port)
        client.ask(query("begin"))
        client.ask(query(f"insert into item values ({number}, 'x')"))
        leave(client, how)
    assert value(relay.port, "select count(*) from item") == "0"
    assert items() == []


@pytest.mark.parametrize("how", ["terminate", "reset", "fin"])
def test_client_gone_during_query_ends_the_query(pool_of_one, database, how):
    # PgBouncer lets it run on (#63).
    client = login(pool_of_one.port)
    client.write(query("select pg_sleep(60)"))
    client.flush()
    sleeping = "select count(*) from pg_stat_activity where query = 'select pg_sleep(60)' and state = 'active'"
    eventually(lambda: database.execute(sleeping).fetchone() == (1,), "the query to run")
    leave(client, how)
    eventually(lambda: database.execute(sleeping).fetchone() == (0,), "the query to end")
    assert value(pool_of_one.port, "select 1") == "1"


def test_client_gone_in_aborted_transaction_and_in_a_pipeline(relay):
    with login(relay.port) as client:
        client.ask(query("begin"))
        client.ask(query("select 1/0"))
    with login(relay.port) as client:
        client.write(run("select 1/0") + run("select 2"))
        client.flush()
    with login(relay.port) as client:
        client.write((run("select 1") + sync()) * 50)
        client.flush()
    assert value(relay.port, "select 1") == "1"


@pytest.mark.parametrize("more", [query("select 2"), copy_data("x"), parse("select 2")], ids=["query", "copy", "parse"])
def test_client_gone_while_the_server_skips_to_sync_frees_it(relay, more):
    # All that comes behind an error is skipped, a Query too: without a Sync the server is never ready again.
    for _ in range(2):
        with login(relay.port) as client:
            client.write(run("select 1/0") + more)
            client.flush()
        assert value(relay.port, "select 1") == "1"


def test_parse_only_then_closed_leaves_nothing_active(relay, database):
    for _ in range(10):
        client = login(relay.port)
        client.write(parse("select 1"))
        client.flush()
        client.socket.close()
    active = f"select count(*) from pg_stat_activity where {OURS} and state <> 'idle'"
    eventually(lambda: database.execute(active).fetchone() == (0,), "servers at rest")


def test_clients_gone_while_queued_leave_no_trace(pool_of_one):
    with login(pool_of_one.port) as holder:
        holder.ask(query("begin"))
        waiting = [login(pool_of_one.port) for _ in range(20)]
        for client in waiting:
            client.write(query("select 'never'"))
            client.flush()
        for client in waiting[::2]:
            client.reset()
        for client in waiting[1::2]:
            client.close()
        holder.ask(query("commit"))
        assert holder.value("select 1") == "1"
    assert value(pool_of_one.port, "select 1") == "1"


def test_clients_gone_during_login_leave_no_trace(relay):
    for _ in range(100):
        client = Client(relay.port)
        client.write(startup(**WHO))
        client.flush()
        client.reset()
    assert value(relay.port, "select 1") == "1"


def test_postgres_restart_clients_reconnect_through_the_same_connection(gateway, postgres):
    # A restart in an idle moment costs nobody its connection.
    relay = gateway(server_login_retry=0.2, cluster={"probe_interval": 0.2, "fall": 2})
    with login(relay.port) as client:
        client.value("select 1")
        postgres.stop("fast")
        client.mark()
        client.write(query("select 'after'"))
        client.flush()
        postgres.start()
        seen = client.until(lambda seen: count(seen, "Z") > 0, 10)
        assert [row.values for row in seen if row.type == "D"] == [[b"after"]], list(map(str, seen))


def test_postgres_down_new_client_gets_an_error_in_time(gateway, postgres):
    relay = gateway(query_wait_timeout=1.0, server_login_retry=0.2)
    with login(relay.port) as early:
        postgres.stop("fast")
        try:
            seen = early.ask(query("select 1"))
            assert error(seen)["C"] in ("57P03", "57014", "08006", "08001", "53300"), error(seen)
            with Client(relay.port) as late:
                late.write(startup(**WHO) + query("select 1"))
                assert count(late.until(lambda seen: count(seen, "E") > 0), "E") == 1
        finally:
            postgres.start()
    eventually(lambda: _served(relay.port), "service after the restart")


def test_postgres_killed_and_recovered_clients_are_served_again(gateway, postgres):
    relay = gateway(server_login_retry=0.2, query_wait_timeout=10.0)
    with login(relay.port) as idle, login(relay.port) as busy:
        busy.ask(query("begin"))
        postgres.kill()
        postgres.start()
        assert count(busy.ask(query("select 1"), 1), "E") == 1
        idle.mark()
        assert idle.value("select 'unharmed'") == "unharmed"


def test_postgres_stopped_by_sigstop_queries_wait_and_go_on(gateway, postgres):
    relay = gateway()
    with login(relay.port) as client:
        client.value("select 1")
        postgres.pause()
        try:
            client.mark()
            client.write(query("select 'patient'"))
            client.flush()
            assert not client.pump(0.3)
        finally:
            postgres.resume()
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert count(seen, "D") == 1 or error(seen)["C"][:2] in ("08", "57")


def test_too_many_connections_at_the_server_are_waited_for(pooler, gateway, postgres, database):
    # 53300 from the server is not death: clients wait for a connection that it has already.
    relay = gateway(default_pool_size=2)
    with login(relay.port) as client:
        assert client.value("select 1") == "1"
        database.execute("alter role bob connection limit 1")
        try:
            with login(relay.port, user="bob") as one, login(relay.port, user="bob") as two:
                one.ask(query("begin"))
                two.mark()
                two.write(query("select 'patient'"))
                two.flush()
                one.ask(query("commit"))
                seen = two.until(lambda seen: count(seen, "Z") > 0)
                assert [row.values for row in seen if row.type == "D"] == [[b"patient"]], list(map(str, seen))
        finally:
            database.execute("alter role bob connection limit -1")


def test_transaction_of_psycopg_after_server_loss_can_be_retried(gateway, database):
    relay = gateway()

    def fails(connection: psycopg.Connection) -> None:
        with connection.transaction():
            connection.execute("select 1")
            terminate_backends(database)
            connection.execute("select 2")

    with relay.connect() as connection:
        with pytest.raises(psycopg.OperationalError):
            fails(connection)
        assert connection.broken or connection.execute("select 3").fetchone() == (3,)


def _served(port: int) -> bool:
    try:
        return value(port, "select 1") == "1"
    except AssertionError:
        return False
