"""Warm servers: where there are to be some, when they are closed, and what becomes of them after a promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.control import Limit
from gateway.worker.endpoint import SERVER_WARM, Server
from gateway.worker.pool import Pool, Verb
from gateway.worker.pools import Pools
from health.view import Status
from tests.worker.test_pools import configure, get, with_database, with_front
from tests.worker.test_views import PG1, PG2, on, see, seen
from tests.worker.worlds import idle_server, make_pool, seconds


def warm(pool: Pool, node: str = "pg2", now: int = 0) -> Server:
    """A server that has logged in to a standby."""
    server = Server(-1, 0, pool, now)
    server.node, server.address = node, {"pg1": PG1, "pg2": PG2}[node]
    server.state, server.warm = SERVER_WARM, True
    pool.warm.append(server)
    return server


def used_pool(**changes: Any) -> Pool:
    """A pool with a client and two standbys."""
    pool = make_pool(**changes)
    pool.standbys = {"pg2": PG2, "pg3": ("10.0.0.3", 5432)}
    pool.clients = 1
    return pool


def test_pool_wants_warm_servers_on_each_standby():
    pool = used_pool(warm_pool_size=2)
    assert pool.wants_warm(0) == ["pg2", "pg3"]
    warm(pool)
    assert pool.wants_warm(0) == ["pg2", "pg3"]
    warm(pool)
    assert pool.wants_warm(0) == ["pg3"]


def test_pool_wants_no_warm_server_while_nobody_uses_it():
    pool = used_pool()
    pool.clients = 0
    assert pool.wants_warm(0) == []
    idle_server(pool)
    assert pool.wants_warm(0) != []
    pool.removed = True
    assert pool.wants_warm(0) == []


def test_pool_wants_no_warm_server_behind_a_failure_until_some_time_has_passed():
    pool = used_pool()
    pool.warm_retry_at = 7
    assert pool.wants_warm(6) == []
    assert pool.wants_warm(7) == ["pg2", "pg3"]


def test_pool_wants_no_warm_server_when_they_are_turned_off():
    assert used_pool(warm_pool_size=0).wants_warm(0) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda pool, server: setattr(server, "connected_at", -seconds(60)), "server lifetime over"),
        (lambda pool, server: setattr(pool, "removed", True), "server idle timeout"),
        (lambda pool, server: warm(pool), "warm_pool_size"),
    ],
)
def test_sweep_retires_a_warm_server(change: Callable[[Pool, Server], None], why):
    pool = used_pool(server_lifetime=60.0)
    server = warm(pool)
    assert pool.sweep(0) == []
    change(pool, server)
    assert [(action.verb, action.who, action.why) for action in pool.sweep(0)] == [(Verb.RETIRE, server, why)]


def test_sweep_retires_warm_servers_of_a_pool_that_has_idled():
    pool = used_pool(server_idle_timeout=5.0)
    server = warm(pool)
    assert pool.sweep(seconds(100)) == []
    pool.clients = 0
    assert pool.sweep(seconds(105) - 1) == []
    assert [action.who for action in pool.sweep(seconds(105))] == [server]


def test_sweep_gives_up_a_warm_server_that_takes_too_long_to_log_in():
    pool = used_pool()
    server = warm(pool)
    server.deadline = 5
    assert pool.sweep(4) == []
    assert [(action.verb, action.who) for action in pool.sweep(5)] == [(Verb.GIVE_UP, server)]


def test_warm_servers_count_against_no_limit():
    pool = used_pool()
    warm(pool)
    assert (pool.share.used, pool.servers, pool.connecting) == (0, [], 0)


def placed(size: int = 20) -> tuple[Pools, Pool]:
    """A pool on pg1 that has a warm server on pg2."""
    pools = Pools(configure(with_front(default_pool_size=size)))
    pool = get(pools)
    pools.see(seen("pg1"))
    warm(pool)
    return pools, pool


def test_view_tells_the_standbys_that_are_up():
    pools, pool = placed()
    assert pool.standbys == {"pg2": PG2}
    pools.see(seen("pg1", pg2=Status.STARTING))
    assert pool.standbys == {}
    pools.see(seen("pg2"))
    assert pool.standbys == {"pg1": PG1}


def test_view_tells_a_pool_of_one_node_no_standbys():
    pools = Pools(configure(with_database(node="pg1")))
    pool = get(pools)
    pools.see(seen("pg1"))
    assert pool.standbys == {}


def test_view_of_a_promoted_standby_adopts_its_warm_servers_before_the_old_ones_are_cut():
    pools, pool = placed()
    ready, old = pool.warm[0], on(pool)[0]
    assert see(pools, seen("pg2")) == [(Verb.ADOPT, ready), (Verb.CUT, old)]


def test_view_adopts_as_many_as_the_limits_allow_without_those_that_are_cut():
    pools, pool = placed(size=1)
    first, second, old = pool.warm[0], warm(pool), on(pool)[0]
    assert see(pools, seen("pg2")) == [(Verb.ADOPT, first), (Verb.RETIRE, second), (Verb.CUT, old)]
    pools.grant(Limit("pool", "app", "bob"), 0)
    assert see(pools, seen("pg2"))[0] == (Verb.RETIRE, first)


def test_view_without_primary_keeps_the_warm_servers():
    pools, pool = placed()
    for view in (seen(None), seen("pg1", held=True), seen("pg1", pg2=Status.STARTING)):
        assert see(pools, view) == []
    assert see(pools, seen("pg2")) == [(Verb.ADOPT, pool.warm[0])]


def test_view_retires_warm_servers_of_a_standby_that_is_gone_or_elsewhere():
    for view in (seen("pg1", pg2=Status.DOWN), seen("pg1", pg2=("10.0.0.9", 5432)), seen("pg1", pg2=None)):
        pools, pool = placed()
        assert see(pools, view) == [(Verb.RETIRE, pool.warm[0])]


def test_pool_that_a_reload_removed_stays_until_its_warm_servers_are_closed():
    pools, pool = placed()
    pool.removed = True
    assert pools.sweep() == [pool]
    pool.warm.clear()
    assert pools.sweep() == []


def test_pool_adds_a_server_that_was_warm_as_one_that_is_connected():
    pool = used_pool()
    server = warm(pool)
    pool.add(server)
    assert (pool.share.used, pool.connecting, pool.servers) == (1, 0, [server])
