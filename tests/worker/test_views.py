"""Views on their way into the pools: where to connect, which servers end, and when nobody may begin."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.worker.endpoint import CLIENT_WAITING, SERVER_ACTIVE, SERVER_IDLE, Client, Server
from gateway.worker.pool import Pool, Verb
from gateway.worker.pools import Pools
from health.view import Admin, ClusterView, Epoch, Node, NodeView, Role, Status
from tests.worker.test_pools import configure, get, with_database
from tests.worker.worlds import idle_server

PG1, PG2 = ("10.0.0.1", 5432), ("10.0.0.2", 5432)


def seen(primary: str | None, *, held: bool = False, **nodes: Any) -> ClusterView:
    """A view of pg1 and pg2, each with an address, or with another or a status given by its name."""
    views = []
    for name, (host, port) in {"pg1": PG1, "pg2": PG2}.items():
        said = nodes.get(name, (host, port))
        status = said if isinstance(said, Status) else Status.UP
        addresses = () if said is None else (said[0],) if isinstance(said, tuple) else (host,)
        port = said[1] if isinstance(said, tuple) else port
        role = Role.PRIMARY if name == primary else Role.STANDBY
        views.append(NodeView(Node(name, host, port), addresses, role, status, "", 0.0))
    return ClusterView("main", 1, Epoch(primary), primary, tuple(views), held)


def on(pool: Pool, count: int = 1) -> list[Server]:
    """Idle servers that were connected to where the pool is now."""
    servers = [idle_server(pool, id=number) for number in range(count)]
    for server in servers:
        server.node, server.address = pool.node, pool.address
    return servers


def see(pools: Pools, view: ClusterView) -> list[tuple[Verb, Any]]:
    return [(action.verb, action.who) for _, action in pools.see(view)]


def placed() -> tuple[Pools, Pool]:
    """A pool on pg1."""
    pools = Pools(configure())
    pool = get(pools)
    assert pools.see(seen("pg1")) == []
    return pools, pool


def test_view_places_the_pools_of_its_cluster_at_the_primary():
    pools, pool = placed()
    assert (pool.node, pool.address) == ("pg1", PG1)
    assert (get(pools, user="eve").node, get(pools, user="eve").address) == ("pg1", PG1)
    assert see(pools, seen("pg2")) == [], "it has no servers elsewhere"
    assert (pool.node, pool.address) == ("pg2", PG2)


def test_view_of_the_same_primary_leaves_its_servers():
    pools, pool = placed()
    on(pool)
    assert see(pools, seen("pg1", pg2=Status.DOWN)) == []


def test_view_of_another_primary_cuts_the_servers_of_the_old_one():
    pools, pool = placed()
    servers = on(pool, 3)
    pool.acquire(0)
    assert see(pools, seen("pg2")) == [(Verb.CUT, server) for server in servers]
    new = on(pool)[0]
    assert new not in [server for _, server in see(pools, seen("pg2"))]


def test_view_of_the_same_primary_elsewhere_retires_its_servers_once():
    pools, pool = placed()
    servers = on(pool, 2)
    moved = seen("pg1", pg1=("10.0.0.9", 6000))
    assert see(pools, moved) == [(Verb.RETIRE, server) for server in servers]
    assert pool.address == ("10.0.0.9", 6000)
    assert all(server.retiring for server in servers)
    assert see(pools, moved) == []


def test_view_of_the_same_place_by_another_name_leaves_its_servers():
    pools, pool = placed()
    (server,) = on(pool)
    view = ClusterView(
        "main", 2, Epoch("new"), "new", (NodeView(Node("new", *PG1), PG1[:1], Role.PRIMARY, Status.UP, "", 0),)
    )
    assert see(pools, view) == []
    assert (server.node, server.retiring) == ("new", False)


def test_view_without_primary_leaves_the_servers_and_lets_new_clients_wait():
    pools, pool = placed()
    on(pool)
    assert see(pools, seen(None)) == []
    assert (pool.node, pool.address) == (None, None)
    assert see(pools, seen("pg1")) == [], "it has come back as it was"
    assert pool.address == PG1


def test_view_of_a_primary_that_is_down_leaves_the_servers_and_lets_new_clients_wait():
    pools, pool = placed()
    on(pool)
    assert see(pools, seen("pg1", pg1=Status.DOWN)) == []
    assert (pool.node, pool.address) == ("pg1", None)
    for status in set(Status) - {Status.DOWN}:
        assert see(pools, seen("pg1", pg1=status)) == []
        assert pool.address == PG1


def test_view_of_another_primary_behind_one_without_any_cuts_the_servers():
    pools, pool = placed()
    servers = on(pool)
    pools.see(seen("pg1", pg1=Status.DOWN))
    pools.see(seen(None, held=True))
    assert see(pools, seen("pg2")) == [(Verb.CUT, servers[0])]


def test_view_of_a_primary_whose_address_is_not_known_retires_the_servers():
    pools, pool = placed()
    servers = on(pool)
    assert see(pools, seen("pg1", pg1=None)) == [(Verb.RETIRE, servers[0])]
    assert (pool.node, pool.address) == ("pg1", None)


def test_view_of_a_primary_that_is_no_node_lets_the_clients_wait():
    pools, pool = placed()
    pools.see(seen("pg3"))
    assert pool.address is None


def test_view_of_another_primary_leaves_a_pool_of_one_node():
    pools = Pools(configure(with_database(node="pg2")))
    pool = get(pools)
    pools.see(seen("pg1"))
    assert (pool.node, pool.address) == ("pg2", PG2)
    on(pool)
    assert see(pools, seen("pg2", held=True)) == []
    assert not pool.held


def test_view_of_another_cluster_moves_nothing():
    pools = Pools(configure())
    pool = get(pools)
    assert pools.see(ClusterView("other", 1, Epoch(), None, ())) == []
    assert pool.address is None


def test_view_of_another_place_forgets_that_the_last_one_could_not_be_reached():
    # The first connect to the new primary waited for server_login_retry.
    for view in (seen("pg2"), seen("pg1", pg1=("10.0.0.9", 5432))):
        pools, pool = placed()
        pool.retry_at, pool.failure = 1 << 60, b"E"
        pools.see(seen("pg1", pg2=Status.DOWN))
        assert pool.retry_at == 1 << 60
        pools.see(view)
        assert pool.retry_at == 0
        assert pool.failure is None


def test_pool_that_is_held_gives_no_server_and_none_is_launched():
    pools, pool = placed()
    on(pool)
    busy = pool.acquire(0)
    on(pool)
    pools.see(seen("pg1", held=True))
    assert pool.acquire(0) is None
    client = Client(-1, 1, 0)
    pool.enqueue(client, 0)
    assert pool.next_waiting(0) is None
    assert not pool.wants_server(0)
    assert [action for action in pool.sweep(0) if action.verb is Verb.LAUNCH] == []
    assert busy is not None
    assert (busy.state, client.state) == (SERVER_ACTIVE, CLIENT_WAITING), "what runs goes on"
    pool.move(busy, SERVER_IDLE, 0)
    pools.see(seen("pg1"))
    assert pool.next_waiting(0) is client
    assert pool.acquire(0) is busy


def test_pool_that_is_held_and_paused_needs_both_to_end():
    pools, pool = placed()
    on(pool)
    pool.paused = True
    pools.see(seen("pg1", held=True))
    pools.see(seen("pg1"))
    assert pool.acquire(0) is None
    pool.paused = False
    assert pool.acquire(0) is not None


def test_clients_that_waited_for_the_new_primary_are_served_first_in_first_out():
    pools, pool = placed()
    clients = [Client(-1, number, number) for number in range(3)]
    pools.see(seen(None))
    for client in clients:
        pool.enqueue(client, client.id)
        assert not pool.wants_server(9)
    pools.see(seen("pg2"))
    assert pool.wants_server(9)
    assert [pool.next_waiting(9) for _ in clients] == clients


def pinned() -> tuple[Pools, Pool, Server]:
    """A pool that the settings keep on pg2, with one server."""
    pools = Pools(configure(with_database(node="pg2")))
    pool = get(pools)
    assert pools.see(seen("pg1")) == []
    (server,) = on(pool)
    return pools, pool, server


def taken_out(admin: Admin) -> ClusterView:
    view = seen("pg1")
    return replace(view, nodes=(view.nodes[0], replace(view.nodes[1], admin=admin, status=Status(admin.value))))


def test_node_that_is_taken_out_lets_those_finish_who_are_pinned_to_it():
    pools, pool, server = pinned()
    assert see(pools, taken_out(Admin.DRAIN)) == [(Verb.RETIRE, server)]
    assert pool.address is None
    assert see(pools, seen("pg1")) == []
    assert pool.address == PG2


def test_node_that_is_taken_out_now_cuts_those_who_are_pinned_to_it():
    pools, pool, server = pinned()
    assert see(pools, taken_out(Admin.MAINT)) == [(Verb.CUT, server)]
    assert pool.address is None
