"""Names to addresses: how long they count, and what is left of them when the name service fails."""

from __future__ import annotations

from functools import partial

import anyio
import dns.asyncresolver
import dns.rcode
import dns.resolver
import pytest

from gateway.supervisor import resolver
from gateway.supervisor.resolver import Host, Resolver, UnresolvedError, look_up
from tests.supervisor.names import dns_server


class Names:
    """A name service: what it answers, how often it was asked, and what the time is."""

    def __init__(self, *addresses: str, ttl: float = 5.0) -> None:
        self.addresses: tuple[str, ...] = addresses
        self.ttl = ttl
        self.error: Exception | None = None
        self.asked = 0
        self.now = 100.0
        self.resolver = Resolver(self.look_up, clock=lambda: self.now)

    async def look_up(self, host: str) -> tuple[tuple[str, ...], float]:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        if self.error:
            raise self.error
        return self.addresses, self.ttl

    def resolve(self, host: str = "db.example") -> tuple[str, ...]:
        return anyio.run(self.resolver.resolve, host)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0", "/run/postgresql", "@abstract"])
def test_resolver_address_or_directory_is_its_own(host):
    names = Names()
    assert names.resolve(host) == (host,)
    assert (names.asked, names.resolver.table()) == (0, [])


def test_resolver_answer_is_sorted_so_that_rotation_is_no_change():
    names = Names("10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2")
    assert names.resolve() == ("10.0.0.1", "10.0.0.2", "fd00::1")


@pytest.mark.parametrize(("ttl", "counts"), [(0.0, 1.0), (0.5, 1.0), (5.0, 5.0), (86400.0, 15.0)])
def test_resolver_ttl_counts_between_its_bounds(ttl, counts):
    names = Names("10.0.0.1", ttl=ttl)
    names.resolve()
    names.now += counts - 0.01
    names.resolve()
    assert names.asked == 1
    names.now += 0.01
    names.addresses = ("10.0.0.2",)
    assert names.resolve() == ("10.0.0.2",)
    assert names.asked == 2


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (dns.resolver.NXDOMAIN(), "name does not exist"),
        (dns.resolver.LifetimeTimeout(timeout=2.0, errors=[]), "name servers do not answer"),
        (dns.resolver.NoNameservers(), "name servers fail"),
        (OSError(24, "Too many open files"), "too many open files"),
        (UnicodeError("label too long"), "label too long"),
        (TimeoutError(), "name servers do not answer"),
    ],
)
def test_resolver_while_name_service_fails_keeps_the_last_address_and_tells_why(error, fault):
    names = Names("10.0.0.1")
    names.resolve()
    names.now += 5.0
    names.error = error
    assert names.resolve() == ("10.0.0.1",)
    assert names.resolver.table() == [Host("db.example", 1.0, ("10.0.0.1",), fault)]
    names.now += 0.5
    names.resolve()
    assert names.asked == 2  # a failure counts for a second
    names.now += 0.5
    names.error = None
    names.resolve()
    assert names.resolver.table() == [Host("db.example", 5.0, ("10.0.0.1",), "")]


def test_resolver_name_that_lost_its_addresses_keeps_them():
    names = Names("10.0.0.1")
    names.resolve()
    names.now += 5.0
    names.addresses = ()
    assert names.resolve() == ("10.0.0.1",)
    assert names.resolver.table()[0].fault == "name has no address"


def test_resolver_name_never_known_is_an_error_with_the_reason():
    names = Names()
    names.error = dns.resolver.NXDOMAIN()
    with pytest.raises(UnresolvedError, match=r"^name does not exist$"):
        names.resolve()


def test_resolver_many_who_ask_at_once_cause_one_lookup():
    names = Names("10.0.0.1")

    async def ask() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(names.resolver.resolve, "db.example")

    anyio.run(ask)
    assert names.asked == 1


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"A": (7, "10.0.0.1"), "AAAA": (3, "fd00::1")}, (["10.0.0.1", "fd00::1"], 3)),
        ({"A": (7, "10.0.0.1", "10.0.0.2"), "AAAA": ()}, (["10.0.0.1", "10.0.0.2"], 7)),
        ({"A": (7, "10.0.0.1"), "AAAA": dns.rcode.SERVFAIL}, (["10.0.0.1"], 7)),
        ({"A": (), "AAAA": (0, "fd00::1")}, (["fd00::1"], 0)),
        ({"A": (), "AAAA": ()}, ([], 0)),
    ],
)
def test_look_up_asks_dns_for_both_families(answers, found):
    async def ask() -> tuple[list[str], float]:
        async with dns_server({("db.example.", kind): answer for kind, answer in answers.items()}) as made:
            return await look_up("db.example", made)

    addresses, ttl = anyio.run(ask)
    assert (sorted(addresses), ttl) == found


def test_look_up_of_one_family_asks_for_no_other():
    async def query() -> tuple[list[str], float]:
        answers = {("db.example.", "A"): (), ("db.example.", "AAAA"): (3, "fd00::1")}
        async with dns_server(answers) as made:
            assert await look_up("db.example", made, ("A",)) == ([], 0)
            return await look_up("db.example", made, ("AAAA",))

    assert anyio.run(query) == (["fd00::1"], 3)


@pytest.mark.parametrize(
    ("answer", "error"), [(dns.rcode.NXDOMAIN, dns.resolver.NXDOMAIN), (dns.rcode.SERVFAIL, dns.resolver.NoNameservers)]
)
def test_look_up_of_name_that_dns_refuses_raises(answer, error):
    async def ask() -> None:
        async with dns_server({("db.example.", kind): answer for kind in ("A", "AAAA")}) as made:
            with pytest.raises(error):
                await look_up("db.example", made)

    anyio.run(ask)


def test_look_up_of_localhost_is_the_systems():
    addresses, ttl = anyio.run(look_up, "localhost")
    assert "127.0.0.1" in addresses
    assert ttl == 0.0


def test_look_up_of_name_in_hosts_file_is_the_systems(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.7\tdb.example other # db.comment\n")
    monkeypatch.setattr(resolver, "_HOSTS_FILE", hosts)
    asked: list[str] = []

    async def system(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.7", 0))]

    monkeypatch.setattr(anyio, "getaddrinfo", system)
    assert anyio.run(look_up, "db.example") == (["127.0.0.7"], 0.0)
    assert asked == ["db.example"]
    assert resolver._hosts_file() == {"db.example", "other"}
    monkeypatch.setattr(resolver, "_HOSTS_FILE", tmp_path / "none")
    assert resolver._hosts_file() == set()


def test_look_up_without_configuration_of_dns_raises_for_the_resolver_to_report():
    def made() -> dns.asyncresolver.Resolver:
        raise dns.resolver.NoResolverConfiguration("cannot open /etc/resolv.conf")

    names = Resolver(partial(look_up, make_resolver=made))
    with pytest.raises(UnresolvedError, match=r"resolv\.conf"):
        anyio.run(names.resolve, "db.example")
