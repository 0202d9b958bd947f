"""A gateway that is not there: what the console would see of two workers, and what it sends to a client."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gateway.console.console import Console
from gateway.settings import Auth, Cluster, Database, Front, Node, PoolMode, Settings, User
from gateway.topology import Fault, SettingsError
from gateway.wire import messages
from health import view
from health.keeper import RefusedError
from health.view import Admin, ClusterView, Epoch, NodeView, Role, Status

ADMIN, LOOKER = (0, 1), (1, 1)
NOW, TIME = 1000.0, 1_700_000_000.0  # 2023-11-14 22:13:20 UTC

SETTINGS = Settings(
    front=Front(auth=Auth(file="/etc/users"), pool_mode=PoolMode.TRANSACTION, max_user_connections=50),
    cluster={
        "main": Cluster(
            node=(Node(name="pg1", host="10.0.0.1"), Node(name="pg2", host="10.0.0.2", port=5433)),
            probe_password="hush",
        )
    },
    database={
        "*": Database(cluster="main"),
        "app": Database(cluster="main", dbname="app1", user="owner", password="hush", pool_size=7),
        "read": Database(cluster="main", node="pg2", pool_mode=PoolMode.SESSION, server_lifetime=60.0),
    },
    user={"bob": User(pool_size=3, max_user_connections=5)},
)
VIEW = ClusterView(
    "main",
    4,
    Epoch("pg1", 7, 1, 1),
    "pg1",
    (
        NodeView(view.Node("pg1", "10.0.0.1"), ("10.0.0.1",), Role.PRIMARY, Status.UP, "", NOW - 60, 0.00125, None),
        NodeView(
            view.Node("pg2", "10.0.0.2", 5433, 2), (), Role.UNKNOWN, Status.DOWN, "refused", NOW - 1, lag_bytes=8192
        ),
    ),
)
COUNTERS = {
    "assignments": 10,
    "xact_count": 20,
    "query_count": 30,
    "received": 40,
    "sent": 50,
    "xact_time": 6000,
    "query_time": 7000,
    "wait_time": 800,
    "client_parses": 9,
    "server_parses": 8,
    "binds": 7,
    "logins": 6,
}


def pool(worker: int = 0, database: str = "app", user: str = "owner", **more: Any) -> dict[str, object]:
    """A worker's row for a pool with one server in each state, three clients active and two waiting."""
    states = ("login", "idle", "active", "tested", "cleanup", "being_canceled", "closing")
    return {
        "database": database,
        "user": user,
        "cluster": "main",
        "pool_mode": "transaction",
        "clients": 5,
        "waiting": 2,
        "maxwait_us": 1_500_000,
        "cancels": 1,
        **{f"sv_{state}": 1 for state in states},
        **COUNTERS,
        "worker": worker,
        **more,
    }


def connection(**more: Any) -> dict[str, object]:
    """A worker's row for a client or a server."""
    return {
        "user": "owner",
        "database": "app",
        "replication": False,
        "state": "active",
        "addr": "10.1.0.1",
        "port": 40000,
        "local_addr": "10.1.0.2",
        "local_port": 6432,
        "connected_us": 20_000_000,
        "request_us": 1_000_000,
        "wait_us": 2_000_003,
        "close_needed": False,
        "id": 5,
        "link": 9,
        "remote_pid": 77,
        "application_name": "psql",
        "prepared_statements": 4,
        "worker": 1,
        **more,
    }


class Keeper:
    """Notes what it is told to do, or refuses it."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.refusal = ""

    async def switchover(self, target: str | None = None, *, force: bool = False) -> str:
        return self._take("switchover", target, force)

    async def promote(self, target: str) -> str:
        return self._take("promote", target)

    async def pause(self, paused: bool) -> None:
        self._take("pause", paused)

    def administer(self, node: str, admin: Admin) -> None:
        self._take("administer", node, admin)

    def _take(self, *order: object) -> str:
        if self.refusal:
            raise RefusedError(self.refusal)
        self.orders.append(order)
        return "pg2 is the primary on timeline 2"


class Gateway:
    """What the console is given; tables holds the workers' rows, sent what each client was sent."""

    def __init__(self, **tables: list[dict[str, object]]) -> None:
        self.settings = SETTINGS
        self.views = {"main": VIEW}
        self.started_at = TIME - 3600
        self.tables = tables
        self.faulty = False
        self.reloads = 0
        self.kept = {"main": Keeper()}
        self.sent: dict[tuple[int, int], bytes] = {}
        self.closed: set[tuple[int, int]] = set()
        self.console = Console(self, clock=lambda: NOW, wall_clock=lambda: TIME)
        for client, admin in ((ADMIN, True), (LOOKER, False)):
            self.console.opened(client, "somebody", admin)

    async def ask(self, table: str) -> list[dict[str, object]]:
        return self.tables[table]

    async def reload(self) -> None:
        self.reloads += 1
        if self.faulty:
            raise SettingsError([Fault("front", "is wrong")])

    def keeper(self, cluster: str) -> Keeper:
        return self.kept[cluster or "main"]

    def keeper_of(self, node: str) -> tuple[Keeper, str]:
        return self.kept["main"], node

    def write(self, client: tuple[int, int], data: bytes, close: bool) -> None:
        assert client not in self.closed
        self.sent[client] = self.sent.get(client, b"") + data
        if close:
            self.closed.add(client)

    def say(self, data: bytes, client: tuple[int, int] = ADMIN) -> list[tuple[int, bytes]]:
        """Let a client send bytes; what it is sent until everything has been answered, as types and bodies."""
        self.sent[client] = b""
        run(self.console.received(client, data))
        return split(self.sent[client])

    def show(self, text: str) -> tuple[list[tuple[str, int]], list[list[str | None]]]:
        """Columns and rows of a query's one result."""
        answer = self.say(messages.query(text))
        assert [type_ for type_, _ in answer if type_ != messages.DATA_ROW] == [
            messages.ROW_DESCRIPTION,
            messages.COMMAND_COMPLETE,
            messages.READY_FOR_QUERY,
        ]
        rows = [messages.row_values(body) for type_, body in answer if type_ == messages.DATA_ROW]
        return messages.row_columns(answer[0][1]), rows

    def table(self, text: str) -> list[dict[str, str | None]]:
        """Rows of a query's one result, by the names of their columns."""
        columns, rows = self.show(text)
        return [dict(zip([name for name, _ in columns], row, strict=True)) for row in rows]

    def error(self, text: str, client: tuple[int, int] = ADMIN) -> tuple[str, str, str]:
        """Severity, SQLSTATE and text of the one error that a query ends in."""
        answer = self.say(messages.query(text), client)
        [fields] = [messages.error_fields(body) for type_, body in answer if type_ == messages.ERROR_RESPONSE]
        assert answer[-1] == (messages.READY_FOR_QUERY, b"I") or client in self.closed
        return fields["severity"], fields["sqlstate"], fields["message"]


def run(task: Coroutine[Any, Any, None]) -> None:
    """Run what never waits."""
    try:
        task.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Messages as types and bodies."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big") + 1
        found.append((data[0], data[5:size]))
        data = data[size:]
    return found
