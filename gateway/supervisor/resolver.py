"""Names of hosts to addresses, asked again when their TTL is over.

1. An address that was good is kept while the name service fails, NXDOMAIN included: a fault of DNS is none of the
   server. The reason is in the table.
2. A TTL counts for 1 to 15 seconds: 0 would ask without end, a day would miss a move.
3. Names without a dot and those in the hosts file are the system's; all others are asked of DNS, search list included.

Called by supervisor.main, for the probes and the workers; by supervisor.discovery, which asks about whole clusters.
Manual: RFC 1035; resolv.conf(5), hosts(5); dns_max_ttl and SHOW DNS_HOSTS of PgBouncer.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import dns.asyncresolver
import dns.exception
import dns.resolver

_HOSTS_FILE: Final = Path("/etc/hosts")
_LIFETIME: Final = 2.0  # of one question to DNS, in seconds

Lookup = Callable[[str], Awaitable[tuple[Sequence[str], float]]]  # host -> addresses and their TTL in seconds
MakeResolver = Callable[[], dns.asyncresolver.Resolver]  # reads resolv.conf


class UnresolvedError(OSError):
    """A name has no address, and had none before."""


class Host(NamedTuple):
    """One line of SHOW DNS_HOSTS; ttl in seconds, fault is empty when the last lookup went well."""

    hostname: str
    ttl: float
    addrs: tuple[str, ...]
    fault: str


class _Record:
    __slots__ = ("addresses", "expires", "fault", "lock")

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.expires = -math.inf
        self.fault = ""
        self.lock = anyio.Lock()  # one lookup at a time for each name, whoever asks


class Resolver:
    """Resolves names and remembers them; lookup is what asks the name service."""

    def __init__(
        self,
        lookup: Lookup | None = None,
        *,
        dns_min: float = 1.0,
        dns_max: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup or look_up
        self._dns_min = dns_min
        self._dns_max = dns_max
        self._clock = clock
        self._records: dict[str, _Record] = {}

    async def resolve(self, host: str) -> tuple[str, ...]:
        """Return the addresses of host, IPv4 first and in an order that stays; raises UnresolvedError.

        An address and the directory of a unix socket are their own address.
        """
        if host.startswith(("/", "@")) or is_address(host):
            return (host,)
        record = self._records.setdefault(host, _Record())
        async with record.lock:
            if self._clock() >= record.expires:
                await self._refresh(host, record)
        if not record.addresses:
            raise UnresolvedError(record.fault)
        return record.addresses

    def table(self) -> list[Host]:
        """List the names that were asked for."""
        now = self._clock()
        return [
            Host(host, max(0.0, record.expires - now), record.addresses, record.fault)
            for host, record in sorted(self._records.items())
        ]

    async def _refresh(self, host: str, record: _Record) -> None:
        ttl = self._dns_min
        try:
            addresses, ttl = await self._lookup(host)
        except Exception as error:  # whatever it is, the servers are where they were
            record.fault = reason(error)
        else:
            record.fault = "" if addresses else "name has no address"
            if addresses:
                record.addresses = tuple(sorted(set(addresses), key=lambda address: (":" in address, address)))
        record.expires = self._clock() + min(max(ttl, self._dns_min), self._dns_max)


async def look_up(
    host: str, make_resolver: MakeResolver = dns.asyncresolver.Resolver, kinds: Sequence[str] = ("A", "AAAA")
) -> tuple[list[str], float]:
    """Ask the system or DNS; the former tells no TTL, so 0, and all families. Raises OSError or DNSException.

    DNS is asked by what resolv.conf says now. A family that fails does not matter if the other has an address.
    """
    if "." not in host.rstrip(".") or host in _hosts_file():
        found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found], 0.0

    resolver = make_resolver()
    answers: list[dns.resolver.Answer] = []
    failures: list[Exception] = []

    async def ask_for(kind: str) -> None:
        try:
            answers.append(await ask(resolver, host, kind))
        except (OSError, dns.exception.DNSException) as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for kind in kinds:
            tasks.start_soon(ask_for, kind)
    answers = [answer for answer in answers if answer.rrset is not None]
    if not answers and failures:
        raise failures[0]
    ttl = min((answer.chaining_result.minimum_ttl for answer in answers), default=0)
    return [record.address for answer in answers for record in answer], ttl


async def ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> dns.resolver.Answer:
    """Ask DNS for the records of one kind, of which there may be none; raises OSError or DNSException."""
    return await resolver.resolve(name, kind, search=True, raise_on_no_answer=False, lifetime=_LIFETIME)


def is_address(host: str) -> bool:
    """Is a host an address, not a name?"""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _hosts_file() -> set[str]:
    try:
        lines = _HOSTS_FILE.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {name for line in lines for name in line.partition("#")[0].split()[1:]}


def reason(error: Exception) -> str:
    """Say in words why a lookup failed."""
    match error:
        case dns.resolver.NXDOMAIN():
            return "name does not exist"
        case dns.exception.Timeout() | TimeoutError():
            return "name servers do not answer"
        case dns.resolver.NoNameservers():
            return "name servers fail"
        case OSError() if error.strerror:
            return error.strerror.lower()
    return str(error) or type(error).__name__
