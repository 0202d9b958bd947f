"""The keeper of a cluster of dictionaries: a plan is done step by step, alone, noted before, and always let go of."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from health import conninfo
from health.failover import FailoverRules
from health.keeper import Commands, Keeper, RefusedError
from health.memory import MemoryFile, MemoryFileError
from health.probe import Probe
from health.view import Admin, ClusterView, Epoch, Memory, Mode, Node, Rules, Status
from health.watch import Watch

from .nodes import SYSTEM, NodeServer
from .servers import Names, RefusalError

QUICK = Rules(probe_interval=0.01, probe_interval_fast=0.002, fall=2, rise=2, jitter=0.0, mode=Mode.PROMOTE)


class NotedFile(MemoryFile):
    """A state file that remembers what was saved, and what the nodes were by then."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.saved: list[Memory] = []
        self.full = False
        self.on_save: Callable[[Memory], None] = lambda memory: None

    def save(self, memory: Memory) -> None:
        if self.full:
            raise MemoryFileError("main.state cannot be written: No space left on device")
        self.on_save(memory)
        super().save(memory)
        self.saved.append(memory)


class Stage:
    """A primary and two standbys that are kept."""

    def __init__(
        self, path: Path, memory: Memory | None = None, *, rules: FailoverRules | None = None, **commands: object
    ) -> None:
        one = NodeServer()
        self.servers = {"pg1": one}
        for name in ("pg2", "pg3"):
            self.servers[name] = NodeServer(f"host=pg1 port=5432 application_name={name}")
            self.servers[name].upstream = one
        probes = [
            Probe(Node(name, name), server.connect, Names("10.0.0.1").resolve) for name, server in self.servers.items()
        ]
        self.views: list[ClusterView] = []
        self.file = NotedFile(path / "main.state")
        self.running = 0
        self.watch = Watch("main", probes, QUICK, self.views.append, memory=memory)
        rules = rules or FailoverRules(mode=Mode.PROMOTE, cool_off=0.0, demotes="demote" in commands)
        rules = replace(rules, fences="fence" in commands)
        limits = Commands(step_timeout=1.0, **commands)  # type: ignore[arg-type]
        self.keeper = Keeper(self.watch, rules, limits, self.file, self._running)

    async def _running(self) -> int:
        return self.running

    def play(self, plot: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.watch.run)
                tasks.start_soon(self.keeper.run)
                await eventually(lambda: self.watch.is_complete)
                await plot()
                tasks.cancel_scope.cancel()

        anyio.run(run)

    async def until(self, is_so: Callable[[ClusterView], bool]) -> ClusterView:
        await eventually(lambda: bool(self.views) and is_so(self.views[-1]))
        return self.views[-1]

    @property
    def held(self) -> list[bool]:
        """Whether transactions were held, each time that it changed."""
        held = [view.held for view in self.views]
        return [now for now, before in zip(held, [False, *held], strict=False) if now is not before]

    def asked(self, node: str, text: str) -> int:
        return sum(text in sql for sql in self.servers[node].queries)


async def eventually(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not is_so():
            await checkpoint()


def is_primary(name: str) -> Callable[[ClusterView], bool]:
    return lambda view: view.primary == name and not view.held


@pytest.fixture
def stage(tmp_path) -> Stage:
    return Stage(tmp_path)


def test_failover_promotes_and_leads_the_others(stage):
    one, two, three = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        three.lsn = 900
        one.die()
        await stage.until(is_primary("pg2"))
        three.upstream = two
        await eventually(lambda: conninfo.upstream(three.conninfo) == ("pg2", 5432))
        await eventually(lambda: not conninfo.is_frozen(two.conninfo))
        await eventually(lambda: stage.file.load().promoting is None and stage.file.load().epoch.primary == "pg2")

    stage.play(plot)
    assert stage.held == [True, False]
    assert stage.watch.memory.former == ("pg1",)


def test_failover_is_on_disk_before_the_node_is_told(stage):
    one, two, three = stage.servers.values()
    seen: list[tuple[str | None, bool, bool]] = []
    stage.file.on_save = lambda memory: seen.append((memory.promoting, two.in_recovery, three.in_recovery))

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        one.die()
        await stage.until(lambda view: view.primary in ("pg2", "pg3") and not view.held)

    stage.play(plot)
    first = next(note for note in seen if note[0] is not None)
    assert first[1:] == (True, True)


def test_failover_that_cannot_be_noted_promotes_nobody_and_lets_go(stage, caplog):
    one, two, three = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        stage.file.full = True
        one.die()
        await stage.until(lambda view: "cannot be written" in view.hindrance and not view.held)
        assert two.in_recovery
        assert three.in_recovery
        assert stage.watch.memory.promoting is None
        assert stage.asked("pg2", "pg_promote") + stage.asked("pg3", "pg_promote") == 0
        stage.file.full = False
        await eventually(lambda: stage.watch.view.primary in ("pg2", "pg3"))

    stage.play(plot)
    assert "main: remember pg2: main.state cannot be written: No space left on device" in caplog.messages
    assert len(stage.held) % 2 == 0


@pytest.mark.parametrize("query", ["alter system", "walreceiver"])
def test_failover_standby_that_cannot_be_frozen_ends_it(stage, query):
    one, two, _ = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        two.telling[query] = RefusalError("42501", "permission denied")
        one.die()
        await stage.until(lambda view: "pg2 cannot be kept from receiving" in view.hindrance and not view.held)
        assert stage.asked("pg3", "pg_promote") == 0

    stage.play(plot)


def test_failover_abandoned_is_tried_ever_less_often(tmp_path):
    # The pause grew without bound and, after hours, beyond what a float holds.
    stage = Stage(tmp_path, fence="exit 1")
    keeper = stage.keeper
    now = [1000.0]
    keeper._clock = lambda: now[0]
    tries: list[float] = []

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        stage.servers["pg1"].die()
        for _ in range(12):
            before = len(stage.held)
            await eventually(lambda before=before: len(stage.held) >= before + 2)  # type: ignore[misc]
            await eventually(lambda: keeper._not_before > now[0])
            tries.append(keeper._not_before - now[0])
            now[0] = keeper._not_before
        keeper._failures = 5000
        await eventually(lambda: keeper._failures > 5000)

    stage.play(plot)
    assert tries[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert tries[-1] == pytest.approx(30.0)


def test_failover_by_command_runs_it_and_waits(tmp_path):
    out = tmp_path / "out"
    stage = Stage(
        tmp_path,
        rules=FailoverRules(mode=Mode.COMMAND, cool_off=0.0),
        failover=f"echo {{name}} {{new_name}} > {out}",
    )
    one, two, three = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        three.lsn = 900
        one.die()
        await eventually(out.exists)
        two.in_recovery, two.timeline = False, 2
        await stage.until(is_primary("pg2"))

    stage.play(plot)
    assert out.read_text() == "pg1 pg2\n"
    assert stage.asked("pg2", "pg_promote") == 0


def test_failover_begun_by_a_gateway_that_died_goes_on(tmp_path):
    epoch = Epoch("pg1", int(SYSTEM), 1, 1)
    stage = Stage(tmp_path, Memory(epoch=epoch, promoting="pg3"))
    stage.servers["pg1"].die()
    for name in ("pg2", "pg3"):
        stage.servers[name].conninfo = conninfo.freeze(stage.servers[name].conninfo)

    async def plot() -> None:
        await stage.until(is_primary("pg3"))

    stage.play(plot)
    assert stage.asked("pg2", "pg_promote") == 0
    assert stage.file.load().promoting is None


def test_failover_waits_for_a_receiver_and_rouses_it(stage):
    one, two, _ = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        for session in one.sessions:
            session.broken = ConnectionResetError(104, "x")
        one.gate = anyio.Event()  # hangs, for us; the others receive from it
        one.telling["select"] = RefusalError("57014")
        one.gate.set()
        await eventually(lambda: two.conninfo.endswith(" "))
        await stage.until(lambda view: "still receive from pg1" in view.hindrance)
        assert two.in_recovery

    stage.play(plot)
    assert stage.held == []


def test_failover_ends_repairs_that_would_undo_it(stage):
    # A repair that failed at first was tried again after the node had been frozen, and let it receive.
    one, two, three = stage.servers.values()
    two.conninfo = conninfo.freeze(two.conninfo)
    two.answers["primary_slot_name"] = [("slot_2",)]
    one.telling["pg_create_physical_replication_slot"] = RefusalError("53300", "too many clients")

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        await eventually(lambda: stage.asked("pg1", "pg_create_physical") > 0)
        assert stage.keeper._mending
        frozen: list[bool] = []
        three.on["pg_promote"] = lambda: frozen.append(not stage.keeper._mending and conninfo.is_frozen(two.conninfo))
        two.lsn = 900
        one.die()
        await stage.until(is_primary("pg3"))
        assert frozen == [True]

    stage.play(plot)


# Operators.


def switching(tmp_path: Path, switchover_timeout: float = 5.0) -> Stage:
    line = f"echo {{name}} {{new_name}} > {tmp_path}/demoted"
    return Stage(tmp_path, demote=line, switchover_timeout=switchover_timeout)


def demote_when_told(stage: Stage, tmp_path: Path) -> None:
    """Let the primary become a standby once demote_command has run."""
    one = stage.servers["pg1"]

    def look() -> None:
        if (tmp_path / "demoted").exists():
            one.in_recovery, one.conninfo = True, "host=pg2"

    one.on["pg_control_system"] = look


def test_switchover_changes_places(tmp_path):
    stage = switching(tmp_path)
    demote_when_told(stage, tmp_path)

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        assert await stage.keeper.switchover("pg2") == "pg2 is the primary on timeline 2"
        await stage.until(is_primary("pg2"))

    stage.play(plot)
    assert stage.held == [True, False]
    assert (tmp_path / "demoted").read_text() == "pg1 pg2\n"


def test_switchover_without_a_name_goes_to_the_successor(tmp_path):
    stage = switching(tmp_path)
    demote_when_told(stage, tmp_path)

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        stage.servers["pg3"].lsn = 1001
        assert await stage.keeper.switchover() == "pg3 is the primary on timeline 2"

    stage.play(plot)


def test_switchover_transactions_that_run_abort_it(tmp_path):
    stage = switching(tmp_path, switchover_timeout=0.05)
    stage.running = 2

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        with pytest.raises(RefusedError, match=r"2 transactions still run after 0\.05 s"):
            await stage.keeper.switchover("pg2")
        await stage.until(lambda view: not view.held)

    stage.play(plot)
    assert stage.held == [True, False]
    assert not (tmp_path / "demoted").exists()
    assert stage.watch.memory.promoting is None


def test_switchover_by_force_goes_on(tmp_path):
    stage = switching(tmp_path, switchover_timeout=0.05)
    demote_when_told(stage, tmp_path)
    stage.running = 2

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        assert await stage.keeper.switchover("pg2", force=True) == "pg2 is the primary on timeline 2"

    stage.play(plot)
    assert stage.held == [True, False]


def test_switchover_that_cannot_be_noted_leaves_nothing_to_go_on_with(tmp_path):
    stage = switching(tmp_path)
    stage.file.full = True

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        with pytest.raises(RefusedError, match="cannot be written"):
            await stage.keeper.switchover("pg2")
        assert stage.watch.memory.promoting is None
        stage.servers["pg1"].telling["select"] = RefusalError("57014")  # one probe is lost
        await eventually(lambda: stage.watch.states[0].doubted_at is not None)
        stage.servers["pg1"].telling.clear()
        await eventually(lambda: stage.watch.states[0].doubted_at is None)

    stage.play(plot)
    assert stage.asked("pg2", "pg_promote") == 0
    assert not (tmp_path / "demoted").exists()


def test_switchover_demote_command_that_fails_leaves_the_primary(tmp_path):
    stage = Stage(tmp_path, demote="exit 4")

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        with pytest.raises(RefusedError, match="demote_command ended with exit code 4"):
            await stage.keeper.switchover("pg2")
        await stage.until(is_primary("pg1"))

    stage.play(plot)
    assert stage.held == [True, False]
    assert stage.file.load().promoting is None


def test_switchover_that_is_cancelled_lets_go(tmp_path):
    stage = switching(tmp_path, switchover_timeout=600.0)
    stage.running = 1

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.keeper.switchover, "pg2")
            await stage.until(lambda view: view.held)
            tasks.cancel_scope.cancel()
        assert not stage.watch.view.held
        stage.running = 0
        assert not stage.keeper._busy.locked()

    stage.play(plot)
    assert stage.held == [True, False]


def test_plan_runs_alone(tmp_path):
    stage = switching(tmp_path, switchover_timeout=600.0)
    stage.running = 1

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.keeper.switchover, "pg2")
            await stage.until(lambda view: view.held)
            for order in (stage.keeper.switchover("pg3"), stage.keeper.promote("pg3")):
                with pytest.raises(RefusedError, match="a failover or a switchover is under way"):
                    await order
            stage.servers["pg1"].die()
            await stage.until(lambda view: view.node("pg1").status is Status.DOWN)
            assert stage.asked("pg2", "alter system") + stage.asked("pg3", "alter system") == 0
            tasks.cancel_scope.cancel()
        await stage.until(lambda view: view.primary in ("pg2", "pg3"))

    stage.play(plot)


def test_promote_is_refused_while_the_primary_lives(stage):
    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        with pytest.raises(RefusedError, match="pg1 is up"):
            await stage.keeper.promote("pg2")
        with pytest.raises(RefusedError, match="there is no node pg9"):
            await stage.keeper.promote("pg9")

    stage.play(plot)
    assert stage.held == []


def test_promote_is_done_though_failover_is_paused(stage):
    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        await stage.keeper.pause(True)
        assert stage.file.load().paused
        stage.servers["pg1"].die()
        await stage.until(lambda view: view.hindrance == "failover is paused")
        assert await stage.keeper.promote("pg3") == "pg3 is the primary on timeline 2"

    stage.play(plot)
    assert stage.held == [True, False]


def test_pause_that_cannot_be_saved_is_told(stage):
    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        stage.file.full = True
        with pytest.raises(RefusedError, match="cannot be written"):
            await stage.keeper.pause(True)

    stage.play(plot)


def test_administer_primary_or_nobody_is_refused(stage):
    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        with pytest.raises(RefusedError, match="pg1 is the primary: use SWITCHOVER first"):
            stage.keeper.administer("pg1", Admin.MAINT)
        with pytest.raises(RefusedError, match="there is no node pg9"):
            stage.keeper.administer("pg9", Admin.MAINT)
        stage.keeper.administer("pg2", Admin.MAINT)
        assert stage.views[-1].node("pg2").status is Status.MAINT

    stage.play(plot)


# What is mended beside.


def test_former_primary_is_rejoined_by_command(tmp_path):
    out = tmp_path / "out"
    stage = Stage(tmp_path, rejoin=f"echo {{name}} {{new_name}} > {out}")
    one, two, three = stage.servers.values()

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        three.lsn = 900
        one.die()
        await stage.until(is_primary("pg2"))
        assert not await anyio.Path(out).exists()
        two.upstream = None
        one.live()
        await eventually(lambda: out.exists() and bool(out.read_text()))

    stage.play(plot)
    assert out.read_text() == "pg1 pg2\n"


def test_memory_is_saved_whenever_it_changes(stage):
    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        await eventually(lambda: stage.file.load().epoch == Epoch("pg1", int(SYSTEM), 1, 1))

    stage.play(plot)


def test_memory_that_cannot_be_saved_is_told_once(stage, caplog):
    stage.file.full = True

    async def plot() -> None:
        await stage.until(is_primary("pg1"))
        asked = stage.asked("pg1", "pg_control_system")
        await eventually(lambda: stage.asked("pg1", "pg_control_system") > asked + 5)

    with caplog.at_level(logging.ERROR, "health.keeper"):
        stage.play(plot)
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "main: main.state cannot be written: No space left on device"
    ]
