"""All pools of a worker: which clients share one, what its limits are here, and what the supervisor hears of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.control import Configure, Demand, Limit
from gateway.settings import Database, PoolMode, Settings, User
from gateway.worker.endpoint import SERVER_GONE, Client, Server
from gateway.worker.pool import UNLIMITED, Pool
from gateway.worker.pools import Pools, oldest_idle
from health import view
from health.view import ClusterView, Epoch, NodeView, Role, Status
from tests.worker.worlds import SETTINGS, idle_server, launch, seconds


def configure(settings: Settings = SETTINGS, index: int = 0, workers: int = 1) -> Configure:
    return Configure(settings, None, index, workers, b"", 1000)


def with_front(**changes: Any) -> Settings:
    return replace(SETTINGS, front=replace(SETTINGS.front, **changes))


def with_database(name: str = "app", **changes: Any) -> Settings:
    return replace(SETTINGS, database={**SETTINGS.database, name: Database(cluster="main", **changes)})


def get(pools: Pools, database: str = "app", user: str = "bob") -> Pool:
    pool = pools.get(database, user)
    assert pool is not None
    return pool


def seen(primary: str | None, *addresses: str, port: int = 5432, version: int = 1) -> ClusterView:
    """A view of pg1 with these addresses, and of pg2."""
    return ClusterView(
        "main",
        version,
        Epoch(primary),
        primary,
        (
            NodeView(view.Node("pg1", "a", port), addresses, Role.UNKNOWN, Status.UP, "", 0.0),
            NodeView(view.Node("pg2", "b"), ("10.0.0.2",), Role.UNKNOWN, Status.UP, "", 0.0),
        ),
    )


def test_pool_of_the_same_database_and_user_is_one():
    pools = Pools(configure())
    pool = get(pools)
    assert get(pools) is pool
    assert get(pools, user="eve") is not pool
    assert get(pools, database="other") is not pool


def test_pool_of_a_database_with_a_user_of_its_own_is_for_all_clients():
    pools = Pools(configure(with_database(user="owner")))
    pool = get(pools)
    assert get(pools, user="eve") is get(pools, user="owner") is pool
    assert list(pools.by_key) == [("app", "owner")]


def test_pool_of_a_database_that_is_unknown_is_none():
    settings = replace(SETTINGS, database={"app": Database(cluster="main")})
    assert Pools(configure(settings)).get("other", "bob") is None
    assert Pools(configure()).get("pgbouncer", "bob") is None


def test_shares_begin_as_this_worker_s_part_of_an_even_split():
    settings = with_front(default_pool_size=7, reserve_pool_size=3)
    limits = [
        (pool.share.limit, pool.reserve.limit)
        for pool in (get(Pools(configure(settings, index, 2))) for index in range(2))
    ]
    assert limits == [(4, 2), (3, 1)]


def test_shares_of_no_limit_are_unlimited_but_for_the_reserve():
    pools = Pools(configure(with_front(default_pool_size=0, reserve_pool_size=0)))
    pool = get(pools)
    assert (pool.share.limit, pool.reserve.limit, pool.shares) == (UNLIMITED, 0, ())
    assert pools.share("clients", 0).limit == UNLIMITED


def test_shares_of_a_database_and_of_a_user_are_common_to_their_pools():
    pools = Pools(configure(with_front(max_db_connections=9, max_user_connections=5)))
    one, other_user, other_database = get(pools), get(pools, user="eve"), get(pools, database="other")
    assert [share.limit for share in one.shares] == [9, 5]
    assert one.shares[0] is other_user.shares[0] is not other_database.shares[0]
    assert one.shares[1] is other_database.shares[1] is not other_user.shares[1]


def test_grant_changes_the_share_and_is_kept_for_a_pool_to_come():
    pools = Pools(configure())
    limit = Limit("pool", "app", "bob")
    pools.grant(limit, 3)
    assert list(pools.demands({})) == [Demand(limit, 0, 3, 0, 0)]
    pool = get(pools)
    assert pool.share.limit == 3
    pools.grant(limit, 12)
    assert pool.share.limit == 12
    assert get(pools, user="eve").share.limit == 20


def test_grant_of_what_has_no_limit_leaves_it_unlimited():
    pools = Pools(configure(with_front(default_pool_size=0)))
    pool = get(pools)
    pools.grant(Limit("pool", "app", "bob"), 3)
    assert pool.share.limit == UNLIMITED


def test_configure_with_other_sizes_changes_the_limits_of_pools_that_are_there():
    pools = Pools(configure(with_front(max_db_connections=9)))
    pool = get(pools)
    pools.configure(configure(with_front(max_db_connections=6, default_pool_size=4, pool_mode=PoolMode.SESSION)))
    assert (pool.share.limit, pool.shares[0].limit, pool.settings.pool_mode) == (4, 6, PoolMode.SESSION)
    pools.configure(configure(with_front(max_db_connections=0, default_pool_size=0)))
    assert (pool.share.limit, pool.shares[0].limit) == (UNLIMITED, UNLIMITED)


def test_configure_with_the_same_sizes_keeps_what_was_granted():
    pools = Pools(configure(workers=2))
    pool = get(pools)
    pools.grant(Limit("pool", "app", "bob"), 3)
    pools.configure(configure(with_front(query_timeout=5.0), workers=2))
    assert (pool.share.limit, pool.settings.query_timeout) == (3, 5.0)


def test_configure_with_a_limit_that_there_was_not_holds_for_pools_that_are_there():
    # A reload set max_db_connections, and the pools that were there went past it.
    pools = Pools(configure())
    pool = get(pools)
    launch(pool)
    pools.configure(configure(with_front(max_db_connections=2, max_user_connections=3)))
    assert [(share.limit, share.used) for share in pool.shares] == [(2, 1), (3, 1)]
    other = get(pools, user="eve")
    assert other.shares[0] is pool.shares[0]


def test_configure_without_a_database_keeps_its_pool_for_those_who_are_in_it():
    pools = Pools(configure(with_database(pool_size=3)))
    pool = get(pools)
    without = replace(SETTINGS, database={"other": Database(cluster="main")})
    assert pools.configure(configure(without)) == [pool]
    assert (pool.share.limit, pool.settings.pool_size) == (3, 3)
    assert pools.get("app", "bob") is None
    assert pools.configure(configure(with_database(pool_size=3))) == []
    assert get(pools) is pool


def test_configure_with_another_user_of_a_database_makes_a_pool_anew():
    pools = Pools(configure(with_database()))
    pool = get(pools)
    assert pools.configure(configure(with_database(user="owner"))) == [pool]
    assert get(pools) is not pool
    assert get(pools).settings.server_user == "owner"


@pytest.mark.parametrize(
    "changes", [{"dbname": "sales"}, {"password": "x"}, {"timezone": "UTC"}, {"connect_query": "x"}]
)
def test_configure_with_another_identity_tells_the_pools_whose_servers_are_replaced(changes):
    pools = Pools(configure(with_database()))
    pool = get(pools)
    assert pools.configure(configure(with_database(pool_size=9))) == []
    assert pools.configure(configure(with_database(**changes))) == [pool]
    assert pools.configure(configure(with_database(**changes))) == []


def test_configure_with_another_node_tells_the_pools_that_have_moved():
    pools = Pools(configure(with_database(node="pg1")))
    pool = get(pools)
    pools.see(seen("pg1", "10.0.0.1"))
    assert pools.configure(configure(with_database(node="pg2"))) == [pool]
    assert pool.address == ("10.0.0.2", 5432)


def test_configure_of_a_user_holds_for_its_pool():
    pools = Pools(configure())
    pool = get(pools)
    pools.configure(configure(replace(SETTINGS, user={"bob": User(pool_size=2, query_timeout=1.0)})))
    assert (pool.share.limit, pool.settings.query_timeout) == (2, 1.0)


def demands(pools: Pools) -> dict[str, tuple[int, int, int, int]]:
    """What is told of each kind of limit: budget, share, used, wanted."""
    return {
        demand.limit.kind: (demand.budget, demand.share, demand.used, demand.wanted) for demand in pools.demands({})
    }


def test_demand_is_what_is_used_and_who_waits():
    pools = Pools(configure(with_front(max_db_connections=9, reserve_pool_size=2)))
    pool = get(pools)
    assert demands(pools) == {"pool": (20, 20, 0, 0), "reserve": (2, 2, 0, 0), "database": (9, 9, 0, 0)}
    launch(pool)
    for number in range(3):
        pool.enqueue(Client(-1, number, 0), 0)
    pool.newcomers[Client(-1, 9, 0)] = None
    assert demands(pools) == {"pool": (20, 20, 1, 5), "reserve": (2, 2, 0, 4), "database": (9, 9, 1, 5)}


def test_demand_leaves_out_what_idles():
    pools = Pools(configure())
    pool = get(pools)
    servers = [idle_server(pool) for _ in range(3)]
    assert demands(pools)["pool"] == (20, 20, 3, 0)
    pool.remove(servers[0], SERVER_GONE, 1)
    pool.acquire(1)
    assert demands(pools)["pool"] == (20, 20, 2, 1)


def test_demand_of_what_has_no_limit_is_not_told():
    pools = Pools(configure(with_front(default_pool_size=0)))
    get(pools)
    pools.share("clients", 0)
    assert list(pools.demands({})) == []


def test_demand_of_clients_counts_those_who_are_parked():
    pools = Pools(configure(with_front(max_client_conn=2)))
    share = pools.share("clients", 2)
    share.used = 2
    assert list(pools.demands({share: 3})) == [Demand(Limit("clients"), 2, 2, 2, 5)]
    assert demands(pools) == {"clients": (2, 2, 2, 2)}


def busy(pool: Pool, count: int) -> list[Server]:
    for _ in range(count):
        idle_server(pool)
    servers = [pool.acquire(0) for _ in range(count)]
    return [server for server in servers if server is not None]


def wait(pool: Pool, now: int) -> None:
    pool.enqueue(Client(-1, 1, now), now)


def test_victims_of_a_share_that_shrank_are_the_idle_ones_first_and_then_busy_ones():
    # Under load no server is ever idle, so that the share would never be given to the worker that waits for it.
    pools = Pools(configure())
    pool = get(pools)
    servers = busy(pool, 2)
    resting = [idle_server(pool, 1), idle_server(pool, 2)]
    pools.grant(Limit("pool", "app", "bob"), 4)
    assert pools.victims(9) == []
    pools.grant(Limit("pool", "app", "bob"), 1)
    doomed = pools.victims(9)
    assert doomed[:2] == resting
    assert len(doomed) == 3
    for server in doomed:
        server.retiring = True
    assert pools.victims(9) == []
    assert [server.retiring for server in servers].count(True) == 1


def test_victim_of_a_share_that_is_contended_is_one_of_the_richest_pool():
    pools = Pools(configure(with_front(max_db_connections=5)))
    needy, rich, poor = get(pools), get(pools, user="ann"), get(pools, user="eve")
    servers = busy(rich, 3)
    busy(poor, 1)
    wait(needy, 10)
    assert pools.victims(seconds(9)) == [], "there is room"
    busy(poor, 1)
    assert pools.victims(10 + seconds(0.1) - 1) == [], "it has not waited long"
    assert pools.victims(10 + seconds(0.1)) == servers[-1:] or pools.victims(10 + seconds(0.1)) == servers[:1]
    launch(needy)
    assert pools.victims(seconds(9)) != []  # above the limit now
    needy.remove(needy.servers[0], SERVER_GONE, 0)
    pools.victims(seconds(9))[0].retiring = True
    assert pools.victims(seconds(9)) == [], "one at a time"


def test_victims_of_a_pool_that_alone_is_full_are_none():
    pools = Pools(configure(with_front(default_pool_size=1)))
    pool = get(pools)
    busy(pool, 1)
    wait(pool, 0)
    assert pools.victims(seconds(60)) == []


def test_pools_in_need_are_those_that_wait_the_longest_wait_first():
    pools = Pools(configure())
    late, early, newcomer = get(pools), get(pools, user="ann"), get(pools, user="eve")
    get(pools, user="zoe")
    wait(late, 7)
    wait(early, 3)
    client = Client(-1, 1, 5)
    client.waiting_since = 5
    newcomer.newcomers[client] = None
    assert pools.in_need() == [early, newcomer, late]


def test_oldest_idle_is_the_longest_idle_server_of_another_pool_under_the_same_full_limit():
    pools = Pools(configure(with_front(max_db_connections=4)))
    needy, one, other, elsewhere = (
        get(pools),
        get(pools, user="ann"),
        get(pools, user="eve"),
        get(pools, database="other"),
    )
    idle_server(elsewhere, 1)
    idle_server(one, 3)
    oldest = idle_server(other, 2)
    idle_server(other, 5)
    assert oldest_idle(pools.all, needy) is None, "the limit is not reached"
    idle_server(needy, 0)
    assert oldest_idle(pools.all, needy) is oldest


def test_servers_are_those_of_all_pools():
    pools = Pools(configure())
    servers = [launch(get(pools)), launch(get(pools, user="eve")), launch(get(pools))]
    assert set(pools.servers()) == set(servers)
