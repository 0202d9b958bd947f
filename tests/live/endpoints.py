"""What the tests connect to: a gateway of their own, or in its place PostgreSQL itself or PgBouncer.

PostgreSQL in the gateway's place must pass every comparison, which proves the tests; PgBouncer fails some, which proves
that they can fail. Each endpoint is a process with a port, a console and a way to tell that nothing leaked.

Called by the fixtures of tests/live/conftest.py.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import psycopg
import pytest
from psycopg.rows import dict_row

from .client import eventually

ROOT = Path(__file__).parents[2]
START = 10.0  # seconds for a process to listen
STOP = 5.0  # seconds for it to end after SIGTERM

Table = Mapping[str, Any]

ADMIN_PASSWORD = "open sesame"


class Server(Protocol):
    """What the bench needs to know of a PostgreSQL node."""

    port: int

    def psql(self, sql: str, database: str = "postgres") -> str: ...


class Endpoint:
    """A port that speaks PostgreSQL's protocol."""

    name = ""
    console_database = ""

    def __init__(self, port: int) -> None:
        self.port = port

    def dsn(self, database: str = "postgres", user: str = "postgres", **more: Any) -> str:
        return psycopg.conninfo.make_conninfo(
            host="127.0.0.1", port=self.port, dbname=database, user=user, connect_timeout=10, **more
        )

    def connect(self, database: str = "postgres", user: str = "postgres", **more: Any) -> psycopg.Connection[Any]:
        """A psycopg connection in autocommit; `more` are connection parameters."""
        return psycopg.connect(self.dsn(database, user, **more), autocommit=True)

    def console(self, sql: str) -> list[dict[str, Any]]:
        """Run one command on the admin console; its rows by column name."""
        if not self.console_database:
            pytest.skip(f"{self.name} has no admin console")
        with self.connect(self.console_database, password=ADMIN_PASSWORD) as connection:
            cursor = psycopg.ClientCursor(connection, row_factory=dict_row)
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def workers(self) -> set[int]:
        """Process ids of the workers."""
        pytest.skip(f"{self.name} has no workers")

    def memory(self) -> int:
        """Resident bytes of all workers together; proc(5)."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.workers())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def busy(self) -> list[object]:
        """Whatever is still held although no client is there."""
        return []

    def assert_no_leak(self) -> None:
        """Wait until no client and no server is in use any more."""
        busy: list[object] = []

        def quiet() -> bool:
            busy[:] = self.busy()
            return not busy

        with suppress(AssertionError):
            eventually(quiet, "pools at rest", 5.0)
        assert not busy, f"{self.name} still holds {busy}"


class Direct(Endpoint):
    """PostgreSQL in the gateway's place."""

    name = "PostgreSQL"

    def __init__(self, postgres: Server) -> None:
        super().__init__(postgres.port)
        self._postgres = postgres

    def busy(self) -> list[object]:
        others = "backend_type = 'client backend' and pid <> pg_backend_pid() and application_name <> 'bench'"
        found = self._postgres.psql(f"select count(*) from pg_stat_activity where {others}").strip()
        return [] if found == "0" else [f"{found} backends"]

    def kill(self) -> None:
        others = "backend_type = 'client backend' and pid <> pg_backend_pid() and application_name <> 'bench'"
        self._postgres.psql(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")

    def stop(self) -> None:
        pass


class Pooler(Endpoint):
    """A process in front of PostgreSQL, with its log and its end."""

    def __init__(self, command: list[str], port: int, directory: Path, config: Path) -> None:
        super().__init__(port)
        self.directory, self.config = directory, config
        self._log = directory / "log"
        with self._log.open("wb") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=environment)
        try:
            eventually(self._listens, f"{self.name} listening on {port}", START)
            self.assert_no_leak()
        except (AssertionError, psycopg.Error) as late:
            self.kill()
            raise AssertionError(f"{self.name} did not start: {late}\n{self.log[-4000:]}") from None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def busy(self) -> list[object]:
        return [
            row
            for row in self.console("show pools")
            if row["database"] != self.console_database
            and (row["cl_active"], row["cl_waiting"], row["sv_active"]) != (0, 0, 0)
        ]

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def terminate(self, deadline: float = STOP) -> int:
        """Send SIGTERM and wait; the exit code."""
        self.process.terminate()
        return self.wait(deadline)

    def wait(self, deadline: float = STOP) -> int:
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {deadline} s:\n{self.log[-2000:]}") from None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> set[int]:
        """Process ids of the children; proc(5)."""
        return set(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def kill(self) -> None:
        """End the process and its children at once."""
        if self.is_running:
            for pid in [*self.children(), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(5)

    def stop(self) -> None:
        """End the process; it must leave with exit code 0, no traceback and no child behind."""
        if self.is_running:
            children = self.children()
            code = self.terminate()
            assert code == 0, f"{self.name} left with {code}:\n{self.log[-2000:]}"
            eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the end of its children")
        assert "Traceback" not in self.log, self.log

    def _listens(self) -> bool:
        # By its log: whoever answers on the port may be another.
        if not self.is_running:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log[-4000:]}")
        return f"listening on 127.0.0.1:{self.port}" in self.log


class Gateway(Pooler):
    """`gateway serve` with a topology of its own.

    Keyword arguments are settings of [front], a mapping is a section: `auth={"type": "md5"}` is [front.auth],
    `user={"bob": {"pool_size": 1}}` is [user.bob], `cluster={"fall": 1}` adds to [cluster.main].
    """

    name = "the gateway"
    console_database = "gateway"

    def __init__(
        self, postgres: Server, port: int, directory: Path, userlist: Mapping[str, str], **settings: Any
    ) -> None:
        self._postgres = postgres
        config = directory / "topology.toml"
        write_userlist(directory, userlist)
        config.write_text(topology(postgres.port, port, **settings))
        super().__init__([sys.executable, "-m", "gateway", "serve", str(config)], port, directory, config)
        self.expected_workers = self.workers()

    def configure(self, **settings: Any) -> None:
        """Write the topology anew and reload it."""
        self.config.write_text(topology(self._postgres.port, self.port, **settings))
        self.reload()

    def workers(self) -> set[int]:
        return self.children()

    def stop(self) -> None:
        died = self.expected_workers - self.workers() if self.is_running else set()
        super().stop()
        assert not died, f"workers {died} died:\n{self.log[-4000:]}"


@contextmanager
def frozen(endpoint: Endpoint) -> Iterator[None]:
    """What is done meanwhile comes to the workers all at once."""
    workers = [psutil.Process(pid) for pid in endpoint.workers()]
    for worker in workers:
        worker.suspend()
    try:
        stopped = psutil.STATUS_STOPPED
        eventually(lambda: all(worker.status() == stopped for worker in workers), "the workers to stop")
        yield
    finally:
        for worker in workers:
            worker.resume()


class PgBouncer(Pooler):
    """PgBouncer with the settings that it shares; what it does not know is left out."""

    name = "PgBouncer"
    console_database = "pgbouncer"

    unknown = frozenset({"workers", "shutdown_timeout", "max_prepared_statements", "server_cleanup_timeout"})

    def __init__(
        self, postgres: Server, port: int, directory: Path, userlist: Mapping[str, str], **settings: Any
    ) -> None:
        write_userlist(directory, userlist)
        (directory / "userlist.txt").chmod(0o644)
        directory.chmod(0o755)
        settings = {**DEFAULTS, **settings}
        auth = settings.pop("auth", {"type": "trust"})["type"]
        sections = {key: settings.pop(key, {}) for key in ("database", "user", "cluster", "console")}
        front = {key: value for key, value in settings.items() if key not in self.unknown}
        lines = ["[databases]", f"* = host=127.0.0.1 port={postgres.port}"]
        lines += [
            f"{name} = host=127.0.0.1 port={postgres.port} {_pairs(table)}"
            for name, table in sections["database"].items()
        ]
        lines += ["[users]", *(f"{name} = {_pairs(table)}" for name, table in sections["user"].items())]
        lines += ["[pgbouncer]", "listen_addr = 127.0.0.1", f"listen_port = {port}", "unix_socket_dir ="]
        lines += [
            f"auth_type = {'plain' if auth == 'password' else auth}",
            "auth_file = userlist.txt",
            "admin_users = postgres",
        ]
        lines += [
            "ignore_startup_parameters = extra_float_digits",
            *(f"{key} = {value}" for key, value in front.items()),
        ]
        config = directory / "pgbouncer.ini"
        config.write_text("\n".join(lines) + "\n")
        config.chmod(0o644)
        command = ["pgbouncer", str(config)]
        if os.geteuid() == 0:
            command[1:1] = ["-u", pwd.getpwnam("postgres").pw_name]
        super().__init__(command, port, directory, config)

    def workers(self) -> set[int]:
        return {self.process.pid}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.wait()

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self.directory, ignore_errors=True)


DEFAULTS: Table = {
    "workers": 1,
    "pool_mode": "transaction",
    "default_pool_size": 1,
    "query_wait_timeout": 4.0,
    "shutdown_timeout": 3.0,
    "max_client_conn": 3000,
}


def topology(server: int, port: int, **settings: Any) -> str:
    """A topology.toml with one node on the port `server`, listening on `port`."""
    settings = {"listen": [f"127.0.0.1:{port}"], **DEFAULTS, **settings}
    auth = {"type": "trust", "file": "userlist.txt", **settings.pop("auth", {})}
    cluster = {"probe_interval": 0.5, "probe_user": "postgres", **settings.pop("cluster", {})}
    nodes = settings.pop("nodes", [{"name": "pg1", "host": "127.0.0.1", "port": server}])
    databases = {"*": {}, **settings.pop("database", {})}
    users, console = settings.pop("user", {}), {"admin_users": ["postgres"], **settings.pop("console", {})}
    return "\n".join(
        [
            _section("front", settings),
            _section("front.auth", auth),
            _section("cluster.main", cluster),
            *(_section("[cluster.main.node]", node) for node in nodes),
            *(_section(f'database."{name}"', {"cluster": "main", **table}) for name, table in databases.items()),
            *(_section(f'user."{name}"', table) for name, table in users.items()),
            _section("console", console),
        ]
    )


def write_userlist(directory: Path, secrets: Mapping[str, str]) -> None:
    """userlist.txt in PgBouncer's format."""
    file = directory / "userlist.txt"
    file.write_text("".join(f'"{name}" "{secret}"\n' for name, secret in secrets.items()))
    file.chmod(0o600)


def _section(name: str, table: Table) -> str:
    # JSON's strings, numbers, booleans and lists are TOML's too.
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])


def _pairs(table: Table) -> str:
    return " ".join(f"{key}={value}" for key, value in table.items() if key != "cluster")
