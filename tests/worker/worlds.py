"""Pools, servers and clients without a socket: what the tests of the worker's decisions begin with."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.pool_settings import pool_settings
from gateway.settings import Cluster, Database, Front, Node, PoolSettings, Settings
from gateway.worker.endpoint import SERVER_IDLE, Client, Server
from gateway.worker.pool import SECOND, Pool, Share

SETTINGS = Settings(
    front=Front(server_check_query="", server_lifetime=0.0, server_idle_timeout=0.0, query_wait_notify=0.0),
    cluster={"main": Cluster(node=(Node(name="pg1", host="10.0.0.1"), Node(name="pg2", host="10.0.0.2")))},
    database={"*": Database(cluster="main")},
)
ADDRESS = ("10.0.0.1", 5432)


def settings_of(database: str = "app", user: str = "bob", **changes: Any) -> PoolSettings:
    """What holds for a pool in which no time limit but query_wait_timeout is set, with changes."""
    settings = pool_settings(SETTINGS, database, user)
    assert settings is not None
    return replace(settings, **changes)


def make_pool(limit: int = 20, reserve: int = 0, shares: tuple[Share, ...] = (), **changes: Any) -> Pool:
    """A pool whose node is known."""
    pool = Pool(settings_of(**changes), Share(limit), Share(reserve), shares)
    pool.address = ADDRESS
    return pool


def launch(pool: Pool, now: int = 0, id: int = 0) -> Server:
    """A server that begins to log in."""
    server = Server(-1, id, pool, now)
    pool.add(server)
    return server


def idle_server(pool: Pool, now: int = 0, id: int = 0) -> Server:
    """A server that has logged in and idles."""
    server = launch(pool, now, id)
    pool.move(server, SERVER_IDLE, now)
    return server


def linked(server: Server, now: int = 0) -> Client:
    """A client that has got an acquired server."""
    client = Client(-1, 1, now)
    client.pool = server.pool
    client.server, server.client = server, client
    return client


def seconds(count: float) -> int:
    """Microseconds of the reactor's clock."""
    return int(count * SECOND)
