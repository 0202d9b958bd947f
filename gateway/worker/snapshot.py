"""What a worker can tell of itself: rows for the console's tables, of which the supervisor makes one table.

1. Numbers are added up by the supervisor, so a row holds counts and sums, never averages.
2. Rows are plain values by PgBouncer's column names where it has the column.

Called by the front when the supervisor asks.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from gateway.wire.parameters import Parameters
from gateway.worker.endpoint import (
    CLIENT_ACTIVE,
    CLIENT_IDLE,
    CLIENT_LEAVING,
    CLIENT_LOGIN,
    CLIENT_WAITING,
    SERVER_ACTIVE,
    SERVER_CANCELED,
    SERVER_CLEANUP,
    SERVER_CLOSING,
    SERVER_IDLE,
    SERVER_LOGIN,
    SERVER_TESTED,
    SERVER_WARM,
    Client,
    Server,
)

if TYPE_CHECKING:
    from gateway.worker.front import Front
    from gateway.worker.pool import Pool
    from health.view import ClusterView

Row = dict[str, object]

CLIENT_STATES = {
    CLIENT_LOGIN: "login",
    CLIENT_IDLE: "idle",
    CLIENT_WAITING: "waiting",
    CLIENT_ACTIVE: "active",
    CLIENT_LEAVING: "leaving",
}
SERVER_STATES = {
    SERVER_LOGIN: "login",
    SERVER_IDLE: "idle",
    SERVER_ACTIVE: "active",
    SERVER_TESTED: "tested",
    SERVER_CLEANUP: "cleanup",
    SERVER_CANCELED: "being_canceled",
    SERVER_CLOSING: "closing",
    SERVER_WARM: "warm",
}
COUNTERS = (
    "assignments",
    "xact_count",
    "query_count",
    "received",
    "sent",
    "xact_time",
    "query_time",
    "wait_time",
    "client_parses",
    "server_parses",
    "binds",
    "logins",
)


def rows(front: Front, table: str) -> list[Row]:
    """Return the rows of a table: pools, clients, servers, clusters."""
    if table == "pools":
        return [_pool(front, pool) for pool in front.pools.all]
    if table == "clients":
        return [_client(front, client) for client in front.clients.by_id.values() if client.pool is not None]
    if table == "clusters":
        return [_cluster(front, name, view) for name, view in front.pools.views.items()]
    if table == "servers":
        return [_server(front, server) for server in front.pools.servers()]
    return []


def _cluster(front: Front, name: str, view: ClusterView) -> Row:
    servers = [server for server in front.pools.servers() if server.pool.settings.cluster == name]
    return {"cluster": name, "held": view.held, "running": sum(map(_runs, servers))}


def _runs(server: Server) -> bool:
    """Is a server in a transaction, or asked for something?"""
    if server.client is not None:
        return not server.client.is_idle()
    return server.state == SERVER_CLEANUP


def _pool(front: Front, pool: Pool) -> Row:
    states = [server.state for server in pool.servers]
    now = front.reactor.now
    queue = [*pool.newcomers, *pool.waiting]
    row: Row = {
        "database": pool.database,
        "user": pool.settings.server_user,
        "cluster": pool.settings.cluster,
        "pool_mode": pool.settings.pool_mode.value,
        "clients": pool.clients,
        "waiting": len(queue),
        "maxwait_us": max((now - client.waiting_since for client in queue), default=0),
        "cancels": sum(server.cancels for server in pool.servers),
    }
    for state, name in SERVER_STATES.items():
        row[f"sv_{name}"] = states.count(state)
    for counter in COUNTERS:
        row[counter] = getattr(pool, counter)
    return row


def _client(front: Front, client: Client) -> Row:
    pool, server = client.pool, client.server
    assert pool is not None
    return {
        "user": pool.user,
        "database": pool.database,
        "replication": client.replication,
        "state": CLIENT_STATES.get(client.state, "login"),
        **_addresses(client.fd),
        "connected_us": front.reactor.now - client.connected_at,
        "request_us": front.reactor.now - (client.query_since or client.idle_since),
        "wait_us": front.reactor.now - client.waiting_since if client.waiting_since else 0,
        "close_needed": False,
        "id": client.id,
        "link": server.id if server is not None else 0,
        "remote_pid": server.pid if server is not None else 0,
        "application_name": _application(client.parameters),
        "prepared_statements": len(client.statements or ()),
    }


def _server(front: Front, server: Server) -> Row:
    client = server.client
    return {
        "user": server.pool.settings.server_user,
        "database": server.pool.database,
        "replication": client.replication if client is not None else False,
        "state": SERVER_STATES.get(server.state, "closing"),
        **_addresses(server.fd, swapped=False),
        "connected_us": front.reactor.now - server.connected_at,
        "request_us": front.reactor.now - server.state_since,
        "wait_us": 0,
        "close_needed": server.retiring,
        "id": server.id,
        "link": client.id if client is not None else 0,
        "remote_pid": server.pid,
        "application_name": _application(server.parameters),
        "prepared_statements": len(server.statements),
    }


def _application(parameters: Parameters | None) -> str:
    return parameters.values.get("application_name", "") if parameters is not None else ""


def _addresses(fd: int, *, swapped: bool = False) -> Row:
    names: list[Any] = []
    if fd >= 0:
        sock = socket.socket(fileno=fd)
        try:
            names = [sock.getpeername(), sock.getsockname()]
        except OSError:
            names = []
        finally:
            sock.detach()
    row: Row = {}
    for prefix, name in zip(("", "local_"), names or ["", ""], strict=True):
        host, port = name[:2] if isinstance(name, tuple) else ("unix" if names else "", 0)
        row[f"{prefix}addr"], row[f"{prefix}port"] = host, port
    return row
