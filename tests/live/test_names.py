"""Nodes that are known by a name: what a change in DNS does to those who are connected.

The name server is real and stands on port 53 of an address of this machine, as resolv.conf has no room for another.
Manual: RFC 1035, RFC 2782; resolv.conf(5); "resolv_conf" of PgBouncer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import dns.rcode
import psycopg
import pytest
from anyio.from_thread import start_blocking_portal

from tests.supervisor.names import SILENT, dns_server

from .client import eventually
from .links import Link

NAME_SERVER = "127.0.53.53"
FAST = {"probe_interval": 0.1, "probe_interval_fast": 0.05}


class Answers(dict[tuple[str, str], Any]):
    """What the name server says; it may change."""

    asked = 0

    def get(self, question: tuple[str, str], default: Any = None) -> Any:
        self.asked += 1
        return super().get(question, default)


@pytest.fixture
def answers() -> Iterator[Answers]:
    told = Answers()
    with start_blocking_portal() as portal, ExitStack() as stack:
        try:
            stack.enter_context(portal.wrap_async_context_manager(dns_server(told, NAME_SERVER, 53)))
        except PermissionError:
            pytest.skip("port 53 is not for this user")
        yield told


@pytest.fixture
def resolv_conf(tmp_path) -> str:
    file = tmp_path / "resolv.conf"
    file.write_text(f"nameserver {NAME_SERVER}\n")
    return str(file)


@pytest.fixture
def places(postgres) -> Iterator[Callable[[str], int]]:
    """Make PostgreSQL known on its port at another address, too."""
    with ExitStack() as stack:

        def make(host: str) -> int:
            stack.enter_context(Link(postgres.port, postgres.port, host))
            return int(postgres.port)

        yield make


class Reader(threading.Thread):
    """A client that asks again and again; it keeps its connection, or says what went wrong."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ended = threading.Event()
        self.count = 0
        self.errors: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with psycopg.connect(f"host=127.0.0.1 port={self._port} user=postgres", autocommit=True) as connection:
                while not self._ended.is_set():
                    connection.execute("select 1")
                    self.count += 1
        except psycopg.Error as error:
            self.errors.append(str(error))

    def stop(self) -> None:
        self._ended.set()
        self.join(10)
        assert not self.is_alive()


def places_of(relay: Any) -> set[str]:
    """The addresses of the server connections that clients have or can have."""
    return {row["addr"] for row in relay.console("show servers")}


def test_address_that_changes_moves_everybody_over_without_an_error(gateway, answers, resolv_conf, places):
    port = places("127.0.0.2")
    answers["db.test.", "A"] = (1, "127.0.0.1")
    answers["db.test.", "AAAA"] = ()
    nodes = [{"name": "pg1", "host": "db.test", "port": port}]
    relay = gateway(nodes=nodes, cluster=FAST, resolv_conf=resolv_conf, default_pool_size=4)
    with relay.connect() as idle, relay.connect() as inside:
        idle.execute("select 1")
        inside.execute("begin")
        readers = [Reader(relay.port) for _ in range(3)]
        assert places_of(relay) == {"127.0.0.1"}
        answers["db.test.", "A"] = (1, "127.0.0.2")
        # The transaction ends where it began; all else goes where the name leads.
        eventually(lambda: places_of(relay) == {"127.0.0.1", "127.0.0.2"}, "servers at the new address")
        before = [reader.count for reader in readers]
        eventually(lambda: all(r.count > b for r, b in zip(readers, before, strict=True)), "everybody goes on")
        inside.execute("commit")
        eventually(lambda: places_of(relay) == {"127.0.0.2"}, "no server at the old address")
        for reader in readers:
            reader.stop()
        assert [reader.errors for reader in readers] == [[], [], []]
        assert idle.execute("select 1").fetchone() == (1,)


@pytest.mark.parametrize("fault", [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL, SILENT], ids=["unknown", "fails", "silent"])
def test_name_service_that_fails_takes_nothing_away(gateway, answers, resolv_conf, postgres, fault):
    answers["db.test.", "A"] = (1, "127.0.0.1")
    answers["db.test.", "AAAA"] = ()
    nodes = [{"name": "pg1", "host": "db.test", "port": postgres.port}]
    relay = gateway(nodes=nodes, cluster=FAST, resolv_conf=resolv_conf, server_lifetime=0.1)
    with relay.connect() as client:
        client.execute("select 1")
        answers["db.test.", "A"] = answers["db.test.", "AAAA"] = fault
        before = answers.asked
        eventually(lambda: answers.asked > before + 2, "the faults are seen", 15)
        for pid in range(3):  # servers that are made now
            assert client.execute(f"select {pid}").fetchone() == (pid,)
        assert relay.console("show nodes")[0]["status"] == "up"


def test_nodes_of_a_service_come_and_go(gateway, answers, resolv_conf, postgres, places):
    port = places("127.0.0.2")
    answers["_pg._tcp.db.test.", "SRV"] = (1, f"0 1 {port} one.db.test.")
    answers["one.db.test.", "A"] = (1, "127.0.0.1")
    answers["two.db.test.", "A"] = (1, "127.0.0.2")
    relay = gateway(nodes=[], cluster={**FAST, "discover": "srv:_pg._tcp.db.test"}, resolv_conf=resolv_conf)
    with relay.connect() as client:
        assert client.execute("select 1").fetchone() == (1,)
        answers["_pg._tcp.db.test.", "SRV"] = (1, f"0 1 {port} two.db.test.")
        eventually(lambda: [row["name"] for row in relay.console("show nodes")] == ["two"], "the other node")
        assert client.execute("select 2").fetchone() == (2,)
        eventually(lambda: places_of(relay) == {"127.0.0.2"}, "servers on the other node")
