"""One node's probe: a connection of its own, kept open, on which each round asks what the node is and how far it got.

1. A round ends in time and never raises: whatever happens is a ProbeResult with a reason in words.
2. A connection that broke proves nothing: it is asked again on a new one, in the same round.
3. What the probe's user may not see is unknown. pg_monitor shows everything; nothing but LOGIN is needed.

Called by health.watch.
Manual: "Recovery Information Functions", "Control Data Functions", "pg_stat_wal_receiver".
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final, Protocol

import anyio
from msgspec.structs import replace

from health import conninfo
from health.view import Node, Outcome, ProbeResult

# A kept connection outlives a postmaster that hangs, so every so many rounds a new one is made.
_ROUNDS_PER_CONNECTION: Final = 10

# Only pg_walfile_name knows a primary's timeline right after its promotion: the control file has to wait for a
# checkpoint. It fails in recovery, hence the CASE.
_BASIC: Final = """\
select pg_is_in_recovery(),
       case when pg_is_in_recovery() then null else pg_walfile_name(pg_current_wal_lsn()) end,
       case when pg_is_in_recovery() then null else pg_current_wal_lsn() end,
       pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()"""
# Without pg_read_all_stats the row of pg_stat_wal_receiver holds its pid alone.
_FULL: Final = f"""\
{_BASIC},
       (select system_identifier from pg_control_system()), (select timeline_id from pg_control_checkpoint()),
       (select count(*) from pg_stat_wal_receiver), (select status from pg_stat_wal_receiver),
       (select received_tli from pg_stat_wal_receiver)"""
# What a failover has to know: pg_monitor may see it. Where nothing is received the newest file in pg_wal tells the
# timeline, as the control file's is that of the last restartpoint.
_DETAILED: Final = f"""\
{_FULL},
       (select extract(epoch from last_msg_receipt_time) from pg_stat_wal_receiver),
       current_setting('primary_conninfo'), current_setting('cluster_name'),
       current_setting('synchronous_standby_names'),
       case when pg_is_in_recovery() then 0
            else (select count(*) from pg_stat_replication where sync_state <> 'async') end,
       case when pg_is_in_recovery() and not exists (select from pg_stat_wal_receiver where status = 'streaming')
            then (select max(substr(name, 1, 8)) from pg_ls_waldir() where name ~ '^[0-9A-F]{{24}}$') end"""
_QUERIES: Final = (_DETAILED, _FULL, _BASIC)
_NOT_PERMITTED: Final = ("42501", "42883")  # insufficient_privilege, undefined_function

# Errors of the operating system on our side of the wire.
_LOCAL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETUNREACH)
_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)

Row = tuple[str | None, ...]


class Session(Protocol):
    """A connection to one server.

    What its methods raise has an attribute sqlstate when the server answered with an error, and is an OSError
    (ConnectionError when the connection broke) when there was no answer.
    """

    async def query(self, sql: str) -> list[Row]:
        """Run sql by the simple protocol and return the rows."""

    async def close(self) -> None:
        """Close the connection; may be called twice."""


Connect = Callable[[str, int], Awaitable[Session]]
Resolve = Callable[[str], Awaitable[tuple[str, ...]]]


class Probe:
    """The probe of one node: run its rounds one after the other, then close it."""

    def __init__(
        self,
        node: Node,
        connect: Connect,  # numeric address or directory, port -> session, logged in
        resolve: Resolve,  # host -> addresses, the last known ones when the name service fails
        *,
        check_query: str = "select 1",
        timeout: float = 2.0,
        shallow: bool = False,  # server_check_query is all that is asked
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._connect_to = connect
        self._resolve = resolve
        self._check_query = check_query
        self._timeout = timeout
        self._shallow = shallow
        self._clock = clock
        self._addresses: tuple[str, ...] = ()
        self._session: Session | None = None
        self._address = ""  # where the session leads, and what worked last
        self._query = 0
        self._rounds = 0

    async def round(self, *, fresh: bool = False) -> ProbeResult:
        """Probe once, on a new connection if fresh; lasts twice the time limit at most, once if the name is known."""
        result = ProbeResult(self.node.name, self._clock(), Outcome.SILENT)
        try:
            with anyio.fail_after(self._timeout):
                self._addresses = await self._resolve(self.node.host)
        except Exception as error:
            if not self._addresses:  # else the node is where it was
                return replace(result, outcome=Outcome.UNRESOLVED, message=f"{self.node.host}: {_words(error)}")
        if self._address not in self._addresses:
            await self.close()
        # What worked last is tried first, by the workers too.
        addresses = sorted(self._addresses, key=lambda address: address != self._address)
        result = replace(result, addresses=tuple(addresses))
        try:
            with anyio.fail_after(self._timeout):
                return await self._ask(result, fresh)
        except Exception as error:
            if not _is_answer(error):
                await self.close()
            return replace(result, **self._explain(error))

    async def open(self) -> Session:
        """Return a further session to the node, where it was reached last; what it raises is as a session raises it."""
        address = self._address or next(iter(self._addresses or await self._resolve(self.node.host)))
        with anyio.fail_after(self._timeout):
            return await self._connect_to(address, self.node.port)

    async def close(self) -> None:
        """Close the connection, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            with anyio.move_on_after(self._timeout, shield=True), suppress(Exception):
                await session.close()

    async def _ask(self, result: ProbeResult, fresh: bool) -> ProbeResult:
        self._rounds += 1
        if self._session is None or fresh or self._rounds > _ROUNDS_PER_CONNECTION:
            try:
                await self._connect(result.addresses)
            except Exception as error:
                if self._session is None or not _is_answer(error):
                    raise
                # A server that takes no more connections still tells on the old one what it is.
                return replace(await self._look(result), **self._explain(error))
        try:
            return await self._look(result)
        except Exception as error:
            if _is_answer(error):
                raise
        await self.close()
        await self._connect(result.addresses)
        return await self._look(result)

    async def _connect(self, addresses: tuple[str, ...]) -> None:
        """Put a new session in the place of the old one, which is kept when that fails."""
        failures: list[Exception] = []
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            remaining = anyio.current_effective_deadline() - anyio.current_time()
            try:
                with anyio.fail_after(remaining / left):
                    session = await self._connect_to(address, self.node.port)
            except Exception as error:
                failures.append(error)
            else:
                await self.close()
                self._session, self._address = session, address
                self._query = self._rounds = 0
                return
        raise failures[0]

    async def _look(self, result: ProbeResult) -> ProbeResult:
        assert self._session is not None
        while True:
            started = self._clock()
            questions = [self._check_query] if self._shallow else [self._check_query, _QUERIES[self._query]]
            try:
                rows = await self._session.query("\n;\n".join(filter(None, questions)))
            except Exception as error:
                if getattr(error, "sqlstate", None) not in _NOT_PERMITTED or self._query + 1 == len(_QUERIES):
                    raise
                if self._check_query:
                    await self._session.query(self._check_query)  # perhaps it is this that is not permitted
                self._query += 1
                continue
            result = replace(result, outcome=Outcome.ANSWERED, latency=self._clock() - started)
            return result if self._shallow else _read(rows[-1], result)

    def _explain(self, error: Exception) -> dict[str, object]:
        outcome, sqlstate, message = Outcome.LOCAL, "", _words(error)
        match error:
            case _ if isinstance(seen := getattr(error, "sqlstate", None), str):
                outcome, sqlstate = Outcome.REJECTED, seen
            case TimeoutError() | BlockingIOError():  # the latter when the backlog of a unix socket is full
                outcome, message = Outcome.SILENT, f"no answer within {self._timeout:g} s"
            case ConnectionRefusedError() | FileNotFoundError():
                outcome = Outcome.REFUSED
            case ConnectionError():
                outcome = Outcome.RESET
            case OSError() if error.errno in _UNREACHABLE:
                outcome = Outcome.UNREACHABLE
            case OSError() if error.errno in _LOCAL:
                message = f"cannot probe: {message}"
            case _:
                message = f"cannot probe: {type(error).__name__}: {message}"
        return {"outcome": outcome, "sqlstate": sqlstate, "message": message}


def _is_answer(error: Exception) -> bool:
    """Did the server answer, and stay? 57P01 and its kind end the connection."""
    sqlstate = getattr(error, "sqlstate", None)
    return isinstance(sqlstate, str) and not sqlstate.startswith("57P")


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio puts the address in the place of the text
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _read(row: Row, result: ProbeResult) -> ProbeResult:
    """Add what a row of _DETAILED, _FULL or _BASIC says."""
    in_recovery, walfile, current, received, replayed, *more = row
    result = replace(
        result,
        in_recovery=in_recovery == "t",
        timeline=int(walfile[:8], 16) if walfile else None,
        current_lsn=_lsn(current),
        received_lsn=_lsn(received),
        replayed_lsn=_lsn(replayed),
    )
    if not more:
        return result
    identifier, checkpoint_timeline, receivers, status, received_timeline, *details = more
    streaming = False if receivers == "0" else None if status is None else status == "streaming"
    result = replace(result, system_identifier=int(identifier) if identifier else None, receiver_streaming=streaming)
    newest = None
    if details:
        heard, text, cluster_name, synchronous, standbys, newest = details
        result = replace(
            result,
            received_at=float(heard) if heard else None,
            conninfo=text,
            application_name=_application_name(text, cluster_name),
            synchronous_standby_names=None if result.in_recovery else synchronous,
            synchronous_standbys=int(standbys or 0),
        )
    if result.in_recovery:
        seen = (
            int(checkpoint_timeline or 0),
            int(received_timeline or 0) if streaming else 0,
            int(newest, 16) if newest else 0,
        )
        result = replace(result, timeline=max(seen) or None)
    return result


@lru_cache(maxsize=64)
def _application_name(text: str | None, cluster_name: str | None) -> str | None:
    """Return what a standby calls itself to its primary, as walreceiver.c has it."""
    if text is None:
        return None
    try:
        parameters = conninfo.parse(text)
    except ValueError:
        return None
    return parameters.get("application_name") or cluster_name or "walreceiver"


def _lsn(text: str | None) -> int | None:
    """Turn a pg_lsn into a byte position."""
    if not text:
        return None
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)
