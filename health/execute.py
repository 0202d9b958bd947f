"""The steps of a failover done: by SQL on the nodes, and by the operator's commands.

1. Each ends within its limit, and has then done what it says, seen to it, or raised StepError with the reason.
2. Each can be done again: what is so already stays.
3. A command is a line for /bin/sh; {name} {host} {port} are the old primary, {new_name} {new_host} {new_port} the new
   one, quoted. Exit code 0 or it failed; its output goes to the log.

Called by health.keeper. Manual: "pg_promote", "ALTER SYSTEM", "primary_conninfo", "pg_stat_activity".
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from health import conninfo
from health.probe import Session
from health.view import Node

log = logging.getLogger(__name__)

_POLL: Final = 0.005  # seconds between two looks at what is about to happen
_LAST_WORDS: Final = 0.2  # seconds: what a command leaves running may keep its output open

Open = Callable[[], Awaitable[Session]]


class StepError(Exception):
    """A step was not done; the text says why."""


@asynccontextmanager
async def _session(open_session: Open, limit: float) -> AsyncIterator[Session]:
    """Open a session for one step; whatever goes wrong within the limit becomes a StepError."""
    session: Session | None = None
    try:
        with anyio.fail_after(limit):
            session = await open_session()
            yield session
    except TimeoutError:
        raise StepError(f"not done within {limit:g} s") from None
    except StepError:
        raise
    except Exception as error:
        raise StepError(str(error) or type(error).__name__) from error
    finally:
        if session is not None:
            with anyio.move_on_after(1, shield=True), suppress(Exception):
                await session.close()


async def rouse(open_session: Open, limit: float) -> None:
    """Let a standby's receiver start again, to see whether the primary still sends; one that is frozen stays so."""
    async with _session(open_session, limit) as session:
        text = await _conninfo(session)
        if not conninfo.is_frozen(text):  # else a failover is under way, and it has to stay so
            await _set_conninfo(session, conninfo.rouse(text))


async def freeze(open_session: Open, limit: float) -> None:
    """Let a standby receive from nobody, and wait until its receiver has ended."""
    async with _session(open_session, limit) as session:
        text = await _conninfo(session)
        if not conninfo.is_frozen(text):
            await _set_conninfo(session, conninfo.freeze(text))
        await _until(session, "select not exists (select from pg_stat_activity where backend_type = 'walreceiver')")


async def repoint(open_session: Open, primary: Node, open_primary: Open, limit: float) -> None:
    """Let a standby receive from the primary; the replication slot that it asks for is made there."""
    async with _session(open_session, limit) as session:
        text = conninfo.thaw(await _conninfo(session))
        if conninfo.upstream(text) != (primary.host, primary.port):
            text = conninfo.lead(text, primary.host, primary.port)
        slot = await _value(session, "select current_setting('primary_slot_name')")
        if slot:
            async with _session(open_primary, limit) as other:
                await other.query(
                    f"select pg_create_physical_replication_slot({_quote(slot)}, true) "
                    f"where not exists (select from pg_replication_slots where slot_name = {_quote(slot)})"
                )
        await _set_conninfo(session, text)


async def thaw(open_session: Open, limit: float) -> None:
    """Undo freeze on a node that is a primary now, for the day when it is a standby again."""
    async with _session(open_session, limit) as session:
        text = await _conninfo(session)
        if conninfo.is_frozen(text):
            await _set_conninfo(session, conninfo.thaw(text))


async def promote(open_session: Open, limit: float) -> None:
    """Make a standby a primary, and wait until it is one."""
    async with _session(open_session, limit) as session:
        if await _value(session, "select pg_is_in_recovery()") == "t":
            await session.query("select pg_promote(false)")
        await _until(session, "select not pg_is_in_recovery()")


async def promoted(open_session: Open, limit: float) -> None:
    """Wait until a standby is a primary, by somebody else's doing."""
    async with _session(open_session, limit) as session:
        await _until(session, "select not pg_is_in_recovery()")


async def checkpoint(open_session: Open, limit: float) -> None:
    """Write what is dirty; on a standby, as far as it may be."""
    async with _session(open_session, limit) as session:
        await session.query("checkpoint")


async def caught_up(open_primary: Open, open_standby: Open, limit: float) -> None:
    """Wait until a standby has replayed all that the primary has written by now."""
    async with _session(open_primary, limit) as primary, _session(open_standby, limit) as standby:
        written = await _value(primary, "select pg_current_wal_lsn()")
        await _until(standby, f"select pg_last_wal_replay_lsn() >= {_quote(written)}::pg_lsn")


async def command(line: str, what: str, old: Node | None, new: Node | None, limit: float) -> None:
    """Run an operator's command; it and all that it has started is killed when it takes longer than the limit."""
    text = line
    for prefix, node in (("", old), ("new_", new)):
        if node is not None:
            for name, value in (("name", node.name), ("host", node.host), ("port", str(node.port))):
                text = text.replace(f"{{{prefix}{name}}}", shlex.quote(value))
    log.info("%s: %s", what, text)
    try:
        with anyio.CancelScope(shield=True):  # else who is cancelled here knows no process to kill
            process = await anyio.open_process(
                ["/bin/sh", "-c", text], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
            )
    except OSError as error:
        raise StepError(f"{what} cannot be run: {error.strerror}") from None
    told = anyio.Event()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_log_output, process, what, told)
            with anyio.fail_after(limit):
                code = await process.wait()
            with anyio.move_on_after(_LAST_WORDS):
                await told.wait()
            tasks.cancel_scope.cancel()
    except* TimeoutError:
        raise StepError(f"{what} did not end within {limit:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    if code:
        raise StepError(f"{what} ended with exit code {code}")


async def _log_output(process: Process, what: str, told: anyio.Event) -> None:
    assert process.stdout is not None
    async for chunk in TextReceiveStream(process.stdout, errors="replace"):
        for text in chunk.splitlines():
            log.info("%s: %s", what, text)
    told.set()


async def _set_conninfo(session: Session, text: str) -> None:
    await session.query(f"alter system set primary_conninfo = {_quote(text)}")
    await session.query("select pg_reload_conf()")
    while await _conninfo(session) != text:  # this session reloads as the others do, soon after
        source = await _value(session, "select source from pg_settings where name = 'primary_conninfo'")
        if source == "command line":
            raise StepError("primary_conninfo is set on the command line, where ALTER SYSTEM has no effect")
        await anyio.sleep(_POLL)


async def _conninfo(session: Session) -> str:
    return await _value(session, "select current_setting('primary_conninfo')")


async def _until(session: Session, condition: str) -> None:
    while await _value(session, condition) != "t":  # noqa: ASYNC110  PostgreSQL does not tell when it is so
        await anyio.sleep(_POLL)


async def _value(session: Session, sql: str) -> str:
    ((value,),) = await session.query(sql)
    return value or ""


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
