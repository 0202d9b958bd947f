"""Steps on servers that are dictionaries, and real commands of /bin/sh."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from health import conninfo, execute
from health.execute import StepError
from health.probe import Session
from health.view import Node

from .nodes import REFUSED, NodeServer
from .servers import RefusalError

OLD, NEW = Node("pg1", "10.0.0.1", 5433), Node("it's $(touch x)", "/tmp/a b; exit 7", 5434)
PLACE = "host=pg1 port=5432 application_name=pg2"


def opener(server: NodeServer) -> execute.Open:
    async def open_session() -> Session:
        return await server.connect("10.0.0.2", 5432)

    return open_session


def run(step: Callable[..., Awaitable[Any]], *args: object) -> None:
    async def main() -> None:
        await step(*args)

    anyio.run(main)


@pytest.fixture
def pair() -> tuple[NodeServer, NodeServer]:
    primary, standby = NodeServer(), NodeServer(PLACE)
    standby.upstream = primary
    return primary, standby


def test_freeze_leads_nowhere_and_the_receiver_ends(pair):
    _, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    assert conninfo.is_frozen(standby.conninfo)
    assert not standby.streams
    assert standby.connected == []


def test_freeze_again_changes_nothing(pair):
    _, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    del standby.queries[:]
    run(execute.freeze, opener(standby), 5.0)
    assert not [sql for sql in standby.queries if "alter system" in sql]


def test_freeze_receiver_that_does_not_end_is_a_failure(pair):
    _, standby = pair
    standby.answers["walreceiver"] = [("f",)]
    with pytest.raises(StepError, match=r"not done within 0\.02 s"):
        run(execute.freeze, opener(standby), 0.02)
    assert standby.connected == []


def test_freeze_setting_of_the_command_line_is_a_failure(pair):
    _, standby = pair
    standby.source = "command line"
    standby.answers["current_setting('primary_conninfo')"] = [(PLACE,)]
    with pytest.raises(StepError, match="primary_conninfo is set on the command line"):
        run(execute.freeze, opener(standby), 5.0)


@pytest.mark.parametrize("error", [RefusalError("42501", "permission denied"), REFUSED])
@pytest.mark.parametrize("step", [execute.freeze, execute.rouse, execute.thaw, execute.promote, execute.promoted])
def test_step_that_the_server_refuses_is_a_failure_and_closes(pair, step, error):
    _, standby = pair
    standby.telling["select"] = error
    with pytest.raises(StepError):
        run(step, opener(standby), 5.0)
    assert standby.connected == []
    standby.connecting = error
    with pytest.raises(StepError):
        run(step, opener(standby), 5.0)


def test_rouse_says_it_in_other_words(pair):
    _, standby = pair
    run(execute.rouse, opener(standby), 5.0)
    assert standby.conninfo != PLACE
    assert conninfo.parse(standby.conninfo) == conninfo.parse(PLACE)


def test_rouse_leaves_alone_what_is_frozen(pair):
    # A failover may have frozen it since it was decided to rouse it: it must not receive again.
    _, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    run(execute.rouse, opener(standby), 5.0)
    assert conninfo.is_frozen(standby.conninfo)


def test_repoint_leads_to_the_primary_and_thaws(pair):
    primary, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    run(execute.repoint, opener(standby), OLD, opener(primary), 5.0)
    assert conninfo.upstream(standby.conninfo) == ("10.0.0.1", 5433)
    assert not conninfo.is_frozen(standby.conninfo)
    assert primary.queries == []


def test_repoint_to_where_it_was_restores_the_text(pair):
    primary, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    run(execute.repoint, opener(standby), Node("pg1", "pg1"), opener(primary), 5.0)
    assert standby.conninfo == PLACE


def test_repoint_makes_the_slot_that_the_standby_asks_for(pair):
    primary, standby = pair
    standby.answers["primary_slot_name"] = [("slot_2",)]
    run(execute.repoint, opener(standby), OLD, opener(primary), 5.0)
    assert primary.slots == {"slot_2"}


def test_repoint_without_its_slot_leaves_the_standby_where_it_was(pair):
    primary, standby = pair
    standby.answers["primary_slot_name"] = [("slot_2",)]
    primary.die()
    with pytest.raises(StepError):
        run(execute.repoint, opener(standby), OLD, opener(primary), 5.0)
    assert standby.conninfo == PLACE


def test_thaw_undoes_freeze_and_nothing_else(pair):
    _, standby = pair
    run(execute.freeze, opener(standby), 5.0)
    run(execute.thaw, opener(standby), 5.0)
    assert standby.conninfo == PLACE
    del standby.queries[:]
    run(execute.thaw, opener(standby), 5.0)
    assert not [sql for sql in standby.queries if "alter system" in sql]


def test_promote_is_done_once(pair):
    _, standby = pair
    run(execute.promote, opener(standby), 5.0)
    run(execute.promote, opener(standby), 5.0)
    run(execute.promoted, opener(standby), 5.0)
    assert (standby.in_recovery, standby.timeline) == (False, 2)


def test_promote_that_takes_too_long_is_a_failure(pair):
    _, standby = pair
    standby.answers["pg_promote"] = [("t",)]
    with pytest.raises(StepError, match=r"not done within 0\.02 s"):
        run(execute.promote, opener(standby), 0.02)


def test_caught_up_waits_for_the_standby(pair):
    primary, standby = pair
    run(execute.caught_up, opener(primary), opener(standby), 5.0)
    assert "select pg_last_wal_replay_lsn() >= '0/3E8'::pg_lsn" in standby.queries
    standby.answers[">="] = [("f",)]
    with pytest.raises(StepError):
        run(execute.caught_up, opener(primary), opener(standby), 0.02)


# Commands.


def command(line: str, limit: float = 5.0, old: Node | None = OLD, new: Node | None = NEW) -> None:
    anyio.run(execute.command, line, "fence_command", old, new, limit)


def test_command_placeholders_are_quoted(tmp_path):
    out = tmp_path / "out"
    command(f"printf '%s\\n' {{name}} {{host}} {{port}} {{new_name}} {{new_host}} {{new_port}} > {out}")
    assert out.read_text().splitlines() == ["pg1", "10.0.0.1", "5433", "it's $(touch x)", "/tmp/a b; exit 7", "5434"]


def test_command_without_a_new_node_keeps_other_braces(tmp_path):
    out = tmp_path / "out"
    command(f"a=1; echo {{name}} ${{a}} '{{}}' > {out}", new=None)
    assert out.read_text() == "pg1 1 {}\n"


@pytest.mark.parametrize(
    ("line", "code"), [("exit 3", "3"), ("false", "1"), ("no-such-command-", "127"), ("kill -9 $$", "-9")]
)
def test_command_exit_code_is_a_failure(line, code):
    with pytest.raises(StepError, match=f"fence_command ended with exit code {code}"):
        command(line)


def test_command_that_cannot_be_started_is_a_failure(monkeypatch):
    # No process left, no descriptor left: that is no fault of ours, and no reason to end.
    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(anyio, "open_process", full)
    with pytest.raises(StepError, match="fence_command cannot be run: Resource temporarily unavailable"):
        command("true")


def test_command_output_is_logged_line_by_line(caplog):
    with caplog.at_level(logging.INFO, "health.execute"):
        command("echo one; echo two >&2; printf 'three\\377'")
    assert [text for text in caplog.messages if text.endswith(("one", "two", "three\ufffd"))] == [
        "fence_command: one",
        "fence_command: two",
        "fence_command: three\ufffd",
    ]


def test_command_reads_nothing():
    command('test -z "$(cat)"')


def is_gone(pid: int) -> bool:
    """Has a process ended, whoever has to reap it?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def gone(file: Path) -> None:
    """Wait until the process that a command has noted has ended."""
    with anyio.fail_after(5):
        pid = int(await anyio.Path(file).read_text())
        while not is_gone(pid):
            await checkpoint()


def test_command_that_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"

    async def main() -> None:
        with pytest.raises(StepError, match=r"fence_command did not end within 0\.3 s"):
            await execute.command(f"sleep 600 & echo $! > {child}; wait", "fence_command", OLD, NEW, 0.3)
        await gone(child)

    anyio.run(main)


def test_command_that_is_cancelled_is_killed_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    line = f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait"

    async def main() -> None:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(execute.command, line, "fence_command", OLD, NEW, 600.0)
                while not child.exists():  # noqa: ASYNC110  a file tells nobody
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
        await gone(child)

    anyio.run(main)


def test_command_that_leaves_a_server_running_has_ended(tmp_path):
    # So does pg_ctl start: what it leaves keeps the output open.
    child = tmp_path / "child"
    command(f"sleep 600 & echo $! > {child}")
    pid = int(child.read_text())
    assert not is_gone(pid)
    os.kill(pid, 9)
