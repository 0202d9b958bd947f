"""The words of health: nodes, what their probes said, and the view of a cluster that is drawn from it.

1. Every value is frozen and holds plain data: a view travels to the workers as it is.
2. Unknown is None, never zero.
3. At most one node of a view has Role.PRIMARY, and it is the one that ClusterView.primary names.

Used by all of health, and by whoever routes by a view.
Manual: "High Availability, Load Balancing, and Replication"; states of a node as in HAProxy's server-t.h.
"""

from __future__ import annotations

import enum

from msgspec import Struct


class Role(enum.StrEnum):
    """What a node is in its cluster."""

    PRIMARY = "primary"
    STANDBY = "standby"
    FALSE_PRIMARY = "false primary"  # takes writes that the cluster would lose: never routed to
    UNKNOWN = "unknown"


class Status(enum.StrEnum):
    """Whether a node is fit. One that is saturated, misconfigured or starting has answered: it is not dead."""

    UP = "up"
    SATURATED = "saturated"  # takes no further connection; those that exist work
    MISCONFIGURED = "misconfigured"  # does not take the probe as it is set up, perhaps takes the clients
    STARTING = "starting"  # or shutting down, or recovering from a crash
    DOWN = "down"
    DRAIN = "drain"  # an operator lets its clients finish
    MAINT = "maint"  # an operator took it out

    @property
    def serves(self) -> bool:
        """Can the connections to such a node work? A wrong password of the probe shuts nobody else out."""
        return self in (Status.UP, Status.SATURATED, Status.MISCONFIGURED)


class Admin(enum.StrEnum):
    """What an operator wants of a node; all but READY covers its status."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"


class Outcome(enum.StrEnum):
    """How a probe ended."""

    ANSWERED = "answered"
    REJECTED = "rejected"  # the server answered with an error
    REFUSED = "refused"  # nobody listens
    RESET = "reset"  # the connection broke
    UNREACHABLE = "unreachable"  # no way to the host
    SILENT = "silent"  # no answer in time
    UNRESOLVED = "unresolved"  # the name has no address, and never had
    LOCAL = "local"  # our own trouble (no file descriptors, no memory): says nothing about the node


class Mode(enum.StrEnum):
    """Who makes a standby the primary when there is none."""

    FOLLOW = "follow"  # somebody else
    PROMOTE = "promote"  # the gateway, by pg_promote
    COMMAND = "command"  # the gateway, by a command of the operator's


class Node(Struct, frozen=True):
    """A server as it is configured; host is a name, an address or the directory of a unix socket."""

    name: str
    host: str
    port: int = 5432
    weight: int = 1
    priority: int = 100  # of two standbys that got equally far the higher one is promoted; 0: never


class Rules(Struct, frozen=True):
    """How a cluster is probed; jitter is the part of an interval by which it varies either way."""

    probe_interval: float = 1.0
    probe_interval_fast: float = 0.1
    probe_timeout: float = 2.0
    fall: int = 3
    rise: int = 2
    jitter: float = 0.1
    mode: Mode = Mode.FOLLOW
    gateways: bool = False  # the nodes are gateways: they know the primary, and any that answers is as good as it

    @property
    def follow(self) -> bool:
        """Does someone else promote, so that a promotion that we did not ask for is meant?"""
        return self.mode is Mode.FOLLOW


class ProbeResult(Struct, frozen=True):
    """What one round of probing found out; in_recovery is known when the node told what it is, whatever the outcome.

    The timeline of a primary is the one it writes; that of a standby is the one it receives, or got WAL of last, where
    the probe may see so, else that of its last restartpoint. LSNs are byte positions; latency is that of its question.
    """

    node: str
    at: float
    outcome: Outcome
    addresses: tuple[str, ...] = ()
    sqlstate: str = ""
    message: str = ""
    latency: float | None = None
    in_recovery: bool | None = None
    timeline: int | None = None
    system_identifier: int | None = None
    current_lsn: int | None = None
    received_lsn: int | None = None
    replayed_lsn: int | None = None
    receiver_streaming: bool | None = None
    received_at: float | None = None  # when its receiver last heard of the sender, by the node's own clock
    conninfo: str | None = None  # primary_conninfo, which may hold a password
    application_name: str | None = None  # what it is called by its primary, or would be if it were a standby
    synchronous_standby_names: str | None = None  # a primary's
    synchronous_standbys: int = 0  # how many standbys a primary has that those names fit


class NodeView(Struct, frozen=True):
    """One node as the workers see it: reason is empty when all is well, since is when status last changed."""

    node: Node
    addresses: tuple[str, ...]  # numeric, the one to try first in front; or one directory of a unix socket
    role: Role
    status: Status
    reason: str
    since: float
    latency: float | None = None
    lag_bytes: int | None = None
    admin: Admin = Admin.READY


class Epoch(Struct, frozen=True):
    """What is known for good: the last node that was primary, its cluster, and the newest timeline seen in it.

    number grows by one with each primary that is adopted, so a view with a lower one is old.
    """

    primary: str | None = None
    system_identifier: int | None = None
    timeline: int = 0
    number: int = 0


class Memory(Struct, frozen=True):
    """What a watch must not forget when the gateway ends: kept in a small file."""

    epoch: Epoch = Epoch()
    synchronous_standby_names: str = ""  # of the primary, when it told last
    synchronous_standbys: int = 0
    application_name: str | None = None  # of the primary, if it were a standby
    promoting: str | None = None  # it was, or is about to be, told to promote
    promoted_at: float = 0.0  # when a failover last began to promote, in seconds since 1970
    former: tuple[str, ...] = ()  # nodes that were primaries before
    usurpers: tuple[str, ...] = ()  # nodes that became primaries while the one there was lived
    paused: bool = False  # an operator wants no failover


class ClusterView(Struct, frozen=True):
    """A cluster at one moment; of two views the one with the higher version is the newer.

    primary is the node that writes go to. It stays there while it is down, and is None when no node may take writes.
    While held, a failover or a switchover is under way: what runs may end, but no transaction begins.
    """

    name: str
    version: int
    epoch: Epoch
    primary: str | None
    nodes: tuple[NodeView, ...]
    held: bool = False
    mode: Mode = Mode.FOLLOW
    paused: bool = False  # an operator wants no failover
    hindrance: str = ""  # why there is none, while the primary is down

    def node(self, name: str) -> NodeView:
        """Return the view of one node; raises KeyError."""
        for view in self.nodes:
            if view.node.name == name:
                return view
        raise KeyError(name)
