"""The admin console: one for all workers, whichever of them a client of it is connected to.

1. What a client is shown is known here or asked of the workers; what it orders is done by the Gateway.
2. Requests of one client are answered in their order; while one waits, other clients are served.
3. Whatever fails ends in one ErrorResponse.

Called by supervisor.main with what console clients send.
Manual: "Admin console" in PgBouncer's usage page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, assert_never

from gateway import __version__, errors
from gateway.console.commands import COMMANDS, Statement, Verb, usage
from gateway.console.session import Result, Session
from gateway.console.tables import DRIVER_PARAMETERS, Averages, Cells, Facts, Row, Table
from gateway.errors import GatewayError, Severity
from gateway.settings import Settings
from gateway.topology import SettingsError
from gateway.wire import messages
from health.keeper import RefusedError
from health.view import Admin, ClusterView

log = logging.getLogger("gateway.console")

ClientId = tuple[int, int]  # the worker that it is connected to, and its number there

_WELCOME: Final = {
    "server_version": f"{__version__}/gateway",
    "server_encoding": "UTF8",
    "client_encoding": DRIVER_PARAMETERS["client_encoding"],
    "standard_conforming_strings": DRIVER_PARAMETERS["standard_conforming_strings"],
    "is_superuser": "on",
    "DateStyle": DRIVER_PARAMETERS["datestyle"],
    "TimeZone": DRIVER_PARAMETERS["timezone"],
    "integer_datetimes": "on",
}


class Keeper(Protocol):
    """Who keeps a primary in one cluster; its methods raise RefusedError."""

    async def switchover(self, target: str | None = None, *, force: bool = False) -> str:
        """Let a standby and the primary change places; return what came of it."""

    async def promote(self, target: str) -> str:
        """Make a node the primary; return what came of it."""

    async def pause(self, paused: bool) -> None:
        """Fail over no more, or again."""

    def administer(self, node: str, admin: Admin) -> None:
        """Take a node out, or give it back."""


class Gateway(Protocol):
    """What the console looks at and gives orders to."""

    @property
    def settings(self) -> Settings: ...
    @property
    def views(self) -> Mapping[str, ClusterView]: ...
    @property
    def started_at(self) -> float:
        """Seconds since 1970."""

    async def ask(self, table: str) -> list[dict[str, object]]:
        """Return the rows of "pools", "clients" or "servers" of all workers, each with the number of its "worker"."""

    async def reload(self) -> None:
        """Read the topology file again; raises SettingsError."""

    def keeper(self, cluster: str) -> Keeper:
        """Return the keeper of a cluster, of the only one when none is named; raises GatewayError."""

    def keeper_of(self, node: str) -> tuple[Keeper, str]:
        """Return who keeps the cluster of a node, and the node's name in it; raises GatewayError."""

    def write(self, client: ClientId, data: bytes, close: bool) -> None:
        """Send to a client, and end its connection if it is to be closed."""


class _Client:
    """A client of the console; busy: what it has sent is being answered."""

    __slots__ = ("admin", "busy", "session")

    def __init__(self, admin: bool) -> None:
        self.admin = admin
        self.busy = False
        self.session = Session()


class Console:
    """Answers the clients of the console."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clients: dict[ClientId, _Client] = {}
        self._gateway = gateway
        self._clock = clock
        self._wall_clock = wall_clock
        self._averages = Averages()

    def opened(self, client: ClientId, user: str, admin: bool) -> None:
        """Welcome a client that has logged in."""
        self.clients[client] = _Client(admin)
        welcome = [messages.parameter_status(name, value) for name, value in _WELCOME.items()]
        self._gateway.write(client, b"".join(welcome) + messages.ready_for_query(messages.IDLE), False)

    def closed(self, client: ClientId) -> None:
        """Forget a client that has gone."""
        self.clients.pop(client, None)

    async def received(self, client: ClientId, data: bytes) -> None:
        """Answer what a client has sent; where it is being answered already, this is added to it."""
        entry = self.clients.get(client)
        if entry is None:
            return
        session = entry.session
        session.feed(data)
        if entry.busy:
            return
        entry.busy = True
        try:
            for step in session.steps():
                if client not in self.clients:
                    return
                if isinstance(step, Statement):
                    session.outcome = await self._outcome(entry, step)
                else:
                    self._gateway.write(client, step, session.ended)
        finally:
            entry.busy = False

    def tick(self, now: float, rows: Iterable[Row]) -> None:
        """Take the rows of all pools at the end of each stats_period; now is monotonic."""
        self._averages.tick(now, rows, self._gateway.settings.front.stats_period)

    async def _outcome(self, client: _Client, statement: Statement) -> Result | GatewayError:
        try:
            return await self._run(client, statement)
        except GatewayError as error:
            return error
        except RefusedError as error:
            return errors.CONSOLE_REFUSED(command=statement.verb, reason=str(error))
        except Exception:
            log.exception("console: %s", statement.text)
            return errors.INTERNAL()

    async def _run(self, client: _Client, statement: Statement) -> Result:
        if COMMANDS[statement.verb].admin and not client.admin:
            raise errors.CONSOLE_ADMIN
        match statement.verb:
            case Verb.SHOW | Verb.SELECT:
                if statement.table is None:
                    return Result("SHOW", notice=_notice("Console usage", usage()))
                rows = await self._rows(statement.table)
                return Result("SHOW" if statement.verb is Verb.SHOW else f"SELECT {len(rows)}", rows)
            case Verb.SET:
                if statement.argument in DRIVER_PARAMETERS:
                    return Result("SET", notice=_notice("SET ignored"))
                if not client.admin:
                    raise errors.CONSOLE_ADMIN
                raise errors.CONSOLE_VALUE(reason=f"cannot set {statement.argument}: use the topology file and RELOAD")
            case Verb.RELOAD:
                try:
                    await self._gateway.reload()
                except SettingsError:
                    raise errors.CONSOLE_RELOAD from None
                return Result("RELOAD")
            case Verb.SWITCHOVER:
                keeper, node = self._gateway.keeper_of(statement.argument)
                done = await keeper.switchover(node or None, force=statement.has_option)
                return Result("SWITCHOVER", notice=_notice(done))
            case Verb.PROMOTE:
                keeper, node = self._gateway.keeper_of(statement.argument)
                return Result("PROMOTE", notice=_notice(await keeper.promote(node)))
            case Verb.ATTACH | Verb.DETACH:
                keeper, node = self._gateway.keeper_of(statement.argument)
                leaving = Admin.MAINT if statement.has_option else Admin.DRAIN
                keeper.administer(node, Admin.READY if statement.verb is Verb.ATTACH else leaving)
                return Result(statement.verb.value)
            case Verb.PAUSE | Verb.RESUME:
                await self._gateway.keeper(statement.argument).pause(statement.verb is Verb.PAUSE)
                return Result(statement.verb.value)
        assert_never(statement.verb)

    async def _rows(self, table: Table) -> list[Cells]:
        gateway = self._gateway
        rows = await gateway.ask(table.asks) if table.asks else []
        facts = Facts(
            version=__version__,
            settings=gateway.settings,
            views=gateway.views,
            averages=self._averages,
            started_at=gateway.started_at,
            time=self._wall_clock(),
            now=self._clock(),
            rows=rows,
        )
        return list(table.rows(facts))


def _notice(text: str, detail: str = "") -> bytes:
    fields = {
        "severity": Severity.NOTICE,
        "severity_nonlocalized": Severity.NOTICE,
        "sqlstate": "00000",
        "message": text,
    }
    return messages.notice_response(fields | ({"detail": detail} if detail else {}))
