"""A gateway in front of gateways: near the applications one that pools, near the database those that know it."""

from __future__ import annotations

import os
import signal

import psycopg
import pytest

from .client import eventually


@pytest.fixture
def tiers(gateway):
    """A front tier, and two back tiers of which it uses one."""
    backs = [gateway(default_pool_size=5) for _ in range(2)]
    nodes = [
        {"name": f"back{number}", "host": "127.0.0.1", "port": back.port, "kind": "gateway"}
        for number, back in enumerate(backs)
    ]
    fast = {"probe_interval_fast": 0.05, "probe_timeout": 0.5, "fall": 2, "rise": 1}
    return gateway(nodes=nodes, cluster=fast, default_pool_size=3), *backs


def test_front_tier_uses_one_back_tier_and_shows_both(tiers):
    front, *_ = tiers
    with front.connect() as client:
        assert client.execute("select 1").fetchone() == (1,)
    eventually(lambda: {row["status"] for row in front.console("show nodes")} == {"up"}, "both are up")
    assert front.console("show clusters")[0]["primary"] == "back0"


def test_back_tier_that_dies_is_replaced_and_idle_clients_stay(tiers):
    front, back, other = tiers
    with front.connect() as client:
        assert client.execute("select 1").fetchone() == (1,)
        back.kill()
        eventually(lambda: front.console("show clusters")[0]["primary"] == "back1", "the other is used")
        assert client.execute("select 2").fetchone() == (2,)
    assert other.console("show servers")


def test_back_tier_that_comes_back_does_not_take_over(tiers):
    front, back, _ = tiers
    for pid in back.children():
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: front.console("show clusters")[0]["primary"] == "back1", "the other is used")
    for pid in back.children():
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: {row["status"] for row in front.console("show nodes")} == {"up"}, "both are up")
    assert front.console("show clusters")[0]["primary"] == "back1"


def test_cancel_goes_through_both_tiers(tiers):
    front, *_ = tiers
    with front.connect() as client, front.connect() as other:
        other.execute("select 1")
        with client.cursor() as cursor:
            client.pgconn.send_query(b"select pg_sleep(60)")
            eventually(lambda: "pg_sleep" in str(other.execute(RUNNING).fetchall()), "it runs")
            client.cancel_safe()
            result = client.pgconn.get_result()
            assert result is not None
            assert result.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"57014"
            assert client.pgconn.get_result() is None
            cursor.execute("select 1")


RUNNING = "select query from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
