"""Three nodes, a gateway that keeps a primary among them, clients that note what became of each row, and the faults.

1. Rows are numbered by their writer; one is acknowledged when its INSERT was answered, and notes which node did.
2. Where links are asked for, the gateway and the nodes reach each other through them, so that they can be cut.

Called by the tests of failover.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.rows import dict_row

from gateway.demo_hooks import Hooks
from gateway.embedded import FAST_SETTINGS, Cluster, PostgresNode, free_ports

from .client import eventually
from .endpoints import ADMIN_PASSWORD, Gateway, Pooler, _section, write_userlist
from .links import Link

PROBING = {"probe_interval": 0.2, "probe_interval_fast": 0.1, "probe_timeout": 0.5, "fall": 2, "rise": 1}
FAILOVER = {"mode": "promote", "cool_off": 0.0, "startup_grace": 0.0}
NODES: dict[str, Any] = {
    "wal_receiver_timeout": "3s",
    "wal_sender_timeout": "3s",
    "max_connections": 60,
    "min_wal_size": "2MB",
}
FRONT = {"default_pool_size": 10, "query_wait_timeout": 30.0, "shutdown_timeout": 2.0, "workers": 2}
SCHEMA = """
create table seen (who int, n int, primary key (who, n));
create role prober login in role pg_monitor password 'before';
"""
SETTLED = 30.0  # seconds for a cluster to be whole again


@cache
def template() -> Path:
    """Make three nodes once, in a directory of their own, and stop them: a copy is made sooner than they are."""
    folder = Path(tempfile.mkdtemp(prefix="gateway-stage-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cluster = Cluster(folder, standbys=3)
    cluster.primary.init("--wal-segsize=1")  # the least there is to copy
    cluster.primary.configure(**FAST_SETTINGS | NODES)
    with cluster:
        cluster.primary.psql(SCHEMA)
        written = cluster.primary.psql("select pg_current_wal_lsn()")
        for node in cluster.standbys:
            caught_up = partial(node.psql, f"select pg_last_wal_replay_lsn() >= '{written}'")
            eventually(lambda: caught_up() == "t", "a template")  # noqa: B023  it is called before the next one is made
        cluster.stop("fast")
    return folder


def copy_template(cluster: Cluster) -> None:
    """Give a cluster the data of the template."""
    for node in cluster.nodes:
        subprocess.run(["cp", "-a", template() / node.name, node.data], check=True)
    for node in cluster.standbys:
        node.follow(cluster.primary)


class Stage:
    """The whole of it; `failover`, `cluster`, `front` are settings of those sections."""

    def __init__(
        self,
        directory: Path,
        *,
        links: bool = False,
        standbys: int = 2,
        synchronous: str = 'ANY 1 ("pg1", "pg2", "pg3")',
        failover: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
        front: dict[str, Any] | None = None,
        nodes: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self._directory = directory
        self._settings = {**FAILOVER, **(failover or {})}, {**PROBING, **(cluster or {})}, {**FRONT, **(front or {})}
        self._nodes = nodes or {}
        self._has_links = links
        self._stack = ExitStack()
        self._synchronous = synchronous
        self.cluster = Cluster(standbys=standbys)
        self.port = free_ports(1)[0]
        self.links: dict[str, Link] = {}
        self.gateway: Gateway

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _begin(self) -> None:
        copy_template(self.cluster)
        for node in self.cluster.nodes:
            node.configure(synchronous_standby_names=self._synchronous)
        self._stack.enter_context(self.cluster)
        self.hooks = self._stack.enter_context(Hooks(self.cluster, restart=None, place=self._address))
        if self._has_links:
            for node, port in zip(self.cluster.nodes, free_ports(len(self.cluster.nodes)), strict=True):
                self.links[node.name] = self._stack.enter_context(Link(port, node.port))
            for node in self.cluster.standbys:
                node.follow(self.cluster.primary, self._address(self.cluster.primary))
            self.cluster.wait_streaming()
        self.start_gateway()
        self._stack.callback(lambda: self.gateway.kill())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.gateway.stop()
            else:
                print(self.gateway.log[-8000:])
        finally:
            self._stack.close()

    def _address(self, node: PostgresNode) -> int:
        return self.links[node.name].port if node.name in self.links else node.port

    def start_gateway(self, deadline: float | None = SETTLED) -> None:
        """Start the gateway, again where there was one, and wait until it knows a primary, unless it need not."""
        failover, cluster, front = self._settings
        config = self._directory / "topology.toml"
        write_userlist(self._directory, {"postgres": ADMIN_PASSWORD})
        hooks = {"demote_command": self.hooks.command("demote"), "rejoin_command": self.hooks.command("rejoin")}
        wanted = {name: line for name, line in hooks.items() if failover.get(name) != ""}
        config.write_text(
            "\n".join(
                [
                    _section("front", {"listen": [f"127.0.0.1:{self.port}"], **front}),
                    _section("front.auth", {"type": "trust", "file": "userlist.txt"}),
                    _section("cluster.main", {"probe_user": "postgres", **cluster}),
                    *(
                        _section(
                            "[cluster.main.node]",
                            {
                                "name": node.name,
                                "host": "127.0.0.1",
                                "port": self._address(node),
                                **self._nodes.get(node.name, {}),
                            },
                        )
                        for node in self.cluster.nodes
                    ),
                    _section("cluster.main.failover", {**wanted, **{k: v for k, v in failover.items() if v != ""}}),
                    _section('database."*"', {"cluster": "main"}),
                    _section("console", {"admin_users": ["postgres"]}),
                ]
            )
        )
        self.gateway = Keeping(self.port, self._directory, config)
        if deadline is not None:
            self.until(lambda view: view["primary"] is not None, "a primary", deadline)

    # What is to be seen.

    @staticmethod
    def signal(pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of a node."""
        os.kill(pid, number)

    def node(self, name: str) -> PostgresNode:
        """A node by its name."""
        return next(node for node in self.cluster.nodes if node.name == name)

    def console(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a command on the console."""
        return self.gateway.console(sql)

    def view(self) -> dict[str, Any]:
        """The row of SHOW CLUSTERS, and under "nodes" those of SHOW NODES by their names."""
        with self.gateway.connect("gateway", password=ADMIN_PASSWORD) as connection:
            cursor = psycopg.ClientCursor(connection, row_factory=dict_row)
            rows = cursor.execute("show clusters").fetchall()
            nodes = cursor.execute("show nodes").fetchall()
        if not rows:  # not every node was probed yet
            return {}
        return {**rows[0], "nodes": {node["name"]: node for node in nodes}}

    def until(self, is_so: Callable[[dict[str, Any]], bool], what: str, deadline: float = SETTLED) -> dict[str, Any]:
        """Wait for the view to be so; return it."""
        last: dict[str, Any] = {}

        def look() -> bool:
            last.clear()
            with suppress(psycopg.OperationalError):
                last.update(self.view())
            return bool(last) and is_so(last)

        try:
            eventually(look, what, deadline)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{last}\n{self.gateway.log[-6000:]}") from None
        return last

    def until_primary(self, *names: str) -> str:
        """Wait until one of these is the primary that clients are sent to; return its name."""
        is_so = self.until(
            lambda view: (
                view["primary"] in names and view["held"] == "no" and view["nodes"][view["primary"]]["status"] == "up"
            ),
            f"the primary is one of {names}",
        )
        return str(is_so["primary"])

    def until_whole(self, deadline: float = SETTLED) -> str:
        """Wait until all nodes are up, one a primary and the others standbys that receive from it; return its name."""

        def is_whole(view: dict[str, Any]) -> bool:
            nodes = view["nodes"].values()
            return view["held"] == "no" and all(
                (row["role"], row["status"], row["reason"])
                == ("primary" if row["name"] == view["primary"] else "standby", "up", "")
                for row in nodes
            )

        return str(self.until(is_whole, "a whole cluster", deadline)["primary"])

    def rows(self, name: str) -> set[tuple[int, int]]:
        """What a node has, asked past the gateway."""
        found = self.node(name).psql("select who, n from seen").splitlines()
        return {(int(who), int(n)) for who, n in (line.split("|") for line in found)}


class Keeping(Gateway):
    """A gateway that starts while clients are already coming."""

    def __init__(self, port: int, directory: Path, config: Path) -> None:
        command = [sys.executable, "-m", "gateway", "serve", str(config)]
        Pooler.__init__(self, command, port, directory, config)
        self.expected_workers = self.workers()

    def busy(self) -> list[object]:
        return []


class Writer(threading.Thread):
    """A client in autocommit that inserts row after row, and goes on whatever happens."""

    def __init__(self, stage: Stage, who: int) -> None:
        super().__init__(daemon=True)
        self.who = who
        self.acknowledged: list[tuple[float, int, int]] = []  # when, which row, by which node's port
        self.errors: list[str] = []  # SQLSTATEs
        self.dropped = 0
        self._stage = stage
        self._ended = threading.Event()
        self.start()

    def stop(self) -> None:
        self._ended.set()
        self.join(40)
        assert not self.is_alive(), "a writer hangs"

    def run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        n = 0
        sql = "insert into seen values (%s, %s) returning inet_server_port()"
        while not self._ended.is_set():
            n += 1
            try:
                connection = connection or self._stage.gateway.connect()
                (port,) = connection.execute(sql, (self.who, n)).fetchone()  # type: ignore[misc]
                self.acknowledged.append((time.monotonic(), n, port))
            except psycopg.Error as error:
                self.errors.append(error.sqlstate or type(error).__name__)
                if connection is not None and connection.closed:
                    self.dropped += 1
                    connection = None
                self._ended.wait(0.05)
            self._ended.wait(0.005)
        if connection is not None:
            connection.close()


class Writers:
    """Several of them, for the time of a with statement; afterwards what they noted is there."""

    def __init__(self, stage: Stage, count: int = 8) -> None:
        self._stage, self._count = stage, count
        self.all: list[Writer] = []

    def __enter__(self) -> Self:
        self.all = [Writer(self._stage, who) for who in range(self._count)]
        self.advance()
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.all:
            writer.stop()

    def advance(self, rows: int = 3, deadline: float = SETTLED) -> None:
        """Wait until each has had so many further rows acknowledged."""
        before = [len(writer.acknowledged) for writer in self.all]

        def is_done() -> bool:
            pairs = zip(self.all, before, strict=True)
            return all(len(writer.acknowledged) >= count + rows for writer, count in pairs)

        eventually(is_done, f"{rows} rows of each writer", deadline)

    @property
    def acknowledged(self) -> set[tuple[int, int]]:
        return {(writer.who, n) for writer in self.all for _, n, _ in writer.acknowledged}

    @property
    def dropped(self) -> int:
        return sum(writer.dropped for writer in self.all)

    @property
    def errors(self) -> list[str]:
        return [error for writer in self.all for error in writer.errors]

    def took_turns(self) -> list[int]:
        """The ports of the nodes that acknowledged rows, in the order of their turns."""
        acks = sorted(ack for writer in self.all for ack in writer.acknowledged)
        ports = [port for _, _, port in acks]
        return [port for number, port in enumerate(ports) if number == 0 or ports[number - 1] != port]
