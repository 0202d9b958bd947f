"""Timeouts: each ends in one error that names its setting, and zero means never.

No test measures time: a short value is set, and the error waited for.
"""

from __future__ import annotations

import pytest

from .client import Client, count, error, login, value
from .messages import WHO, query, run, startup, sync

SHORT = 0.4


def only_error(client: Client) -> dict[str, str]:
    """The one error that the client gets; nothing else comes, or the connection ends."""
    seen = client.until(lambda seen: count(seen, "E") > 0)
    while client.pump(0.1):
        pass
    assert count(client.messages, "E") == 1, list(map(str, seen))
    return error(client.messages)


@pytest.mark.both
def test_query_wait_timeout_tells_who_waited(gateway):
    relay = gateway(query_wait_timeout=SHORT)
    with login(relay.port) as holder, login(relay.port) as waiting:
        holder.ask(query("begin"))
        waiting.write(query("select 1"))
        fields = only_error(waiting)
        assert "query_wait_timeout" in fields["M"] + fields.get("H", "")
        assert holder.value("select 1") == "1"


def test_query_timeout_ends_the_query_and_frees_the_server(gateway, database):
    relay = gateway(query_timeout=SHORT)
    for request in (query("select pg_sleep(30)"), run("select pg_sleep(30)") + sync()):
        with login(relay.port) as client:
            client.write(request)
            fields = only_error(client)
            assert fields["C"] == "57014"
            assert "query_timeout" in fields["M"] + fields.get("H", "")
        assert value(relay.port, "select 1") == "1"
    running = "select count(*) from pg_stat_activity where query like '%pg_sleep(30)%' and state = 'active'"
    assert database.execute(running + " and pid <> pg_backend_pid()").fetchone() == (0,)


def test_query_timeout_does_not_fire_without_a_query(gateway):
    # #1395: an idle transaction is no query.
    relay = gateway(query_timeout=SHORT)
    with login(relay.port) as client:
        client.ask(query("begin"))
        assert not client.pump(SHORT * 2)
        assert client.value("select 1") == "1"


@pytest.mark.both
def test_idle_transaction_timeout_is_25p03(gateway):
    relay = gateway(idle_transaction_timeout=SHORT)
    with login(relay.port) as client:
        client.ask(query("begin"))
        fields = only_error(client)
        assert fields["C"] == "25P03"
        assert "idle_transaction_timeout" in fields["M"] + fields.get("H", "")
    assert value(relay.port, "select 1") == "1"


def test_idle_transaction_timeout_spares_long_queries_and_idle_clients(gateway):
    # #125: it fired too early.
    relay = gateway(idle_transaction_timeout=SHORT)
    with login(relay.port) as client:
        assert not client.pump(SHORT * 2)
        client.ask(query("begin"))
        client.ask(query(f"select pg_sleep({SHORT * 2})"))
        assert client.value("select 'alive'") == "alive"


def test_transaction_timeout_is_25p04(gateway):
    relay = gateway(transaction_timeout=SHORT)
    with login(relay.port) as client:
        client.ask(query("begin"))
        client.write(query("select pg_sleep(30)"))
        fields = only_error(client)
        assert fields["C"] == "25P04"
        assert "transaction_timeout" in fields["M"] + fields.get("H", "")
    assert value(relay.port, "select 1") == "1"


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_client_idle_timeout_ends_idle_clients_only(gateway, mode):
    # #282: in session mode it did not fire.
    relay = gateway(client_idle_timeout=SHORT, pool_mode=mode, default_pool_size=2)
    with login(relay.port) as idle, login(relay.port) as busy:
        idle.value("select 1")
        busy.ask(query(f"select pg_sleep({SHORT * 2})"))
        fields = only_error(idle)
        assert fields["S"] == "FATAL"
        assert "client_idle_timeout" in fields["M"] + fields.get("H", "")
        idle.wait_closed()


def test_client_login_timeout_ends_who_does_not_finish(gateway):
    relay = gateway(client_login_timeout=SHORT, auth={"type": "md5"})
    with Client(relay.port) as client:
        client.write(startup(user="alice", database="postgres"))
        client.until(lambda seen: count(seen, "R") > 0)
        client.wait_closed()
        assert count(client.messages, "E") <= 1


def test_server_connect_timeout_ends_in_an_error_when_the_server_is_silent(gateway, postgres):
    relay = gateway(server_connect_timeout=SHORT, query_wait_timeout=1.0, server_login_retry=0.2)
    postgres.pause()
    try:
        with Client(relay.port) as client:
            client.write(startup(**WHO) + query("select 1"))
            assert count(client.until(lambda seen: count(seen, "E") > 0), "E") == 1
    finally:
        postgres.resume()


def test_timeouts_of_zero_are_off(gateway):
    names = "query_timeout transaction_timeout idle_transaction_timeout client_idle_timeout server_idle_timeout"
    relay = gateway(**dict.fromkeys([*names.split(), "server_lifetime", "query_wait_timeout"], 0))
    with login(relay.port) as client:
        client.ask(query("begin"))
        assert not client.pump(SHORT)
        assert client.value("select 1") == "1"


def test_timeouts_of_a_user_override_the_default(gateway):
    relay = gateway(
        idle_transaction_timeout=60, user={"alice": {"idle_transaction_timeout": SHORT}}, default_pool_size=2
    )
    with login(relay.port, user="alice") as short, login(relay.port) as long:
        for client in (short, long):
            client.ask(query("begin"))
        assert only_error(short)["C"] == "25P03"
        assert long.value("select 1") == "1"


def test_query_wait_notify_tells_a_waiting_client(gateway):
    relay = gateway(query_wait_notify=SHORT)
    with login(relay.port) as holder, login(relay.port) as waiting:
        holder.ask(query("begin"))
        waiting.mark()
        waiting.write(query("select 'in the end'"))
        assert count(waiting.until(lambda seen: count(seen, "N") > 0), "N") == 1
        holder.ask(query("commit"))
        seen = waiting.until(lambda seen: count(seen, "Z") > 0)
        assert (count(seen, "D"), count(seen, "E")) == (1, 0)
