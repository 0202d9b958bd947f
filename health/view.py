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


class Node(Struct, frozen=True):
    """A server as it is configured; host is a name, an address or the directory of a unix socket."""

    name: str
    host: str
    port: int = 5432
    weight: int = 1


class Rules(Struct, frozen=True):
    """How a cluster is probed; jitter is the part of an interval by which it varies either way."""

    probe_interval: float = 1.0
    probe_interval_fast: float = 0.2
    probe_timeout: float = 2.0
    fall: int = 3
    rise: int = 2
    jitter: float = 0.1
    follow: bool = True  # someone else promotes, so a promotion that we did not ask for is meant


class ProbeResult(Struct, frozen=True):
    """What one round of probing found out; in_recovery is known when the node told what it is, whatever the outcome.

    The timeline of a primary is the one it writes; that of a standby lags until its next restartpoint unless it is
    streaming and the probe may see so. LSNs are byte positions. latency is that of the last query.
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


class Epoch(Struct, frozen=True):
    """What is known for good: the last node that was primary, its cluster, and the newest timeline seen in it.

    number grows by one with each primary that is adopted, so a view with a lower one is old.
    """

    primary: str | None = None
    system_identifier: int | None = None
    timeline: int = 0
    number: int = 0


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

    def node(self, name: str) -> NodeView:
        """Return the view of one node; raises KeyError."""
        for view in self.nodes:
            if view.node.name == name:
                return view
        raise KeyError(name)
