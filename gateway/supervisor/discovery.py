"""The nodes of a cluster as DNS lists them: the targets of its SRV records, or the addresses of a name.

1. What was found is kept while DNS fails, lists nothing or does not answer: the reason is in `fault`.
2. A TTL counts for 1 to 60 seconds, a failure for 1.
3. A node keeps its name as long as it is found, whatever comes beside it: a primary is remembered by its name.

Called by supervisor.main, for clusters with `discover`; resolver.Resolver then resolves the targets like any host.
Manual: RFC 2782.
"""

from __future__ import annotations

import enum
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import anyio
import dns.asyncresolver
import dns.name
from msgspec import Struct

from gateway.supervisor.resolver import MakeResolver, UnresolvedError, ask, is_address, look_up, reason
from health.view import Node

log = logging.getLogger(__name__)

_LABEL: Final = re.compile(r"\w([\w-]{0,61}\w)?", re.ASCII)
_NAME_LENGTH: Final = 253
_PORT_MAX: Final = 65535
_FORMS: Final = 'expected "srv:_postgresql._tcp.NAME" or "dns:NAME:PORT"'


class Source(enum.StrEnum):
    """Which records list the nodes."""

    SRV = "srv"
    DNS = "dns"


class Discovery(Struct, frozen=True):
    """Where the nodes of a cluster are listed; port is theirs where the records tell none."""

    source: Source
    name: str
    port: int = 5432

    def __str__(self) -> str:
        return f"{self.source}:{self.name}" + (f":{self.port}" if self.source is Source.DNS else "")


class Record(NamedTuple):
    """One node as it is listed; the lower a priority, the earlier the node stands in the list."""

    host: str
    port: int
    priority: int = 0
    weight: int = 1


class Change(NamedTuple):
    """The nodes that are found now, those that were not before, and those that are no more.

    The latter two are empty when only weights or the order have changed.
    """

    nodes: tuple[Node, ...]
    added: tuple[Node, ...]
    removed: tuple[Node, ...]

    def __str__(self) -> str:
        kinds = (("new", self.added), ("gone", self.removed))
        words = [f"{node.name} ({node.host}:{node.port}) is {kind}" for kind, nodes in kinds for node in nodes]
        return ", ".join(words) or "weights or order have changed"


Lookup = Callable[[Discovery], Awaitable[tuple[Sequence[Record], float]]]  # records and their TTL in seconds


def parse_discover(text: str) -> Discovery:
    """Read `srv:_postgresql._tcp.db.example.com` or `dns:db.example.com:5432`; raises ValueError."""
    source, _, rest = text.partition(":")
    match source:
        case Source.SRV:
            discovery = Discovery(Source.SRV, rest)
        case Source.DNS:
            name, _, port = rest.rpartition(":")
            if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= _PORT_MAX:
                raise ValueError(f"{port!r} is not a port: {_FORMS}")
            if is_address(name.strip("[]")):
                raise ValueError(f"{name!r} is an address: write it as a node")
            discovery = Discovery(Source.DNS, name, int(port))
        case _:
            raise ValueError(f"{source!r} is no way to discover nodes: {_FORMS}")
    labels = discovery.name.removesuffix(".").split(".")
    if len(discovery.name) > _NAME_LENGTH or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{discovery.name!r} is not a name in DNS: {_FORMS}")
    if discovery.source is Source.SRV and [label[0] == "_" for label in labels[:3]] != [True, True, False]:
        raise ValueError(f"{discovery.name!r} is not the name of a service: {_FORMS}")
    return discovery


def draw_nodes(records: Sequence[Record], before: Sequence[Node]) -> list[Node]:
    """Make nodes of records, in an order that stays; those that were there before keep their names.

    A new one is called by the first label of its host, or by more of it where that is taken. A weight of 0 is the least
    one in a SRV record, but none of the reads here: it becomes 1.
    """
    found: dict[tuple[str, int], Record] = {}
    for record in sorted(records, key=lambda record: (record.priority, -record.weight, record.host, record.port)):
        found.setdefault((record.host, record.port), record)
    names = {place: node.name for node in before if (place := (node.host, node.port)) in found}
    for host, port in found:
        if (host, port) not in names:
            label = host if is_address(host) else host.partition(".")[0]
            taken = names.values()
            names[host, port] = next(name for name in (label, host, f"{host}:{port}") if name not in taken)
    return [Node(names[place], record.host, record.port, max(record.weight, 1)) for place, record in found.items()]


def compare(before: Sequence[Node], after: Sequence[Node]) -> Change:
    """Say what has changed from one list of nodes to another; a node is its host and port."""
    old, new = ({(node.host, node.port) for node in nodes} for nodes in (before, after))
    return Change(
        tuple(after),
        tuple(node for node in after if (node.host, node.port) not in old),
        tuple(node for node in before if (node.host, node.port) not in new),
    )


class Directory:
    """The nodes that one discovery finds; lookup is what asks DNS."""

    def __init__(
        self,
        discovery: Discovery,
        lookup: Lookup | None = None,
        *,
        dns_min: float = 1.0,
        dns_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.discovery = discovery
        self.fault = ""  # why the last lookup was of no use
        self._lookup = lookup or look_up_records
        self._dns_min = dns_min
        self._dns_max = dns_max
        self._clock = clock
        self._nodes: list[Node] = []
        self._expires = -math.inf
        self._lock = anyio.Lock()  # one lookup at a time, whoever asks

    async def nodes(self) -> list[Node]:
        """Return the nodes, asked for anew when their TTL is over; raises UnresolvedError if none was ever found."""
        async with self._lock:
            if self._clock() >= self._expires:
                await self._refresh()
        if not self._nodes:
            raise UnresolvedError(self.fault)
        return list(self._nodes)

    async def run(self, publish: Callable[[Change], None]) -> None:
        """Publish the nodes that are found first and every change of them, until cancelled."""
        published: list[Node] = []
        while True:
            with suppress(UnresolvedError):  # it is in the log
                nodes = await self.nodes()
                if nodes != published:
                    change, published = compare(published, nodes), nodes
                    publish(change)
            await anyio.sleep(max(0.0, self._expires - self._clock()))

    async def _refresh(self) -> None:
        records: Sequence[Record] = ()
        ttl = 0.0
        try:
            records, ttl = await self._lookup(self.discovery)
            fault = "" if records else "no node is listed"
        except Exception as error:  # whatever it is, the nodes are where they were
            fault = reason(error)
        if fault != self.fault:
            log.log(logging.WARNING if fault else logging.INFO, "%s: %s", self.discovery, fault or "answered again")
        self.fault = fault
        if records:
            before, self._nodes = self._nodes, draw_nodes(records, self._nodes)
            if self._nodes != before:
                log.info("%s: %s", self.discovery, compare(before, self._nodes))
        self._expires = self._clock() + min(max(0.0 if fault else ttl, self._dns_min), self._dns_max)


async def look_up_records(
    discovery: Discovery, make_resolver: MakeResolver = dns.asyncresolver.Resolver
) -> tuple[list[Record], float]:
    """Ask for the records and their TTL; raises OSError or DNSException.

    Only where a name has no IPv4 address do its IPv6 addresses count. A server with one of each would be two nodes, and
    a primary that seems to be two is none.
    """
    match discovery.source:
        case Source.SRV:
            answer = await ask(make_resolver(), discovery.name, "SRV")
            return [
                Record(target.target.to_text(omit_final_dot=True).lower(), target.port, target.priority, target.weight)
                for target in answer.rrset or ()
                if target.target != dns.name.root  # the service is decidedly not there
            ], answer.chaining_result.minimum_ttl
        case Source.DNS:
            addresses, ttl = await look_up(discovery.name, make_resolver, ("A",))
            if not addresses:
                addresses, ttl = await look_up(discovery.name, make_resolver, ("AAAA",))
            addresses = [address for address in addresses if ":" not in address] or addresses
            return [Record(address, discovery.port) for address in addresses], ttl
