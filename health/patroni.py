"""A cluster that Patroni manages: its /cluster document read, held against the nodes, and followed.

1. The leader is who holds the leader lock. It has the lock before it is promoted: only the probes tell whether it takes
   writes yet.
2. A document that leaves in doubt who leads is refused whole; one that says more than is known here is not.
3. Silence proves nothing: while nobody answers, the last answer stays, and it has an age.

Called by whoever serves a cluster whose failovers are Patroni's; health.fetch is a Get.
Source: "Patroni REST API", Cluster status endpoints; cluster_as_json in patroni/utils.py of Patroni 2.1 to 4.1.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final

import anyio
import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from health.view import Node

log = logging.getLogger(__name__)

_COOL_DOWN: Final = 5.0  # seconds that a URL is left alone after a first failure
_COOL_DOWN_MAX: Final = 60.0
_HEAD_START: Final = 0.25  # seconds that the URL which answered last is asked alone; as in RFC 8305

Get = Callable[[str, float], Awaitable[bytes]]  # URL and seconds -> the body of a 200; raises a reason in words


class PatroniRole(enum.StrEnum):
    """What a member is, by the names of Patroni 4; those of others and of later versions are read too."""

    LEADER = "leader"
    STANDBY_LEADER = "standby_leader"  # leads a cluster that is itself in recovery: takes no writes
    SYNC_STANDBY = "sync_standby"
    QUORUM_STANDBY = "quorum_standby"
    REPLICA = "replica"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> PatroniRole:
        return cls.LEADER if value in ("master", "primary") else cls.UNKNOWN


class PatroniMember(Struct, frozen=True):
    """One member as Patroni lists it; it has no host before it has first started."""

    name: str
    role: PatroniRole
    state: str = ""  # running, streaming, in archive recovery, starting, stopped, ...
    host: str = ""
    port: int = 5432
    timeline: int | None = None
    lag: int | str | None = None  # bytes, or "unknown"; up to loop_wait old
    replay_lag: int | str | None = None  # since Patroni 4.1, where lag is of what was received
    tags: dict[str, object] = {}

    @property
    def lag_bytes(self) -> int | None:
        """How far reads are behind, None when Patroni does not know."""
        lag = self.lag if self.replay_lag is None else self.replay_lag
        return lag if isinstance(lag, int) else None

    @property
    def noloadbalance(self) -> bool:
        """Shall the member answer no reads?"""
        return bool(self.tags.get("noloadbalance"))

    @property
    def nofailover(self) -> bool:
        """Shall the member never lead? failover_priority says so too, where nofailover says nothing."""
        priority = self.tags.get("failover_priority")
        return bool(self.tags.get("nofailover", isinstance(priority, int) and priority <= 0))

    def __str__(self) -> str:
        return f"{self.name} ({self.role} at {self.host}:{self.port})" if self.host else f"{self.name} ({self.role})"


class Switchover(Struct, frozen=True):
    """A switchover that is to come: when, in ISO 8601, and from which member to which, where that is settled."""

    at: str
    leader: str | None = field(default=None, name="from")
    candidate: str | None = field(default=None, name="to")


class PatroniCluster(Struct, frozen=True):
    """The document of /cluster; scope is the cluster's name, which old versions do not tell."""

    members: tuple[PatroniMember, ...]
    scope: str = ""
    pause: bool = False
    scheduled_switchover: Switchover | None = None


class Managed(Struct, frozen=True):
    """What Patroni says of our nodes, by their names.

    leader is None when there is none, when it leads a standby cluster, or when it is no node: mismatches then says so.
    """

    leader: str | None
    members: dict[str, PatroniMember]
    paused: bool  # Patroni neither promotes nor demotes
    mismatches: tuple[str, ...]  # members that are no node and nodes that are no member, in words


class Report(Struct, frozen=True):
    """What is known after a round: the last good answer, whose it was and when; reason says why it is not of now."""

    cluster: PatroniCluster | None = None
    url: str = ""
    at: float | None = None
    reason: str = "Patroni was not asked yet"

    def age(self, now: float) -> float:
        """Return the seconds since the answer, infinite when there was none."""
        return math.inf if self.at is None else now - self.at


def parse(body: bytes) -> PatroniCluster:
    """Read the document of /cluster; raises ValueError."""
    try:
        cluster = msgspec.json.decode(body, type=PatroniCluster)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a document of /cluster: {error}") from None
    if not cluster.members:  # not even the one that answers, as after the loss of its store
        raise ValueError("document of /cluster has no members")
    names = Counter(member.name for member in cluster.members)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"document of /cluster has several members {', '.join(repeated)}")
    if len(leaders := [member for member in cluster.members if _leads(member)]) > 1:
        raise ValueError(f"document of /cluster has several leaders: {', '.join(map(str, leaders))}")
    return cluster


def facts(cluster: PatroniCluster, nodes: Sequence[Node]) -> Managed:
    """Say what the document means for our nodes: a member is the node at its host and port, else the one of its name.

    Patroni may know a node by another address than we do, hence the name.
    """
    # Of two members in one place, as after a change of name, the one that leads counts: it comes last.
    places = {(_bare(m.host), m.port): m for m in sorted(cluster.members, key=_leads)}
    free = {member.name: member for member in cluster.members}
    found: dict[str, PatroniMember] = {}
    for node in nodes:
        if member := places.get((_bare(node.host), node.port)):
            found[node.name] = free.pop(member.name)
    for node in nodes:
        if node.name not in found and node.name in free:
            found[node.name] = free.pop(node.name)
    return Managed(
        leader=next((name for name, member in found.items() if member.role is PatroniRole.LEADER), None),
        members={node.name: found[node.name] for node in nodes if node.name in found},
        paused=cluster.pause,
        mismatches=(
            *(f"member {member} is no node" for member in free.values()),
            *(f"node {node.name} ({node.host}:{node.port}) is no member" for node in nodes if node.name not in found),
        ),
    )


def cool_down(failures: int) -> float:
    """Return the seconds for which a URL that has failed so many times in a row is left alone."""
    return min(math.ldexp(_COOL_DOWN, min(failures - 1, 10)), _COOL_DOWN_MAX)


class _Source:
    __slots__ = ("failures", "fault", "resumes", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures = 0
        self.fault = ""
        self.resumes = -math.inf


class Follower:
    """Asks Patroni by any of its URLs (http://10.0.0.1:8008) for as long as run() runs; get is bounded by timeout.

    A URL that fails is left alone for a while, ever longer, as long as another one answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        get: Get,
        interval: float = 1.0,
        timeout: float = 2.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = [_Source(url.rstrip("/")) for url in urls]
        self._get = get
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._report = Report()

    @property
    def report(self) -> Report:
        """What was published last."""
        return self._report

    async def run(self, publish: Callable[[Report], None]) -> None:
        """Ask and publish what is known, once each interval, until cancelled."""
        while True:
            publish(await self.round())
            await anyio.sleep(self._interval)

    async def round(self) -> Report:
        """Ask once and take the first good answer; lasts the time limit and a head start at most, and never raises."""
        answers: list[Report] = []

        async def ask(source: _Source, failed: anyio.Event) -> None:
            try:
                with anyio.fail_after(self._timeout):
                    body = await self._get(f"{source.url}/cluster", self._timeout)
                cluster = parse(body)
            except Exception as error:
                self._fail(source, self._explain(error))
                failed.set()
            else:
                self._recover(source)
                answers.append(Report(cluster, source.url, self._clock(), ""))
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for source in self._due():
                failed = anyio.Event()
                tasks.start_soon(ask, source, failed)
                if source.url == self._report.url:
                    with anyio.move_on_after(_HEAD_START):
                        await failed.wait()

        if answers:
            self._report = answers[0]
        else:
            faults = "; ".join(f"{source.url}: {source.fault}" for source in self._sources)
            self._report = replace(self._report, reason=f"Patroni does not answer: {faults}")
        return self._report

    def _due(self) -> list[_Source]:
        """List whom to ask, who answered last in front; everybody when nobody answered."""
        now = self._clock()
        due = [source for source in self._sources if self._report.reason or now >= source.resumes]
        return sorted(due, key=lambda source: source.url != self._report.url)

    def _fail(self, source: _Source, fault: str) -> None:
        source.failures += 1
        source.resumes = self._clock() + cool_down(source.failures)
        if fault != source.fault:
            log.warning("Patroni at %s: %s", source.url, fault)
        source.fault = fault

    def _recover(self, source: _Source) -> None:
        if source.failures:
            log.info("Patroni at %s answers again", source.url)
        source.failures, source.fault, source.resumes = 0, "", -math.inf

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout:g} s"
        return str(error) or type(error).__name__


def _leads(member: PatroniMember) -> bool:
    return member.role in (PatroniRole.LEADER, PatroniRole.STANDBY_LEADER)


def _bare(host: str) -> str:
    """Write a host as one that is the same is written."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.rstrip(".").lower()
