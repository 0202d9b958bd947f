"""Nodes found by DNS: what may be written, what becomes of records, and what is left of nodes when DNS fails."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import dns.rcode
import dns.resolver
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.supervisor import resolver
from gateway.supervisor.discovery import (
    Change,
    Directory,
    Discovery,
    Record,
    Source,
    compare,
    draw_nodes,
    look_up_records,
    parse_discover,
)
from gateway.supervisor.resolver import MakeResolver, UnresolvedError
from health.view import Node
from tests.supervisor.names import SILENT, dns_server

SERVICE = "_postgresql._tcp.db.example"
SRV = (f"{SERVICE}.", "SRV")
NAME = "db.example"


@pytest.mark.parametrize(
    ("text", "discovery"),
    [
        ("srv:_postgresql._tcp.db.example.com", Discovery(Source.SRV, "_postgresql._tcp.db.example.com")),
        ("srv:_pg._tcp.db.", Discovery(Source.SRV, "_pg._tcp.db.")),
        ("dns:db.example.com:5432", Discovery(Source.DNS, "db.example.com", 5432)),
        ("dns:db:65535", Discovery(Source.DNS, "db", 65535)),
        ("dns:pg_headless.prod.svc:1", Discovery(Source.DNS, "pg_headless.prod.svc", 1)),
    ],
)
def test_parse_discover_known_form_is_read_and_written_back(text, discovery):
    assert parse_discover(text) == discovery
    assert str(discovery) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", '\'\' is no way to discover nodes: expected "srv:_postgresql._tcp.NAME" or "dns:NAME:PORT"'),
        ("db.example.com", "'db.example.com' is no way to discover nodes"),
        ("SRV:_postgresql._tcp.db", "'SRV' is no way to discover nodes"),
        ("consul:db", "'consul' is no way to discover nodes"),
        ("srv:", "'' is not a name in DNS"),
        ("srv:db.example.com", "'db.example.com' is not the name of a service"),
        ("srv:_postgresql.db.example.com", "is not the name of a service"),
        ("srv:_postgresql._tcp", "is not the name of a service"),
        ("srv:_postgresql._tcp.db.example.com:5432", "is not a name in DNS"),
        ("dns:", "'' is not a port"),
        ("dns:db.example.com", "'db.example.com' is not a port"),
        ("dns:db.example.com:", "'' is not a port"),
        ("dns:db.example.com:0", "'0' is not a port"),
        ("dns:db.example.com:65536", "'65536' is not a port"),
        ("dns:db.example.com:\u0663", "is not a port"),
        ("dns::5432", "'' is not a name in DNS"),
        ("dns:db..example:5432", "'db..example' is not a name in DNS"),
        ("dns:-db.example:5432", "'-db.example' is not a name in DNS"),
        ("dns:b\u00fccher.example:5432", "is not a name in DNS"),
        (f"dns:{'a' * 64}.example:5432", "is not a name in DNS"),
        (f"dns:{'a.' * 127}:5432", "is not a name in DNS"),
        ("dns:10.0.0.1:5432", "'10.0.0.1' is an address: write it as a node"),
        ("dns:[fd00::1]:5432", "'[fd00::1]' is an address: write it as a node"),
    ],
)
def test_parse_discover_other_text_is_refused_with_what_is_expected(text, reason):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_discover(text)
    assert reason in str(caught.value)


def test_draw_nodes_stand_by_priority_and_weight_and_rotation_is_no_change():
    records = [Record("c", 1, 20, 9), Record("b", 1, 10, 0), Record("a", 1, 10, 5), Record("d", 1, 10, 0)]
    nodes = draw_nodes(records, [])
    assert [(node.name, node.weight) for node in nodes] == [("a", 5), ("b", 1), ("d", 1), ("c", 9)]
    assert draw_nodes(records[::-1], nodes) == nodes


def test_draw_nodes_are_called_by_their_first_label_or_by_as_much_as_it_takes():
    records = [
        Record("pg1.eu.example", 5432),
        Record("pg1.us.example", 5432),
        Record("pg1.us.example", 5433),
        Record("pg2.eu.example", 5432),
        Record("10.0.0.1", 5432),
    ]
    assert {(node.host, node.port): node.name for node in draw_nodes(records, [])} == {
        ("pg1.eu.example", 5432): "pg1",
        ("pg1.us.example", 5432): "pg1.us.example",
        ("pg1.us.example", 5433): "pg1.us.example:5433",
        ("pg2.eu.example", 5432): "pg2",
        ("10.0.0.1", 5432): "10.0.0.1",
    }


def test_draw_nodes_that_stay_keep_their_names():
    # The epoch knows the primary by its name.
    before = draw_nodes([Record("pg1.eu.example", 5432), Record("pg1.us.example", 5432)], [])
    after = draw_nodes([Record("pg1.ap.example", 5432, 1), Record("pg1.us.example", 5432, 2)], before)
    assert [node.name for node in after] == ["pg1", "pg1.us.example"]
    last = draw_nodes([Record("pg1.ap.example", 5432), Record("pg1.eu.example", 5432)], after)
    assert [node.name for node in last] == ["pg1", "pg1.eu.example"]


RECORDS = st.lists(
    st.builds(
        Record,
        st.sampled_from(["a", "a.b", "a.c", "a.b.c", "b", "10.0.0.1", "fd00::1"]),
        st.integers(1, 3),
        st.integers(0, 2),
        st.integers(0, 2),
    )
)


@given(st.lists(RECORDS))
def test_draw_nodes_of_any_records_have_names_of_their_own_that_stay(answers):
    before: list[Node] = []
    for records in answers:
        nodes = draw_nodes(records, before)
        assert {(node.host, node.port) for node in nodes} == {(record.host, record.port) for record in records}
        assert len({node.name for node in nodes}) == len(nodes)
        known = {(node.host, node.port): node.name for node in before}
        assert all(known.get((node.host, node.port), node.name) == node.name for node in nodes)
        before = nodes


def test_compare_tells_what_is_new_and_what_is_gone():
    one, two, three = Node("pg1", "a"), Node("pg2", "b"), Node("pg3", "c")
    change = compare([one, two], [two, three])
    assert change == Change((two, three), (three,), (one,))
    assert str(change) == "pg3 (c:5432) is new, pg1 (a:5432) is gone"
    assert str(compare([one], [Node("pg1", "a", weight=9)])) == "weights or order have changed"


class World:
    """A directory that asks a DNS server of ours; what that answers, and what the time is."""

    def __init__(self, answers: dict[tuple[str, str], Any], text: str = f"srv:{SERVICE}") -> None:
        self.answers = answers
        self.discovery = parse_discover(text)
        self.now = 100.0
        self.asked = 0
        self.made: MakeResolver
        self.directory = Directory(self.discovery, self.look_up, clock=lambda: self.now)

    async def look_up(self, discovery: Discovery) -> tuple[list[Record], float]:
        self.asked += 1
        return await look_up_records(discovery, self.made)

    async def names(self) -> list[str]:
        return [node.name for node in await self.directory.nodes()]

    def play(self, plot: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with dns_server(self.answers) as self.made:
                await plot()

        anyio.run(run)


def test_directory_of_a_service_lists_its_targets():
    world = World({SRV: (30, "10 60 5432 PG1.example.", "10 40 5433 pg2.example.", "20 0 5432 pg3.example.")})

    async def plot() -> None:
        assert await world.directory.nodes() == [
            Node("pg1", "pg1.example", 5432, 60),
            Node("pg2", "pg2.example", 5433, 40),
            Node("pg3", "pg3.example", 5432, 1),
        ]

    world.play(plot)


@pytest.mark.parametrize(
    ("answers", "addresses"),
    [
        ({"A": (30, "10.0.0.2", "10.0.0.1"), "AAAA": dns.rcode.SERVFAIL}, ["10.0.0.1", "10.0.0.2"]),
        ({"A": (30, "10.0.0.1"), "AAAA": (30, "fd00::1")}, ["10.0.0.1"]),
        ({"A": (), "AAAA": (30, "fd00::2", "fd00::1")}, ["fd00::1", "fd00::2"]),
    ],
)
def test_directory_of_a_name_lists_the_addresses_of_one_family(answers, addresses):
    # A server with an address of each family would be two nodes, and two primaries are none.
    world = World({(f"{NAME}.", kind): answer for kind, answer in answers.items()}, f"dns:{NAME}:6543")

    async def plot() -> None:
        assert await world.directory.nodes() == [Node(address, address, 6543) for address in addresses]

    world.play(plot)


def test_directory_of_a_name_that_the_system_knows_lists_it():
    directory = Directory(parse_discover("dns:localhost:5432"))
    assert anyio.run(directory.nodes) == [Node("127.0.0.1", "127.0.0.1")]


@pytest.mark.parametrize(("ttl", "counts"), [(0, 1.0), (5, 5.0), (86400, 60.0)])
def test_directory_ttl_counts_between_its_bounds(ttl, counts):
    world = World({SRV: (ttl, "0 0 5432 pg1.example.")})

    async def plot() -> None:
        await world.names()
        world.answers[SRV] = (ttl, "0 0 5432 pg2.example.")
        world.now += counts - 0.01
        assert (await world.names(), world.asked) == (["pg1"], 1)
        world.now += 0.01
        assert (await world.names(), world.asked) == (["pg2"], 2)

    world.play(plot)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (dns.rcode.NXDOMAIN, "name does not exist"),
        (dns.rcode.SERVFAIL, "name servers fail"),
        (SILENT, "name servers do not answer"),
        ((), "no node is listed"),
        ((300, "0 0 0 ."), "no node is listed"),
    ],
)
def test_directory_while_dns_fails_keeps_the_nodes_and_asks_again_soon(monkeypatch, answer, fault):
    world = World({SRV: (30, "0 0 5432 pg1.example.")})

    async def plot() -> None:
        await world.names()
        world.now += 30.0
        world.answers[SRV] = answer
        monkeypatch.setattr(resolver, "_LIFETIME", 0.05 if answer is SILENT else 2.0)
        assert await world.names() == ["pg1"]
        assert world.directory.fault == fault
        monkeypatch.undo()
        world.answers[SRV] = (30, "0 0 5432 pg2.example.")
        assert await world.names() == ["pg1"]
        world.now += 1.0
        assert await world.names() == ["pg2"]
        assert (world.directory.fault, world.asked) == ("", 3)

    world.play(plot)


def test_directory_while_the_systems_resolver_fails_keeps_the_nodes(monkeypatch):
    now = 100.0
    directory = Directory(parse_discover("dns:db:5432"), clock=lambda: now)
    found = [(2, 1, 6, "", ("10.0.0.1", 0)), (10, 1, 6, "", ("fd00::1", 0, 0, 0))]

    async def system(host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return found

    async def plot() -> None:
        nonlocal now
        assert await directory.nodes() == [Node("10.0.0.1", "10.0.0.1")]
        found.clear()
        now += 1.0
        assert await directory.nodes() == [Node("10.0.0.1", "10.0.0.1")]
        assert directory.fault == "temporary failure in name resolution"

    monkeypatch.setattr(anyio, "getaddrinfo", system)
    anyio.run(plot)


def test_directory_that_never_found_a_node_raises_the_reason():
    world = World({})

    async def plot() -> None:
        with pytest.raises(UnresolvedError, match=r"^name does not exist$"):
            await world.names()

    world.play(plot)


def test_directory_asked_by_many_asks_once():
    world = World({SRV: (30, "0 0 5432 pg1.example.")})

    async def plot() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(world.names)
        assert world.asked == 1

    world.play(plot)


def test_directory_run_publishes_changes_alone_and_logs_them(caplog):
    answers: dict[tuple[str, str], Any] = {}
    changes: list[Change] = []
    asked = anyio.Event()

    async def look_up(discovery: Discovery, made: MakeResolver) -> tuple[list[Record], float]:
        nonlocal asked
        try:
            return await look_up_records(discovery, made)
        finally:
            asked.set()
            asked = anyio.Event()

    async def settle(answer: Any) -> None:
        """Have DNS answer so, until the answer has been dealt with: the third lookup began after the change."""
        answers[SRV] = answer
        for _ in range(3):
            await asked.wait()

    async def plot() -> None:
        async with dns_server(answers) as made, anyio.create_task_group() as tasks:
            directory = Directory(
                parse_discover(f"srv:{SERVICE}"), partial(look_up, made=made), dns_min=0.001, dns_max=0.001
            )
            tasks.start_soon(directory.run, changes.append)
            with anyio.fail_after(30):
                await settle(dns.rcode.NXDOMAIN)
                await settle((1, "0 0 5432 pg1.example.", "0 0 5432 pg2.example."))
                await settle((1, "0 0 5432 pg2.example.", "0 0 5432 pg1.example."))
                await settle(dns.rcode.SERVFAIL)
                await settle((1, "0 0 5432 pg3.example.", "0 0 5432 pg2.example."))
                await settle((1, "0 9 5432 pg3.example.", "0 0 5432 pg2.example."))
            tasks.cancel_scope.cancel()

    with caplog.at_level(logging.INFO, "gateway.supervisor.discovery"):
        anyio.run(plot)
    one, two, three = (Node(f"pg{n}", f"pg{n}.example") for n in (1, 2, 3))
    heavy = Node("pg3", "pg3.example", weight=9)
    assert changes == [
        Change((one, two), (one, two), ()),
        Change((two, three), (three,), (one,)),
        Change((heavy, two), (), ()),
    ]
    assert caplog.messages == [
        f"srv:{SERVICE}: name does not exist",
        f"srv:{SERVICE}: answered again",
        f"srv:{SERVICE}: pg1 (pg1.example:5432) is new, pg2 (pg2.example:5432) is new",
        f"srv:{SERVICE}: name servers fail",
        f"srv:{SERVICE}: answered again",
        f"srv:{SERVICE}: pg3 (pg3.example:5432) is new, pg1 (pg1.example:5432) is gone",
        f"srv:{SERVICE}: weights or order have changed",
    ]


def test_directory_run_goes_on_when_the_ttl_is_over_before_it_sleeps():
    # A busy machine, or one that was suspended: the time to sleep was negative, which ended the run.
    now = 100.0
    found = iter(["pg1", "pg2"])
    changes: list[Change] = []

    async def look_up(discovery: Discovery) -> tuple[list[Record], float]:
        if (host := next(found, None)) is None:
            await anyio.sleep_forever()
        return [Record(str(host), 5432)], 5.0

    async def plot() -> None:
        done = anyio.Event()

        def publish(change: Change) -> None:
            nonlocal now
            now += 6.0
            changes.append(change)
            if len(changes) == 2:
                done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Directory(parse_discover("dns:db:5432"), look_up, clock=lambda: now).run, publish)
            with anyio.fail_after(10):
                await done.wait()
            tasks.cancel_scope.cancel()

    anyio.run(plot)
    assert [change.nodes[0].name for change in changes] == ["pg1", "pg2"]
