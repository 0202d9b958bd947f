"""The composition root of the supervisor: `gateway serve FILE`.

1. It decides nothing that a worker needs to serve a query; a worker goes on without it for as long as it takes.
2. Settings are read here only. A reload with a faulty file changes nothing and says so.
3. SIGTERM and SIGINT drain, a second one ends now; SIGHUP reloads.

Called by the cli. See the sections "Two kinds of process" and "A failover" of ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from gateway import __version__, variant
from gateway.console.console import Console
from gateway.control import (
    WORKER_SHIFT,
    Answer,
    Ask,
    CancelElsewhere,
    Configure,
    ConsoleClosed,
    ConsoleInput,
    ConsoleOpened,
    ConsoleOutput,
    Demand,
    Down,
    Drain,
    Grant,
    Limit,
    Met,
    Ready,
    Up,
    View,
)
from gateway.logs import set_up
from gateway.settings import PARAMETERS, Settings
from gateway.supervisor.budget import Ledger
from gateway.supervisor.clusters import Clusters, check_state_files
from gateway.supervisor.listeners import Listeners
from gateway.supervisor.workers import Workers
from gateway.topology import Fault, SettingsError, load
from gateway.wire.userlist import parse
from health.keeper import Keeper
from health.view import ClusterView

log = logging.getLogger("gateway.supervisor")

_DESCRIPTORS_OF_OUR_OWN = 100  # per worker: listeners, epoll, the channel, cancel requests
_ANSWER_TIME = 5.0  # seconds for a worker to answer the console
_GRACE = 5.0  # seconds for a worker to exit after it has drained


class Supervisor:
    """Everything that one running gateway is, beside its workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = load(path)
        self.users = read_users(self.settings)
        check_state_files(self.settings)
        set_up(self.settings.front, "supervisor")
        workers = self.settings.front.workers
        self.count = len(os.sched_getaffinity(0)) if workers == "auto" else workers
        self.secret = secrets.token_bytes(32)
        self.started_at = time.time()
        self.ledgers: dict[Limit, Ledger] = {}
        self.granted: dict[tuple[int, Limit], int] = {}
        self.clusters = Clusters(self._publish, self._running)
        self.answers: dict[int, tuple[list[dict[str, object]], set[int], anyio.Event]] = {}
        self.asked = 0
        self.client_limit = self._raise_limit()
        self.listeners = Listeners(self.settings.front, self.count)
        self.workers = Workers(self.count, self.listeners, self._first_words)
        self.console = Console(self)
        self.tasks: TaskGroup

    # At the start.

    def _raise_limit(self) -> int:
        """Raise RLIMIT_NOFILE as far as it goes; return how many clients each worker can hold."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        servers = self.settings.front.default_pool_size or self.settings.front.max_db_connections or 100
        limit = max(hard - _DESCRIPTORS_OF_OUR_OWN - servers, 1)
        wanted = self.settings.front.max_client_conn
        whole = limit * self.count
        if wanted > whole:
            log.warning(
                "max_client_conn is %d, but the limit on open files (%d) allows %d clients: raise it (ulimit -n)",
                wanted,
                hard,
                whole,
            )
        else:
            log.info("the limit on open files (%d) allows max_client_conn up to %d", hard, whole)
        return limit

    def _configure(self, index: int) -> Configure:
        return Configure(self.settings, self.users, index, self.count, self.secret, self.client_limit)

    def _first_words(self, index: int) -> Iterator[Down]:
        yield self._configure(index)
        for (worker, limit), share in self.granted.items():
            if worker == index:
                yield Grant(limit, share)
        for view in self.views.values():
            yield View(view)

    async def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        if os.getuid() == 0:
            log.warning("running as root, which the gateway has no need of: prefer a user of its own")
        for warning in self.settings.warnings:
            log.warning("%s: %s", self.path, warning)
        log.info("gateway %s (%s), pid %d, %d workers", __version__, variant(), os.getpid(), self.count)
        for listen in self.settings.front.listen:
            log.info("listening on %s", listen)
        try:
            async with anyio.create_task_group() as self.tasks:
                for index in range(self.count):
                    self.tasks.start_soon(self.workers.tend, index, self._heard, self._died)
                self.clusters.watch(self.settings, self.users, self.tasks)
                self.tasks.start_soon(self._tick)
                await self._obey_signals()
                self.tasks.cancel_scope.cancel()
        finally:
            self.listeners.close()
            self.workers.kill()
        log.info("ended")
        return 0

    # Signals, reload and drain.

    async def _obey_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGHUP, signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    with contextlib.suppress(SettingsError):  # it is in the log
                        await self.reload()
                else:
                    log.info("%s: draining (shutdown_timeout %g s)", number.name, self.settings.front.shutdown_timeout)
                    break
            async with anyio.create_task_group() as ending:
                ending.start_soon(self._drain, ending)
                async for number in signals:
                    if number in (signal.SIGTERM, signal.SIGINT):
                        log.info("%s again: ending now", number.name)
                        ending.cancel_scope.cancel()

    async def _drain(self, ending: TaskGroup) -> None:
        timeout = self.settings.front.shutdown_timeout
        self.workers.stopping = True
        self.listeners.close()
        self.workers.tell_all(Drain(timeout), self.tasks)
        with anyio.move_on_after(timeout + _GRACE):
            await self.workers.ended()
        ending.cancel_scope.cancel()

    async def reload(self) -> None:
        """Read the settings anew; raises SettingsError, having changed nothing, when there is a fault."""
        try:
            settings = load(self.path)
            users = read_users(settings)
            check_state_files(settings)
        except SettingsError as error:
            for fault in error.faults:
                log.error("reload of %s: %s", self.path, fault)
            log.error("the running settings are kept")
            raise
        for name in unreloadable(self.settings, settings):
            log.warning("%s has changed: it takes effect at the next start", name)
        self.settings, self.users = settings, users
        set_up(settings.front, "supervisor")
        for index in range(self.count):
            self.tasks.start_soon(self.workers.tell, index, self._configure(index))
        self.clusters.watch(settings, users, self.tasks)
        log.info("reloaded %s", self.path)

    # Health.

    def _publish(self, view: ClusterView) -> None:
        self.workers.tell_all(View(view), self.tasks)

    async def _running(self, cluster: str) -> int:
        """Return how many transactions run in a cluster that is held; a worker that does not know yet counts too."""
        rows = await self.ask("clusters")
        silent = self.count - len({row["worker"] for row in rows if row["cluster"] == cluster and row["held"]})
        return silent + sum(int(str(row["running"])) for row in rows if row["cluster"] == cluster)

    @property
    def views(self) -> dict[str, ClusterView]:
        """The clusters as they are now."""
        return self.clusters.views

    # What the workers say.

    def _heard(self, index: int, record: Up) -> None:
        match record:
            case Ready():
                self.workers.all[index].ready = True
            case Demand():
                self._demanded(index, record)
            case Met():
                self.clusters.hint(record)
            case CancelElsewhere():
                owner = (record.pid >> WORKER_SHIFT) - 1
                if 0 <= owner < self.count and owner != index:
                    self.tasks.start_soon(self.workers.tell, owner, record)
            case Answer():
                self._answered(index, record)
            case ConsoleOpened():
                self.console.opened((index, record.client), record.user, record.admin)
            case ConsoleInput():
                self.tasks.start_soon(self.console.received, (index, record.client), record.data)
            case ConsoleClosed():
                self.console.closed((index, record.client))

    def _demanded(self, index: int, demand: Demand) -> None:
        ledger = self.ledgers.get(demand.limit)
        grants: list[tuple[int, int]] = []
        if ledger is None:
            ledger = self.ledgers[demand.limit] = Ledger(demand.budget, self.count)
        elif demand.budget not in (0, ledger.budget):
            grants += ledger.resize(demand.budget)
        grants += ledger.report(index, demand.share, demand.used, demand.wanted)
        self._grant(demand.limit, grants)

    def _grant(self, limit: Limit, grants: list[tuple[int, int]]) -> None:
        for worker, share in grants:
            self.granted[worker, limit] = share
            self.tasks.start_soon(self.workers.tell, worker, Grant(limit, share))

    def _died(self, index: int) -> None:
        for limit, ledger in self.ledgers.items():
            self._grant(limit, ledger.restart(index))
        for client in [client for client in self.console.clients if client[0] == index]:
            self.console.closed(client)
        for _, waiting, done in self.answers.values():
            waiting.discard(index)
            if not waiting:
                done.set()

    # For the console.

    async def ask(self, table: str) -> list[dict[str, object]]:
        """Return the rows of a table from all workers."""
        self.asked += 1
        number = self.asked
        waiting = {worker.index for worker in self.workers.all if worker.ready}
        rows: list[dict[str, object]] = []
        done = anyio.Event()
        self.answers[number] = (rows, waiting, done)
        try:
            self.workers.tell_all(Ask(number, table), self.tasks)
            if waiting:
                with anyio.move_on_after(_ANSWER_TIME):
                    await done.wait()
        finally:
            del self.answers[number]
        return rows

    def _answered(self, index: int, answer: Answer) -> None:
        if answer.number in self.answers:
            rows, waiting, done = self.answers[answer.number]
            rows += [{**row, "worker": index} for row in answer.rows]
            waiting.discard(index)
            if not waiting:
                done.set()

    def keeper(self, cluster: str) -> Keeper:
        """Return the keeper of a cluster; raises GatewayError."""
        return self.clusters.keeper(cluster)

    def keeper_of(self, node: str) -> tuple[Keeper, str]:
        """Return who keeps the cluster of a node, and its name there; raises GatewayError."""
        return self.clusters.keeper_of(node)

    def write(self, client: tuple[int, int], data: bytes, close: bool) -> None:
        """Send bytes to a console client."""
        self.tasks.start_soon(self.workers.tell, client[0], ConsoleOutput(client[1], data, close))

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(self.settings.front.stats_period or 60.0)
            self.console.tick(time.monotonic(), await self.ask("pools"))


def read_users(settings: Settings) -> dict[str, str] | None:
    """Read auth.file; raises SettingsError when a line of it is no user and secret."""
    file = settings.front.auth.file
    if file is None:
        return None
    try:
        secrets_, faults = parse(Path(file).read_text("utf-8"))
    except OSError as error:
        raise SettingsError([Fault("front.auth.file", f"{file}: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError([Fault("front.auth.file", f"{file}: line {line}: not UTF-8")]) from None
    if faults:
        raise SettingsError([Fault("front.auth.file", f"{file}: {fault}") for fault in faults])
    return {user: secret.text for user, secret in secrets_.items()}


def unreloadable(before: Settings, after: Settings) -> Iterator[str]:
    """Yield the keys that have changed and that only a new start takes up."""
    for parameter in PARAMETERS:
        name = parameter.name
        if (
            parameter.section == "front"
            and not parameter.reloadable
            and getattr(before.front, name) != getattr(after.front, name)
        ):
            yield f"front.{name}"
