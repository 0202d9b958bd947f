"""Session, probe and watch against PostgreSQL: what each version tells, to whom, and how a cluster is followed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import to_thread

from gateway.embedded import Cluster, PostgresNode
from gateway.session import Session, SessionError
from health.probe import Probe
from health.view import ClusterView, Node, Outcome, ProbeResult, Role, Rules, Status
from health.watch import Watch

from .client import eventually

RULES = Rules(probe_interval=0.2, probe_interval_fast=0.05, probe_timeout=1.0, fall=2, rise=1)

ROLES = """
create role prober login password 'secret';
create role watcher login in role pg_monitor;
create role outsider login;
revoke execute on function pg_control_system() from public;
grant execute on function pg_control_system() to prober, watcher;
"""


@pytest.fixture(scope="module", params=["15", "16", "18"])
def pair(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A primary and a standby of each version."""
    with Cluster(version=request.param, standbys=1) as cluster:
        cluster.primary.psql(ROLES)
        position = cluster.primary.psql("select pg_current_wal_lsn()")
        cluster.primary.hba(["host all prober 127.0.0.1/32 scram-sha-256", "host all all 127.0.0.1/32 trust"])
        _settle(cluster.standbys[0], f"select pg_last_wal_replay_lsn() >= '{position}'")
        yield cluster


def _settle(node: PostgresNode, question: str) -> None:
    # Asked anew each time: on a standby the snapshot of one long question may be in the way of what it waits for.
    eventually(lambda: node.psql(question) == "t", question)


def probe_of(node: PostgresNode, user: str = "postgres", password: str | None = None, timeout: float = 5.0) -> Probe:
    async def connect(address: str, port: int) -> Session:
        return await Session.connect(address, port, user, password, timeout=timeout)

    async def resolve(host: str) -> tuple[str, ...]:
        return (host,)

    return Probe(Node(node.name, "127.0.0.1", node.port), connect, resolve, timeout=timeout)


def result_of(probe: Probe) -> ProbeResult:
    async def run() -> ProbeResult:
        result = await probe.round()
        await probe.close()
        return result

    return anyio.run(run)


@pytest.mark.parametrize("user", ["postgres", "watcher"])
def test_probe_that_may_see_all_tells_all(pair, user):
    system = int(pair.primary.psql("select system_identifier from pg_control_system()"))
    first, second = result_of(probe_of(pair.primary, user)), result_of(probe_of(pair.standbys[0], user))
    assert (first.outcome, first.in_recovery, first.timeline, first.system_identifier) == ("answered", False, 1, system)
    assert (first.current_lsn or 0) > 0
    assert (second.outcome, second.in_recovery, second.timeline) == ("answered", True, 1)
    assert (second.system_identifier, second.receiver_streaming) == (system, True)
    assert 0 < (second.replayed_lsn or 0) <= (second.received_lsn or 0)


def test_probe_by_scram_with_nothing_but_login_knows_what_matters(pair):
    first = result_of(probe_of(pair.primary, "prober", "secret"))
    assert (first.outcome, first.in_recovery, first.timeline) == ("answered", False, 1)
    second = result_of(probe_of(pair.standbys[0], "prober", "secret"))
    assert (second.in_recovery, second.timeline, second.receiver_streaming) == (True, 1, None)
    assert second.replayed_lsn is not None


def test_probe_that_may_not_see_the_control_file_does_without(pair):
    result = result_of(probe_of(pair.primary, "outsider"))
    assert (result.outcome, result.timeline, result.system_identifier) == ("answered", 1, None)


def test_probe_with_wrong_password_or_user_is_rejected(pair):
    wrong = result_of(probe_of(pair.primary, "prober", "wrong"))
    assert (wrong.outcome, wrong.sqlstate) == (Outcome.REJECTED, "28P01")
    nobody = result_of(probe_of(pair.primary, "nobody"))
    assert (nobody.outcome, nobody.sqlstate, nobody.message) == ("rejected", "28000", 'role "nobody" does not exist')


def test_session_rows_columns_and_values(pair):
    async def run() -> None:
        session = await Session.connect("127.0.0.1", pair.primary.port, "postgres", options={"application_name": "us"})
        assert session.parameters["application_name"] == "us"
        assert await session.query("select 1 as a, null as b; select 'ä'") == [("1", None), ("ä",)]
        assert await session.query("select $1 as it, $2::int + 1 as sum", ["o'clock", "41"]) == [("o'clock", "42")]
        assert session.columns == ["it", "sum"]
        assert await session.query("") == []
        with pytest.raises(SessionError, match="division by zero") as caught:
            await session.query("select 1/0")
        assert caught.value.sqlstate == "22012"
        assert await session.query("select 2") == [("2",)]  # goes on after an error
        await session.close()
        await session.close()
        with pytest.raises(ConnectionError):
            await session.query("select 3")

    anyio.run(run)


def test_session_on_unix_socket_by_name_and_to_nobody(pair):
    async def run() -> None:
        for host in (str(pair.primary.data), "localhost"):
            session = await Session.connect(host, pair.primary.port, "postgres")
            await session.close()
        with pytest.raises(FileNotFoundError):
            await Session.connect("/nowhere", 5432, "postgres")
        with pytest.raises(ConnectionRefusedError):
            await Session.connect("127.0.0.1", 1, "postgres")

    anyio.run(run)


def test_session_too_long_an_answer_is_an_error_and_ends_it(pair):
    async def run() -> None:
        session = await Session.connect("127.0.0.1", pair.primary.port, "postgres")
        with pytest.raises(SessionError, match="longer than") as caught:
            await session.query("select repeat('x', 1000000) from generate_series(1, 30)")
        assert caught.value.sqlstate == "54000"
        session = await Session.connect("127.0.0.1", pair.primary.port, "postgres")
        with pytest.raises(SessionError) as caught:
            await session.query("select repeat('x', 20000000)")
        assert caught.value.sqlstate == "08P01"

    anyio.run(run)


def test_session_terminated_while_it_waits_tells_why(pair):
    async def run() -> None:
        session = await Session.connect("127.0.0.1", pair.primary.port, "postgres")
        with pytest.raises(SessionError) as caught:
            await session.query("select pg_terminate_backend(pg_backend_pid())")
        assert caught.value.sqlstate == "57P01"

    anyio.run(run)


@pytest.mark.parametrize(
    ("greeting", "sqlstate"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "08P01"),
        (b"R\0\0\0\3", "08P01"),
        (b"Z\0\0\0\5I", "08P01"),
        (b"R\0\0\0\x08\0\0\0\x09", "0A000"),  # SSPI
        (b"R\0\0\0\x08\0\0\0\x03", "28000"),  # a password in clear text, on a connection that is
        (b"E\0\0\0\4", "XX000"),
        (b"", None),
    ],
)
def test_session_to_something_else_is_an_error_in_words(greeting, sqlstate):
    async def run() -> None:
        async def greet(client: anyio.abc.ByteStream) -> None:
            async with client:
                with suppress(anyio.BrokenResourceError):
                    await client.send(greeting)
                    await client.receive()

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, greet)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            with pytest.raises((SessionError, ConnectionError)) as caught:
                await Session.connect("127.0.0.1", port, "postgres", timeout=5.0)
            assert getattr(caught.value, "sqlstate", None) == sqlstate
            tasks.cancel_scope.cancel()

    anyio.run(run)


class Story:
    """A watched cluster, and the views that came of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.nodes = {node.name: node for node in cluster.nodes}
        self.views: list[ClusterView] = []
        probes = [probe_of(node, timeout=RULES.probe_timeout) for node in cluster.nodes]
        self.watch = Watch("main", probes, RULES, self.views.append)

    def play(self, plot: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.watch.run)
                await plot()
                tasks.cancel_scope.cancel()

        anyio.run(run)

    async def until(self, **expected: str) -> None:
        """Wait for a view: primary="pg1", pg2="standby, up"."""
        primary = expected.pop("primary", None)

        def shown() -> dict[str, str]:
            return {
                node.node.name: f"{node.role}, {node.status}"
                for node in self.watch.view.nodes
                if node.node.name in expected
            }

        with anyio.move_on_after(10):
            while not (self.views and shown() == expected and primary in (None, self.watch.view.primary)):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            return
        raise AssertionError(f"{self.watch.view} is not {expected}, primary {primary}")

    async def do(self, node: str, what: str, *how: Any, **more: Any) -> None:
        await to_thread.run_sync(partial(getattr(self.nodes[node], what), *how, **more))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of three, with few connections; the last test that uses it breaks it."""
    with Cluster(version=request.config.getoption("--postgres"), max_connections=20) as cluster:
        yield cluster


@pytest.fixture
def story(cluster: Cluster) -> Story:
    """A new watch over the cluster."""
    return Story(cluster)


def test_watch_is_not_misled_by_answers_that_refuse(story):
    async def plot() -> None:
        await story.until(primary="pg1", pg1="primary, up", pg2="standby, up")
        # Every connection is ended, the probe's too: that is an operator's doing, not death.
        ended = "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend'"
        await story.do("pg1", "psql", f"{ended} and pid <> pg_backend_pid()")
        await story.do("pg1", "psql", "select pg_sleep(1)")
        # No slot is left: no new connection is accepted, but the probe's own tells what the node is.
        sessions = []
        with suppress(SessionError):
            while True:
                sessions.append(await Session.connect("127.0.0.1", story.nodes["pg1"].port, "postgres"))
        story.watch.hint("pg1")
        await story.until(primary="pg1", pg1="primary, saturated")
        assert story.watch.view.node("pg1").reason == "sorry, too many clients already"
        for session in sessions:
            await session.close()
        await story.until(primary="pg1", pg1="primary, up")
        assert {view.primary for view in story.views} == {"pg1"}
        assert not any(view.node("pg1").status is Status.DOWN for view in story.views)

    story.play(plot)


def test_watch_of_frozen_primary_ends_in_time_and_heals(story):
    async def plot() -> None:
        await story.until(primary="pg1", pg1="primary, up", pg2="standby, up")
        await story.do("pg1", "pause")
        await story.until(primary="pg1", pg1="primary, down", pg2="standby, up")
        assert story.watch.view.node("pg1").reason == "no answer within 1 s"
        await story.do("pg1", "resume")
        await story.until(primary="pg1", pg1="primary, up")

    story.play(plot)


def test_watch_follows_death_promotion_and_return(story):
    async def plot() -> None:
        await story.until(primary="pg1", pg1="primary, up", pg2="standby, up", pg3="standby, up")
        await story.do("pg1", "kill")
        await story.until(primary="pg1", pg1="primary, down", pg2="standby, up")
        assert story.watch.view.node("pg1").reason == "connection refused"
        await story.do("pg2", "promote")
        await story.until(primary="pg2", pg2="primary, up")
        assert story.watch.view.epoch.timeline == 2
        # Fed by the old primary it could not follow the new one, and before it knew of timeline 2 would open another.
        await story.do("pg3", "follow", story.nodes["pg2"])
        await to_thread.run_sync(_settle, story.nodes["pg3"], "select received_tli = 2 from pg_stat_wal_receiver")
        # The old primary comes back, and believes that it still is one.
        await story.do("pg1", "start")
        await story.until(primary="pg2", pg1="false primary, up")
        # A standby that is promoted beside a living primary is obeyed: somebody meant it. Only one is routed to.
        await story.do("pg3", "promote")
        await story.until(primary="pg3", pg1="false primary, up", pg2="false primary, up", pg3="primary, up")

    story.play(plot)
    assert not any(view.primary == "pg1" for view in story.views if view.epoch.timeline > 1)
    assert all([node.role for node in view.nodes].count(Role.PRIMARY) <= 1 for view in story.views)
