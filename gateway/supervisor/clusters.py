"""The clusters that the supervisor watches and keeps: settings become probes, rules and commands.

1. A cluster whose settings have changed is watched anew; what was known of it (view, memory, who is taken out) stays.
2. What its watch publishes goes to the workers; what its keeper needs of them is asked through `running`.

Called by supervisor.main. See the section "A failover" of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import dns.asyncresolver
from anyio.abc import TaskGroup

from gateway import errors
from gateway.control import Met
from gateway.session import Session
from gateway.settings import Cluster, Settings, is_of_gateways
from gateway.supervisor.discovery import Change, Directory, look_up_records, parse_discover
from gateway.supervisor.resolver import Resolver, look_up
from gateway.topology import Fault, SettingsError
from gateway.wire.scram import Cache
from gateway.wire.userlist import Secret
from health.failover import FailoverRules
from health.keeper import Commands, Keeper
from health.memory import MemoryFile, MemoryFileError
from health.patroni import Follower, Report, facts
from health.probe import Probe
from health.view import ClusterView, Memory, Node, Rules
from health.watch import Watch

_RESOLV_CONF: Final = "/etc/resolv.conf"


class Clusters:
    """All clusters of a gateway."""

    _tasks: TaskGroup

    def __init__(
        self,
        publish: Callable[[ClusterView], None],
        running: Callable[[str], Awaitable[int]],  # transactions that run in a cluster that is held
    ) -> None:
        self.views: dict[str, ClusterView] = {}  # as they were published last
        self.keepers: dict[str, Keeper] = {}
        self._publish = publish
        self._running = running
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._searches: dict[str, anyio.CancelScope] = {}
        self._found: dict[str, tuple[Node, ...]] = {}  # the nodes of a cluster that is discovered
        self._watched: dict[str, Cluster] = {}  # as it was when its watch began
        self._users: dict[str, str] | None = None
        self._resolv_conf: str | None = None
        self._resolver = Resolver(partial(look_up, make_resolver=self._make_resolver))
        self._cache: Cache = {}

    def watch(self, settings: Settings, users: dict[str, str] | None, tasks: TaskGroup) -> None:
        """Watch every cluster, each anew whose settings have changed."""
        self._users = users
        self._tasks = tasks
        self._resolv_conf = settings.front.resolv_conf and str(settings.front.resolv_conf)
        for name, cluster in list(self._watched.items()):
            other = settings.cluster.get(name)
            if other is None or other.discover != cluster.discover:
                self._found.pop(name, None)
                if name in self._searches:
                    self._searches.pop(name).cancel()
            if other is None:
                self._end(name)
                del self._watched[name]
        for name, cluster in settings.cluster.items():
            if self._watched.get(name) != cluster:
                self._watched[name] = cluster
                if cluster.discover is not None and name not in self._searches:
                    scope = self._searches[name] = anyio.CancelScope()
                    tasks.start_soon(self._search, name, cluster.discover, scope)
                if cluster.discover is None or name in self._found:
                    self._begin(name)

    def _begin(self, name: str) -> None:
        """Watch a cluster from now on, with what is known of it."""
        memory = self._end(name)
        cluster = self._watched[name]
        scope = self._scopes[name] = anyio.CancelScope()
        keeper = self.keepers[name] = self._keeper(name, cluster, memory)
        self._tasks.start_soon(_run, keeper, cluster, scope, name=f"cluster {name}")

    def _end(self, name: str) -> Memory | None:
        if name not in self.keepers:
            return None
        self._scopes.pop(name).cancel()
        return self.keepers.pop(name).watch.memory

    async def _search(self, name: str, discover: str, scope: anyio.CancelScope) -> None:
        def found(change: Change) -> None:
            self._found[name] = change.nodes
            self._begin(name)

        with scope:
            look_up_all = partial(look_up_records, make_resolver=self._make_resolver)
            await Directory(parse_discover(discover), look_up_all).run(found)

    def _make_resolver(self) -> dns.asyncresolver.Resolver:
        return dns.asyncresolver.Resolver(self._resolv_conf or _RESOLV_CONF)

    def hint(self, met: Met) -> None:
        """A worker has met something that says something about a node."""
        keeper = self.keepers.get(met.cluster)
        if keeper is not None:
            keeper.watch.hint(met.node)

    def keeper(self, name: str) -> Keeper:
        """Return the keeper of a cluster, of the only one when no name is given. Raises GatewayError."""
        if not name and len(self.keepers) == 1:
            return next(iter(self.keepers.values()))
        if name not in self.keepers:
            known = ", ".join(self.keepers)
            raise errors.CONSOLE_VALUE(reason=f"there is no cluster {name or 'without a name'}, choose of {known}")
        return self.keepers[name]

    def keeper_of(self, node: str) -> tuple[Keeper, str]:
        """Return who keeps the cluster of a node, CLUSTER.NODE where it is not the only one, and the node's own name.

        An empty name is of the only cluster there is. Raises GatewayError.
        """
        if not node:
            return self.keeper(""), ""
        found = [(keeper, node) for keeper in self.keepers.values() if node in keeper.watch.probes]
        cluster, _, name = node.partition(".")
        if cluster in self.keepers and name in self.keepers[cluster].watch.probes:
            found = [(self.keepers[cluster], name)]
        if len(found) != 1:
            why = "is in several clusters, write CLUSTER.NODE" if found else "is in no cluster, see SHOW NODES"
            raise errors.CONSOLE_VALUE(reason=f"{node} {why}")
        return found[0]

    def _keeper(self, name: str, cluster: Cluster, memory: Memory | None) -> Keeper:
        file = MemoryFile(Path(cluster.state_file or ""))
        failover = cluster.failover

        def publish(view: ClusterView) -> None:
            self.views[view.name] = view
            self._publish(view)

        watch = Watch(
            name,
            [self._probe(cluster, node) for node in self._found.get(name, nodes(cluster))],
            rules(cluster),
            publish,
            memory=memory or file.load(),
            after=self.views.get(name),
        )
        return Keeper(
            watch,
            FailoverRules(
                mode=failover.mode,
                quorum=failover.quorum,
                max_lag_bytes=failover.max_lag_on_failover,
                cool_off=failover.cool_off,
                startup_grace=failover.startup_grace,
                fences=failover.fence_command is not None,
                demotes=failover.demote_command is not None,
            ),
            Commands(
                fence=failover.fence_command,
                demote=failover.demote_command,
                failover=failover.failover_command,
                rejoin=failover.rejoin_command,
                command_timeout=failover.command_timeout,
                promote_timeout=failover.promote_timeout,
                switchover_timeout=failover.switchover_timeout,
                step_timeout=failover.step_timeout,
            ),
            file,
            lambda: self._running(name),
        )

    def _probe(self, cluster: Cluster, node: Node) -> Probe:
        async def connect(address: str, port: int) -> Session:
            password = cluster.probe_password
            if password is None and self._users is not None:  # as the file has it now
                password = Secret.of(self._users.get(cluster.probe_user, "")).password
            return await Session.connect(
                address,
                port,
                cluster.probe_user,
                password,
                cluster.probe_database,
                timeout=cluster.probe_timeout,
                options={"application_name": "gateway probe"},
                cache=self._cache,
            )

        return Probe(
            node,
            connect,
            self._resolver.resolve,
            check_query=cluster.server_check_query,
            timeout=cluster.probe_timeout,
            shallow=is_of_gateways(cluster),
        )


async def _run(keeper: Keeper, cluster: Cluster, scope: anyio.CancelScope) -> None:
    with scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keeper.watch.run)
            tasks.start_soon(keeper.run)
            if cluster.manager is not None:
                tasks.start_soon(_follow, keeper.watch, cluster)


async def _follow(watch: Watch, cluster: Cluster) -> None:
    """Let Patroni say who the leader is; while it does not answer the nodes speak for themselves."""
    from health.fetch import open_http  # half a second to import, for those who have Patroni

    known = [probe.node for probe in watch.probes.values()]

    def report(told: Report) -> None:
        watch.follow(None if told.cluster is None or told.reason else facts(told.cluster, known), told.reason)

    async with open_http() as get:
        await Follower(cluster.patroni_urls, get, cluster.probe_interval, cluster.probe_timeout).run(report)


def check_state_files(settings: Settings) -> None:
    """Raise SettingsError when the state file of a cluster cannot be read."""
    faults = []
    for name, cluster in settings.cluster.items():
        try:
            MemoryFile(Path(cluster.state_file or "")).load()
        except MemoryFileError as error:
            faults.append(Fault(f"cluster.{name}.state_file", str(error)))
    if faults:
        raise SettingsError(faults)


def nodes(cluster: Cluster) -> tuple[Node, ...]:
    """Return a cluster's nodes as health knows them."""
    return tuple(Node(node.name, node.host, node.port, node.weight, node.priority) for node in cluster.node)


def rules(cluster: Cluster) -> Rules:
    """Return how a cluster is probed."""
    return Rules(
        probe_interval=cluster.probe_interval,
        probe_interval_fast=cluster.probe_interval_fast,
        probe_timeout=cluster.probe_timeout,
        fall=cluster.fall,
        rise=cluster.rise,
        mode=cluster.failover.mode,
        gateways=is_of_gateways(cluster),
    )
