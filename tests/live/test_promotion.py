"""A standby that is promoted: its clients go on there, on sessions that were ready before.

Each test has a cluster of its own, whose primary is lost in one way: killed, or standing still as a host does that has
lost its network. The one who promotes is the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from gateway.embedded import Cluster, PostgresNode, free_ports

from .client import Client, count, error, eventually, login, types
from .endpoints import ADMIN_PASSWORD, Gateway
from .messages import query
from .test_lost_servers import COUNTING, is_aborted, simple, status

pytestmark = pytest.mark.usefixtures("pooler")

SETTINGS: dict[str, Any] = {
    "query_wait_timeout": 12.0,
    "default_pool_size": 4,
    "cluster": {"probe_interval": 0.2, "probe_interval_fast": 0.1, "probe_timeout": 0.4, "fall": 2, "rise": 1},
}


class Pair(NamedTuple):
    """A primary, its standby, and a gateway in front of both."""

    primary: PostgresNode
    standby: PostgresNode
    relay: Gateway


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path) -> Iterator[Pair]:
    if request.config.getoption("--endpoint") != "gateway":
        pytest.skip("only the gateway follows")
    with Cluster(version=request.config.getoption("--postgres"), standbys=1) as cluster:
        cluster.primary.psql("create table item (id int primary key, name text)")
        nodes = [{"name": node.name, "host": "127.0.0.1", "port": node.port} for node in cluster.nodes]
        secrets = {"postgres": ADMIN_PASSWORD}
        relay = Gateway(cluster.primary, free_ports(1)[0], tmp_path, secrets, nodes=nodes, **SETTINGS)
        yield Pair(cluster.primary, cluster.standbys[0], relay)
        Client.close_all()
        relay.stop()
        print(relay.log[-4000:])
        cluster.primary.resume()


def warm_pid(relay: Gateway) -> int:
    """Wait for the session that is ready on the standby."""
    rows = eventually(lambda: [row for row in relay.console("show servers") if row["state"] == "warm"], "a warm server")
    return int(rows[0]["remote_pid"])


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_promotion_serves_clients_on_the_session_that_was_ready(pair, how):
    primary, standby, relay = pair
    with login(relay.port) as client, login(relay.port) as inside, login(relay.port) as reading:
        assert client.value("select 1") == "1"
        ready = warm_pid(relay)
        inside.ask(query("begin"))
        inside.ask(query("insert into item values (1, 'lost')"))
        if how == "killed":
            primary.kill()
        else:
            primary.pause()
        reading.write(query(COUNTING))
        reading.flush()
        reading.mark()
        standby.promote()
        seen = reading.until(lambda seen: count(seen, "Z") > 0, 10)
        assert types(seen).replace("S", "") == "TDCZ", list(map(str, seen))  # it is told of in_hot_standby
        # The first to wait has got the session that lived through the promotion.
        assert standby.psql(f"select query from pg_stat_activity where pid = {ready}") == COUNTING
        assert client.value("show transaction_read_only") == "off"
        assert client.parameters["in_hot_standby"] == "off"
        client.ask(query("insert into item values (2, 'kept')"))
        seen = inside.ask(query("insert into item values (3, 'lost')"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "E")
        is_aborted(inside, simple)
        assert standby.psql("select id from item") == "2"
