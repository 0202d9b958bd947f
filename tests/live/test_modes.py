"""Pool modes: session, transaction, statement; and what only a session may do.

Manual: "Streaming Replication Protocol".
"""

from __future__ import annotations

import subprocess

import pytest

from . import player
from .client import Client, count, error, login, types, value
from .messages import WHO, query, run, startup, sync


@pytest.mark.both
def test_session_mode_keeps_one_server_for_each_client(gateway):
    relay = gateway(pool_mode="session", default_pool_size=2)
    with login(relay.port) as one, login(relay.port) as two:
        pids = {client.value("select pg_backend_pid()") for client in (one, two, one, two)}
        assert len(pids) == 2
        one.ask(query("set statement_timeout to '5s'; create temp table mine (a int)"))
        assert one.value("show statement_timeout") == "5s"


@pytest.mark.both
def test_session_mode_resets_the_server_for_the_next_client(gateway):
    relay = gateway(pool_mode="session", default_pool_size=1)
    with login(relay.port) as one:
        pid = one.value("select pg_backend_pid()")
        one.ask(query("set statement_timeout to '5s'; create temp table mine (a int); set role bob"))
        one.ask(query("listen news; prepare p as select 1; select pg_advisory_lock(1)"))
    with login(relay.port) as two:
        assert two.value("select pg_backend_pid()") == pid
        assert two.value("show statement_timeout") == "0"
        assert two.value("select current_user") == "postgres"
        assert two.value("select to_regclass('mine') is null") == "t"
        assert two.value("select count(*) from pg_prepared_statements") == "0"
        assert two.value("select count(*) from pg_listening_channels()") == "0"


def test_session_mode_second_client_waits_until_the_first_leaves(gateway):
    relay = gateway(pool_mode="session", default_pool_size=1)
    one, two = login(relay.port), login(relay.port)
    one.value("select 1")
    two.mark()
    two.write(query("select 'at last'"))
    two.flush()
    assert not two.pump(0.2)
    one.close()
    assert types(two.until(lambda seen: count(seen, "Z") > 0)) == "TDCZ"
    two.close()


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_mixed_script_answers_as_postgres_in_every_mode(gateway, postgres, mode):
    relay = gateway(pool_mode=mode)
    script = [
        [query("begin"), run("select 1"), sync()],
        [run("select 1/0"), sync()],
        [query("rollback"), query("set timezone to 'Asia/Tokyo'"), query("show timezone")],
        [query("copy (select 1) to stdout")],
    ]
    player.compare(postgres.port, relay.port, script)


@pytest.mark.both
def test_transaction_mode_changes_servers_between_transactions_only(gateway):
    relay = gateway(default_pool_size=2)
    with login(relay.port) as client, login(relay.port) as other:
        client.ask(query("begin"))
        pid = client.value("select pg_backend_pid()")
        assert other.value("select pg_backend_pid()") != pid
        assert client.value("select pg_backend_pid()") == pid
        client.ask(query("commit"))
        other.ask(query("begin"))
        assert {client.value("select pg_backend_pid()") for _ in range(3)}


@pytest.mark.both
def test_statement_mode_refuses_transaction_blocks(gateway):
    relay = gateway(pool_mode="statement")
    for begin in (query("begin"), run("begin") + sync(), query("begin; select 1")):
        with login(relay.port) as client:
            assert client.value("select 1") == "1"
            client.mark()
            client.write(begin)
            fields = error(client.until(lambda seen: count(seen, "E") > 0))
            assert fields["M"] == "transaction blocks not allowed in statement pooling mode"
        assert value(relay.port, "select 1") == "1"


def test_pool_mode_of_user_beats_database_beats_default(gateway):
    relay = gateway(
        pool_mode="transaction",
        database={"shop": {"pool_mode": "session"}},
        user={"alice": {"pool_mode": "statement"}},
    )
    with login(relay.port, database="shop", user="alice") as client:
        client.mark()
        client.write(query("begin"))
        assert "statement pooling" in error(client.until(lambda seen: count(seen, "E") > 0))["M"]
    with login(relay.port, database="shop") as one, login(relay.port, database="shop") as two:
        one.value("select 1")
        two.write(query("select 1"))
        two.flush()
        assert not two.pump(0.2), "the session's server was given to another client"


def test_forced_user_and_other_database_name(gateway):
    relay = gateway(database={"store": {"dbname": "shop", "user": "postgres"}})
    assert (
        value(relay.port, "select current_database() || '/' || current_user", database="store", user="bob")
        == "shop/postgres"
    )


def test_connect_query_runs_on_every_new_server(gateway):
    relay = gateway(database={"postgres": {"connect_query": "set work_mem to '7MB'"}})
    assert value(relay.port, "show work_mem") == "7MB"


def test_replication_connection_in_session_mode_streams(gateway, postgres, tmp_path):
    # CopyBoth: pg_receivewal and a logical slot go through, one server each.
    relay = gateway(pool_mode="session", default_pool_size=3)
    with login(relay.port, replication="true") as client:
        assert count(client.ask(query("IDENTIFY_SYSTEM")), "D") == 1
        position = client.value("SHOW server_version")
        assert position
        client.mark()
        client.write(query("START_REPLICATION PHYSICAL 0/1000000"))
        client.until(lambda seen: count(seen, "W") + count(seen, "E") > 0)
    dsn = f"host=127.0.0.1 port={relay.port} user=postgres dbname=replication"
    done = subprocess.run(
        [postgres.bin / "pg_basebackup", "-d", dsn, "-D", tmp_path / "copy", "-X", "fetch", "-c", "fast"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_replication_connection_in_transaction_mode_is_served_or_refused_in_words(gateway):
    relay = gateway()
    with Client(relay.port) as client:
        client.write(startup(**WHO, replication="database") + query("IDENTIFY_SYSTEM"))
        seen = client.until(lambda seen: count(seen, "Z") == 2)
        assert count(seen, "D") == 1 or "replication" in error(seen)["M"]
