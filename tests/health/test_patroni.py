"""Patroni's /cluster: read as its versions write it, held against nodes, and followed through its failures."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from health.fetch import open_http
from health.patroni import Follower, PatroniRole, Report, Switchover, cool_down, facts, parse
from health.view import Node
from tests.health.managers import PATRONI_2, PATRONI_3, PATRONI_4, Patroni, document, patronis

NODES = [Node(f"pg{n}", f"10.0.0.{n}") for n in (1, 2, 3)]


def members(text: str) -> list[tuple[object, ...]]:
    return [(m.name, m.role, m.state, m.timeline, m.lag_bytes) for m in parse(text.encode()).members]


def test_parse_patroni_2_reads_roles_tags_pause_and_switchover():
    cluster = parse(PATRONI_2.encode())
    assert members(PATRONI_2) == [
        ("pg1", PatroniRole.LEADER, "running", 3, None),
        ("pg2", PatroniRole.SYNC_STANDBY, "running", 3, 0),
        ("pg3", PatroniRole.REPLICA, "starting", None, None),
    ]
    assert [(m.noloadbalance, m.nofailover) for m in cluster.members] == [(False, False), (False, False), (True, True)]
    assert (cluster.scope, cluster.pause) == ("", True)
    assert cluster.scheduled_switchover == Switchover("2022-06-08T12:30:00+00:00", "pg1", None)


def test_parse_patroni_3_reads_states_of_replication_and_priority():
    cluster = parse(PATRONI_3.encode())
    assert members(PATRONI_3) == [
        ("pg1", PatroniRole.REPLICA, "streaming", 4, 16777216),
        ("pg2", PatroniRole.LEADER, "running", 4, None),
        ("pg3", PatroniRole.REPLICA, "in archive recovery", 4, 0),
    ]
    assert [m.nofailover for m in cluster.members] == [True, False, False]
    assert (cluster.scope, cluster.pause) == ("main", False)
    assert cluster.scheduled_switchover == Switchover("2024-02-01T03:00:00+01:00", "pg2", "pg3")


def test_parse_patroni_4_takes_the_lag_of_replay_and_a_member_without_host():
    cluster = parse(PATRONI_4.encode())
    assert members(PATRONI_4) == [
        ("pg1", PatroniRole.QUORUM_STANDBY, "streaming", 5, 4096),
        ("pg2", PatroniRole.LEADER, "running", 5, None),
        ("pg3", PatroniRole.REPLICA, "creating replica", None, None),
    ]
    assert (cluster.members[2].host, cluster.members[2].nofailover) == ("", False)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("master", PatroniRole.LEADER),
        ("primary", PatroniRole.LEADER),
        ("leader", PatroniRole.LEADER),
        ("standby_leader", PatroniRole.STANDBY_LEADER),
        ("replica", PatroniRole.REPLICA),
        ("witness", PatroniRole.UNKNOWN),
    ],
)
def test_parse_role_of_any_version_is_one_of_ours(name, role):
    (member,) = parse(b'{"members": [{"name": "pg1", "role": "%s"}]}' % name.encode()).members
    assert member.role is role


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a document of /cluster: Input data was truncated"),
        (b"<html>502 Bad Gateway</html>", "not a document of /cluster: JSON is malformed"),
        (b"[]", "not a document of /cluster: Expected `object`, got `array`"),
        (b"{}", "not a document of /cluster: Object missing required field `members`"),
        (b'{"members": [{"role": "leader"}]}', "missing required field `name` - at `\\$.members\\[0\\]`"),
        (b'{"members": [{"name": "pg1"}]}', "missing required field `role`"),
        (b'{"members": [{"name": "pg1", "role": 1}]}', "Expected `str`, got `int` - at `\\$.members\\[0\\].role`"),
        (b'{"members": [{"name": "pg1", "role": "leader", "port": "5432"}]}', "Expected `int`, got `str`"),
        (b'{"members": [], "pause": "no"}', "Expected `bool`"),
        (b'{"members": []}', "document of /cluster has no members"),
        (b'{"members": [{"name": "\xff", "role": "leader"}]}', "not a document of /cluster"),
        (b'{"members": %s' % (b"[" * 100_000), "not a document of /cluster"),
        (
            b'{"members": [{"name": "pg1", "role": "replica"}, {"name": "pg1", "role": "leader"}]}',
            "document of /cluster has several members pg1",
        ),
        (
            b'{"members": [{"name": "pg1", "role": "leader", "host": "a"}, {"name": "pg2", "role": "primary"}]}',
            r"document of /cluster has several leaders: pg1 \(leader at a:5432\), pg2 \(leader\)",
        ),
    ],
)
def test_parse_document_in_doubt_is_refused_with_the_reason(body, reason):
    with pytest.raises(ValueError, match=reason):
        parse(body)


@given(st.binary(max_size=200) | st.integers(0, len(PATRONI_4)).map(lambda end: PATRONI_4.encode()[:end]))
def test_parse_anything_raises_nothing_but_value_error(body):
    with suppress(ValueError):
        parse(body)


def test_facts_of_known_members_name_leader_and_roles():
    managed = facts(parse(PATRONI_2.encode()), NODES)
    assert (managed.leader, managed.paused, managed.mismatches) == ("pg1", True, ())
    assert [(name, member.role) for name, member in managed.members.items()] == [
        ("pg1", PatroniRole.LEADER),
        ("pg2", PatroniRole.SYNC_STANDBY),
        ("pg3", PatroniRole.REPLICA),
    ]


def test_facts_node_is_the_member_at_its_place_whatever_the_names():
    nodes = [Node("a", "10.0.0.2"), Node("pg2", "10.0.0.1"), Node("c", "10.0.0.3")]
    managed = facts(parse(document("pg2")), nodes)
    assert managed.leader == "a"
    assert {name: member.name for name, member in managed.members.items()} == {"a": "pg2", "pg2": "pg1", "c": "pg3"}
    assert managed.mismatches == ()


def test_facts_node_known_by_another_address_is_found_by_name():
    nodes = [Node("pg1", "db1.example"), Node("pg2", "/run/postgresql"), Node("pg3", "10.0.0.3", 6543)]
    managed = facts(parse(document("pg2")), nodes)
    assert (managed.leader, list(managed.members), managed.mismatches) == ("pg2", ["pg1", "pg2", "pg3"], ())


@pytest.mark.parametrize(("ours", "theirs"), [("DB1.Example.", "db1.example"), ("0:0:0:0:0:0:0:1", "::1")])
def test_facts_host_written_in_another_way_is_the_same(ours, theirs):
    body = b'{"members": [{"name": "x", "role": "leader", "host": "%s", "port": 5432}]}' % theirs.encode()
    assert facts(parse(body), [Node("pg1", ours)]).leader == "pg1"


def test_facts_what_does_not_match_is_told_and_a_strange_leader_is_none_of_ours():
    managed = facts(parse(document("pg3")), [NODES[0], Node("pg9", "10.0.0.9")])
    assert managed.leader is None
    assert list(managed.members) == ["pg1"]
    assert managed.mismatches == (
        "member pg2 (replica at 10.0.0.2:5432) is no node",
        "member pg3 (leader at 10.0.0.3:5432) is no node",
        "node pg9 (10.0.0.9:5432) is no member",
    )


def test_facts_of_standby_cluster_have_no_leader():
    managed = facts(parse(document().replace(b'"leader"', b'"standby_leader"')), NODES)
    assert (managed.leader, managed.members["pg1"].role) == (None, PatroniRole.STANDBY_LEADER)


def test_facts_of_two_members_in_one_place_count_the_leader():
    # A member that was renamed stays listed until its key has expired.
    body = b"""{"members": [{"name": "new", "role": "leader", "host": "10.0.0.1", "port": 5432},
                            {"name": "old", "role": "replica", "host": "10.0.0.1", "port": 5432}]}"""
    managed = facts(parse(body), NODES[:1])
    assert (managed.leader, managed.mismatches) == ("pg1", ("member old (replica at 10.0.0.1:5432) is no node",))


def test_cool_down_grows_to_its_bound():
    assert [cool_down(failures) for failures in (1, 2, 3, 4, 5, 6, 10**6)] == [5, 10, 20, 40, 60, 60, 60]


class Stage:
    """A follower of real servers, with a clock that stands still, and what it published."""

    def __init__(self, *patronis: Patroni, timeout: float = 5.0) -> None:
        self.patronis = patronis
        self.timeout = timeout
        self.now = 100.0
        self.reports: list[Report] = []
        self.news = anyio.Event()
        self.follower: Follower

    def play(self, plot: Callable[[], Awaitable[None]]) -> None:
        """Open the follower's client while the plot runs."""

        async def run() -> None:
            async with open_http() as get:
                urls = [patroni.url for patroni in self.patronis]
                self.follower = Follower(urls, get, 0.01, self.timeout, clock=lambda: self.now)
                await plot()

        anyio.run(run)

    async def run(self, plot: Callable[[], Awaitable[None]]) -> None:
        """Have the follower run while the plot does."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.follower.run, self.publish)
            await plot()
            tasks.cancel_scope.cancel()

    def publish(self, report: Report) -> None:
        self.reports.append(report)
        self.news.set()
        self.news = anyio.Event()

    async def until(self, is_so: Callable[[Report], bool]) -> Report:
        """Wait for the last report to be so."""
        with anyio.fail_after(10):
            while not (self.reports and is_so(self.reports[-1])):
                await self.news.wait()
        return self.reports[-1]


def leader(report: Report) -> str | None:
    return facts(report.cluster, NODES).leader if report.cluster else None


def test_follower_follows_a_change_of_leader_and_a_pause():
    with patronis(document("pg1")) as (patroni,):
        stage = Stage(patroni)

        async def plot() -> None:
            first = await stage.until(lambda report: leader(report) == "pg1")
            assert (first.url, first.reason, first.age(101.5)) == (patroni.url, "", 1.5)
            patroni.body = document(None)
            await stage.until(lambda report: leader(report) is None)
            patroni.body = document("pg2")
            await stage.until(lambda report: leader(report) == "pg2")
            patroni.body = document("pg2", pause=True)
            last = await stage.until(lambda report: report.cluster is not None and report.cluster.pause)
            assert stage.follower.report == last
            assert set(patroni.asked) == {"/cluster"}

        stage.play(lambda: stage.run(plot))


def test_follower_before_its_first_answer_knows_nothing_and_says_why():
    report = Follower([], no_get).report
    assert (report.cluster, report.age(5.0), report.reason) == (None, math.inf, "Patroni was not asked yet")


async def no_get(url: str, timeout: float) -> bytes:
    raise AssertionError


def refuse(patroni: Patroni) -> None:
    patroni.stop()


def be_unavailable(patroni: Patroni) -> None:
    patroni.status = 503


def redirect(patroni: Patroni) -> None:
    patroni.status, patroni.headers = 302, {"Location": "/elsewhere"}


def hang(patroni: Patroni) -> None:
    patroni.hang()


def talk_nonsense(patroni: Patroni) -> None:
    patroni.body = b"<html>"


def talk_without_end(patroni: Patroni) -> None:
    patroni.body = b" " * (2 << 20)


def break_off(patroni: Patroni) -> None:
    patroni.headers = {"Content-Length": "100000"}


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (refuse, "connection refused"),
        (be_unavailable, "HTTP status 503"),
        (redirect, "HTTP status 302"),
        (hang, "no answer within 1 s"),
        (talk_nonsense, "not a document of /cluster: JSON is malformed"),
        (talk_without_end, "answer is longer than 1048576 bytes"),
        (break_off, "peer closed connection"),
    ],
)
def test_follower_of_a_patroni_that_fails_keeps_the_last_answer_and_says_why(fail, reason):
    with patronis(document("pg2")) as (patroni,):
        stage = Stage(patroni, timeout=1.0 if fail is hang else 5.0)

        async def plot() -> None:
            before = await stage.follower.round()
            fail(patroni)
            stage.now += 3.0
            after = await stage.follower.round()
            assert after.reason.startswith(f"Patroni does not answer: {patroni.url}: {reason}")
            assert replace(after, reason="") == before
            assert after.age(stage.now) == 3.0

        stage.play(plot)


def test_follower_resumes_at_once_when_the_only_patroni_answers_again():
    with patronis(document("pg1")) as (patroni,):
        stage = Stage(patroni)

        async def plot() -> None:
            await stage.until(lambda report: leader(report) == "pg1")
            patroni.stop()
            await stage.until(lambda report: "connection refused" in report.reason)
            patroni.body = document("pg2")
            patroni.start()
            report = await stage.until(lambda report: not report.reason)
            assert leader(report) == "pg2"

        stage.play(lambda: stage.run(plot))


def test_follower_when_one_is_down_has_the_answer_of_another_in_the_same_round():
    with patronis(document("pg1"), document("pg1"), document("pg1")) as (one, two, three):
        stage = Stage(one, two, three)

        async def plot() -> None:
            one.stop()
            report = await stage.follower.round()
            assert (report.url in (two.url, three.url), report.reason) == (True, "")
            (two if report.url == two.url else three).stop()
            report = await stage.follower.round()
            assert (report.url in (two.url, three.url), report.reason) == (True, "")

        stage.play(plot)


def test_follower_does_not_wait_for_a_patroni_that_hangs():
    with patronis(document("pg1"), document("pg2")) as (one, two):
        stage = Stage(one, two)

        async def plot() -> None:
            two.stop()
            assert (await stage.follower.round()).url == one.url
            stage.now += 5.0
            two.start()
            one.hang()
            began = anyio.current_time()
            report = await stage.follower.round()
            assert (report.url, leader(report)) == (two.url, "pg2")
            assert anyio.current_time() - began < stage.timeout / 2

        stage.play(plot)


class Scripted:
    """A get without a network: who is broken, and who was asked."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.asked: list[str] = []

    async def get(self, url: str, timeout: float) -> bytes:
        host = url.removeprefix("http://").removesuffix("/cluster")
        self.asked.append(host)
        await anyio.lowlevel.checkpoint()
        if host in self.broken:
            raise OSError("connection refused")
        return document("pg1")


def test_follower_leaves_a_url_that_fails_alone_ever_longer_while_another_answers():
    script = Scripted()
    now = 100.0
    follower = Follower(["http://a", "http://b/"], script.get, clock=lambda: now)

    async def asked() -> list[str]:
        script.asked.clear()
        await follower.round()
        return script.asked

    async def plot() -> None:
        nonlocal now
        script.broken = {"a"}
        assert await asked() == ["a", "b"]
        assert await asked() == ["b"]
        script.broken = {"a", "b"}
        assert await asked() == ["b"]  # a is left alone, for all that was known
        assert await asked() == ["b", "a"]  # nobody answered: everybody is asked
        script.broken = {"b"}
        assert await asked() == ["b", "a"]
        assert follower.report.url == "http://a"
        script.broken = {"a", "b"}
        now += 19.9
        assert await asked() == ["a"]  # b has failed three times
        script.broken = {"b"}
        await asked()
        script.broken = set()
        now += 39.9
        assert await asked() == ["a"]

    anyio.run(plot)


def test_follower_bounds_a_get_that_does_not_bound_itself():
    async def get(url: str, timeout: float) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async def plot() -> None:
        report = await Follower(["http://a"], get, timeout=0.05).round()
        assert report.reason == "Patroni does not answer: http://a: no answer within 0.05 s"

    anyio.run(plot)


def test_follower_logs_a_failure_once_and_its_end_and_no_request(caplog):
    with patronis(document("pg1")) as (patroni,):
        stage = Stage(patroni)

        async def plot() -> None:
            for status in (200, 503, 503, 503, 200, 200):
                patroni.status = status
                await stage.follower.round()

        with caplog.at_level(logging.INFO):
            stage.play(plot)
        assert caplog.messages == [
            f"Patroni at {patroni.url}: HTTP status 503",
            f"Patroni at {patroni.url} answers again",
        ]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://[::1:8008", "[Ii]nvalid"),
        ("ftp://127.0.0.1", "unsupported protocol"),
        ("http://127.0.0.1:1", "^connection refused$"),
    ],
)
def test_fetch_of_url_that_leads_nowhere_raises_os_error_in_words(url, reason):
    async def plot() -> None:
        async with open_http() as get:
            with pytest.raises(OSError, match=reason):
                await get(url, 2.0)

    anyio.run(plot)


def test_fetch_over_tls_trusts_whom_it_is_told_to():
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    with patronis(document(), tls=server) as (patroni,):

        async def plot() -> None:
            async with open_http(client) as get:
                assert await get(f"{patroni.url}/cluster", 5.0) == document()
            async with open_http() as get:
                with pytest.raises(OSError, match=r"^certificate verify failed: "):
                    await get(f"{patroni.url}/cluster", 5.0)

        anyio.run(plot)
