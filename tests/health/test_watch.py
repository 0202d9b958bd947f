"""The watch over a cluster of dictionaries: what it publishes, when, and how often it asks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from health.probe import Probe, Row
from health.view import Admin, ClusterView, Node, Role, Rules, Status
from health.watch import Watch

from .servers import PRIMARY, STANDBY, Names, RefusalError, Server

# Milliseconds in the place of seconds; each test waits for a view or a probe, never for time.
QUICK = Rules(probe_interval=0.01, probe_interval_fast=0.002, jitter=0.0)
SELDOM = Rules(probe_interval=3600.0, probe_interval_fast=0.002, jitter=0.0)
PROMOTED: Row = ("f", "000000040000000100000001", *PRIMARY[2:])
REFUSED = ConnectionRefusedError(111, "x")


class Stage:
    """Servers that are watched, and the views that come of it."""

    def __init__(self, *servers: Server, rules: Rules = QUICK, after: ClusterView | None = None) -> None:
        probes = [
            Probe(Node(f"pg{i}", f"pg{i}"), server.connect, Names(f"10.0.0.{i}").resolve)
            for i, server in enumerate(servers, start=1)
        ]
        self.servers = servers
        self.views: list[ClusterView] = []
        self.watch = Watch("main", probes, rules, self.views.append, after=after)

    def play(self, plot: Callable[[], Awaitable[None]]) -> None:
        """Run the watch while the plot lasts."""

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.watch.run)
                await plot()
                tasks.cancel_scope.cancel()

        anyio.run(run)

    async def until(self, is_so: Callable[[ClusterView], bool]) -> ClusterView:
        """Wait for the last published view to be so."""
        await eventually(lambda: bool(self.views) and is_so(self.views[-1]))
        return self.views[-1]


async def eventually(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not is_so():
            await checkpoint()


def server(row: Row = PRIMARY) -> Server:
    made = Server()
    made.row = row
    return made


def is_settled(view: ClusterView) -> bool:
    return all(node.status is Status.UP and not node.reason for node in view.nodes)


def test_watch_of_single_node_publishes_before_its_first_probe():
    stage = Stage(server())

    async def plot() -> None:
        view = await stage.until(is_settled)
        first = stage.views[0]
        assert (first.version, first.primary, first.node("pg1").reason) == (1, "pg1", "not probed yet")
        assert view.version > 1
        assert view.node("pg1").addresses == ("10.0.0.1",)

    stage.play(plot)


def test_watch_publishes_nothing_before_every_node_had_its_say():
    # A primary of yesterday that answers first must not be believed.
    old, slow = server(), server(PROMOTED)
    stage = Stage(old, slow)

    async def plot() -> None:
        slow.gate = anyio.Event()
        await eventually(lambda: len(old.queries) > 6)
        assert stage.views == []
        slow.gate.set()
        view = await stage.until(is_primary("pg2"))
        assert view.node("pg1").role is Role.FALSE_PRIMARY
        assert stage.views[0] == view

    stage.play(plot)


def is_primary(name: str) -> Callable[[ClusterView], bool]:
    return lambda view: view.primary == name


def test_watch_of_standbys_alone_publishes_them_for_reads():
    stage = Stage(server(STANDBY), server(STANDBY))

    async def plot() -> None:
        view = await stage.until(is_settled)
        assert view.primary is None
        assert [node.role for node in view.nodes] == [Role.STANDBY, Role.STANDBY]

    stage.play(plot)


def test_watch_without_news_publishes_nothing_and_renews_the_figures():
    one, two = server(), server(STANDBY)
    stage = Stage(one, two)

    async def plot() -> None:
        view = await stage.until(is_settled)
        lag = view.node("pg2").lag_bytes
        assert lag == 0x30
        one.row = (*PRIMARY[:2], "1/A0001028", *PRIMARY[3:])
        await eventually(lambda: stage.watch.view.node("pg2").lag_bytes == 0x1030)
        assert stage.views[-1] == view

    stage.play(plot)


def test_watch_follows_a_promotion_and_the_return_of_the_old_primary():
    one, two = server(), server(STANDBY)
    stage = Stage(one, two)

    async def plot() -> None:
        await stage.until(is_settled)
        for session in one.sessions:
            session.broken = REFUSED
        one.connecting = REFUSED
        down = await stage.until(lambda view: view.node("pg1").status is Status.DOWN)
        assert (down.primary, down.node("pg1").reason) == ("pg1", "connection refused")
        two.row = PROMOTED
        await stage.until(is_primary("pg2"))
        one.connecting = None
        await stage.until(lambda view: view.node("pg1").role is Role.FALSE_PRIMARY)
        one.row = STANDBY  # still on the timeline of yesterday
        await stage.until(lambda view: view.node("pg1").role is Role.UNKNOWN)
        one.row = (*STANDBY[:-1], "4")
        view = await stage.until(lambda view: view.node("pg1").role is Role.STANDBY)
        assert view.primary == "pg2"
        assert [view.version for view in stage.views] == list(range(1, len(stage.views) + 1))

    stage.play(plot)


def test_watch_hint_probes_at_once_on_a_new_connection():
    one = server()
    stage = Stage(one, rules=SELDOM)

    async def plot() -> None:
        await stage.until(is_settled)
        await eventually(lambda: len(one.sessions) == 1)
        stage.watch.hint("nobody")
        stage.watch.hint("pg1")
        await eventually(lambda: len(one.sessions) == 2)

    stage.play(plot)


def test_watch_hints_in_masses_cause_four_probes_for_each_fast_interval():
    one = server()
    stage = Stage(one, rules=Rules(probe_interval=3600.0, probe_interval_fast=0.05, jitter=0.0))

    async def plot() -> None:
        await stage.until(is_settled)
        began = anyio.current_time()
        while len(one.sessions) < 4:
            stage.watch.hint("pg1")
            await checkpoint()
        assert anyio.current_time() - began >= 0.025

    stage.play(plot)


def test_watch_hint_during_a_probe_leads_to_another():
    one = server()
    stage = Stage(one, rules=SELDOM)

    async def plot() -> None:
        one.gate = anyio.Event()
        await eventually(lambda: bool(stage.views))
        await checkpoint()
        stage.watch.hint("pg1")
        one.gate.set()
        await eventually(lambda: len(one.sessions) == 2)

    stage.play(plot)


def test_watch_news_of_one_node_has_the_others_looked_at():
    # Else a promotion is noticed a whole interval after the primary's death.
    one, two = server(), server(STANDBY)
    stage = Stage(one, two, rules=SELDOM)

    async def plot() -> None:
        await stage.until(is_settled)
        two.row = PROMOTED
        one.connecting = RefusalError("57P03", "the database system is shutting down")
        stage.watch.hint("pg1")
        await stage.until(is_primary("pg2"))

    stage.play(plot)


def test_watch_node_in_maintenance_is_published_until_it_is_ready():
    stage = Stage(server(), server(STANDBY))

    async def plot() -> None:
        await stage.until(is_settled)
        stage.watch.administer("pg2", Admin.DRAIN)
        assert stage.views[-1].node("pg2").status is Status.DRAIN
        stage.watch.administer("pg2", Admin.READY)
        assert stage.views[-1].node("pg2").status is Status.UP
        with pytest.raises(KeyError):
            stage.watch.administer("pg9", Admin.MAINT)

    stage.play(plot)


def test_watch_that_replaces_another_remembers_its_epoch():
    # The promoted node is down at the reload; the old primary must not take its place.
    before = Stage(server(), server(PROMOTED))

    async def learn() -> None:
        await before.until(is_primary("pg2"))

    before.play(learn)
    dead = server()
    dead.connecting = REFUSED
    stage = Stage(server(), dead, after=before.views[-1])

    async def plot() -> None:
        view = await stage.until(lambda view: view.node("pg2").status is Status.DOWN)
        assert view.primary == "pg2"
        assert view.node("pg1").role is Role.FALSE_PRIMARY
        assert stage.views[0].version == before.views[-1].version + 1

    stage.play(plot)


def test_watch_that_ends_closes_every_connection():
    stage = Stage(server(), server(STANDBY))

    async def plot() -> None:
        await stage.until(is_settled)

    stage.play(plot)
    assert [server.connected for server in stage.servers] == [[], []]


def test_watch_logs_what_it_publishes(caplog):
    stage = Stage(server(), server(STANDBY))

    async def plot() -> None:
        await stage.until(is_settled)

    with caplog.at_level(logging.INFO, "health.watch"):
        stage.play(plot)
    assert "main: primary is pg1 on timeline 3" in caplog.messages
    assert "main: pg2 is standby, up" in caplog.messages
